"""Residual forms with several streams: hyper-connections, mHC, attention residuals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omniattn import functional
from omniattn.checks.arguments import widen
from omniattn.modules.base.fields import Backend, Epsilon, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.layer import config_or_fields
from omniattn.modules.base.streams import Streams, StreamsConfig


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Returns nearly doubly stochastic matrices (..., n, n): normalises rows and columns in turn.

    Args:
        logits: (..., n, n), logarithms of the positive matrices.
        iterations: number of normalisations of rows, and of columns.
        eps: added to all entries after the first, and to the sums.
    """
    m = logits.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


class _Mixed(Streams):
    """Streams of which a layer reads a weighted sum, and that mix and gain the layer's output."""

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weights to read (B, T, n), to write (B, T, n) and to mix (B, T, n, n)."""
        raise NotImplementedError

    def start(self, x: Tensor) -> Tensor:
        """Returns n copies of x."""
        return x.repeat(*(1,) * (x.dim() - 1), self.config.streams)

    def read(self, h: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the weighted sum of the streams, and the other weights."""
        streams = self.apart(h)
        pre, post, mix = self.weights(streams)
        y = (pre.to(h.dtype).unsqueeze(-2) @ streams).squeeze(-2)
        return y, (post, mix)

    def write(self, h: Tensor, y: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the mixed streams plus their shares of y."""
        post, mix = (t.to(h.dtype) for t in found)
        kept = mix.transpose(-1, -2) @ self.apart(h)
        return (kept + post.unsqueeze(-1) * y.to(h.dtype).unsqueeze(-2)).flatten(-2)


class HyperConnections(_Mixed):
    """Computes n streams ``h_m = sum_i A_im h_i + b_m f(sum_i a_i h_i)`` around a layer f.

    a, b and A are learned, plus terms ``s tanh(LayerNorm(h_i) W)`` that depend on the token. In the
    beginning layer l reads stream l mod n, A is the identity and b is 1. The streams start as
    copies of the embeddings and are added up after the last layer.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        h (B, T, streams * dim); x, y (B, T, dim).
        Parameters static_alpha (streams, streams + 1), whose first column is a; static_beta
        (streams,), alpha_weight (dim, streams + 1), beta_weight (dim,), scale (2,), norm_weight
        (dim,), all float32 for every dtype; none with `head`.

    Reference:
        Zhu et al., Hyper-Connections, 2024, arXiv 2409.19606, whose appendix has this as code.

    Example:
        >>> layer = HyperConnections(dim=2, streams=2)
        >>> h = layer.start(torch.ones(1, 1, 2))
        >>> x, found = layer.read(h)
        >>> layer.write(h, x, found)
        tensor([[[2., 2., 2., 2.]]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(StreamsConfig):
        """Sizes and options.

        Args:
            dim: width of a stream.
            place: number of layers before this one.
            head: True for the output of a model.
            streams: number of streams.
            norm_eps: epsilon of the norm.
            backend: backend of the norm.
        """

        streams: Size = 4
        norm_eps: Epsilon = 1e-5
        backend: Backend = None

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
        if not c.head:

            def new(*shape: int) -> nn.Parameter:
                return nn.Parameter(torch.empty(shape, device=device))

            self.static_alpha, self.static_beta = new(c.streams, c.streams + 1), new(c.streams)
            self.alpha_weight, self.beta_weight = new(c.dim, c.streams + 1), new(c.dim)
            self.norm_weight, self.scale = new(c.dim), new(2)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights of a plain residual stream; those that depend on the token are 0."""
        c = self.config
        if c.head:
            return
        with torch.no_grad():
            self.static_alpha.copy_(torch.eye(c.streams, c.streams + 1).roll(1, 1))
            self.static_alpha[c.place % c.streams, 0] = 1
        for parameter in (self.static_beta, self.norm_weight):
            nn.init.ones_(parameter)
        for parameter in (self.alpha_weight, self.beta_weight):
            nn.init.zeros_(parameter)
        nn.init.constant_(self.scale, 0.01)

    @property
    def undecayed(self) -> tuple[str, ...]:
        """Names of parameters without weight decay: in the paper those that no token changes."""
        return () if self.config.head else ("static_alpha",)

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a, b and A of each token."""
        c = self.config
        norm = functional.layer_norm(
            widen(streams),
            self.norm_weight.to(widen(streams).dtype),
            eps=c.norm_eps,
            backend=c.backend,
        )
        alpha = self.static_alpha + self.scale[0] * torch.tanh(
            norm @ self.alpha_weight.to(norm.dtype)
        )
        beta = self.static_beta + self.scale[1] * torch.tanh(norm @ self.beta_weight.to(norm.dtype))
        return alpha[..., 0], beta, alpha[..., 1:]

    def collapse(self, h: Tensor) -> Tensor:
        """Returns the sum of the streams."""
        return self.apart(h).sum(-2)


class ManifoldHyperConnections(_Mixed):
    """Computes n streams ``h_m = sum_i A_im h_i + b_m f(sum_i a_i h_i)`` with A doubly stochastic.

    The weights depend on all streams of the token, with ``(u, v, M) = scale (W x) + bias`` and x
    the normed streams: ``a = sigmoid(u) + eps``, ``b = 2 sigmoid(v)``, and A from M by Sinkhorn's
    normalisations of rows and columns (mHC). In the beginning this is nearly a plain residual
    stream. The streams start as copies of the embeddings, and a weighted sum, with weights such as
    a, follows the last layer.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        h (B, T, streams * dim); x, y (B, T, dim).
        Parameters weight (streams (2 + streams), streams dim), bias (streams (2 + streams),) and
        scale (3,), or with `head` (streams, streams dim), (streams,) and (1,), float32 for every
        dtype.

    Reference:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025, arXiv 2512.24880;
        DeepSeek-V4's form in transformers 5.24.

    Example:
        >>> layer = ManifoldHyperConnections(dim=2, streams=2)
        >>> x, found = layer.read(layer.start(torch.ones(1, 1, 2)))
        >>> layer.write(layer.start(x), x, found).shape
        torch.Size([1, 1, 4])
    """

    @dataclass(frozen=True)
    class Config(StreamsConfig):
        """Sizes and options.

        Args:
            dim: width of a stream.
            place: number of layers before this one.
            head: True for the output of a model.
            streams: number of streams.
            iterations: number of Sinkhorn's iterations.
            eps: added to weights and sums.
            norm_eps: epsilon of the norm.
            init_std: standard deviation of the initial weight.
            backend: backend of the norm.
        """

        streams: Size = 4
        iterations: Size = 20
        eps: Epsilon = 1e-6
        norm_eps: Epsilon = 1e-6
        init_std: float = 0.02
        backend: Backend = None

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
        rows = c.streams * (1 if c.head else 2 + c.streams)
        self.weight = nn.Parameter(torch.empty(rows, c.streams * c.dim, device=device))
        self.bias = nn.Parameter(torch.empty(rows, device=device))
        self.scale = nn.Parameter(torch.empty(1 if c.head else 3, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from N(0, init_std^2); the bias is 0 and the scales are 0.01."""
        nn.init.normal_(self.weight, std=self.config.init_std)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.scale, 0.01)

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a, b and A of each token."""
        c = self.config
        scores = self._scores(streams)
        n = c.streams
        pre, post, mix = (
            score * scale + bias
            for score, scale, bias in zip(
                scores.split([n, n, n * n], -1),
                self.scale,
                self.bias.split([n, n, n * n]),
                strict=True,
            )
        )
        mix = sinkhorn(mix.unflatten(-1, (n, n)), c.iterations, c.eps)
        return pre.sigmoid() + c.eps, 2 * post.sigmoid(), mix

    def collapse(self, h: Tensor) -> Tensor:
        """Returns a weighted sum of the streams."""
        streams = self.apart(h)
        shares = (self._scores(streams) * self.scale + self.bias).sigmoid() + self.config.eps
        return (shares.to(h.dtype).unsqueeze(-2) @ streams).squeeze(-2)

    def _scores(self, streams: Tensor) -> Tensor:
        c = self.config
        flat = functional.rms_norm(widen(streams.flatten(-2)), eps=c.norm_eps, backend=c.backend)
        return flat @ self.weight.to(flat.dtype).T


class AttentionResiduals(Streams):
    """Computes a layer's input as attention over the outputs of earlier layers.

    ``x = sum_i softmax_i(w . RMSNorm(v_i)) v_i`` with a learned w, initially 0, over the embeddings
    v_0 and the outputs v_i of earlier layers (AttnRes). With block_size = S, S consecutive layers
    share one v_i, the sum of their outputs. The norm has no weight, as w can contain it.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters.

    Shape:
        h (B, T, m * dim) with m growing; x, y (B, T, dim).
        Parameters query (dim,), float32 for every dtype.

    Reference:
        Kimi Team, Attention Residuals, 2026, arXiv 2603.15031 (README of
        MoonshotAI/Attention-Residuals).

    Example:
        >>> layer = AttentionResiduals(dim=1)
        >>> h = layer.write(torch.ones(1, 1, 1), torch.full((1, 1, 1), 3.0), None)
        >>> layer.read(h)[0]
        tensor([[[2.]]], grad_fn=...)
    """

    @dataclass(frozen=True)
    class Config(StreamsConfig):
        """Sizes and options.

        Args:
            dim: width of x and y.
            place: number of layers before this one.
            head: True for the output of a model.
            block_size: number of layers whose outputs are added up, counting mixers and MLPs.
            norm_eps: epsilon of the norm.
            backend: backend of the norm.
        """

        block_size: Size = 1
        norm_eps: Epsilon = 1e-6
        backend: Backend = None

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
        self.query = nn.Parameter(torch.empty(config.dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the query to 0, for the mean of all earlier outputs."""
        nn.init.zeros_(self.query)

    def start(self, x: Tensor) -> Tensor:
        """Returns x, the first of the outputs."""
        return x

    def read(self, h: Tensor) -> tuple[Tensor, None]:
        """Returns the weighted mean of the earlier outputs."""
        c, streams = self.config, self.apart(h)
        keys = functional.rms_norm(widen(streams), eps=c.norm_eps, backend=c.backend)
        shares = (keys @ self.query.to(keys.dtype)).softmax(-1)
        return (shares.to(h.dtype).unsqueeze(-2) @ streams).squeeze(-2), None

    def write(self, h: Tensor, y: Tensor, found: None) -> Tensor:
        """Appends y, or adds it to the last of the outputs within a block."""
        y = y.to(h.dtype)
        if self.config.place % self.config.block_size == 0:
            return torch.cat([h, y], -1)
        before, last = h.tensor_split([h.shape[-1] - self.config.dim], -1)
        return torch.cat([before, last + y], -1)
