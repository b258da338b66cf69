"""Linear time-invariant state-space models with dense matrices."""

import torch


def ssm_kernel(Ab: torch.Tensor, Bb: torch.Tensor, C: torch.Tensor, length: int) -> torch.Tensor:
    """K_l = C Ab^l Bb: Ab (..., N, N), Bb, C (..., N) -> (..., L)."""
    state, taps = Bb, []
    for _ in range(length):
        taps.append((C * state).sum(-1))
        state = (Ab @ state[..., None])[..., 0]
    if not taps:
        return (C * Bb).sum(-1, keepdim=True)[..., :0]
    return torch.stack(taps, -1)


def ssm_recurrence(
    Ab: torch.Tensor,
    Bb: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s_t = Ab s_{t-1} + Bb u_t, y_t = C s_t + D u_t per channel; returns y and the last s.

    Ab (H, N, N), Bb, C (H, N), D (H,), u (B, T, H), states (B, H, N).
    """
    state = Bb.new_zeros(len(u), *Bb.shape) if initial_state is None else initial_state
    outputs = []
    for x in u.unbind(1):
        state = (Ab @ state[..., None])[..., 0] + Bb * x[..., None]
        y = (C * state).sum(-1)
        outputs.append(y if D is None else y + D * x)
    return (torch.stack(outputs, 1) if outputs else u * C.sum(-1)), state
