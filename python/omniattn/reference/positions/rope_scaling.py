"""Scalings of rotary frequencies, for contexts longer than a model was trained on.

Each maps theta (n,) fp64, theta_i = base^(-i / n), to the frequencies for the longer context. L is
the trained length (`original_max_positions`), `factor` the ratio of the longer context to L.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


@dataclass(frozen=True)
class RopeScaling:
    """Base class of all scalings: checks their fields."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            kind = str(field.type)
            if value is None and kind.endswith("| None"):
                continue
            if kind == "bool":
                holds, what = isinstance(value, bool), "True or False"
            elif kind.startswith("tuple"):
                holds, what = isinstance(value, tuple), "a sequence of finite numbers > 0"
                holds = holds and all(map(_is_positive, value))
            elif name.startswith("mscale"):  # 0 means unset
                holds, what = value == 0 or _is_positive(value), "a finite number >= 0"
            else:
                holds, what = _is_positive(value), "a finite number > 0"
            if not holds:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be {what}, got {name}={value!r}"
                )

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""
        return 1.0

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """Returns frequencies for contexts of `seq_len`, an int, a 0-d tensor or None (<= L)."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): theta / factor."""

    factor: float

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """theta / factor."""
        return theta / self.factor


def _with_base_times(theta: Tensor, stretch: float | Tensor) -> Tensor:
    """Returns the frequencies for base * stretch^(Dr / (Dr - 2)): the first one is unchanged, the
    last one divided by `stretch`."""
    n = theta.numel()
    exponent = torch.arange(n, dtype=theta.dtype, device=theta.device) / max(n - 1, 1)
    return theta * stretch**-exponent


@dataclass(frozen=True)
class NTKScaling(RopeScaling):
    """NTK-aware (bloc97 2023): base * factor^(Dr / (Dr - 2)), independent of the length."""

    factor: float

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """Frequencies for the larger base."""
        return _with_base_times(theta, self.factor)


@dataclass(frozen=True)
class DynamicNTKScaling(RopeScaling):
    """Dynamic NTK (emozilla 2023): base * (factor n / L - (factor - 1))^(Dr / (Dr - 2)).

    n > L is the present length; up to L frequencies are unchanged.
    """

    factor: float
    original_max_positions: int

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """Frequencies for the base that belongs to `seq_len`."""
        if seq_len is None:
            return theta
        trained = self.original_max_positions
        n = torch.as_tensor(seq_len, dtype=theta.dtype, device=theta.device).clamp(min=trained)
        return _with_base_times(theta, self.factor * n / trained - (self.factor - 1))


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): fast pairs keep theta, slow pairs get theta /
    factor, with a linear ramp over the pairs between.

    Pair d(r) = n ln(L / 2 pi r) / ln(base) turns r times within L. The ramp runs from d(beta_fast)
    to d(beta_slow), rounded outwards if `truncate`. cos and sin are scaled by `attention_factor` if
    given; with both mscale and mscale_all_dim (DeepSeek), by the ratio of (0.1 m ln(factor) + 1) at
    m = mscale to that at m = mscale_all_dim; else by 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""

        def scale(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1 if self.factor > 1 else 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """Keeps theta of fast pairs, divides theta of slow ones by the factor."""
        if base <= 1:
            raise ValueError(f"YarnScaling: base must be > 1, got base={base}")
        n = theta.numel()

        def pair(turns: float) -> float:
            return (
                n * math.log(self.original_max_positions / (2 * math.pi * turns)) / math.log(base)
            )

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        high += 0.001 * (low == high)
        i = torch.arange(n, dtype=theta.dtype, device=theta.device)
        ramp = ((i - low) / (high - low)).clamp(0, 1)
        return theta * (1 - ramp + ramp / self.factor)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1 (arXiv 2407.21783): theta of long wavelengths / factor, short ones kept, a ramp
    between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low_freq_factor <= self.high_freq_factor:
            raise ValueError(
                "Llama3Scaling: low_freq_factor must be <= high_freq_factor, "
                f"got low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """Interpolates linearly in the number of turns within L."""
        turns = self.original_max_positions * theta / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor  # 0 in Llama 4: a step, no ramp
        ramp = (turns - self.low_freq_factor) / width if width else (turns > self.low_freq_factor)
        ramp = ramp.to(theta.dtype).clamp(0, 1)
        return theta * (ramp + (1 - ramp) / self.factor)


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): theta_i / e_i with searched factors e.

    `long_factor` holds them for contexts beyond L, `short_factor` up to L. cos and sin are scaled
    by sqrt(1 + ln(factor) / ln(L)), or by `attention_factor`.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_positions: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            if isinstance(values := getattr(self, name), list):
                object.__setattr__(self, name, tuple(values))  # JSON lists become hashable
        super().__post_init__()
        if self.original_max_positions == 1:
            raise ValueError(
                "LongRopeScaling: original_max_positions must be > 1, got original_max_positions=1"
            )

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    def apply(self, theta: Tensor, *, base: float, seq_len: int | Tensor | None) -> Tensor:
        """theta / e, with e by the length."""
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != theta.numel():
                raise ValueError(
                    f"LongRopeScaling: {name} must have one value per pair, Dr / 2 = "
                    f"{theta.numel()}, got {len(getattr(self, name))}"
                )
        if seq_len is None:
            return theta / theta.new_tensor(self.short_factor)
        long = torch.as_tensor(seq_len, device=theta.device) > self.original_max_positions
        return theta / torch.where(
            long, theta.new_tensor(self.long_factor), theta.new_tensor(self.short_factor)
        )


#: Hugging Face's `rope_type`; NTKScaling has none.
_BY_TYPE: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
    "longrope": LongRopeScaling,
}
_HF_FIELDS = {"original_max_positions": "original_max_position_embeddings"}
#: Entries that set base, head size or position ids, and no scaling.
_NOT_SCALING = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}


def scaling_from_hf(
    parameters: Mapping[str, Any] | None, *, max_positions: int | None = None
) -> RopeScaling | None:
    """Returns the scaling of a Hugging Face config's `rope_parameters`; None for the default type.

    `max_positions` is the config's max_position_embeddings. It is L of the dynamic type, and of
    other types whose parameters have no L; a missing factor is max_positions / L. Without
    `max_positions`, the parameters must have L and factor.
    """
    if parameters is None:  # `rope_scaling` of older configs
        return None
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("default", "mrope"):
        return None
    if kind not in _BY_TYPE:
        raise ValueError(
            f"scaling_from_hf: rope_type must be default, {', '.join(_BY_TYPE)}, "
            f"got rope_type={kind!r}"
        )
    cls = _BY_TYPE[kind]
    names = {f.name: _HF_FIELDS.get(f.name, f.name) for f in fields(cls)}
    known = _NOT_SCALING | set(names.values()) | set(_HF_FIELDS.values())
    if unknown := sorted(set(parameters) - known):
        raise ValueError(f"scaling_from_hf: rope_type={kind!r} has no parameters {unknown}")
    values = {n: parameters[hf] for n, hf in names.items() if parameters.get(hf) is not None}
    if max_positions is not None and "original_max_positions" in names:
        trained = values.setdefault("original_max_positions", max_positions)
        if kind == "dynamic":
            values["original_max_positions"] = max_positions
        elif cls is not Llama3Scaling:
            values.setdefault("factor", max_positions / trained)
    required = {f.name for f in fields(cls) if f.default is MISSING} | {"factor"}
    if missing := sorted(required - set(values)):
        raise ValueError(
            f"scaling_from_hf: rope_type={kind!r} must have {', '.join(missing)}, "
            f"got {dict(parameters)}"
        )
    return cls(**values)


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns a Hugging Face config's `rope_parameters`, without rope_theta."""
    if scaling is None:
        return {"rope_type": "default"}
    kind = next((k for k, cls in _BY_TYPE.items() if type(scaling) is cls), None)
    if kind is None:
        raise NotImplementedError(f"scaling_to_hf: transformers has no type for {scaling!r}")
    values = {_HF_FIELDS.get(f.name, f.name): getattr(scaling, f.name) for f in fields(scaling)}
    if kind == "dynamic":  # L is the config's max_position_embeddings
        del values["original_max_position_embeddings"]
    lists = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return {"rope_type": kind} | {n: v for n, v in lists.items() if v is not None}
