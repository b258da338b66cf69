"""Models by name: small ones for `python -m omniattn train`, and published sizes."""

from __future__ import annotations

from omniattn.checks.arguments import shown
from omniattn.models.model import ModelConfig
from omniattn.models.presets.dense import DENSE
from omniattn.models.presets.encoder_decoders import ENCODER_DECODERS
from omniattn.models.presets.encoders import ENCODERS
from omniattn.models.presets.experts import EXPERTS
from omniattn.models.presets.images import IMAGES
from omniattn.models.presets.others import OTHERS
from omniattn.models.presets.recurrent import RECURRENT
from omniattn.models.presets.trained import TRAINED
from omniattn.suggestions import did_you_mean

__all__ = ["PRESETS", "TRAINED"]


class _Presets(dict[str, ModelConfig]):
    def __missing__(self, name: object) -> ModelConfig:
        raise KeyError(
            f"PRESETS: name must be that of a model, got name={shown(name)}"
            f"{did_you_mean(name, self)}"
        )


#: Models by name.
PRESETS: dict[str, ModelConfig] = _Presets(
    TRAINED | DENSE | EXPERTS | ENCODER_DECODERS | ENCODERS | OTHERS | IMAGES | RECURRENT
)
