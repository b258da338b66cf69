"""Options of the device and the backend."""

from __future__ import annotations

import torch

from omniattn.cli.errors import CommandError


def require_device(name: str, backend: str | None) -> None:
    """Raises CommandError unless torch has the device, and the backend runs on it."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise CommandError(f"cannot use --device {name}: it must be cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's message for a device that it lacks
        raise CommandError(f"cannot use --device {name}: {error}") from error
    if backend not in (None, "reference", device.type):
        raise CommandError(f"cannot use --backend {backend} with --device {name}")
