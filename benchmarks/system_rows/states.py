"""Rows of state-space models: systems, discretisations, initialisations, layers and hybrids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omniattn import functional as F
from omniattn import modules as m
from omniattn.models import HybridLayer, hybrid_schedule
from system_rows.system import Provider, System, functions, layer, normal

T, WIDTH = 512, 256


def _system(inputs: int = 4, states: int = 64) -> list[Tensor]:
    """Makes u, A, B, C of a stable system."""
    A = 0.9 * torch.linalg.qr(normal(states, states).detach())[0]
    rows = normal(2, T, inputs), normal(states, inputs, seed=1), normal(inputs, states, seed=2)
    return [rows[0], A.requires_grad_(), *rows[1:]]


def _loop(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    state, out = u.new_zeros(len(u), len(A)), []
    for x in u.unbind(1):
        state = state @ A.T + x @ B.T
        out.append(state @ C.T)
    return torch.stack(out, 1)


def _recurrence() -> dict[str, Provider]:
    return functions(_system(), ours=lambda *given: F.ssm_recurrence(*given)[0], eager=_loop)


def _delayed() -> dict[str, Provider]:
    def ours(*given: Tensor) -> Tensor:
        return F.ssm_recurrence(*given, delayed=True)[0]

    def eager(*given: Tensor) -> Tensor:
        return nn.functional.pad(_loop(*given)[:, :-1], (0, 0, 1, 0))

    return functions(_system(), ours=ours, eager=eager)


def _convolution() -> dict[str, Provider]:
    """State-space model as a convolution; "eager" computes its kernel power by power."""

    def ours(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return F.fft_conv(u, F.ssm_kernel(A, B, C, T))

    def eager(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        columns, taps = B, []
        for _ in range(T):
            taps.append(C @ columns)
            columns = A @ columns
        spectra = [torch.fft.rfft(t, n=2 * T, dim=-1) for t in (u.mT, torch.stack(taps, -1))]
        y = torch.einsum("bif,oif->bof", *spectra)
        return torch.fft.irfft(y, n=2 * T)[..., :T].mT

    return functions(_system(), ours=ours, eager=eager)


def _channels() -> dict[str, Provider]:
    """A filter per channel; "aten" uses torch's convolution."""
    u, kernel = normal(2, T, WIDTH), normal(WIDTH, T, seed=1)

    def aten(u: Tensor, kernel: Tensor) -> Tensor:
        padded = nn.functional.pad(u.mT, (T - 1, 0))
        return nn.functional.conv1d(padded, kernel.flip(1)[:, None], groups=WIDTH).mT

    return functions([u, kernel], ours=F.fft_conv, aten=aten)


def _discretisation(rule: str) -> dict[str, Provider]:
    """Discretisation of a dense system; "eager" uses only torch.linalg."""
    A, B = F.hippo_legs(8)
    steps = torch.linspace(0.001, 0.1, 64)

    def eager(A: Tensor, B: Tensor) -> Any:
        a, b, one = A * steps[:, None, None], B * steps[:, None], torch.eye(8)
        if rule == "bilinear":
            below = torch.linalg.inv(one - a / 2)
            return below @ (one + a / 2), (below @ b[..., None])[..., 0]
        if rule == "euler":
            return one + a, b
        power = torch.linalg.matrix_exp(a)
        if rule == "mamba":
            return power, b
        return power, torch.linalg.solve(a, (power - one) @ b[..., None])[..., 0]

    leaves = [A.requires_grad_(), B.requires_grad_()]
    return functions(leaves, ours=lambda A, B: F.discretize(A, B, steps, rule), eager=eager)


def _initial() -> dict[str, Provider]:
    """HiPPO's matrix; "eager" computes it element by element."""
    size = 64

    def eager() -> Tensor:
        A = torch.zeros(size, size)
        for n in range(size):
            for k in range(n):
                A[n, k] = -(((2 * n + 1) * (2 * k + 1)) ** 0.5)
            A[n, n] = -(n + 1)
        return A

    return functions([], ours=lambda: F.hippo_legs(size)[0], eager=eager)


def _normal_form() -> dict[str, Provider]:
    """Frequencies of HiPPO-LegT's normal part; "eager" finds them without its symmetry."""
    A, B = F.hippo("legt", 64, dtype=torch.float64)
    parity = torch.arange(64) % 2
    normal_part = A + torch.where(parity[:, None] == parity, 2 * B[:, None] * B, 0)

    def ours() -> Tensor:
        return F.nplr(64, measure="legt", dtype=torch.complex128)[0].imag

    def eager() -> Tensor:
        return torch.linalg.eigvals(normal_part).imag.sort().values[32:]

    return functions([], ours=ours, eager=eager)


def _layer(config: Any, steps: int = T) -> dict[str, Provider]:
    return layer(config, normal(1, steps, config.dim))


def _steps(config: Any) -> dict[str, Provider]:
    """A prompt of 32 and 8 more tokens."""
    x = torch.randn(1, 40, config.dim, generator=torch.Generator().manual_seed(0))

    def call(module: Any, x: Tensor) -> Tensor:
        state = module.new_state(1, 40)
        with torch.no_grad():
            return torch.cat([module(t, state=state) for t in x.split((32, *(1,) * 8), 1)], 1)

    return layer(config, x, call=call)


class _Stack(nn.Module):
    """Stack of blocks on one residual stream."""

    def __init__(self, blocks: tuple[Any, ...], backend: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block.with_backend(backend).build() for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual)
        assert residual is not None
        return x + residual


def _hybrid(layers: tuple[HybridLayer, ...]) -> dict[str, Provider]:
    """Stack of blocks with the mixers of a schedule; "eager" uses the definitions."""
    mlp, norm = m.GatedMLP.Config(WIDTH, 2 * WIDTH), m.RMSNorm.Config(WIDTH)
    blocks = tuple(m.DecoderBlock.Config(_MIXERS[each.mixer], mlp, norm) for each in layers)
    providers: dict[str, Provider] = {}
    x, weights = normal(1, 32, WIDTH), None
    for name, backend in (("ours", None), ("eager", "reference")):
        torch.manual_seed(0)
        stack = _Stack(blocks, backend)
        weights = weights or stack.state_dict()
        stack.load_state_dict(weights)
        providers[name] = (lambda stack=stack: stack(x), [x, *stack.parameters()])
    return providers


_MIXERS = {
    "mamba": m.Mamba.Config(WIDTH),
    "attention": m.Attention.Config(WIDTH, 4, 2),
    "window": m.Attention.Config(WIDTH, 4, 2, window_size=(15, 0)),
}
_HYBRIDS = {"ratio": hybrid_schedule("ratio", 4, ratio=3), "samba": hybrid_schedule("samba", 2)}

STATES: dict[str, tuple[System, ...]] = {
    "HGRN-2: keys are the forgotten shares": (
        System("hgrn2-B1T64C128H2", lambda: _layer(m.HGRN2.Config(128, 2), 64)),
    ),
    "Rodimus: decays with a temperature": (
        System("rodimus-B1T64C128", lambda: _layer(m.Rodimus.Config(128), 64)),
    ),
    "Raven: tokens are routed to slots": (
        System("raven-B1T64C128H2", lambda: _layer(m.Raven.Config(128, 2), 64)),
    ),
    "MoM: gated delta rule with several memories": (
        System("mom-B1T64C128H2", lambda: _layer(m.MixtureOfMemories.Config(128, 2), 64)),
    ),
    "lightning attention: constant decays of heads and layers": (
        System("lightning-B1T64C128H2", lambda: _layer(m.LightningAttention.Config(128, 2), 64)),
    ),
    "Based and ReBased: features of second order": (
        System(
            "based-B1T64C128H2",
            lambda: _layer(
                m.LinearAttention.Config(128, 2, feature_map="taylor", feature_dim=16), 64
            ),
        ),
        System("rebased-B1T64C128H2", lambda: _layer(m.ReBased.Config(128, 2, feature_dim=16), 64)),
    ),
    "linear time-invariant SSM (MIMO): recurrence, one-step delay": (
        System(f"lti-B2T{T}I4N64", _recurrence),
        System(f"ltidelayed-B2T{T}I4N64", _delayed),
    ),
    "linear time-invariant SSM: FFT convolution, per channel or MIMO": (
        System(f"ltifft-B2T{T}I4N64", _convolution),
        System(f"fftconv-B2T{T}H{WIDTH}", _channels),
    ),
    "discretisation: zero-order hold, bilinear, Euler, Mamba's": tuple(
        System(f"{rule}-H64N8", lambda rule=rule: _discretisation(rule))
        for rule in ("zoh", "bilinear", "euler", "mamba")
    ),
    "HiPPO-LegS and its NPLR form": (System("hippo-N64", _initial),),
    "HiPPO-LegT, LagT and FouT, NPLR of rank two": (
        System("hippolegt-N64", _normal_form),
        System("s4legt-B1T128C64N16", lambda: _layer(m.S4.Config(64, 16, init="legt"), 128)),
    ),
    "S4 (DPLR): convolution and recurrence": (
        System("s4-B1T128C64N16", lambda: _layer(m.S4.Config(64, 16), 128)),
        System("s4steps-B1T40C64N16", lambda: _steps(m.S4.Config(64, 16))),
    ),
    "S4D (Lin, Inv, Real, LegS): convolution and recurrence": (
        *(
            System(f"{init}-B1T128C64N32", lambda init=init: _layer(_s4d(init), 128))
            for init in ("s4d-lin", "s4d-inv", "s4d-real", "legs")
        ),
        System("s4dsteps-B1T40C64N32", lambda: _steps(_s4d("s4d-lin"))),
    ),
    "simplified selective SSM: no step sizes, one state for all channels": (
        System("simplessm-B1T64C128", lambda: _layer(m.SimpleSelectiveSSM.Config(128), 64)),
    ),
    "Mamba-attention hybrids: periodic (Jamba), alternating (Samba)": tuple(
        System(f"{name}-B1T32C{WIDTH}", lambda layers=layers: _hybrid(layers))
        for name, layers in _HYBRIDS.items()
    ),
}


def _s4d(init: str) -> Any:
    return m.S4D.Config(64, 32, init=init)
