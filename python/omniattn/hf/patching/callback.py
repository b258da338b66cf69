"""A callback that patches the model of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, TrainerCallback
from typing_extensions import Unpack

from omniattn.checks.arguments import require_bool, shown
from omniattn.hf.patching.find import PatchOptions
from omniattn.hf.patching.patch import is_patched, patch
from omniattn.suggestions import did_you_mean

__all__ = ["OmniattnCallback", "PatchOptions"]


class OmniattnCallback(TrainerCallback):
    """Patches the Trainer's model: ``Trainer(..., callbacks=[OmniattnCallback()])``.

    The model is patched when the Trainer is made, before it is wrapped for several devices, mixed
    precision or torch.compile. A model that `model_init` makes later is patched when training
    begins; in mixed precision it then makes logits, since accelerate has already replaced its
    forward. A model that is patched already stays unchanged.

    Args:
        options: of :func:`patch`, all True by default.

    Raises:
        TypeError: an option is unknown to :func:`patch`, or not a bool.
    """

    def __init__(self, **options: Unpack[PatchOptions]) -> None:
        known = PatchOptions.__annotations__
        for name, value in options.items():
            if name not in known:
                raise TypeError(
                    f"OmniattnCallback: options must be of {', '.join(known)}, "
                    f"got {name}={shown(value)}{did_you_mean(name, known)}"
                )
            require_bool("OmniattnCallback", name, value)
        self.options = options

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: PreTrainedModel | None = None, **_: Any
    ) -> None:
        self._patch(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: PreTrainedModel | None = None, **_: Any
    ) -> None:
        self._patch(model)

    def _patch(self, model: PreTrainedModel | None) -> None:
        if model is not None and not is_patched(model):
            patch(model, **self.options)
