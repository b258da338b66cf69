"""Block of a token mixer and a channel mixer on a residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import Unpack

from omniattn.checks.arguments import require_choice, shown, widen
from omniattn.functional.masks import Mask
from omniattn.functional.scores import RelativeBias
from omniattn.functional.scores.score_mod import ScoreMod
from omniattn.modules.attention.attention import Attention
from omniattn.modules.base.dropout import Dropout
from omniattn.modules.base.engram import Engram
from omniattn.modules.base.fields import Positive, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.mixer import ChannelMixer, Mixer, Norm
from omniattn.modules.base.residual import DropPath, LayerScale
from omniattn.modules.base.state import (
    RecurrentState,
    State,
    Stateful,
    StatePair,
    States,
    Storage,
    takes_cache,
)
from omniattn.modules.base.streams import Streams
from omniattn.modules.blocks import ngrams
from omniattn.modules.blocks.canon import Canon, CanonCall, require_places
from omniattn.modules.caches.eviction import Eviction

_PLACEMENTS = ("pre", "sandwich", "parallel", "parallel_norms", "post")


class DecoderBlock(Layer, Stateful):
    """Computes h = h + Mixer(Norm(h)), then h = h + MLP(Norm(h)).

    With placement="sandwich" each layer is also followed by a norm: h = h + Norm(Mixer(Norm(h))).
    With "parallel" both layers read one norm, h = h + Mixer(Norm(h)) + MLP(Norm(h)), and with
    "parallel_norms" each has its own. With "post" the norms follow the additions,
    h = Norm(h + Mixer(h)).
    With `cross`, h = h + Cross(Norm(h), memory) comes between the two. A mixer with causal=False
    makes it an encoder block. The norm after each addition also computes the addition, in one pass
    over memory. The block therefore takes and returns a pair (x, residual) whose sum is h; the norm
    after the last block adds them. With "post" x is h, and the returned residual is None.

    Args:
        config: configs of the layers and norms.
        device, dtype: device and dtype of the parameters.

    Shape:
        x, residual (B, T, dim) -> x, residual (B, T, dim).
        Parameters input_layernorm, mixer, cross_attention_layernorm, cross_attn,
        post_attention_layernorm (absent with "parallel"), mlp; with "sandwich" also
        mixer_output_norm, cross_attn_output_norm, mlp_output_norm, with "post" these in place of
        the others; with canon, canon.A to canon.D; with engram, engram; with layer_scale
        mixer_scale, cross_attn_scale, mlp_scale. `load_state_dict` also accepts self_attn, the
        former name of mixer.

    Example:
        >>> from omniattn.modules import Attention, GatedMLP, RMSNorm
        >>> config = DecoderBlock.Config(
        ...     Attention.Config(8, 2), GatedMLP.Config(8, 16), RMSNorm.Config(8)
        ... )
        >>> x, residual = DecoderBlock(config)(torch.ones(1, 3, 8))
        >>> x.shape, residual.shape
        (torch.Size([1, 3, 8]), torch.Size([1, 3, 8]))
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Configs of the layers.

        Args:
            mixer: config of a Mixer.
            mlp: config of a ChannelMixer, or None for a block with only a mixer, such as mLSTM's.
            norm: config of a Norm, used where `placement` says.
            cross: config of the cross-attention between mixer and mlp, None for none.
            dropout_p: dropout probability of each layer's output.
            residual_in_fp32: True to keep the residual in float32 if x is half precision; under
                autocast it always is.
            placement: "pre"; "sandwich" for norms before and after each layer (Gemma 2);
                "parallel" (GPT-J, Falcon-7B) or "parallel_norms" (Falcon-40B) for a sum of both
                layers, which read one norm or one each; "post" for norms after each addition
                (Transformer of 2017, BART).
            drop_path_p: stochastic depth: probability to leave out a sample's branch in training.
            layer_scale: initial factor per channel of each layer's output, None for no factors.
            streams: config of Streams, a residual form other than h + f(h), such as
                HyperConnections, for "pre" without cross. `place` is the block's number; x is then
                the state h of the streams, and the returned residual is None.
            canon: places of Canon layers, t + conv(t) with a short causal convolution: letters of
                "ABCD", for the inputs of mixer (A) and mlp (C) after their norms, for queries, keys
                and values of Attention (B), and for the hidden channels of MLP and GatedMLP before
                the activation (D).
            canon_size: number of taps of the Canon layers.
            engram: config of Engram, added to h before the block, or None; without streams. The
                block then needs the model's tokens, as `shared["tokens"]`.
        """

        mixer: LayerConfig
        mlp: LayerConfig | None
        norm: LayerConfig
        cross: Attention.Config | None = None
        dropout_p: Probability = 0.0
        residual_in_fp32: bool = False
        placement: str = "pre"
        drop_path_p: Probability = 0.0
        layer_scale: Positive | None = None
        streams: LayerConfig | None = None
        canon: str = ""
        canon_size: Size = 4
        engram: Engram.Config | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            Mixer.require_config("DecoderBlock", "mixer", self.mixer)
            if self.mlp is not None:
                ChannelMixer.require_config("DecoderBlock", "mlp", self.mlp)
            Norm.require_config("DecoderBlock", "norm", self.norm)
            require_choice("DecoderBlock", "placement", self.placement, _PLACEMENTS)
            if self.is_parallel and (self.mlp is None or self.cross is not None):
                raise ValueError(
                    f"DecoderBlock: placement={self.placement!r} needs mlp and no cross, "
                    f"got mlp={shown(self.mlp)}, cross={shown(self.cross)}"
                )
            if self.residual_in_fp32 and self.placement == "post":
                raise ValueError(
                    "DecoderBlock: residual_in_fp32 must be False if a norm's output is the "
                    "stream, got placement='post'"
                )
            if self.is_parallel and self.layer_scale is not None:
                raise ValueError(
                    f"DecoderBlock: layer_scale must be None with placement={self.placement!r}, "
                    f"got layer_scale={self.layer_scale}"
                )
            if self.streams is not None:
                self._check_streams()
            require_places("DecoderBlock", self.canon)
            streams = 1 if self.engram is None else self.engram.num_streams
            if streams > 1 or (self.engram is not None and self.streams is not None):
                raise ValueError(
                    "DecoderBlock: engram needs num_streams=1 and a block without streams, "
                    f"got num_streams={streams}, streams={shown(self.streams)}"
                )

        def _check_streams(self) -> None:
            Streams.require_config("DecoderBlock", "streams", self.streams)
            others = {
                "placement": self.placement != "pre",
                "cross": self.cross is not None,
                "layer_scale": self.layer_scale is not None,
                "residual_in_fp32": self.residual_in_fp32,
            }
            wrong = [f"{n}={shown(getattr(self, n))}" for n, given in others.items() if given]
            if wrong:
                raise ValueError(
                    'DecoderBlock: streams needs placement="pre" and no cross, layer_scale and '
                    f"residual_in_fp32, got {', '.join(wrong)}"
                )

        @property
        def is_parallel(self) -> bool:
            """True if mixer and mlp read the same input."""
            return self.placement.startswith("parallel")

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config

        def norm(*placements: str) -> torch.nn.Module | None:
            if config.placement not in placements:
                return None
            built: torch.nn.Module = config.norm.build(device=device, dtype=dtype)
            return built

        def scale() -> LayerScale | None:
            if config.layer_scale is None:
                return None
            dim: int = config.norm.dim  # type: ignore[attr-defined]
            return LayerScale(dim, config.layer_scale, device=device, dtype=dtype)

        before, after = ("pre", "sandwich", "parallel_norms"), ("sandwich", "post")
        self.input_layernorm = norm(*before, "parallel")
        self.mixer = config.mixer.build(device=device, dtype=dtype)
        self.mixer_output_norm = norm(*after)
        self.mixer_scale = scale()
        self.cross_attn: Attention | None = None
        if config.cross is not None:
            self.cross_attention_layernorm = norm(*before)
            self.cross_attn = Attention(config.cross, device=device, dtype=dtype)
            self.cross_attn_output_norm = norm(*after)
            self.cross_attn_scale = scale()
        self.mlp: torch.nn.Module | None = None
        if config.mlp is not None:
            self.post_attention_layernorm = norm(*before)
            self.mlp = config.mlp.build(device=device, dtype=dtype)
            self.mlp_output_norm = norm(*after)
            self.mlp_scale = scale()
        self.mixer_streams, self.mlp_streams = self._new_streams(device, dtype)
        self.canon = self._new_canon(device, dtype) if config.canon else None
        self.engram: Engram | None = None
        if config.engram is not None:
            self.engram = Engram(config.engram, device=device, dtype=dtype)
        self.dropout = Dropout(config.dropout_p)
        self.drop_path = DropPath(config.drop_path_p) if config.drop_path_p else None
        self.register_load_state_dict_pre_hook(_rename_self_attn)

    def _new_streams(
        self, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> tuple[Streams | None, Streams | None]:
        """Builds the residual forms of mixer and mlp, if the config has one."""
        given: Any = self.config.streams
        if given is None:
            return None, None
        first, second = (
            replace(given, place=2 * given.place + n).build(device=device, dtype=dtype)
            for n in range(2)
        )
        return first, None if self.mlp is None else second

    def _new_canon(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Canon:
        """Builds the Canon layers, whose widths follow from those of the other layers."""
        c: Any = self.config
        mlp: Any = self.mlp
        widths = {"A": c.norm.dim, "B": self.mixer.convolved_width, "C": c.norm.dim, "D": 0}
        widths |= {"C": 0} if mlp is None else {"D": mlp.convolved_width}
        chosen = {place: widths[place] for place in c.canon}
        if not all(chosen.values()):
            raise ValueError(
                "DecoderBlock: canon must have B only with Attention, C only with an mlp, and D "
                f"only with MLP or GatedMLP, got canon={c.canon!r}, "
                f"mixer={type(self.mixer).__name__}, mlp={type(mlp).__name__}"
            )
        backend = getattr(c.norm, "backend", None)
        return Canon(chosen, c.canon_size, backend, device=device, dtype=dtype)

    def new_state(
        self,
        batch: int,
        max_length: int,
        *,
        eviction: Eviction | Sequence[Eviction] | None = None,
        kv_dtype: torch.dtype | None = None,
        **storage: Unpack[Storage],
    ) -> State:
        """Creates the state of the mixer, or of both layers if the channel mixer has a state too.

        `eviction` and `kv_dtype` are as in `Attention`; mixers with a constant-size state ignore
        them.
        """
        given = {
            "eviction": (eviction, self.mixer.evicts),
            "kv_dtype": (kv_dtype, self.mixer.quantizes),
        }
        asked = {name: x for name, (x, _) in given.items() if x is not None}
        more: dict[str, Any] = {name: x for name, x in asked.items() if given[name][1]}
        state: State = self.mixer.new_state(batch, max_length, **storage, **more)
        for name in asked.keys() - more.keys():
            if not isinstance(state, RecurrentState):
                raise ValueError(
                    f"DecoderBlock: {name} needs Attention or a mixer whose state does not grow, "
                    f"got mixer={type(self.mixer).__name__}"
                )
        parts: dict[str, State] = {"mixer": state}
        if isinstance(self.mlp, Stateful):
            parts["mlp"] = self.mlp.new_state(batch, max_length, **storage)
        if self.canon is not None:
            parts["canon"] = self.canon.new_state(batch, **storage)
        if self.engram is not None:
            parts["engram"] = ngrams.new_state(self.engram, batch, **storage)
        if self.canon is not None or self.engram is not None:
            return States(**parts)
        return StatePair(**parts) if len(parts) > 1 else state

    @takes_cache
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        state: State | None = None,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        relative: RelativeBias | None = None,
        score_mod: ScoreMod | None = None,
        memory: torch.Tensor | None = None,
        memory_state: State | None = None,
        shared: dict[str, torch.Tensor] | None = None,
        memory_mask: torch.Tensor | Mask | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the block; `residual` is None in the first block.

        `memory`, `memory_state` and `memory_mask` are source, state and mask of the
        cross-attention. Other arguments are as in Mixer; `relative` and `score_mod` require a mixer
        that accepts them.
        """
        canon = None if self.canon is None else self.canon.over("DecoderBlock", x, state, mask)
        if self.engram is not None:
            h = x if residual is None else (x + residual).to(x.dtype)
            x = x + ngrams.memory("DecoderBlock", self.engram, h, shared, state, mask).to(x.dtype)
        after: dict[str, Any] = {}
        if isinstance(state, States):
            parts = {"canon": self.canon, "engram": self.engram}
            if any(part is None and state.get(name) is not None for name, part in parts.items()):
                raise TypeError(
                    f"DecoderBlock: state must be that of this block, got state={shown(state)}"
                )
            if state.get("mlp") is not None:
                after["state"] = state.get("mlp")
            state = state.get("mixer")
        if mask is not None and isinstance(self.mlp, Stateful):
            after["mask"] = mask
        given = {"relative": relative, "score_mod": score_mod}
        more: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        if self.mixer.shares:
            more["shared"] = shared
        more |= {"state": state, "rope": rope, "mask": mask}
        if canon is not None:
            options = {"B": more, "D": after}
            for place in options.keys() & set(self.config.canon):
                options[place]["convolve"] = canon.at(place)
        if self.mixer_streams is not None:
            x, residual = self._in_streams(self.mixer_streams, x, more, after, canon), None
        else:
            cross = {"memory": memory, "state": memory_state, "mask": memory_mask}
            x, residual = self._on_stream(x, residual, more, after, canon, cross)
        if canon is not None:
            canon.finish()
        return x, residual

    def _on_stream(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        given: dict[str, Any],
        after: dict[str, Any],
        canon: CanonCall | None,
        cross: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the block on a plain residual stream."""
        y, h = self._input(self.input_layernorm, x, residual)
        x = self._mixed(y, given, canon)
        if self.config.is_parallel:
            assert self.mlp is not None
            if self.post_attention_layernorm is not None:
                y = self.post_attention_layernorm(h.to(y.dtype))
            return self._output(x + self._channels(y, after, canon), None, None, h)
        x, residual = self._output(x, self.mixer_output_norm, self.mixer_scale, h)
        if self.cross_attn is not None:
            y, h = self._input(self.cross_attention_layernorm, x, residual)
            y = self.cross_attn(y, cross["memory"], state=cross["state"], mask=cross["mask"])
            x, residual = self._output(y, self.cross_attn_output_norm, self.cross_attn_scale, h)
        if self.mlp is None:
            return x, residual
        y, h = self._input(self.post_attention_layernorm, x, residual)
        y = self._channels(y, after, canon)
        return self._output(y, self.mlp_output_norm, self.mlp_scale, h)

    def _mixed(
        self, y: torch.Tensor, given: dict[str, Any], canon: CanonCall | None
    ) -> torch.Tensor:
        """Calls the mixer."""
        x: torch.Tensor = self.mixer(y if canon is None else canon.input("A", y), **given)
        return x

    def _channels(
        self, y: torch.Tensor, given: dict[str, Any], canon: CanonCall | None
    ) -> torch.Tensor:
        """Calls the channel mixer."""
        assert self.mlp is not None
        if canon is not None:
            y = canon.input("C", y)
        if "convolve" in given and y.is_nested:  # its function takes (1, total, width)
            assert canon is not None
            return canon.sequences.restored(self.mlp(y.values()[None], **given))
        x: torch.Tensor = self.mlp(y, **given)
        return x

    def _in_streams(
        self,
        first: Streams,
        x: torch.Tensor,
        given: dict[str, Any],
        after: dict[str, Any],
        canon: CanonCall | None,
    ) -> torch.Tensor:
        """Computes the block on the state of its streams, or on the embeddings in block 0."""
        h, sequences = sequences_of("DecoderBlock", "x", x)
        if first.config.place == 0:
            h = first.start(h)
        parts: list[tuple[Any, Any, Any, dict[str, Any]]] = [
            (first, self.input_layernorm, self._mixed, given)
        ]
        if self.mlp_streams is not None:
            parts.append((self.mlp_streams, self.post_attention_layernorm, self._channels, after))
        for streams, norm, run, options in parts:
            y, found = streams.read(h)
            y, _ = self._output(run(norm(sequences.restored(y)), options, canon), None, None, y)
            h = streams.write(h, y.values()[None] if y.is_nested else y, found)
        return sequences.restored(h)

    def _input(
        self, norm: torch.nn.Module | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's input, and h = x + residual."""
        if norm is None:
            h = x if residual is None else x + residual
            return h, h
        if residual is None:
            return norm(x), widen(x) if self.config.residual_in_fp32 else x
        y, h = norm(x, residual)
        return y, h

    def _output(
        self,
        y: torch.Tensor,
        norm: torch.nn.Module | None,
        scale: LayerScale | None,
        h: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns x and residual after a layer with input from h and result y."""
        if norm is not None and self.config.placement == "sandwich":
            y, norm = norm(y), None
        y = self.dropout(y if scale is None else scale(y))
        if self.drop_path is not None:
            y = self.drop_path(y)
        if norm is None:
            return y, h
        x, _ = norm(y.to(h.dtype), h)  # keeps the stream's dtype under autocast
        return x, None


def _rename_self_attn(
    block: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Renames the weights of old checkpoints, in which the mixer was named self_attn."""
    former = f"{prefix}self_attn."
    for name in [name for name in state_dict if name.startswith(former)]:
        state_dict[f"{prefix}mixer.{name.removeprefix(former)}"] = state_dict.pop(name)
