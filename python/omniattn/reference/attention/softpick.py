"""Softpick attention: a rectified softmax."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from omniattn.encoding.options import SoftpickOptions, pack, spelled_out
from omniattn.reference.attention.attention import attend


@spelled_out(SoftpickOptions)
def softpick_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[SoftpickOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B,Tq,Hq,D), k (B,Tk,Hkv,D), v (B,Tk,Hkv,Dv) -> O (B,Tq,Hq,Dv) [, lse (B,Hq,Tq)].

    ``w_ij = relu(e^z_ij - 1) / sum_l |e^z_il - 1|``, z = scale q k^T, over the visible keys l;
    ``lse = ln sum_l |e^z_il - 1|``. Hidden keys have z = -inf and count nothing.
    """
    record = pack("softpick_attention", options, SoftpickOptions)
    out, lse = attend(q, k, v, record._replace(normalizer="softpick"))
    return (out, lse) if return_lse else out
