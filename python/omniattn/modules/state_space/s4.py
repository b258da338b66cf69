"""Linear time-invariant state-space layers: S4D and S4."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf
from typing_extensions import Unpack

from omniattn import functional
from omniattn.functional.state_space.parameters import INITS, MEASURES, RULES
from omniattn.modules.base.fields import Backend, Size
from omniattn.modules.base.forms import ByConfig, OnDevice, either
from omniattn.modules.base.jagged import Sequences
from omniattn.modules.base.layer import LayerConfig, config_or_fields
from omniattn.modules.base.linear import Linear
from omniattn.modules.base.state import RecurrentState, Storage
from omniattn.modules.recurrent.recurrent import Device, fp32, zeros_of_states
from omniattn.modules.recurrent.state_mixer import StateMixer

__all__ = ["S4", "S4D"]

#: Initial -Re A where it is 0, whose logarithm is not finite; as in state-spaces/s4.
_LEAST_DECAY = 1e-4


@dataclass(frozen=True)
class SSMConfig(LayerConfig):
    """Common options of S4D and S4."""

    dim: Size
    state_size: int = 64
    dt_min: float = 1e-3
    dt_max: float = 0.1
    init_std: float = 0.02
    backend: Backend = None

    def __post_init__(self) -> None:
        super().__post_init__()
        op = self.layer.__name__
        if self.state_size < 2 or self.state_size % 2:
            raise ValueError(
                f"{op}: state_size must be even and >= 2, got state_size={self.state_size}"
            )
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(
                f"{op}: dt_min must be above 0 and at most dt_max, "
                f"got dt_min={self.dt_min}, dt_max={self.dt_max}"
            )


class _SSM(StateMixer):
    """Computes ``y = GLU(W gelu(ssm(x)) + b)`` with one state-space model per channel.

    Complex parameters are stored as real pairs, which torch.compile, optimizers and file formats
    support.
    """

    #: Parameters without weight decay, which would change the systems' time scales.
    undecayed: ClassVar[tuple[str, ...]] = ("log_dt", "log_A_real", "A_imag")
    #: Names of the systems' complex vectors (dim, N / 2) besides A.
    vectors: ClassVar[tuple[str, ...]] = ("C",)

    #: Rank of the systems' difference from diagonal ones, the number of vectors P.
    rank: int = 1

    config: SSMConfig

    def _build(self, **factory: Any) -> None:
        c = self.config
        own = {**factory, "dtype": fp32(factory["dtype"])}
        shape = (c.dim, c.state_size // 2)
        self.log_dt = nn.Parameter(torch.empty(c.dim, **own))
        self.log_A_real = nn.Parameter(torch.empty(shape, **own))
        self.A_imag = nn.Parameter(torch.empty(shape, **own))
        for name in self.vectors:
            ranks = (self.rank,) if name == "P" and self.rank > 1 else ()
            vector = torch.empty(c.dim, *ranks, c.state_size // 2, 2, **own)
            self.register_parameter(name, nn.Parameter(vector))
        self.D = nn.Parameter(torch.empty(c.dim, **own))
        linear = Linear.Config(c.dim, 2 * c.dim, True, c.init_std, c.backend)
        self.out_proj = Linear(linear, **factory)
        self.reset_parameters()

    @abstractmethod
    def _initial(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the initial A in complex128, and the initial vectors that are not random."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the paper's A; draws C with variance 1, D from N(0, 1) and log_dt uniformly."""
        c = self.config
        A, vectors = self._initial()
        nn.init.uniform_(self.log_dt, math.log(c.dt_min), math.log(c.dt_max))
        nn.init.normal_(self.D)
        decay = (-A.real).clamp_min(_LEAST_DECAY)
        self.log_A_real.copy_(decay.log().expand_as(self.log_A_real))
        self.A_imag.copy_(A.imag.expand_as(self.A_imag))
        for name in self.vectors:
            parameter = self.get_parameter(name)
            if name in vectors:
                parameter.copy_(torch.view_as_real(vectors[name]).expand_as(parameter))
            else:
                nn.init.normal_(parameter, std=math.sqrt(0.5))

    @abstractmethod
    def _system(
        self, x: Tensor, A: Tensor, vectors: list[Tensor], dt: Tensor, D: Tensor, **options: Any
    ) -> Any:
        """Calls the functional of the layer."""

    def new_state(self, batch: int, max_length: int, **storage: Unpack[Storage]) -> RecurrentState:
        """Creates zeros: `s` (B, dim, N / 2, 2), complex pairs in fp32 (fp64 for fp64)."""
        zeros = zeros_of_states(self.D, storage)
        return RecurrentState(s=zeros.new_zeros(batch, *self.A_imag.shape, 2))

    def _mix(
        self, x: Tensor, state: RecurrentState | None, sequences: Sequences, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = fp32(x.dtype)
        A = torch.complex(-self.log_A_real.to(wide).exp(), self.A_imag.to(wide))
        vectors = [_complex(getattr(self, name), wide) for name in self.vectors]
        options: dict[str, Any] = {}
        if self.config.backend == "reference":
            options["mode"] = "recurrent"
        terms = A, vectors, self.log_dt.to(wide).exp(), self.D.to(wide)
        after: dict[str, Tensor] = {}
        if state is None:
            y = sequences.in_batches(lambda x: self._system(x, *terms, **options), x)
        else:
            final = _complex(state["s"], wide).clone()
            options["output_final_state"] = True

            def go_on(row: slice, x: Tensor) -> Tensor:
                how = options | ({"mode": "recurrent"} if x.shape[1] == 1 else {})
                y, final[row] = self._system(x, *terms, initial_state=final[row], **how)
                return y

            parts = [go_on(row, part) for row, (part,) in sequences.each(x)]
            y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            after["s"] = torch.view_as_real(final)
        return nnf.glu(self.out_proj(nnf.gelu(y)), -1), after


def _complex(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(pairs.to(dtype).contiguous())


class S4D(_SSM):
    """One diagonal state-space model per channel, and a gated linear layer across channels.

    ``y = GLU(W gelu(s) + b)`` with s of :func:`functional.s4d`, A = -exp(log_A_real) + i A_imag,
    dt = exp(log_dt) and B = 1.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; in half layers the system's parameters
            are fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters log_dt (dim), log_A_real, A_imag (dim, N / 2), C (dim, N / 2, 2), D (dim),
        out_proj.

    Reference:
        Gu et al., On the Parameterization and Initialization of Diagonal State Space Models, 2022,
        arXiv:2206.11893.

    Example:
        >>> S4D(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    @dataclass(frozen=True)
    class Config(SSMConfig):
        """Sizes and options.

        Args:
            dim: width of x and y, the number of systems.
            state_size: N, even; N / 2 pairs of conjugates.
            dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
            init_std: standard deviation of the linear layer's weight.
            backend: as in Attention; "reference" runs the system step by step in plain torch.
            init: initialisation of A, see :func:`functional.ssm_init`.
            rule: discretisation rule, see :func:`functional.discretize`.
        """

        init: str = "s4d-lin"
        rule: str = "zoh"

        def __post_init__(self) -> None:
            super().__post_init__()
            for name, choices in (("init", INITS), ("rule", RULES)):
                if getattr(self, name) not in choices:
                    raise ValueError(
                        f"S4D: {name} must be one of {choices}, got {name}={getattr(self, name)!r}"
                    )

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._build(device=device, dtype=dtype)

    def _initial(self) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        return functional.ssm_init(c.init, c.state_size, dtype=torch.complex128), {}

    def _system(
        self, x: Tensor, A: Tensor, vectors: list[Tensor], dt: Tensor, D: Tensor, **options: Any
    ) -> Any:
        (C,) = vectors
        return functional.s4d(x, A, C, dt, D, rule=self.config.rule, **options)


class S4(_SSM):
    """S4: like S4D, with a diagonal-minus-low-rank matrix initialised by HiPPO.

    ``y = GLU(W gelu(s) + b)`` with s of :func:`functional.s4`, Lambda = -exp(log_A_real) + i A_imag
    and dt = exp(log_dt). Unlike S4D's, the kernel needs dense powers of (N, N) matrices.

    Args:
        config: sizes and options.
        device, dtype: device and dtype of the parameters; in half layers the system's parameters
            are fp32.

    Shape:
        x (B, T, dim) -> the same shape.
        Parameters log_dt (dim), log_A_real, A_imag (dim, N / 2), P, B, C (dim, N / 2, 2), D (dim),
        out_proj; with init="legt" P (dim, 2, N / 2, 2).

    Note:
        torch.export specialises on T, on which the matrix powers depend; S4D exports a dynamic T.

    Reference:
        Gu, Goel and Re, Efficiently Modeling Long Sequences with Structured State Spaces, 2021,
        arXiv:2111.00396.

    Example:
        >>> S4(dim=8)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    undecayed = (*_SSM.undecayed, "P", "B")
    vectors = ("P", "B", "C")

    @dataclass(frozen=True)
    class Config(SSMConfig):
        """Sizes and options.

        Args:
            dim: width of x and y, the number of systems.
            state_size: N, even; N / 2 pairs of conjugates.
            dt_min, dt_max: range of the initial step sizes, drawn log-uniformly.
            init_std: standard deviation of the linear layer's weight.
            backend: as in Attention; "reference" runs the system step by step in plain torch.
            init: initialisation of the system, "legs", "legt", "lagt" or "fout", see
                :func:`functional.hippo`; -Re Lambda is at least 1e-4.
        """

        init: str = "legs"

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.init not in MEASURES:
                raise ValueError(f"S4: init must be one of {MEASURES}, got init={self.init!r}")

    config: Config

    class _Fields(Config, OnDevice): ...

    @config_or_fields(Config, either(ByConfig[Config], _Fields).init)
    def __init__(
        self, config: Config, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.rank = 2 if config.init == "legt" else 1
        self._build(device=device, dtype=dtype)

    def _initial(self) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        Lambda, P, B, _ = functional.nplr(c.state_size, measure=c.init, dtype=torch.complex128)
        return Lambda, {"P": P, "B": B}

    def _system(
        self, x: Tensor, A: Tensor, vectors: list[Tensor], dt: Tensor, D: Tensor, **options: Any
    ) -> Any:
        P, B, C = vectors
        return functional.s4(x, A, P, B, C, dt, D, **options)
