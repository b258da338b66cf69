"""The recurrences of RWKV-5, 6 and 7."""

from __future__ import annotations

from torch import Tensor

from omniattn.functional._jagged import over_sequences
from omniattn.functional._recurrence import low_rank, require_heads, run, sequence_count, widened

__all__ = ["rwkv6", "rwkv7"]


@over_sequences("r", "k", "v", either=("w",))
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention in which a token sees itself by a weight that does not decay.

    ``o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T r_t``,
    ``S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T``. RWKV-5 is this with a constant w.

    Args:
        r: (B, T, H, K), float64, float32, bfloat16 or float16, any strides.
        k: (B, T, H, K), of r's dtype.
        v: (B, T, Hv, V), of r's dtype; Hv is a multiple of H, and head h of v reads head
            h // (Hv / H) of r and k.
        w: logarithms of the decays, <= 0: (B, T, Hv, K), or (Hv, K) for the same ones of all
            tokens. Not decays, and not the inputs of RWKV's ``exp(-exp(.))``.
        u: (Hv, K), the bonus.
        scale: 1 in RWKV; None for K^-0.5.
        initial_state: (N, Hv, K, V), computed in float32 (float64 for float64); None for zeros. N
            is B, or the number of sequences.
        cu_seqlens: (N + 1,) int32 or int64: B is 1, and tokens cu_seqlens[n] .. cu_seqlens[n + 1]
            are sequence n, with a state of its own. Jagged nested tensors (B, j, ...) in place of
            (B, T, ...) bring their own boundaries, and the output has them, too.
        backend: None for the native kernel of r's device, "cpu" or "cuda" to insist on it,
            "reference" for the eager definition.

    Returns:
        o (B, T, Hv, V) of r's dtype, and the state (N, Hv, K, V) after the last token in float32
        (float64 for float64).

    Raises:
        TypeError: a dtype that is unsupported or differs from r's.
        ValueError: a shape, device or value that does not fit.
        NotImplementedError: no native kernel for the device.

    Note:
        As in `gated_linear_attention`.

    Reference:
        Peng et al., Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence, 2024,
        arXiv:2404.05892.

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> o, state = rwkv6(one, one, one, torch.tensor([[0.5]]).log(), torch.tensor([[2.0]]))
        >>> o.flatten(), state.flatten()
        (tensor([2.0000, 3.0000, 3.5000]), tensor([1.7500]))
    """
    op = "rwkv6"
    k, v = require_heads(op, r, k, v, "r")
    heads, size = v.shape[2], r.shape[-1]
    wide = (*v.shape[:3], size)
    w = widened(op, "w", w, v, (wide, (heads, size))).expand(wide)
    u = widened(op, "u", u, v, ((heads, size),))
    bonus = u.expand(sequence_count(op, r, cu_seqlens, "r"), heads, size)
    return run(op, r, k, v, w, scale, initial_state, cu_seqlens, backend, bonus=bonus, q_name="r")


@over_sequences("r", "w", "k", "v", "a", "b")
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-7: `dplr_delta_rule` in its order of arguments.

    ``S_t = diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T``,
    ``o_t = scale * S_t^T r_t``. Of the normalised key kk and the learning rate alpha of RWKV-7,
    a is -kk and b is kk * alpha.

    Args:
        r, k, v, initial_state, cu_seqlens, backend: as in `rwkv6`.
        w: (B, T, Hv, K), logarithms of the decays, <= 0.
        a, b: (B, T, H, K), of r's dtype.
        scale: 1 in RWKV; None for K^-0.5.

    Returns:
        o (B, T, Hv, V) of r's dtype, and the state (N, Hv, K, V) after the last token.

    Raises:
        TypeError: a dtype that is unsupported or differs from r's.
        ValueError: a shape, device or value that does not fit.

    Reference:
        Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025,
        arXiv:2503.14456.

    Example:
        >>> one = torch.ones(1, 2, 1, 1)
        >>> rwkv7(one, torch.log(one / 2), one, one, -one, one / 4)[0].flatten()
        tensor([1.0000, 1.2500])
    """
    op = "rwkv7"
    k, v = require_heads(op, r, k, v, "r")
    w = widened(op, "w", w, v, ((*v.shape[:3], r.shape[-1]),))
    return low_rank(op, r, k, v, a, b, w, scale, initial_state, cu_seqlens, backend, "r")
