"""Lightning indexer of DeepSeek Sparse Attention, which selects keys, and its loss."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from omniattn import reference
from omniattn.checks.arguments import (
    autocast_dtype,
    full_precision,
    implementation,
    is_one_of,
    is_traced,
    require_bool,
    require_choice,
    require_float,
    require_int,
    require_like,
    require_number,
    shown,
    use_reference,
    widen,
)
from omniattn.functional.attention._common import (
    autocast,
    require_int32_or_int64,
    require_lse,
    require_parameter,
)
from omniattn.functional.attention.attention import attention
from omniattn.functional.masks import KeyPadding
from omniattn.functional.sparse._common import require_real
from omniattn.functional.sparse.selected_attention import selected_attention
from omniattn.ops import indexer as ops
from omniattn.reference.attention.attention import default_scale
from omniattn.reference.precision import compute_dtype
from omniattn.reference.sparse.selected_attention import require_lists

__all__ = ["dsa_indexer", "dsa_indexer_loss"]


@overload
def dsa_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    topk: int,
    *,
    causal: bool = True,
    key_stride: int = 1,
    past: int | None = None,
    activation: Literal["relu"] | None = "relu",
    tie: Literal["first", "recent"] = "first",
    key_padding: Tensor | None = None,
    sorted_by_index: bool = False,
    return_scores: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def dsa_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    topk: int,
    *,
    causal: bool = True,
    key_stride: int = 1,
    past: int | None = None,
    activation: Literal["relu"] | None = "relu",
    tie: Literal["first", "recent"] = "first",
    key_padding: Tensor | None = None,
    sorted_by_index: bool = False,
    return_scores: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def dsa_indexer(
    q: Tensor,
    k: Tensor,
    w: Tensor | None,
    topk: int,
    *,
    causal: bool = True,
    key_stride: int = 1,
    past: int | None = None,
    activation: Literal["relu"] | None = "relu",
    tie: Literal["first", "recent"] = "first",
    key_padding: Tensor | None = None,
    sorted_by_index: bool = False,
    return_scores: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Selects the keys of each query in DeepSeek Sparse Attention by cheap separate scores.

    ``S_t = topk keys s of the largest I_ts = sum_h w_th relu(q_th . k_s)``, s <= t + Tk - Tq if
    causal; all heads of the attention share them: pass ``S[:, None]`` to
    :func:`selected_attention` with ``block_size=1``. No (Tq, Tk) tensor is made.

    Args:
        q: (B, Tq, H, D), float64, float32, bfloat16 or float16, after the rotary embedding.
        k: (B, Tk, D) of q's dtype, one key for all heads.
        w: (B, Tq, H) of q's dtype or float32, signed, with the factors 1 / sqrt(H) and 1 / sqrt(D)
            if wanted. None is 1 for each head.
        topk: number of keys per query, >= 0.
        causal: query t sees keys up to t + Tk - Tq.
        key_stride: number of tokens for which a key stands: key s is seen from token
            (s + 1) key_stride - 1 on, as the compressed keys of DeepSeek-V4 and Qwen4 are.
        past: number of tokens before the first query; k has (past + Tq) // key_stride keys. None is
            Tk - Tq, for key_stride = 1 only.
        activation: "relu", or None for the products themselves.
        tie: order of equal scores, the "first" key or the most "recent" first. With relu, equal
            scores (0) are common.
        key_padding: (B, Tk) of bool, True = real; other keys are never selected.
        sorted_by_index: return the keys in the order of their indices, -1 last.
        return_scores: also return the keys' scores I.
        backend: None for the native kernel of q's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        S (B, Tq, topk) int32, by falling score, -1 where a query sees fewer keys; and with
        return_scores I (B, Tq, topk) in float32 (float64 for float64), -inf where S is -1.

    Raises:
        TypeError: a dtype is unsupported or does not match the others.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Scores are sums in fp32 (fp64 for fp64) of products in the dtype of q; -0 equals +0, and NaN
        is less than -inf. There is no gradient: :func:`dsa_indexer_loss` trains the indexer.

    Reference:
        DeepSeek-AI, DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2025,
        arXiv:2512.02556.

    Example:
        >>> q, k = torch.ones(1, 3, 1, 1), torch.tensor([[[1.0], [3.0], [2.0]]])
        >>> dsa_indexer(q, k, None, 2)
        tensor([[[ 0, -1],
                 [ 1,  0],
                 [ 1,  2]]], dtype=torch.int32)
    """
    op = "dsa_indexer"
    q, k, w = _index_inputs(op, q, k, w, ("q", "k", "w"))
    require_int(op, "topk", topk, 0, 2**31 - 1)
    _check_options(op, k, causal, activation, key_padding)
    require_choice(op, "tie", tie, ("first", "recent"))
    require_bool(op, "sorted_by_index", sorted_by_index)
    require_bool(op, "return_scores", return_scores)
    run = implementation(op, backend, q, ops.dsa_indexer)
    weights = None if w is None else widen(w.detach())
    given = q.detach(), k.detach(), weights, key_padding
    windows = _windows(op, q, k, causal, key_stride, past)
    if key_stride > 1 and q.shape[1] == 1:  # the query sees all keys
        causal, windows = False, None
    index, scores = run(
        *(given if windows is None else windows.split(*given)),
        *(topk, causal, activation == "relu", tie == "recent", return_scores),
    )
    if windows is not None:
        index = windows.joined(index)
        scores = windows.joined(scores) if return_scores else scores
    if sorted_by_index:
        order = torch.where(index < 0, k.shape[1], index).argsort(-1)
        index = index.gather(-1, order)
        scores = scores.gather(-1, order) if return_scores else scores
    return (index, scores) if return_scores else index


class _Windows(NamedTuple):
    """Queries by their places in windows of tokens, so that keys of windows are causal to each.

    A query at position t sees (t + 1) // stride keys. The queries with equal (t + 1) % stride, one
    for each window, are an entry of the batch.
    """

    stride: int
    #: Places in the first window that have no query, and number of queries.
    lead: int
    queries: int

    def split(
        self, q: Tensor, k: Tensor, w: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns the rows of each place, (B stride, windows, ..), and the keys for each."""
        rest = -(self.lead + self.queries) % self.stride

        def by_place(t: Tensor) -> Tensor:
            added = (0, 0) * (t.dim() - 2) + (self.lead, rest)
            t = torch.nn.functional.pad(t, added).unflatten(1, (-1, self.stride))
            return t.transpose(1, 2).flatten(0, 1)

        if padding is not None:
            padding = padding.repeat_interleave(self.stride, 0)
        weights = None if w is None else by_place(w)
        return by_place(q), k.repeat_interleave(self.stride, 0), weights, padding

    def joined(self, t: Tensor) -> Tensor:
        """Returns results of the places (B stride, windows, n) in the order of queries."""
        t = t.unflatten(0, (-1, self.stride)).transpose(1, 2).flatten(1, 2)
        return t[:, self.lead : self.lead + self.queries]


def _windows(
    op: str, q: Tensor, k: Tensor, causal: bool, key_stride: int, past: int | None
) -> _Windows | None:
    """Checks the positions of queries and keys; returns windows unless each token has a key."""
    require_int(op, "key_stride", key_stride, 1, 2**31 - 1)
    if past is None and key_stride == 1:
        return None
    if past is None or not causal:
        raise ValueError(
            f"{op}: key_stride > 1 and past need each other and causal=True, got past={past}, "
            f"key_stride={key_stride}, causal={causal}"
        )
    require_int(op, "past", past, 0)
    queries, keys = q.shape[1], k.shape[1]
    if not is_one_of(keys, (past + queries) // key_stride):
        raise ValueError(
            f"{op}: k must have (past + Tq) // key_stride keys, got Tk={keys}, past={past}, "
            f"Tq={queries}, key_stride={key_stride}"
        )
    if key_stride == 1:
        return None
    return _Windows(key_stride, (past + 1) % key_stride, queries)


def dsa_indexer_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor | None,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    activation: Literal["relu"] | None = "relu",
    key_padding: Tensor | None = None,
    debug: bool = False,
    backend: str | None = None,
) -> Tensor:
    """KL divergence of an indexer's softmax from the weights of the attention that it serves.

    ``loss_t = KL(p_t || softmax_s I_ts) = sum_s p_ts (ln p_ts - I_ts) + ln sum_s exp I_ts``, with I
    of :func:`dsa_indexer` and p_t the sum over heads of ``exp(scale q_th . k_s - lse_th)``, divided
    by its own sum. s runs over all keys that query t sees (dense warm-up), or over the keys in
    `indices` (sparse stage). No (Tq, Tk) tensor is kept.

    Args:
        q_idx: (B, Tq, HI, DI), k_idx (B, Tk, DI) and w (B, Tq, HI) or None, as q, k and w of
            :func:`dsa_indexer`. Detach their inputs from the trunk to train it by the language
            model's loss alone.
        k_idx, w: see q_idx.
        q: (B, Tq, Hq, D) and k (B, Tk, Hkv, D) of the attention, as in :func:`attention`.
        k: see q.
        lse: (B, Hq, Tq) float32 (float64 for float64), as returned for them by :func:`attention`,
            or in the sparse stage :func:`selected_attention`; None computes it.
        indices: (B, Tq, n) int32 or int64: the keys of each query, each at most once, -1 for none.
            None for all.
        scale: factor on q k^T; None is 1 / sqrt(D).
        causal: query t sees keys up to t + Tk - Tq.
        activation: as in :func:`dsa_indexer`.
        key_padding: (B, Tk) of bool, True = real; other keys take no part.
        debug: check `indices` for repeated keys, which count twice, and on a GPU for numbers out of
            range, with a synchronisation.
        backend: None for the native kernels of q's device, "cpu" or "cuda" to insist on them,
            "reference" for the eager definition.

    Returns:
        loss (B, Tq) in float32 (float64 for float64), 0 for a query that sees no key. DeepSeek's
        loss is its mean.

    Raises:
        TypeError: a dtype is unsupported or does not match the others.
        ValueError: a shape, device or value is invalid.
        NotImplementedError: no native kernel for the device.

    Note:
        Gradients flow to q_idx, k_idx and w; q, k and lse are constants. They and the loss do not
        depend on the number of threads. Products are in fp32 (fp64 for fp64). The sparse stage
        keeps p, (B, Tq, n), for the backward; the dense one computes it again. On CUDA the
        products are torch's (cuBLAS), for some queries at a time.

    Reference:
        DeepSeek-AI, DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, 2025,
        arXiv:2512.02556.

    Example:
        >>> q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
        >>> dsa_indexer_loss(q, k[:, :, 0], None, q, k)
        tensor([[0., 0.]])
    """
    op = "dsa_indexer_loss"
    q_idx, k_idx, w = _index_inputs(op, q_idx, k_idx, w, ("q_idx", "k_idx", "w"))
    _check_options(op, k_idx, causal, activation, key_padding)
    q, k = _attention_inputs(op, q_idx, k_idx, q, k, lse)
    if scale is not None:
        require_number(op, "scale", scale)
    require_bool(op, "debug", debug)
    if indices is not None:
        _check_lists(op, indices, q_idx, k_idx.shape[1])
        if debug:
            require_lists(op, indices, k_idx.shape[1], "key")
    if use_reference(op, backend, q_idx):
        return reference.dsa_indexer_loss(
            *(q_idx, k_idx, w, q, k, lse, indices),
            scale=scale,
            causal=causal,
            activation=activation,
            key_padding=key_padding,
        )
    q, k, own = q.detach(), k.detach(), compute_dtype(q_idx)
    if scale is None:
        scale = default_scale(q.shape[3])
    if lse is None:
        lse = _lse(q, k, indices, scale, causal, key_padding, backend)
    dtype = torch.promote_types(q_idx.dtype, q.dtype)
    q_idx, k_idx, q, k = (t.to(dtype) for t in (q_idx, k_idx, q, k))
    run = implementation(op, backend, q_idx, ops.dsa_indexer_loss)
    loss: Tensor = run(
        *(q_idx, k_idx, None if w is None else w.to(compute_dtype(q)), q, k),
        *(lse.detach().to(compute_dtype(q)), None if indices is None else indices.int()),
        *(key_padding, float(scale), causal, activation == "relu"),
    )
    return loss.to(own)


def _lse(
    q: Tensor,
    k: Tensor,
    indices: Tensor | None,
    scale: float,
    causal: bool,
    key_padding: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Computes attention's lse, in full precision also under autocast."""
    q, k = widen(q), widen(k)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "backend": backend}
    with full_precision(q):
        if indices is None:
            mask = None if key_padding is None else KeyPadding(key_padding)
            return attention(q, k, k[..., :1], mask=mask, return_lse=True, **options)[1]
        if key_padding is not None and k.shape[1] > 0:
            places = indices.long().clamp(0, k.shape[1] - 1)
            real = key_padding.gather(1, places.flatten(1)).view(places.shape)
            indices = indices.masked_fill(~real, -1)
        lists = indices[:, None]
        return selected_attention(
            q, k, k[..., :1], lists, block_size=1, return_lse=True, **options
        )[1]


def _index_inputs(
    op: str, q: Tensor, k: Tensor, w: Tensor | None, names: tuple[str, str, str]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checks an indexer's q, k and w; under autocast casts q and k to its dtype."""
    q_name, k_name, w_name = names
    require_float(op, q_name, q)
    dtype = autocast_dtype(q)
    if dtype is not None:
        require_float(op, k_name, k)
        q, k = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k))
    require_like(op, k_name, k, q, q_name)
    if q.dim() != 4 or k.dim() != 3 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"{op}: {q_name} and {k_name} must have shapes (B, Tq, H, D) and (B, Tk, D), "
            f"got {q_name}.shape={tuple(q.shape)}, {k_name}.shape={tuple(k.shape)}"
        )
    if w is not None:
        require_parameter(op, w_name, w, q, [tuple(q.shape[:3])])
        if w.dtype != q.dtype and not (w.dtype == torch.float32 and q.itemsize == 2):
            raise TypeError(
                f"{op}: {w_name} must have the dtype of {q_name} or be float32 beside 16 bits, "
                f"got {w_name}.dtype={w.dtype}, {q_name}.dtype={q.dtype}"
            )
    return q, k, w


def _check_options(
    op: str, k: Tensor, causal: bool, activation: str | None, key_padding: Tensor | None
) -> None:
    require_bool(op, "causal", causal)
    if activation is not None and activation != "relu":
        raise ValueError(
            f'{op}: activation must be "relu" or None, got activation={shown(activation)}'
        )
    if key_padding is not None:
        require_real(op, key_padding, k)


def _attention_inputs(
    op: str, q_idx: Tensor, k_idx: Tensor, q: Tensor, k: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Checks q, k and lse of the attention that the indexer learns from.

    Under autocast q and k are cast to its dtype, as in that attention.
    """
    q, k, _ = autocast(op, q, k, k)
    batch, tq, tk = q_idx.shape[0], q_idx.shape[1], k_idx.shape[1]
    if (
        q.dim() != 4
        or k.dim() != 4
        or q.shape[:2] != (batch, tq)
        or k.shape[:2] != (batch, tk)
        or q.shape[3] != k.shape[3]
        or q.shape[2] % max(k.shape[2], 1)
    ):
        raise ValueError(
            f"{op}: q and k must have shapes (B, Tq, Hq, D) and (B, Tk, Hkv, D) with B={batch}, "
            f"Tq={tq}, Tk={tk} and Hq a multiple of Hkv, got q.shape={tuple(q.shape)}, "
            f"k.shape={tuple(k.shape)}"
        )
    if lse is not None:
        require_lse(op, lse, q, (batch, q.shape[2], tq))
    return q, k


def _check_lists(op: str, indices: Tensor, q: Tensor, tk: int) -> None:
    """Checks lists of keys; checks values only without a device synchronisation."""
    require_int32_or_int64(op, "indices", indices, q)
    if indices.dim() != 3 or indices.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"{op}: indices must have shape (B, Tq, n) with B={q.shape[0]}, Tq={q.shape[1]}, "
            f"got indices.shape={tuple(indices.shape)}"
        )
    if not indices.is_cpu or indices.numel() == 0 or is_traced():
        return
    low, high = (int(t) for t in indices.aminmax())
    if low < -1 or high >= tk:
        raise ValueError(f"{op}: indices must be in [-1, {tk}), got indices from {low} to {high}")
