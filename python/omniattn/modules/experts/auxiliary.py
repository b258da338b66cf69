"""Layers with an auxiliary loss, which training adds to the model's loss."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from omniattn.modules.experts.router_state import in_backward


class AuxiliaryLoss(nn.Module):
    """A layer with an auxiliary loss, such as an indexer trained to imitate the attention.

    `auxiliary` is the unweighted, differentiable loss () of the last forward in training, else
    None. Recomputations by activation checkpointing do not change it, and copies of the layer have
    None. A Decoder adds the losses of its layers, times their `auxiliary_weight`, to
    `auxiliary_loss`.
    """

    #: Name of the loss in `further_losses` of a model.
    auxiliary_name: ClassVar[str] = "auxiliary"
    auxiliary: Tensor | None = None

    @property
    def auxiliary_weight(self) -> float:
        """Factor of the loss in training."""
        return 1.0

    def __getstate__(self) -> dict[str, Any]:
        # Non-leaf tensors can neither be copied nor pickled.
        return self.__dict__ | {"auxiliary": None}

    def _keep(self, loss: Tensor | None) -> None:
        if not in_backward():
            self.auxiliary = loss
