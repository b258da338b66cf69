"""Position encodings that are trained on short texts and tested on long ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from omniattn.compare.cells import Cell, Result, described
from omniattn.compare.losses import train_config, trained_for, warmup_of
from omniattn.compare.mixers import Frame
from omniattn.compare.recall import IGNORED
from omniattn.compare.settings import Settings
from omniattn.functional import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
)
from omniattn.functional.masks import Mask
from omniattn.functional.scores import T5Bias
from omniattn.models import BlocksConfig, Decoder
from omniattn.modules import (
    Attention,
    DecoderBlock,
    GatedMLP,
    LayerConfig,
    LearnedPositional,
    Mixer,
    RMSNorm,
    RotaryEmbedding,
    SinusoidalPositional,
    State,
    T5RelativeBias,
)
from omniattn.modules.base.state import Storage, takes_cache
from omniattn.training import TextTask, Trainer


class T5Attention(Mixer):
    """Attention with T5's biases, whose table the first layer of a model shares with the others.

    Args:
        config: attention, and the sizes of the table.
        device, dtype: device and dtype of the parameters.

    Shape:
        x (B, T, dim) -> (B, T, dim).

    Reference:
        Raffel et al., "Exploring the Limits of Transfer Learning", 2020, arXiv 1910.10683.
    """

    shares = True

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Attention, and the table of biases, None in all layers but the first."""

        attention: Attention.Config
        bias: T5RelativeBias.Config | None
        max_distance: int = 128

        @property
        def dim(self) -> int:
            """Width of x."""
            return self.attention.dim

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config.attention, device=device, dtype=dtype)
        self.bias = None
        if config.bias is not None:
            self.bias = T5RelativeBias(config.bias, device=device, dtype=dtype)

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> State:
        """Creates the cache of the attention."""
        return self.attention.new_state(batch, max_length, **storage)

    @takes_cache
    def forward(
        self,
        x: Tensor,
        *,
        state: State | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | Mask | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Maps x (B, T, dim) to (B, T, dim)."""
        assert shared is not None
        if self.bias is not None:
            shared["t5_bias"] = self.bias.weight
        relative = T5Bias(shared["t5_bias"], False, self.config.max_distance)
        y: Tensor = self.attention(x, state=state, rope=rope, mask=mask, relative=relative)
        return y


@dataclass(frozen=True)
class SinusoidalConfig(BlocksConfig):
    """Config of a decoder with sinusoidal positions."""

    def build(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Decoder:
        model = super().build(device=device, dtype=dtype)
        added: Any = SinusoidalPositional(SinusoidalPositional.Config(self.dim))
        model.embed_positions = added
        return model


@dataclass(frozen=True)
class Encoding:
    """Position encoding.

    Args:
        name: name in the report.
        config: returns the decoder for a trained length.
        longer: changes a trained model for a length, or None if nothing changes.
    """

    name: str
    config: Callable[[Frame, int], BlocksConfig]
    longer: Callable[[Decoder, int, int], None] | None = None


def _decoder(
    frame: Frame,
    kind: type[BlocksConfig] = BlocksConfig,
    mixers: Sequence[LayerConfig] = (),
    alibi: float | None = None,
    **options: Any,
) -> BlocksConfig:
    """Returns a decoder with attention, or with the given mixers of its layers."""
    mlp = frame.drawn(GatedMLP.Config(frame.dim, round(8 / 3 * frame.dim)))
    norm = RMSNorm.Config(frame.dim)
    same = frame.drawn(Attention.Config(frame.dim, frame.heads, alibi=alibi))
    blocks = [DecoderBlock.Config(mixer, mlp, norm) for mixer in mixers or (same,)]
    return kind(
        vocab_size=frame.vocab,
        dim=frame.dim,
        num_layers=frame.layers,
        blocks=tuple(blocks),
        init_std=frame.init_std,
        **options,
    )


def _rope(frame: Frame, length: int) -> BlocksConfig:
    return _decoder(frame, rope=RotaryEmbedding.Config(frame.dim // frame.heads))


def _learned(frame: Frame, length: int) -> BlocksConfig:
    return _decoder(frame, positions=LearnedPositional.Config(length, frame.dim, frame.init_std))


def _t5(frame: Frame, length: int) -> BlocksConfig:
    attention = frame.drawn(Attention.Config(frame.dim, frame.heads))
    table = frame.drawn(T5RelativeBias.Config(frame.heads, bidirectional=False))
    mixers = [T5Attention.Config(attention, None if i else table) for i in range(frame.layers)]
    return _decoder(frame, mixers=mixers)


def _stretched(model: Decoder, trained: int, length: int) -> None:
    """Interpolates the trained table of positions."""
    assert isinstance(model.embed_positions, LearnedPositional)
    model.embed_positions = model.embed_positions.interpolate(length)


def scaling(name: str, factor: float, trained: int, pairs: int) -> RopeScaling:
    """Returns a scaling of the rotary embedding for `factor` times the trained length.

    LongRoPE searches its factors; here they are those of NTK, theta / factor^(i / (pairs - 1)).
    """
    searched = tuple(factor ** (i / max(1, pairs - 1)) for i in range(pairs))
    found: dict[str, Callable[[], RopeScaling]] = {
        "linear": lambda: LinearScaling(factor),
        "NTK": lambda: NTKScaling(factor),
        "dynamic NTK": lambda: DynamicNTKScaling(factor, trained),
        "YaRN": lambda: YarnScaling(factor, trained),
        "Llama 3": lambda: Llama3Scaling(factor, original_max_positions=trained),
        "LongRoPE": lambda: LongRopeScaling((1.0,) * pairs, searched, factor, trained),
    }
    return found[name]()


#: Scalings of the rotary embedding, in the order of the report.
SCALINGS = ("linear", "NTK", "dynamic NTK", "YaRN", "Llama 3", "LongRoPE")


#: Encodings that are trained; scalings apply to the trained model of "RoPE".
ENCODINGS: tuple[Encoding, ...] = (
    Encoding("none", lambda frame, length: _decoder(frame)),
    Encoding("sinusoidal", lambda frame, length: _decoder(frame, SinusoidalConfig)),
    Encoding("learned, stretched", _learned, _stretched),
    Encoding("RoPE", _rope),
    Encoding("ALiBi", lambda frame, length: _decoder(frame, alibi=8.0)),
    Encoding("T5", _t5),
)


def cells(frame: Frame, settings: Settings, task_of: Callable[[int], TextTask]) -> Iterator[Cell]:
    """Yields a run for each encoding and seed; `task_of` returns texts of a length."""
    tasks = task_of(trained_length(settings)), task_of(longest(settings))
    for encoding in ENCODINGS:
        for seed in settings.seeds:
            given = trained_for(settings, tasks[0]) | {"steps": settings.steps}
            given |= {"frame": described(frame), "test_lengths": settings.test_lengths}

            def compute(encoding: Encoding = encoding, seed: int = seed) -> Result:
                return _train(encoding, frame, settings, tasks, seed)

            yield Cell("positions", encoding.name, "", seed, given, compute)


def trained_length(settings: Settings) -> int:
    """Returns the length of the texts that encodings are trained on: half that of other parts."""
    return max(1, settings.length // 2)


def longest(settings: Settings) -> int:
    """Returns the length of the longest test."""
    return max(settings.test_lengths) * trained_length(settings)


def _train(
    encoding: Encoding,
    frame: Frame,
    settings: Settings,
    tasks: tuple[TextTask, TextTask],
    seed: int,
) -> Result:
    short, steps = trained_length(settings), settings.steps
    config = train_config(
        encoding.config(frame, short),
        replace(settings, batch=2 * settings.batch),  # as many tokens as in other parts
        seed,
        steps=steps,
        length=short,
        warmup=warmup_of(steps),
    )
    trainer = Trainer(config, tasks[0])
    for _ in range(steps):
        trainer.train_step()
    model: Any = trainer.model.eval()
    tests = {encoding.name: _tested(model, encoding, tasks[1], settings)}
    if encoding.name == "RoPE":
        for name in SCALINGS:
            scaled = replace(encoding, longer=_scaled_by(name))
            tests[f"RoPE, {name}"] = _tested(model, scaled, tasks[1], settings)
    return {"tests": tests}


def _scaled_by(name: str) -> Callable[[Decoder, int, int], None]:
    def change(model: Decoder, trained: int, length: int) -> None:
        assert model.rotary is not None
        plain = model.rotary.config
        new = scaling(name, length / trained, trained, plain.rotary_dim // 2)
        model.rotary = RotaryEmbedding(replace(plain, scaling=new))

    return change


@torch.no_grad()
def _tested(
    model: Any, encoding: Encoding, task: TextTask, settings: Settings
) -> list[list[float]]:
    """Returns pairs of a length and the loss of the same last tokens with that much context."""
    short = trained_length(settings)
    tokens, targets = task.held_out_batch(2 * settings.batch)
    targets = targets.clone()
    targets[:, :-short] = IGNORED
    found = []
    for times in settings.test_lengths:
        length = times * short
        before = model.rotary, model.embed_positions
        if encoding.longer is not None and times > 1:
            encoding.longer(model, short, length)
        loss = model(tokens[:, -length:], targets[:, -length:])
        found.append([length, float(loss)])
        model.rotary, model.embed_positions = before
    return found
