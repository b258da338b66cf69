"""AdamW for weights in 16 bits, on copies of them in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps weights in bfloat16 or float16 as float32 too, and steps those copies.

    A step of a small learning rate is less than the rounding of a weight in 16 bits, and would be
    lost. So the optimizer owns a master weight in float32 of each such weight, and its moments are
    in float32. After a step the model gets the master weights, rounded. Weights in float32 and
    float64 are optimized as they are. `param_groups` has the master weights, so that schedulers and
    :func:`clip_gradients` take the optimizer's parameters.

    Args:
        params, options: as in torch.optim.AdamW; `params` may be those of :func:`parameter_groups`.

    Notes:
        `state_dict` includes the master weights, so that a run resumes with the same bits. A model
        in float32 does not need this class, under autocast neither.

    Reference:
        Micikevicius et al., "Mixed Precision Training", 2017, arXiv 1710.03740.

    Example:
        >>> layer = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = MasterAdamW(layer.parameters(), lr=1e-4)
        >>> layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> layer.weight.dtype, optimizer.param_groups[0]["params"][0].dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, params: Any, **options: Any) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # weight in 16 bits, master weight
        super().__init__(params, **options)
        self.register_step_pre_hook(_before)
        self.register_step_post_hook(_after)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, with master weights for those in 16 bits."""
        given = param_group["params"]
        weights = [given] if isinstance(given, Tensor) else list(given)
        if any(not isinstance(weight, Tensor) for weight in weights):
            raise TypeError(
                "MasterAdamW: params must be tensors, or groups of them, without their names, "
                f"got {type(weights[0]).__name__}"
            )
        known = {id(weight) for weight, _ in self._pairs}
        if any(id(weight) in known for weight in weights):
            raise ValueError("MasterAdamW: params must be in one group each, got one in two groups")
        masters = [_master(weight) for weight in weights]
        super().add_param_group(param_group | {"params": masters})
        pairs = zip(weights, masters, strict=True)
        self._pairs += [(weight, master) for weight, master in pairs if weight is not master]

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the gradients of weights in 16 bits to those of their master weights, in float32.

        `step` calls it. Call it after each backward where several backwards make one step, and
        before gradients are clipped.
        """
        for weight, master in self._pairs:
            if weight.grad is None:
                continue
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in self._pairs:
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all weights and master weights."""
        super().zero_grad(set_to_none)
        for weight, _ in self._pairs:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of AdamW, with the master weights as "masters"."""
        return super().state_dict() | {"masters": [master.detach() for _, master in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state, and the weights of the model, which are rounded master weights."""
        masters = state_dict.get("masters")
        found = [tuple(m.shape) for m in masters] if masters is not None else None
        expected = [tuple(master.shape) for _, master in self._pairs]
        if masters is None or found != expected:
            raise ValueError(
                "MasterAdamW: state_dict must have master weights of the shapes of the weights in "
                f"16 bits, got {found}, expected {expected}"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        for (_, master), saved in zip(self._pairs, masters, strict=True):
            master.copy_(saved)
        self._publish()


def _master(weight: Tensor) -> Tensor:
    """Returns a copy in float32 of a weight in 16 bits, or the weight itself."""
    if weight.dtype not in _HALF:
        return weight
    return weight.detach().float().requires_grad_(weight.requires_grad)


def _before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise TypeError("MasterAdamW: step must have no closure; run backward before it")
    optimizer.collect()


def _after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._publish()
    for _, master in optimizer._pairs:
        master.grad = None  # so that model.zero_grad() resets all gradients too
