"""TTT-Linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.modules.base.fields import Backend, Epsilon, Positive, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import LayerNorm
from omniattn.modules.base.short_conv import ShortConvolution
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.caches.cache import storage_like
from omniattn.modules.recurrent.recurrent import Device, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer


class TTTLinear(StateMixer):
    """Layer whose state is a linear model, trained on the tokens that it reads.

    ``y = W_o (gate * LN(o))`` with o of `functional.ttt_linear` for q, k and v, q and k rotated by
    their place in a mini-batch, step sizes ``eta_t = max(1 / p + learnable_token_idx_p, 0)`` for
    the p-th token of a mini-batch and factors ``lr = ttt_base_lr sigmoid(x w_lr + b_lr) / D``;
    ``gate = gelu(x W_g)`` with `use_gate`, else 1. The first weights W1 and b1 are learned.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters q_proj, k_proj, v_proj, o_proj, learnable_ttt_lr_weight (H, 1, dim),
        learnable_ttt_lr_bias (H, 1), learnable_token_idx (C), ttt_norm_weight and ttt_norm_bias
        (H, D), W1 (H, D, D), b1 (H, 1, D) and post_norm; with use_gate g_proj, with share_qk
        conv_q and conv_k in place of k_proj: names and shapes as in ttt-lm.

    Reference:
        Sun et al., Learning to (Learn at Test Time), 2024, arXiv 2407.04620. Verified against
        `TTTLinear` of test-time-training/ttt-lm-pytorch, commit cd831db1.

    Example:
        >>> TTTLinear(dim=8, num_heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of x and y, a multiple of num_heads.
            num_heads: number H of heads, each with a linear model; D = dim / H is even.
            mini_batch_size: number C of tokens whose gradients are taken at the same weights.
            ttt_base_lr: largest lr, times D.
            rope_theta: base of the rotation.
            use_gate: True for a gate of the output.
            share_qk: True to make q and k from one projection by two convolutions.
            conv_kernel: number of taps of these convolutions.
            norm_eps: added to variances.
            init_std: standard deviation of weights.
            backend: as in Attention.
        """

        dim: Size
        num_heads: Size
        mini_batch_size: Size = 16
        ttt_base_lr: Positive = 1.0
        rope_theta: Positive = 10000.0
        use_gate: bool = False
        share_qk: bool = False
        conv_kernel: Size = 4
        norm_eps: Epsilon = 1e-6
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.dim % (2 * self.num_heads):
                raise ValueError(
                    "TTTLinear: dim must be a multiple of 2 num_heads, "
                    f"got dim={self.dim}, num_heads={self.num_heads}"
                )

        @property
        def head_dim(self) -> int:
            return self.dim // self.num_heads

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = c = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        names = ["q_proj", "v_proj", "o_proj"]
        names += [] if c.share_qk else ["k_proj"]
        names += ["g_proj"] if c.use_gate else []
        for name in names:
            layer = Linear(c.dim, c.dim, False, init_std=c.init_std, backend=c.backend, **factory)
            self.add_module(name, layer)
        for name in ("conv_q", "conv_k") if c.share_qk else ():
            conv = ShortConvolution.Config(c.dim, c.conv_kernel, True, None, c.backend)
            self.add_module(name, conv.build(**factory))
        heads, size = c.num_heads, c.head_dim
        shapes = {
            "learnable_ttt_lr_weight": (heads, 1, c.dim),
            "learnable_ttt_lr_bias": (heads, 1),
            "learnable_token_idx": (c.mini_batch_size,),
            "ttt_norm_weight": (heads, size),
            "ttt_norm_bias": (heads, size),
            "W1": (heads, size, size),
            "b1": (heads, 1, size),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        norm = LayerNorm.Config(c.dim, c.norm_eps, backend=c.backend)
        self.post_norm = norm.build(**factory)
        self.reset_parameters()

    #: Names of the parameters that optimizers do not decay.
    undecayed = ("learnable_ttt_lr_bias", "ttt_norm_weight", "ttt_norm_bias", "W1", "b1")
    learnable_ttt_lr_weight: nn.Parameter
    learnable_ttt_lr_bias: nn.Parameter
    learnable_token_idx: nn.Parameter
    ttt_norm_weight: nn.Parameter
    ttt_norm_bias: nn.Parameter
    W1: nn.Parameter
    b1: nn.Parameter

    def reset_parameters(self) -> None:
        """Draws W1 and learnable_ttt_lr_weight; sets ttt_norm_weight to 1 and the others to 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in ("W1", "learnable_ttt_lr_weight"):
                nn.init.normal_(parameter, std=self.config.init_std)
            else:
                nn.init.constant_(parameter, float(name == "ttt_norm_weight"))

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates W1 and b1 for each sequence, and zeros, in fp32 (fp64 for fp64).

        `w` (B, H, D, D), `b` (B, H, D) and the gradients `dw` and `db` are those of
        functional.ttt_linear, `position` (B) the number of tokens; with share_qk also the states of
        the convolutions.
        """
        wide = zeros_of_states(self.W1, storage)
        w, b = self._first(batch, wide)
        tensors = {"w": w.detach().clone(), "b": b.detach().clone()}
        tensors |= {"dw": torch.zeros_like(w), "db": torch.zeros_like(b)}
        tensors["position"] = wide.new_zeros(batch)
        if self.config.share_qk:
            like = wide.new_zeros(0, dtype=storage_like(self.W1, **storage)["dtype"])
            for name in ("conv_q", "conv_k"):
                conv = cast(ShortConvolution, self.get_submodule(name))
                tensors[name] = conv.new_state(batch, like)
        return RecurrentState(**tensors)

    def _first(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns W1 and b1 for each of `count` sequences, with the device and dtype of `like`."""
        return self.W1.to(like).expand(count, -1, -1, -1), self.b1.to(like)[:, 0].expand(
            count, -1, -1
        )

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        c, packed = self.config, sequences.cu_seqlens
        after: dict[str, Tensor] = {}
        q, k = self._queries_and_keys(x, state, packed, after)
        parts = (q, k, self.get_submodule("v_proj")(x))
        q, k, v = (t.unflatten(-1, (c.num_heads, c.head_dim)) for t in parts)
        wide = self.W1.new_zeros(0, dtype=torch.promote_types(self.W1.dtype, torch.float32))
        past = None if state is None else state["position"].long()
        at = sequences.positions(x)[None]
        if past is not None:
            at = at + (past[:, None] if packed is None else past[sequences.entries(x)])
        at = at % c.mini_batch_size
        theta = functional.rope_frequencies(c.head_dim, base=c.rope_theta, device=x.device)
        places = torch.arange(c.mini_batch_size, device=x.device)
        tables = functional.rotary_tables(theta, places, wide.dtype)
        q, k = functional.apply_rotary(
            q, k, *tables, positions=at, interleaved=True, backend=c.backend
        )
        logits = nnf.linear(x, self.learnable_ttt_lr_weight[:, 0], self.learnable_ttt_lr_bias[:, 0])
        lr = logits.to(wide.dtype).sigmoid() * (c.ttt_base_lr / c.head_dim)
        steps = (places.to(wide.dtype) + 1).reciprocal()
        steps = (steps + self.learnable_token_idx.to(wide.dtype)).clamp(min=0)
        count = x.shape[0] if packed is None else packed.shape[0] - 1
        if state is None:
            w, b = self._first(count, wide)
            before = (w, b, torch.zeros_like(w), torch.zeros_like(b))
        else:
            before = (state["w"], state["b"], state["dw"], state["db"])
        o, found = functional.ttt_linear(
            *(q, k, v, self.ttt_norm_weight, self.ttt_norm_bias),
            steps[at][..., None].expand_as(lr),
            lr,
            scale=1.0,
            eps=c.norm_eps,
            mini_batch_size=c.mini_batch_size,
            residual="query",
            position=past,
            initial_state=before,
            cu_seqlens=packed,
            backend=c.backend,
        )
        after |= dict(zip(("w", "b", "dw", "db"), found, strict=True))
        if state is not None:
            tokens = x.shape[1] if packed is None else packed.diff()
            after["position"] = state["position"] + tokens
        y = self.post_norm(o.flatten(-2))
        if c.use_gate:
            y = nnf.gelu(self.get_submodule("g_proj")(x), approximate="tanh") * y
        return self.get_submodule("o_proj")(y), after

    def _queries_and_keys(
        self,
        x: Tensor,
        state: RecurrentState | None,
        packed: Tensor | None,
        after: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Computes q and k, and stores the states of their convolutions in `after`."""
        q: Tensor = self.get_submodule("q_proj")(x)
        if not self.config.share_qk:
            return q, self.get_submodule("k_proj")(x)
        found = []
        for name in ("conv_q", "conv_k"):
            before = None if state is None else state[name].to(q.dtype)
            y, after[name] = self.get_submodule(name)(q, before, packed)
            found.append(y)
        return found[0], found[1]
