"""S4 and S4D: their formulas, steps, how their parameters begin, training."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import reference as R
from omniattn.modules import S4, S4D
from omniattn.training import parameter_groups

DIM, STATE, STEPS = 6, 8, 20
CONFIGS = {
    "s4d": S4D.Config(DIM, STATE),
    "s4d, bilinear": S4D.Config(DIM, STATE, init="s4d-inv", rule="bilinear"),
    "s4d, real": S4D.Config(DIM, STATE, init="s4d-real"),
    "s4d, legs": S4D.Config(DIM, STATE, init="legs", rule="mamba"),
    "s4": S4.Config(DIM, STATE),
    "s4, legt": S4.Config(DIM, STATE, init="legt"),
    "s4, lagt": S4.Config(DIM, STATE, init="lagt"),
    "s4, fout": S4.Config(DIM, STATE, init="fout"),
}
PARAMETERS = pytest.mark.parametrize("name", CONFIGS)


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layer = CONFIGS[name].build(dtype=dtype)
    nn.init.normal_(layer.out_proj.weight)
    nn.init.normal_(layer.out_proj.bias)
    return layer


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, STEPS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def both(t: torch.Tensor) -> torch.Tensor:
    return torch.cat((t, t.conj()), -1)


def expected(layer: nn.Module, u: torch.Tensor) -> torch.Tensor:
    """By dense matrices over both conjugates."""
    diagonal = both(torch.complex(-layer.log_A_real.exp(), layer.A_imag))
    A, B, C = (
        torch.diag_embed(diagonal),
        torch.ones_like(diagonal),
        both(torch.complex(*layer.C.unbind(-1))),
    )
    rule = "bilinear"
    if isinstance(layer, S4):
        P, B = (both(torch.view_as_complex(t)) for t in (layer.P, layer.B))
        P = P.reshape(DIM, -1, STATE)
        A, C = A - P.mT @ P.conj(), C.conj()
    else:
        rule = layer.config.rule
    s, _ = R.ssm_recurrence(*F.discretize(A, B, layer.log_dt.exp(), rule), C, layer.D, u + 0j)
    y = nnf.gelu(s.real) @ layer.out_proj.weight.T + layer.out_proj.bias
    return y[..., :DIM] * y[..., DIM:].sigmoid()


@PARAMETERS
def test_formula(name):
    layer, u = made(name), inputs()
    torch.testing.assert_close(layer(u), expected(layer, u))


@PARAMETERS
def test_the_reference_runs_step_by_step(name, monkeypatch):
    layer, u = made(name), inputs()
    y = layer(u)
    layer.config = layer.config.with_backend("reference")
    monkeypatch.delattr(torch.fft, "rfft")
    torch.testing.assert_close(layer(u), y)


@PARAMETERS
@torch.no_grad()
def test_steps_are_the_whole(name):
    layer, u = made(name), inputs()
    state, parts = layer.new_state(2, STEPS), []
    for a, b in ((0, 7), (7, 8), (8, 9), (9, STEPS)):
        parts.append(layer(u[:, a:b], state=state))
    torch.testing.assert_close(torch.cat(parts, 1), layer(u))
    assert state["s"].shape == (2, DIM, STATE // 2, 2) and state.length == STEPS


@PARAMETERS
def test_half_layers_keep_their_systems(name):
    layer = made(name, torch.bfloat16)
    system = {k: p for k, p in layer.named_parameters() if not k.startswith("out_proj")}
    assert {p.dtype for p in system.values()} == {torch.float32}
    assert layer.out_proj.weight.dtype == torch.bfloat16
    state, u = layer.new_state(2, STEPS), inputs(torch.bfloat16)
    assert state["s"].dtype == torch.float32
    y = layer(u)
    assert y.dtype == torch.bfloat16
    wide = CONFIGS[name].build(dtype=torch.float64)
    wide.load_state_dict(layer.state_dict())
    exact = wide(u.double())
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@PARAMETERS
def test_compiled_without_breaks(name, backend):
    torch._dynamo.reset()  # or the layers of other tests count as compilations of this one
    layer = made(name, torch.float32)
    u = inputs(torch.float32).requires_grad_()
    leaves = [u, *layer.parameters()]
    grads = torch.autograd.grad(layer(u).square().sum(), leaves)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(u).square().sum(), leaves)
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        state = layer.new_state(2, STEPS)
        torch.testing.assert_close(compiled(u, state=state), layer(u), rtol=1e-4, atol=1e-5)


@PARAMETERS
def test_compiled_with_padding(name):
    torch._dynamo.reset()
    layer, u = made(name), inputs()
    mask = torch.arange(STEPS) < torch.tensor([STEPS, 2])[:, None, None, None]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, mask=mask), layer(u, mask=mask))


@torch.no_grad()
@PARAMETERS
def test_states_pass_over_padding(name):
    layer, u = made(name), inputs()
    masks = torch.ones(2, 1, 1, STEPS, dtype=torch.bool)
    masks[0, ..., :3] = masks[1, ..., 5] = masks[0, ..., -4:] = False
    state, half = layer.new_state(2, STEPS), STEPS // 2
    parts = [layer(u[:, :half], mask=masks[..., :half], state=state)]
    parts += [layer(u[:, half:], mask=masks, state=state)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(u, mask=masks))
    for row, real in enumerate(masks[:, 0, 0]):
        alone = layer.new_state(1, STEPS)
        layer(u[row : row + 1, real], state=alone)
        torch.testing.assert_close(state["s"][row], alone["s"][0])


@PARAMETERS
def test_gradients_reach_all_parameters(name):
    layer = made(name)
    layer(inputs()).square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key


def test_how_parameters_begin():
    torch.manual_seed(0)
    layer = S4D(400, 6, init="s4d-inv", dt_min=0.01, dt_max=0.2)
    assert math.log(0.01) <= layer.log_dt.min() < layer.log_dt.max() <= math.log(0.2)
    A = F.ssm_init("s4d-inv", 6)
    torch.testing.assert_close(-layer.log_A_real.exp(), A.real.expand(400, 3))
    torch.testing.assert_close(layer.A_imag.detach(), A.imag.expand(400, 3))
    assert layer.C.square().sum(-1).mean().item() == pytest.approx(1, rel=0.1)
    assert layer.D.std().item() == pytest.approx(1, rel=0.1)
    layer = S4(400, 6)
    Lambda, P, B, _ = F.nplr(6)
    torch.testing.assert_close(torch.view_as_complex(layer.P.detach()), P.expand(400, 3))
    torch.testing.assert_close(torch.view_as_complex(layer.B.detach()), B.expand(400, 3))
    torch.testing.assert_close(layer.A_imag.detach(), Lambda.imag.expand(400, 3))
    layer = S4(400, 6, init="legt")
    Lambda, P, _, _ = F.nplr(6, measure="legt")
    torch.testing.assert_close(torch.view_as_complex(layer.P.detach()), P.expand(400, 2, 3))
    torch.testing.assert_close(layer.log_A_real.exp(), torch.full((400, 3), 1e-4))
    assert S4(400, 6, init="fout").A_imag.min() == 0


def test_time_scales_do_not_decay():
    layer = nn.Sequential(S4(DIM, STATE), S4D(DIM, STATE))
    decayed, others = (group["params"] for group in parameter_groups(layer, 0.1))
    names = {id(p): name for name, p in layer.named_parameters()}
    kept = {"0.C", "0.out_proj.weight", "1.C", "1.out_proj.weight"}
    assert {names[id(p)] for p in decayed} == kept
    assert len(decayed) + len(others) == len(names)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: S4D(8, 7), ValueError, "S4D: state_size must be even and >= 2, got state_size=7"),
        (lambda: S4(8, 0), ValueError, "S4: state_size must be even and >= 2, got state_size=0"),
        (lambda: S4(8, dt_min=0.0), ValueError, "S4: dt_min must be above 0 .* got dt_min=0.0"),
        (lambda: S4D(8, dt_min=0.2), ValueError, "S4D: dt_min must be .* dt_min=0.2, dt_max=0.1"),
        (lambda: S4(8, init="lmu"), ValueError, "S4: init must be one of .* init='lmu'"),
        (lambda: S4D(8, init="hippo"), ValueError, "S4D: init must be one of .* init='hippo'"),
        (lambda: S4D(8, rule="foh"), ValueError, "S4D: rule must be one of .* rule='foh'"),
        (lambda: S4D(8)(torch.ones(1, 2, 8), mask=torch.ones(2, 2)), ValueError, "mask must be"),
        (lambda: S4(8)(torch.ones(2, 8)), ValueError, r"S4: x must have shape \(B, T, 8\)"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
