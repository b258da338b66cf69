"""Multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import shown
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, C, OnDevice, either
from omniattn.modules.base.layer import Layer, LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.norm import RMSNorm

__all__ = ["MultiTokenPredictor"]


class _ByConfig(ByConfig[C]):
    block: Callable[[], nn.Module]


class MultiTokenPredictor(Layer):
    """Predicts further tokens, one more per depth.

    ``h^d[i] = Block_d(M_d [RMSNorm(h^(d-1)[i]) ; RMSNorm(Emb(t[i + d]))])``, or with `parallel`
    ``h^d[i] = Block_d(h^0[i])`` from the trunk's hidden states ``h^0``;
    ``logits_d[i] = Head(RMSNorm(h^d[i]))`` for token ``i + d + 1``.

    Args:
        config: sizes and options.
        block: builds a causal transformer block (B, T, dim) -> (B, T, dim); called once per depth.
        device, dtype: device and dtype of the parameters.

    Shape:
        hidden states (B, T, dim) of the trunk, tokens (B, T) -> logits (B, T - d, V) per depth
        d = 1, 2, ... Parameters depths.<d>.hidden_norm, embedding_norm, proj (dim, 2 dim), block,
        norm; with `parallel` only block and norm. Embedding and head are shared with the trunk.

    Reference:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv 2412.19437, section 2.2; in
        parallel: Gloeckle et al., "Better & Faster Large Language Models via Multi-token
        Prediction", 2024, arXiv 2404.19737.

    Example:
        >>> predictor = MultiTokenPredictor(MultiTokenPredictor.Config(8, depths=2), nn.Identity)
        >>> embedding, head = nn.Embedding(5, 8), nn.Linear(8, 5)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> [l.shape[1] for l in predictor(embedding(tokens), tokens, embedding, head)]
        [3, 2]
    """

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Sizes and options.

        Args:
            dim: width of the hidden states.
            depths: number of further tokens.
            eps: eps of the norms.
            concat: order of proj's inputs, "hidden_first" (paper) or "embedding_first" (released
                weights).
            post_norm: True if a depth passes its normalised output to the next, and expects the
                trunk's hidden states after its final norm.
            parallel: True if every depth predicts from the trunk's hidden states; `concat` and
                `post_norm` then have no effect.
            init_std, backend: as in Linear.
        """

        dim: Size
        depths: Size = 1
        eps: Epsilon = 1e-6
        concat: str = "hidden_first"
        post_norm: bool = True
        parallel: bool = False
        init_std: float = 0.02
        backend: Backend = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.concat not in ("hidden_first", "embedding_first"):
                raise ValueError(
                    "MultiTokenPredictor: concat must be hidden_first or embedding_first, "
                    f"got concat={shown(self.concat)}"
                )

    class _Fields(Config, OnDevice):
        block: Callable[[], nn.Module] = field(kw_only=True)

    @config_or_fields(Config, either(_ByConfig[Config], _Fields).init)
    def __init__(
        self,
        config: Config,
        block: Callable[[], nn.Module],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = c = config

        def norm() -> RMSNorm:
            return RMSNorm(
                RMSNorm.Config(c.dim, eps=c.eps, backend=c.backend), device=device, dtype=dtype
            )

        def depth() -> nn.ModuleDict:
            if c.parallel:
                return nn.ModuleDict({"block": block(), "norm": norm()})
            proj = Linear.Config(2 * c.dim, c.dim, init_std=c.init_std, backend=c.backend)
            return nn.ModuleDict(
                {
                    "hidden_norm": norm(),
                    "embedding_norm": norm(),
                    "proj": Linear(proj, device=device, dtype=dtype),
                    "block": block(),
                    "norm": norm(),
                }
            )

        self.depths = nn.ModuleList(depth() for _ in range(c.depths))

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        embedding: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        run: Callable[[nn.Module, Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """Computes the logits of each depth.

        Args:
            hidden: hidden states (B, T, dim) of the trunk.
            tokens: (B, T) int.
            embedding, head: the trunk's embedding and output head.
            run: calls a block that needs further arguments, such as rotary tables:
                run(block, x); default: block(x).
        """
        if tokens.shape != hidden.shape[:2]:
            raise ValueError(
                f"MultiTokenPredictor: tokens must have shape {tuple(hidden.shape[:2])}, "
                f"got tokens.shape={tuple(tokens.shape)}"
            )
        if tokens.shape[1] <= self.config.depths:
            raise ValueError(
                "MultiTokenPredictor: tokens must be longer than the depths, "
                f"got T={tokens.shape[1]}, depths={self.config.depths}"
            )
        logits, chain = [], hidden
        for d, depth in enumerate(self.depths, 1):
            assert isinstance(depth, nn.ModuleDict)
            if self.config.parallel:
                x = hidden[:, :-d]
            else:
                x = self.join(depth, chain[:, :-1], embedding(tokens[:, d:]))
            chain = depth["block"](x) if run is None else run(depth["block"], x)
            normed = depth["norm"](chain)
            logits.append(head(normed))
            chain = normed if self.config.post_norm else chain
        return logits

    def join(self, depth: nn.ModuleDict, chain: Tensor, embedded: Tensor) -> Tensor:
        """Computes the input of a depth's block.

        Args:
            depth: one of `depths`.
            chain: hidden states (B, T, dim) of the previous depth.
            embedded: embeddings (B, T, dim) of the tokens that the depth adds.
        """
        pair = [depth["hidden_norm"](chain), depth["embedding_norm"](embedded)]
        if self.config.concat == "embedding_first":
            pair.reverse()
        x: Tensor = depth["proj"](torch.cat(pair, -1))
        return x

    @staticmethod
    def loss(logits: list[Tensor], labels: Tensor, *, weight: float = 0.3) -> Tensor:
        """Computes ``weight`` times the mean over depths of the cross entropies.

        The cross entropy of a depth is the mean over its targets. Gloeckle et al. use the sum over
        depths: a weight equal to the number of depths. labels (B, T) int64 are the next token of
        each position, -100 for positions without a loss.
        """
        losses = [functional.cross_entropy(x, labels[:, d:]) for d, x in enumerate(logits, start=1)]
        return weight * torch.stack(losses).mean()
