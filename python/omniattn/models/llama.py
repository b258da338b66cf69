"""Llama (Touvron et al. 2023, arXiv 2302.13971; Llama 3: arXiv 2407.21783).

RMSNorm in front, grouped-query attention with half-split rotary embedding, SwiGLU, no biases.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from omniattn.models.decoder import Decoder
from omniattn.modules import Attention, DecoderBlock, GatedMLP, RMSNorm, RotaryEmbedding
from omniattn.reference import Llama3Scaling, RopeScaling, scaling_from_hf, scaling_to_hf

if TYPE_CHECKING:
    from transformers import LlamaConfig as HFLlamaConfig
    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a Llama.

    Args:
        vocab_size, dim, num_layers, num_heads, num_kv_heads, hidden_dim: sizes; hidden_dim is that
            of the feed-forward layer.
        head_dim: default dim / num_heads.
        max_positions: longest sequence it was made for; nothing is allocated for it.
        norm_eps, rope_base, rope_scaling: of the norms and the rotary embedding.
        tie_embeddings: the head uses the weight of the embedding.
        init_std: of all weights; that of o_proj and down_proj is divided by sqrt(2 num_layers).
        gradient_checkpointing: recompute the blocks in backward.
        backend: of all ops, e.g. "reference".
    """

    vocab_size: int = 256
    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    hidden_dim: int = 512
    head_dim: int | None = None
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02
    gradient_checkpointing: bool = False
    backend: str | None = None

    def decoder(self) -> Decoder.Config:
        """The same model in terms of the shared decoder."""
        out_std = self.init_std / math.sqrt(2 * max(self.num_layers, 1))
        common: dict[str, Any] = {
            "init_std": self.init_std,
            "out_init_std": out_std,
            "backend": self.backend,
        }
        attention = Attention.Config(
            self.dim, self.num_heads, self.num_kv_heads, self.head_dim, **common
        )
        norm = RMSNorm.Config(self.dim, self.norm_eps, backend=self.backend)
        block = DecoderBlock.Config(
            attention, GatedMLP.Config(self.dim, self.hidden_dim, **common), norm
        )
        return Decoder.Config(
            vocab_size=self.vocab_size,
            dim=self.dim,
            blocks=(block,) * self.num_layers,
            norm=norm,
            rope=RotaryEmbedding.Config(attention.head_size, self.rope_base, self.rope_scaling),
            tie_embeddings=self.tie_embeddings,
            init_std=self.init_std,
            gradient_checkpointing=self.gradient_checkpointing,
            backend=self.backend,
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        d = self.dim
        size = self.decoder().blocks[0].attention.head_size if self.num_layers else 0
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        layer = d * size * heads + 3 * d * self.hidden_dim + 2 * d
        return (2 - self.tie_embeddings) * self.vocab_size * d + self.num_layers * layer + d

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the backend."""
        values = asdict(self)
        del values["backend"]
        if self.rope_scaling is not None:
            values["rope_scaling"]["type"] = type(self.rope_scaling).__name__
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LlamaConfig":
        """The inverse of to_dict."""
        values = dict(values)
        if values["rope_scaling"] is not None:
            scaling = dict(values["rope_scaling"])
            kinds = {kind.__name__: kind for kind in RopeScaling.__subclasses__()}
            values["rope_scaling"] = kinds[scaling.pop("type")](**scaling)
        return cls(**values)

    @classmethod
    def from_hf(cls, config: "HFLlamaConfig") -> "LlamaConfig":
        """From a transformers LlamaConfig.

        Raises:
            NotImplementedError: for biases or another activation.
            ValueError: for an unknown rotary scaling.
        """
        rope = dict(config.rope_parameters or {})
        scaling = scaling_from_hf(rope, max_positions=config.max_position_embeddings)
        for name, supported in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
        ):
            if getattr(config, name) != supported:
                raise NotImplementedError(
                    f"LlamaConfig: {name} must be {supported!r}, "
                    f"got {name}={getattr(config, name)!r}"
                )
        heads, head_dim = config.num_attention_heads, config.head_dim
        if head_dim is not None and heads * head_dim == config.hidden_size:
            head_dim = None
        return cls(
            vocab_size=config.vocab_size,
            dim=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            hidden_dim=config.intermediate_size,
            head_dim=head_dim,
            max_positions=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_base=rope["rope_theta"],
            rope_scaling=scaling,
            tie_embeddings=config.tie_word_embeddings,
            init_std=config.initializer_range,
        )

    def to_hf(self) -> "HFLlamaConfig":
        """To a transformers LlamaConfig."""
        from transformers import LlamaConfig as HFLlamaConfig

        rope = scaling_to_hf(self.rope_scaling) | {"rope_theta": self.rope_base}
        return HFLlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            intermediate_size=self.hidden_dim,
            head_dim=self.head_dim or self.dim // self.num_heads,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=self.tie_embeddings,
            initializer_range=self.init_std,
        )


_LLAMA2 = LlamaConfig(
    vocab_size=32000,
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11008,
    max_positions=4096,
)
_LLAMA3 = replace(
    _LLAMA2,
    vocab_size=128256,
    num_kv_heads=8,
    hidden_dim=14336,
    max_positions=8192,
    rope_base=5e5,
)

PRESETS: dict[str, LlamaConfig] = {
    # The size of the tests: odd on purpose, so that every tail path of the kernels is hit.
    "llama-test": LlamaConfig(
        vocab_size=97, dim=48, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96
    ),
    # Byte-level models for one machine; "llama-small" is what the main job trains.
    "llama-tiny": LlamaConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=176),
    "llama-small": LlamaConfig(),
    "llama-medium": LlamaConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, hidden_dim=1408
    ),
    "llama-2-7b": _LLAMA2,
    "llama-2-70b": replace(
        _LLAMA2, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28672
    ),
    "llama-3-8b": _LLAMA3,
    "llama-3-70b": replace(_LLAMA3, dim=8192, num_layers=80, num_heads=64, hidden_dim=28672),
    "llama-3.1-8b": replace(_LLAMA3, max_positions=131072, rope_scaling=Llama3Scaling()),
}


class Llama(Decoder):
    """The shared decoder with a LlamaConfig, and conversion from and to Hugging Face.

    Args:
        config: sizes and options.
        device, dtype: of the parameters.

    Example:
        >>> model = Llama(PRESETS["llama-test"])
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 97])
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config.decoder(), device=device, dtype=dtype)
        self.config = config

    @classmethod
    def from_hf(cls, model: "LlamaForCausalLM", *, backend: str | None = None) -> "Llama":
        """A copy of a transformers LlamaForCausalLM, on its device and in its dtype.

        Both keep rotary pairs half-split, so the weights are equal under equal names.
        """
        weight = model.model.embed_tokens.weight
        config = replace(LlamaConfig.from_hf(model.config), backend=backend)
        ours = cls(config, device=weight.device, dtype=weight.dtype)
        state = {name.removeprefix("model."): w for name, w in model.state_dict().items()}
        if config.tie_embeddings:
            state.pop("lm_head.weight", None)
        ours.load_state_dict(state)
        return ours.train(model.training)

    def to_hf(self) -> "LlamaForCausalLM":
        """A copy as a transformers LlamaForCausalLM, on the same device and in the same dtype."""
        from transformers import LlamaForCausalLM

        weight = self.embed_tokens.weight
        model = LlamaForCausalLM(self.config.to_hf())
        torch.nn.Module.to(model, weight.device, weight.dtype)
        state = {
            name if name.startswith("lm_head.") else f"model.{name}": w
            for name, w in self.state_dict().items()
        }
        state["lm_head.weight"] = self.head_weight
        model.load_state_dict(state)
        model.train(self.training)
        return model
