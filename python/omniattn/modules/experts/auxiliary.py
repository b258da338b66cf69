"""Layers with a loss of their own, which training adds to the model's."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from omniattn.modules.experts.router_state import in_backward


class AuxiliaryLoss(nn.Module):
    """A layer that a loss of its own trains too, as an indexer that imitates the attention.

    `auxiliary` is that loss () of the last forward in training, with its gradient and before its
    weight, else None. A forward that activation checkpointing repeats in the backward does not
    count, and a copy of the layer has none. A Decoder adds the losses of its layers to
    `auxiliary_loss`, each times its `auxiliary_weight`.
    """

    #: Name of the loss in `further_losses` of a model.
    auxiliary_name: ClassVar[str] = "auxiliary"
    auxiliary: Tensor | None = None

    @property
    def auxiliary_weight(self) -> float:
        """Factor of the loss in training."""
        return 1.0

    def __getstate__(self) -> dict[str, Any]:
        # Tensors of a graph cannot be copied nor pickled.
        return self.__dict__ | {"auxiliary": None}

    def _keep(self, loss: Tensor | None) -> None:
        if not in_backward():
            self.auxiliary = loss
