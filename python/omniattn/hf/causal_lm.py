"""Decoders of this package as transformers' causal language models.

They work with Trainer, PEFT, `save_pretrained` and `generate`.
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from omniattn.checks.arguments import is_traced, shown
from omniattn.functional.masks import KeyPadding
from omniattn.hf.common.packed import marked_starts
from omniattn.hf.no_logits import NoLogits, missing_logits
from omniattn.hf.recurrent.states import DecoderStates
from omniattn.models import Decoder, ModelConfig, Routers
from omniattn.models.head import head_loss
from omniattn.suggestions import did_you_mean

__all__ = ["OmniattnConfig", "OmniattnForCausalLM"]

#: Name of the states in outputs and arguments; transformers 5.24 changed it.
_STATES = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
#: Source file saved with a model, through which `trust_remote_code=True` finds the classes.
_REMOTE = '''"""Classes of the package omniattn, which must be installed."""

from omniattn.hf import OmniattnConfig, OmniattnForCausalLM

__all__ = ["OmniattnConfig", "OmniattnForCausalLM"]
'''


class OmniattnConfig(PretrainedConfig):
    """Wraps the config of a decoder of `omniattn.models` as a transformers config.

    Args:
        model: the decoder's config, or its `to_dict()` with an "architecture" entry.
        use_cache: True to return states in evaluation, see `OmniattnForCausalLM.forward`.
        kv_dtype: "int8" to store cached keys and values in int8.

    Example:
        >>> from omniattn.models import PRESETS
        >>> OmniattnConfig(PRESETS["llama-test"]).vocab_size
        97
    """

    model_type = "omniattn"

    model: Any = None
    use_cache: bool = True
    kv_dtype: str | None = None
    tie_word_embeddings: bool = False

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        use_cache: bool = True,
        kv_dtype: str | None = None,
        **more: Any,
    ) -> None:
        if kv_dtype not in (None, "int8"):
            raise ValueError(
                f"OmniattnConfig: kv_dtype must be 'int8' or None, got kv_dtype={shown(kv_dtype)}"
            )
        if model is not None and not isinstance(model, dict | Decoder.Config):
            raise TypeError(
                "OmniattnConfig: model must be the config of a decoder, such as "
                f"PRESETS['llama'], got model={shown(model)}"
            )
        if isinstance(model, Decoder.Config):
            more = dict(model.token_ids) | more
            model = {"architecture": model.architecture, **model.to_dict()}
        self.model = {} if model is None else model
        self.use_cache = use_cache
        self.kv_dtype = kv_dtype
        self.vocab_size = self.model.get("vocab_size", 0)
        self.hidden_size = self.model.get("dim", 0)
        self.num_hidden_layers = self.model.get("num_layers", 0)
        more["tie_word_embeddings"] = self.model.get("tie_embeddings", False)
        super().__init__(**more)

    def decoder_config(self) -> Decoder.Config:
        """Returns the wrapped config with this config's vocabulary size.

        Raises:
            ValueError: the architecture or a layer is not defined.
        """
        values = {name: value for name, value in self.model.items() if name != "architecture"}
        known, name = ModelConfig.architectures, self.model.get("architecture")
        if name not in known:
            raise ValueError(
                f"OmniattnConfig: architecture must be one of {', '.join(known)}, or be defined "
                f"before, got architecture={shown(name)}{did_you_mean(name, known)}"
            )
        config = known[str(name)].from_dict(values | {"vocab_size": self.vocab_size})
        assert isinstance(config, Decoder.Config)
        return config


class OmniattnForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of this package with transformers' interface.

    Training with labels computes no logits, as in a model patched by :func:`patch`. The loss
    includes router losses and the losses of further heads.

    Args:
        config: configuration of the model.
        decoder: decoder to wrap; default: a new one built from the config.

    Example:
        >>> from omniattn.models import PRESETS
        >>> model = OmniattnForCausalLM(OmniattnConfig(PRESETS["llama-test"]))
        >>> tokens = torch.zeros(1, 4, dtype=torch.long)
        >>> model(tokens, labels=tokens).loss.shape
        torch.Size([])
    """

    config_class = OmniattnConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["DecoderBlock", "HybridBlock"]  # noqa: RUF012

    def __init__(self, config: OmniattnConfig, decoder: Decoder | None = None) -> None:
        super().__init__(config)
        ours = config.decoder_config()
        self.model = ours.build() if decoder is None else decoder
        half = ours.build(device="meta", dtype=torch.bfloat16).named_parameters()
        self._keep_in_fp32_modules_strict = {
            f"model.{name}" for name, p in half if p.dtype == torch.float32
        }
        self.post_init()

    @classmethod
    def wrap(cls, decoder: Decoder) -> OmniattnForCausalLM:
        """Returns a model that shares the decoder's parameters.

        Raises:
            TypeError: `decoder` is not a Decoder.
        """
        if not isinstance(decoder, Decoder):
            raise TypeError(
                f"OmniattnForCausalLM: decoder must be a Decoder, got {type(decoder).__name__}"
            )
        return cls(OmniattnConfig(decoder.config), decoder).train(decoder.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderStates | None = None,
        past_key_values: DecoderStates | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Computes logits, the loss if labels are given, and the states after the tokens.

        Args:
            input_ids: (B, T), the tokens after those in the states.
            attention_mask: (B, past + T), 0 for padding on either side; (B, 1, T, past + T) bool.
            position_ids: (B, T). Without a mask, each restart of the positions begins another
                packed sequence, as do the boundaries in `others`.
            cache, past_key_values: states, from an earlier output.
            labels: (B, T), -100 for tokens without a loss; padding has none either.
            use_cache: return states; default: the config's value in evaluation, without gradients
                or labels, otherwise False.
            logits_to_keep: number of last tokens, or indices of tokens, with logits; 0 for all.
            num_items_in_batch: divisor of the summed loss; default: the number of labels.
            skip_logits: compute no logits, and return an object in their place that raises when
                used; default: True in training with labels.
            return_dict: False to return a tuple.
            others: `shift_labels`, labels already shifted to the next tokens; `seq_idx` (B, T) or
                `cu_seq_lens_q`, boundaries of packed sequences.
        """
        shifted = others.pop("shift_labels", None)
        self._refuse(others)
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"OmniattnForCausalLM: input_ids must be a tensor, got {input_ids!r}")
        if labels is not None and shifted is None:
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        states = cache if cache is not None else past_key_values
        packed = None
        rows, length = input_ids.shape[0], input_ids.shape[-1]
        _require_shapes(attention_mask, position_ids, length)
        marked = marked_starts(others, rows, length, input_ids.device)
        if attention_mask is None and states is None:
            packed = _packed(input_ids, position_ids, marked)
        elif marked is not None and (is_traced() or int(marked.sum()) > rows):
            raise NotImplementedError(
                "OmniattnForCausalLM: attention_mask and cache must be None with the lengths of "
                f"packed sequences, got {', '.join(others)}"
            )
        if states is None and self._caches(use_cache, packed is not None, shifted is not None):
            kv_dtype = None if self.config.kv_dtype is None else torch.int8
            states = DecoderStates(self.model, kv_dtype=kv_dtype)
        if packed is not None:
            x = self.model.hidden(packed).values()[None]
        else:
            x = self._hidden(input_ids, attention_mask, position_ids, states)
        loss = None
        if shifted is not None:
            loss = self._loss(x, shifted, attention_mask, num_items_in_batch)
        if skip_logits is None:
            skip_logits = loss is not None and self.training
        logits: Tensor | NoLogits | None = missing_logits(self)
        if not skip_logits:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = self.model.head(x[:, kept])
        made: dict[str, Any] = {"loss": loss, "logits": logits, _STATES: states}
        out = CausalLMOutputWithPast(**made)
        tuples = return_dict is False or (return_dict is None and not self.config.return_dict)
        return out.to_tuple() if tuples else out

    def _caches(self, use_cache: bool | None, packed: bool, asked: bool) -> bool:
        """Returns True if a call without states creates them."""
        if use_cache is None:
            possible = not (packed or asked or self.training or torch.is_grad_enabled())
            return bool(self.config.use_cache) and possible
        if use_cache and (packed or torch.is_grad_enabled()):
            raise NotImplementedError(
                "OmniattnForCausalLM: use_cache must be False with gradients and for packed "
                "sequences, got use_cache=True"
            )
        return use_cache

    def _hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        states: DecoderStates | None,
    ) -> Tensor:
        """Returns the hidden states (B, T, dim) after the final norm."""
        given: dict[str, Any] = {}
        if mask is not None:
            given["mask"] = _mask(mask)
            if positions is None and mask.dim() == 2:
                positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if positions is not None:
            given["positions"] = positions
        if states is not None:
            given["state"] = states.of(tokens, self.model.embed_tokens.weight.dtype)
        return self.model.hidden(tokens, **given)

    def _loss(
        self, x: Tensor, shifted: Tensor, mask: Tensor | None, count: Tensor | int | None
    ) -> Tensor:
        """Returns the mean loss, or the sum over `count`; in training, with the routers' loss."""
        if mask is not None and mask.dim() == 2:  # left padding has no next-token loss
            shifted = shifted.masked_fill(mask[:, -shifted.shape[1] :] == 0, -100)
        own = (shifted != -100).sum()
        total = head_loss(self.model, x, shifted, reduction="sum")
        loss = total / (own.clamp(min=1) if count is None else count)
        if not self.training:
            return loss
        further = self.model.auxiliary_loss() + Routers(self.model).loss()
        return loss + further * (1.0 if count is None else own / count)

    def _refuse(self, others: dict[str, Any]) -> None:
        """Raises for arguments that transformers' other models accept and this one does not."""
        for name, value in others.items():
            if value is None or value is False:
                continue
            if name in ("output_attentions", "output_hidden_states", "inputs_embeds"):
                raise NotImplementedError(
                    f"OmniattnForCausalLM: {name} is not supported, got {name}={shown(value)}"
                )
            if name not in _BOUNDARIES:
                known = [*_ARGUMENTS, *_BOUNDARIES]
                raise TypeError(
                    f"OmniattnForCausalLM: arguments must be of {', '.join(known)}, "
                    f"got {name}={shown(value)}{did_you_mean(name, known)}"
                )

    def get_input_embeddings(self) -> torch.nn.Module:
        """Returns the token embedding."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Replaces the token embedding."""
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """Returns the output head, or None if its weight is tied to the embedding."""
        return self.model.lm_head

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        """Replaces the output head."""
        self.model.lm_head = new_embeddings

    def resize_token_embeddings(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        """Resizes the embedding as transformers does and updates the decoder's config."""
        embeddings: torch.nn.Module = super().resize_token_embeddings(*args, **kwargs)
        rows = self.model.embed_tokens.weight.shape[0]
        self.config.vocab_size = rows
        self.config.model = self.config.model | {"vocab_size": rows}
        self.model.config = dataclasses.replace(self.model.config, vocab_size=rows)
        return embeddings

    @property
    def is_gradient_checkpointing(self) -> bool:
        """True if layers are recomputed in the backward pass."""
        return bool(self.model.config.gradient_checkpointing)

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **options: Any) -> None:
        if options.get("every_n_layers", 1) != 1:
            raise NotImplementedError(
                "OmniattnForCausalLM: every_n_layers must be 1, "
                f"got every_n_layers={options['every_n_layers']}"
            )
        self.model.config = dataclasses.replace(self.model.config, gradient_checkpointing=enable)

    def init_weights(self) -> None:
        """Does nothing: the decoder initialises and ties its own weights."""

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Initialises parameters missing from a checkpoint as the layer does; keeps the others."""
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            return
        tensors = chain(module.parameters(), module.buffers())
        loaded = [(t, t.clone()) for t in tensors if getattr(t, "_is_hf_initialized", False)]
        reset()
        for t, value in loaded:
            t.copy_(value)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward creates its own states

    def save_pretrained(  # type: ignore[override]
        self, save_directory: Any, is_main_process: bool = True, **options: Any
    ) -> None:
        """Saves as transformers does, with a source file for `trust_remote_code=True`."""
        self.config.auto_map = {
            "AutoConfig": "modeling_omniattn.OmniattnConfig",
            "AutoModelForCausalLM": "modeling_omniattn.OmniattnForCausalLM",
        }
        super().save_pretrained(save_directory, is_main_process, **options)
        if not is_main_process:
            return
        (Path(save_directory) / "modeling_omniattn.py").write_text(_REMOTE, encoding="utf-8")


#: Names of forward's arguments.
_ARGUMENTS = (
    *("input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "labels"),
    *("shift_labels", "use_cache", "logits_to_keep", "num_items_in_batch", "skip_logits"),
    "return_dict",
)
#: Boundaries of packed sequences that collators add.
_BOUNDARIES = (*("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),)


def _mask(mask: Tensor) -> Tensor | KeyPadding | None:
    """Converts transformers' attention_mask to a decoder's mask."""
    if mask.dim() == 2:
        real = mask.bool()
        known = real.is_cpu and not is_traced()
        return None if known and bool(real.all()) else KeyPadding(real)
    if mask.dtype != torch.bool:
        raise NotImplementedError(
            "OmniattnForCausalLM: attention_mask must be (B, past + T), or bool where it has four "
            f"dimensions, got attention_mask={shown(mask)}"
        )
    return mask


def _require_shapes(mask: Tensor | None, positions: Tensor | None, length: int) -> None:
    short = mask is not None and mask.dim() == 2 and mask.shape[1] < length
    other = positions is not None and (positions.dim() > 2 or positions.shape[-1] != length)
    for name, given, shape, wrong in (
        ("attention_mask", mask, "(B, past + T)", short),
        ("position_ids", positions, "(B, T)", other),
    ):
        if given is not None and wrong:
            raise ValueError(
                f"OmniattnForCausalLM: {name} must have shape {shape} with T={length}, "
                f"got {name}.shape={tuple(given.shape)}"
            )


def _packed(tokens: Tensor, positions: Tensor | None, marked: Tensor | None) -> Tensor | None:
    """Splits a row where its positions restart and at marked starts, into a jagged tensor; None for
    one sequence."""
    if positions is None and marked is None:
        return None
    if is_traced() and marked is not None:
        raise NotImplementedError(
            "OmniattnForCausalLM: packed sequences must be computed outside of compiled graphs"
        )
    if is_traced():
        raise NotImplementedError(
            "OmniattnForCausalLM: position_ids in a compiled graph need an attention_mask, since "
            "their values may separate packed sequences"
        )
    starts = torch.zeros_like(tokens, dtype=torch.bool) if marked is None else marked
    starts[:, :1] = True
    if positions is not None:
        starts[:, 1:] |= positions.diff(dim=-1) != 1
    if int(starts.sum()) <= len(starts):
        return None
    if tokens.shape[0] != 1:
        raise NotImplementedError(
            "OmniattnForCausalLM: packed sequences must be in one row, "
            f"got input_ids.shape={tuple(tokens.shape)}"
        )
    offsets = torch.nn.functional.pad(starts[0].nonzero()[:, 0], (0, 1), value=tokens.shape[1])
    return torch.nested.nested_tensor_from_jagged(tokens[0], offsets)


AutoConfig.register("omniattn", OmniattnConfig, exist_ok=True)
AutoModelForCausalLM.register(OmniattnConfig, OmniattnForCausalLM, exist_ok=True)
