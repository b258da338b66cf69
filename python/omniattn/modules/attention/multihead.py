"""Drop-in replacement for torch.nn.MultiheadAttention: same parameters and mask conventions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import require_tensor
from omniattn.checks.jagged import same_boundaries
from omniattn.functional.masks import All, BoolMask, Causal, KeyPadding, Mask
from omniattn.modules.base.fields import Backend, Probability, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences, sequences_of
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear


class MultiheadAttention(Layer):
    """torch.nn.MultiheadAttention computed by this package's kernels; loads its `state_dict`.

    Masks follow torch: bool masks are True for keys that are NOT attended to, float masks are
    added.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        query (B, T, dim), key (B, S, kdim), value (B, S, vdim) -> (B, T, dim) and None or the
        weights (B, T, S); without batch_first (T, B, dim) etc.; B can be missing in all. With
        batch_first and without need_weights, jagged nested tensors are accepted. Parameters
        in_proj_weight or q_proj_weight, k_proj_weight, v_proj_weight; in_proj_bias, bias_k, bias_v,
        out_proj.weight, out_proj.bias.

    Notes:
        With need_weights the weights are computed explicitly, in T x S memory and without dropout.
        The attention output of a fully masked query is 0 (NaN in torch). Can replace `self_attn` of
        torch's Transformer layers; torch.nn.TransformerEncoder then needs
        enable_nested_tensor=False.

    Example:
        >>> layer = MultiheadAttention.from_torch(torch.nn.MultiheadAttention(8, 2))
        >>> x = torch.ones(5, 1, 8)
        >>> layer(x, x, x, need_weights=False)[0].shape
        torch.Size([5, 1, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Arguments of torch.nn.MultiheadAttention, and the ops' `backend`."""

        embed_dim: Size
        num_heads: Size
        dropout: Probability = 0.0
        bias: bool = True
        add_bias_kv: bool = False
        add_zero_attn: bool = False
        kdim: Size | None = None
        vdim: Size | None = None
        batch_first: bool = False
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            self._require_multiple("embed_dim", "num_heads")

        @property
        def joint(self) -> bool:
            """True if the three input projections are one parameter."""
            return self.kdim in (None, self.embed_dim) and self.vdim in (None, self.embed_dim)

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
        self.config = c = config
        dim = c.embed_dim

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        if c.joint:
            self.in_proj_weight = parameter(3 * dim, dim)
        else:
            self.q_proj_weight = parameter(dim, dim)
            self.k_proj_weight = parameter(dim, dim if c.kdim is None else c.kdim)
            self.v_proj_weight = parameter(dim, dim if c.vdim is None else c.vdim)
        self.in_proj_bias = parameter(3 * dim) if c.bias else None
        self.bias_k = parameter(1, 1, dim) if c.add_bias_kv else None
        self.bias_v = parameter(1, 1, dim) if c.add_bias_kv else None
        self.reset_parameters()
        out = Linear.Config(dim, dim, c.bias, init_std=dim**-0.5, backend=c.backend)
        self.out_proj = Linear(out, device=device, dtype=dtype)

    @property
    def batch_first(self) -> bool:
        """Value of the config; torch's Transformer layers read it."""
        return self.config.batch_first

    @property
    def num_heads(self) -> int:
        """Value of the config; torch's Transformer layers read it."""
        return self.config.num_heads

    #: Prevents torch's Transformer layers from passing the weights to their fused kernels.
    _qkv_same_embed_dim = False

    def reset_parameters(self) -> None:
        """Draws the input projections, bias_k and bias_v by Xavier's rule; zeroes in_proj_bias."""
        for weight in self._in_weights():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
        for row in (self.bias_k, self.bias_v):
            if row is not None:
                nn.init.xavier_normal_(row)

    def _in_weights(self) -> tuple[nn.Parameter, ...]:
        if self.config.joint:
            return (self.in_proj_weight,)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, backend: str | None = None
    ) -> MultiheadAttention:
        """Creates a copy of torch's layer with its weights, device and dtype."""
        config = cls.Config(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            module.bias_k is not None,
            module.add_zero_attn,
            module.kdim,
            module.vdim,
            module.batch_first,
            backend,
        )
        weight = module.out_proj.weight
        ours = cls(config, device=weight.device, dtype=weight.dtype)
        ours.load_state_dict(module.state_dict())
        return ours.train(module.training)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projects the inputs to q (B, T, dim), k (B, S, dim), v (B, S, dim)."""
        c = self.config
        weights = self.in_proj_weight.chunk(3) if c.joint else self._in_weights()
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if query is key and key is value and c.joint:
            joint = functional.linear(
                query, self.in_proj_weight, self.in_proj_bias, backend=c.backend
            )
            return list(joint.chunk(3, -1))
        return [
            functional.linear(x, w, b, backend=c.backend)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        ]

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes q (B, T, H, D), and k and v including bias_k, bias_v and zero rows."""
        c = self.config
        q, k, v = self._project(query, key, value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
        if c.add_zero_attn:
            k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (c.num_heads, -1)) for x in (q, k, v))
        return q, k, v

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes torch.nn.MultiheadAttention.forward.

        Args:
            query, key, value: see Shape.
            key_padding_mask: (B, S), bool (True = not attended to) or float (added).
            need_weights: True to return the attention weights as well.
            attn_mask: (T, S) or (B num_heads, T, S), bool (True = not attended to) or float
                (added).
            average_attn_weights: True to average the weights over heads; False for weights
                (B, num_heads, T, S).
            is_causal: hint that attn_mask is causal, as in torch. Unlike torch, attn_mask is
                optional; the causal mask is then aligned top-left.
        """
        c = self.config
        require_tensor("MultiheadAttention", "query", query)
        batched = query.dim() == 3
        same = query is key and key is value
        inputs = [query] if same else [query, key, value]
        sequences = keys = Sequences()
        if query.is_nested:
            inputs, sequences, keys = self._unnested(inputs, need_weights)
        elif not batched:
            inputs = [x[None] for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not c.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        batch = len(query) if query.is_nested else inputs[0].shape[0]
        q, k, v = self._heads(*(inputs * 3 if same else inputs))
        mask, bias = self._masks(key_padding_mask, attn_mask, is_causal, batch)
        out, lse = sequences.attention(keys)(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            dropout_p=c.dropout if self.training else 0.0,
            return_lse=True,
            backend=c.backend,
        )
        y = sequences.restored(self.out_proj(out.flatten(-2)))
        weights = None
        if need_weights:
            weights = self._weights(q, k, lse, mask, bias)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return y[0], None if weights is None else weights[0]
        return (y if c.batch_first else y.transpose(0, 1)), weights

    def _unnested(
        self, inputs: list[Tensor], need_weights: bool
    ) -> tuple[list[Tensor], Sequences, Sequences]:
        """Packs nested inputs into (1, total, dim); returns also the sequences of query and key."""
        c, op = self.config, "MultiheadAttention"
        if not c.batch_first or need_weights or c.add_bias_kv or c.add_zero_attn:
            raise ValueError(
                f"{op}: a nested query needs batch_first=True and need_weights=False, without "
                f"add_bias_kv and add_zero_attn, got batch_first={c.batch_first}, "
                f"need_weights={need_weights}, add_bias_kv={c.add_bias_kv}, "
                f"add_zero_attn={c.add_zero_attn}"
            )
        query, queries = sequences_of(op, "query", inputs[0])
        if len(inputs) == 1:
            return [query], queries, queries
        key, keys = sequences_of(op, "key", inputs[1], queries=queries)
        value, _ = sequences_of(op, "value", inputs[2], queries=queries)
        if not same_boundaries(inputs[1], inputs[2]):
            raise ValueError(
                f"{op}: key and value must have the same boundaries, "
                f"got key.shape={inputs[1].shape}, value.shape={inputs[2].shape}"
            )
        return [query, key, value], queries, keys

    def _masks(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        batch: int,
    ) -> tuple[Mask, Tensor | None]:
        """Converts the masks to rules and a bias; all queries attend to added keys."""
        extra = self.config.add_bias_kv + self.config.add_zero_attn
        rules: list[Mask] = []
        bias: Tensor | None = None
        if attn_mask is None and is_causal:
            if extra:
                raise NotImplementedError(
                    "MultiheadAttention: is_causal needs attn_mask with add_bias_kv, add_zero_attn"
                )
            rules.append(Causal(top_left=True))
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is None:
                continue
            padded = nn.functional.pad(mask, (0, extra))
            if name == "attn_mask" and mask.dim() == 3:
                padded = padded.unflatten(0, (batch, -1))
            if mask.dtype == torch.bool:
                wrap = KeyPadding if name == "key_padding_mask" else BoolMask
                rules.append(wrap(~padded))
            elif mask.is_floating_point():
                term = padded[:, None, None] if name == "key_padding_mask" else padded
                bias = term if bias is None else bias + term
            else:
                raise TypeError(
                    f"MultiheadAttention: {name} must be bool or float, "
                    f"got {name}.dtype={mask.dtype}"
                )
        return All(tuple(rules)), bias

    @staticmethod
    def _weights(q: Tensor, k: Tensor, lse: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """Computes the weights exp(logits - lse) (B, H, T, S), 0 for masked keys."""
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        logits = logits if bias is None else logits + bias
        seen = mask.visible(q.shape[1], k.shape[1], q.device, q.shape[2])
        some = lse[..., None] > -torch.inf
        weights = (logits - lse[..., None].masked_fill(~some, 0)).exp()
        return weights.masked_fill(~(some if seen is None else some & seen), 0).to(q.dtype)
