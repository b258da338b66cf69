"""Functions of mamba-ssm that its tests import and `omniattn.compat.mamba_ssm` does not have."""

from omniattn import functional as F


def mamba3_siso_combined(
    Q,
    K,
    V,
    ADT,
    DT,
    Trap,
    Q_bias,
    K_bias,
    Angles,
    D=None,
    Z=None,
    Input_States=None,
    chunk_size=64,
    return_final_states=False,
    cu_seqlens=None,
):
    gates = (t.mT for t in (ADT, DT, Trap))
    rest = Q_bias, K_bias, Angles, D, Z
    state = None if Input_States is None else tuple(Input_States)
    y, after = F.mamba3(Q, K, V, *gates, *rest, initial_state=state, cu_seqlens=cu_seqlens)
    return (y, *after) if return_final_states else y


def mamba3_siso_step(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, Input_States=None
):
    Q, K, V, ADT, DT, Trap, Angles = (t[:, None] for t in (Q, K, V, ADT, DT, Trap, Angles))
    rest = Q_bias, K_bias, Angles, D, None if Z is None else Z[:, None]
    y, after = F.mamba3(Q, K, V, ADT, DT, Trap, *rest, initial_state=Input_States)
    return y[:, 0], after


NAMES = {
    "mamba3_siso_combined": mamba3_siso_combined,
    "mamba3_siso_step": mamba3_siso_step,
}
