"""DeepSeek sparse attention: latent attention to keys selected by a small indexer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from omniattn import functional
from omniattn.checks.arguments import require_choice, shown
from omniattn.checks.tracing import may_train
from omniattn.functional.masks import Mask
from omniattn.modules.attention.mla import MultiHeadLatentAttention
from omniattn.modules.base.fields import Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import sequences_of
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.mixer import require_no_mask, require_tokens
from omniattn.modules.base.norm import LayerNorm
from omniattn.modules.base.state import State, Storage, take, takes_cache
from omniattn.modules.caches import new
from omniattn.modules.caches.cache import Cache
from omniattn.modules.experts.auxiliary import AuxiliaryLoss


class DSAState:
    """Caches of DeepSeek sparse attention: each token's latent and its indexer key.

    Args:
        latents: cache of the latents, as in MultiHeadLatentAttention.
        index: cache of the indexer's normalised and rotated keys, without values.
    """

    def __init__(self, latents: Cache, index: Cache) -> None:
        self.latents, self.index = latents, index

    @property
    def parts(self) -> tuple[Cache, ...]:
        """Caches of latents and of the indexer's keys."""
        return self.latents, self.index

    def append(self, k: Tensor, v: Tensor, k_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores n new tokens; returns k, v and k_idx (B, T, .) of all T tokens."""
        k, v = self.latents.append(k, v)
        keys, _ = self.index.append(k_idx[:, :, None], k_idx[:, :, None, :0])
        return k, v, keys[:, :, 0]

    @property
    def length(self) -> int:
        return self.latents.length

    @property
    def nbytes(self) -> int:
        return self.latents.nbytes + self.index.nbytes

    def crop(self, length: int) -> None:
        self.latents.crop(length)
        self.index.crop(length)

    def reorder(self, index: Tensor) -> None:
        self.latents.reorder(index)
        self.index.reorder(index)

    def state_dict(self) -> dict[str, Any]:
        return {"latents": self.latents.state_dict(), "index": self.index.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        latents, index = take("DSAState", state, "latents", "index")
        self.latents.load_state_dict(latents)
        self.index.load_state_dict(index)


class Indexer(nn.Module):
    """Computes queries, keys and weights of the indexer's scores, detached from the inputs.

    Parameters are named as in DeepSeek-V3.2.
    """

    def __init__(self, config: Any, device: Any, dtype: Any) -> None:
        super().__init__()
        self.config = c = config
        single = c.indexer == "single"
        source = c.dim if single or c.q_lora_rank is None else c.q_lora_rank

        def linear(n_in: int, n_out: int) -> Linear:
            own = Linear.Config(n_in, n_out, False, c.init_std, c.backend)
            return Linear(own, device=device, dtype=dtype)

        self.wq_b = linear(source, c.scorers * c.index_dim)
        self.wk = linear(c.dim, c.index_dim)
        if not single:
            norm = LayerNorm.Config(c.index_dim, 1e-6, backend=c.backend)
            self.k_norm = LayerNorm(norm, device=device, dtype=dtype)
            self.weights_proj = linear(c.dim, c.scorers)

    def forward(
        self, x: Tensor, latent: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Maps x (B, T, dim) and the latent of q to q (B, T, H, D), k (B, T, D), w (B, T, H)."""
        c = self.config
        x, latent = x.detach(), latent.detach()
        if c.indexer == "single":
            return self.wq_b(x)[:, :, None], self.wk(x), None
        q = self.wq_b(latent).unflatten(-1, (c.scorers, -1))
        k = self.k_norm(self.wk(x))[:, :, None]
        if rope is not None:
            q, k = functional.apply_rotary(
                q, k, *rope, interleaved=c.index_rope_interleaved, backend=c.backend
            )
        return q, k[:, :, 0], self.weights_proj(x) * (c.scorers * c.index_dim) ** -0.5


class DeepSeekSparseAttention(MultiHeadLatentAttention, AuxiliaryLoss):
    """Latent attention of each query to the `index_topk` keys with the highest indexer scores.

    The scores are ``I_ts = sum_h w_th relu(q_th . k_s)``: queries from the latent of the
    attention's queries, one normalised key for all heads, both rotated in their first dimensions,
    and signed weights from x, see :func:`omniattn.functional.dsa_indexer`. All attention heads
    share the selected keys. The attention is the absorbed form of MultiHeadLatentAttention on the
    selected latents. The indexer is trained by its own loss ``KL(p || softmax I)``, with p the
    attention weights, in `auxiliary`; it neither receives gradients from the model's loss nor
    passes any to the model.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim). Parameters of MultiHeadLatentAttention, and indexer.wq_b,
        indexer.wk, and unless "single" indexer.k_norm and indexer.weights_proj, as in DeepSeek-V3.2
        in transformers.

    Reference:
        DeepSeek-AI, DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2025,
        arXiv 2512.02556.

    Example:
        >>> sizes = {"kv_lora_rank": 16, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_dim": 8}
        >>> sizes |= {"index_heads": 2, "index_dim": 8, "index_topk": 3}
        >>> layer = DeepSeekSparseAttention(dim=32, num_heads=2, q_lora_rank=None, **sizes)
        >>> layer(torch.ones(1, 5, 32), rope=(torch.ones(5, 2), torch.zeros(5, 2))).shape
        torch.Size([1, 5, 32])
    """

    auxiliary_name = "indexer"

    @dataclass(frozen=True)
    class Config(MultiHeadLatentAttention.Config):
        """Fields of MultiHeadLatentAttention.Config, and the indexer.

        Args:
            index_heads: number of the indexer's heads, default 64, or 1 with "single".
            index_dim: size of the indexer's queries and keys.
            index_topk: number of selected keys per query.
            index_rope_interleaved: True for rotary pairs (2i, 2i + 1) in the indexer, as in
                GLM-MoE-DSA.
            indexer: "lightning", or "single": one head with q and k from x, without norm, rotation
                and weights.
            index_activation: "relu", or None for scores that can be negative.
            index_tie: key preferred among equal scores, the "first" or the most "recent".
            stage: "sparse", or "dense" for the warm-up, in which attention uses all keys and the
                indexer learns the weights of all keys.
            index_weight: weight of the indexer's loss, a mean over tokens, in training; 0 for none.
                Only this loss trains the indexer: add a model's `auxiliary_loss()` to its loss.
        """

        index_heads: Size | None = None
        index_dim: Size = 128
        index_topk: int = 2048
        index_rope_interleaved: bool = False
        indexer: str = "lightning"
        index_activation: str | None = "relu"
        index_tie: str = "first"
        stage: str = "sparse"
        index_weight: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            op = "DeepSeekSparseAttention"
            require_choice(op, "indexer", self.indexer, ("lightning", "single"))
            require_choice(op, "index_tie", self.index_tie, ("first", "recent"))
            require_choice(op, "stage", self.stage, ("dense", "sparse"))
            if self.fuse_up:
                raise ValueError(
                    f"{op}: fuse_up must be False, as the selected keys are latents, "
                    "got fuse_up=True"
                )
            if self.num_latents > 1:
                raise ValueError(
                    f"{op}: num_latents must be 1, as keys are selected for all heads, "
                    f"got num_latents={self.num_latents}"
                )
            if self.index_activation not in (None, "relu"):
                raise ValueError(
                    f'{op}: index_activation must be "relu" or None, '
                    f"got index_activation={shown(self.index_activation)}"
                )
            if self.index_topk < 1 or self.scorers < 1:
                raise ValueError(
                    f"{op}: index_topk and index_heads must be >= 1, "
                    f"got index_topk={self.index_topk}, index_heads={self.index_heads}"
                )
            if self.indexer == "single" and self.scorers > 1:
                raise ValueError(
                    f'{op}: indexer="single" has one head, got index_heads={self.index_heads}'
                )
            if self.indexer == "lightning" and self.index_dim < self.qk_rope_dim:
                raise ValueError(
                    f"{op}: index_dim must be at least qk_rope_dim, "
                    f"got index_dim={self.index_dim}, qk_rope_dim={self.qk_rope_dim}"
                )
            if not self.causal or tuple(self.window_size) != (-1, -1):
                raise ValueError(
                    f"{op}: must have causal=True and no window, "
                    f"got causal={self.causal}, window_size={self.window_size}"
                )

        @property
        def scorers(self) -> int:
            """Number of the indexer's heads."""
            if self.index_heads is None:
                return 64 if self.indexer == "lightning" else 1
            return self.index_heads

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.config = config
        self.indexer = Indexer(config, device, dtype)

    @property
    def auxiliary_weight(self) -> float:
        return float(self.config.index_weight)

    def new_state(  # type: ignore[override]
        self, batch: int, max_length: int, **storage: Unpack[Storage]
    ) -> DSAState:
        """Creates caches of the latents and of the indexer's keys."""
        weight = self.kv_a_proj_with_mqa.weight
        sizes = (batch, max_length, 1, self.config.index_dim)
        index = new.keys_and_values(self, weight, *sizes, v_head_dim=0, **storage)
        return DSAState(super().new_state(batch, max_length, **storage), index)

    @takes_cache
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim).

        Args:
            x: the tokens after those in `state`. For a jagged nested tensor the result is jagged,
                and each sequence attends only to itself.
            state: from `new_state`; the new latents and index keys are appended.
            rope: (cos, sin) at the positions of x, (T, qk_rope_dim / 2) or (B, T, qk_rope_dim / 2),
                or of x.values() if x is nested.
            mask: must be None; padding must be at the end of the sequences.
        """
        op, c = "DeepSeekSparseAttention", self.config
        require_no_mask(op, mask)
        if state is not None and not isinstance(state, DSAState):
            raise TypeError(f"{op}: state must be a DSAState, got {type(state).__name__}")
        x, sequences = sequences_of(op, "x", x, state=state)
        require_tokens(op, x, c.dim)
        self._require_rope(rope)
        latent = self._query_latent(x)
        q, k, v = self._rotated(self._queries(latent, x), *self._latents(x), rope)
        q_idx, k_idx, w = self.indexer(x, latent, rope)
        few = False
        if state is not None:
            k, v, k_idx = state.append(k, v, k_idx)
            few = x.shape[1] <= c.absorb_max
        given = (q, k, v, q_idx, k_idx) if w is None else (q, k, v, q_idx, k_idx, w)
        losses: list[Tensor] = []
        out = sequences.apart(partial(self._searched, few, losses), *given)
        self._keep(torch.cat(losses, 1).mean() if losses else None)
        y: Tensor = self.o_proj(out.flatten(-2))
        return sequences.restored(y)

    def _searched(
        self,
        few: bool,
        losses: list[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_idx: Tensor,
        k_idx: Tensor,
        w: Tensor | None = None,
    ) -> Tensor:
        """Computes the attention to the keys that the indexer selects.

        With `few` queries the absorbed form is always used. In training the indexer's loss of each
        token is appended to `losses`.
        """
        c = self.config
        # With at most index_topk keys all are selected, without a search.
        every = c.stage == "dense" or k.shape[1] <= c.index_topk
        index = None if every else self._chosen(q_idx, k_idx, w)
        if every and not few:
            k, v = self._expanded(k, v)
        else:
            q = self._to_latents(q)
        out, lse = self._attend_to(q, k, v, index)
        if self.training and may_train() and c.index_weight > 0:
            losses.append(self._loss(q_idx, k_idx, w, q, k, lse, index))
        return self._from_latents(out) if few or not every else out

    def _chosen(self, q_idx: Tensor, k_idx: Tensor, w: Tensor | None) -> Tensor:
        """Selects the keys (B, T, index_topk) of each query."""
        c = self.config
        return functional.dsa_indexer(
            *(q_idx, k_idx, w, c.index_topk),
            activation=cast(Literal["relu"] | None, c.index_activation),
            tie=cast(Literal["first", "recent"], c.index_tie),
            backend=c.backend,
        )

    def _attend_to(
        self, q: Tensor, k: Tensor, v: Tensor, index: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes output and lse of attention to the keys `index`, None for all causal keys."""
        c = self.config
        options: dict[str, Any] = {"causal": True, "scale": c.scale, "return_lse": True}
        options |= {"dropout_p": c.dropout_p if self.training else 0.0, "backend": c.backend}
        if index is None:
            out, lse = functional.attention(q, k, v, **options)
        else:
            out, lse = functional.selected_attention(
                q, k, v, index[:, None], block_size=1, **options
            )
        return out, lse

    def _loss(
        self,
        q_idx: Tensor,
        k_idx: Tensor,
        w: Tensor | None,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        index: Tensor | None,
    ) -> Tensor:
        """Computes the indexer's loss of each token (B, T)."""
        c = self.config
        return functional.dsa_indexer_loss(
            *(q_idx, k_idx, w, q.detach(), k.detach(), lse.detach(), index),
            scale=c.scale,
            activation=cast(Literal["relu"] | None, c.index_activation),
            backend=c.backend,
        )
