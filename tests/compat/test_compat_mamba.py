"""omniattn.compat: the functions of mamba-ssm against loops with their arguments."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat, modules
from omniattn.compat import mamba_ssm

B, D, N, T, G = 2, 6, 3, 9, 2


def tensors(groups: int | None = G, *, constant: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = (D, N) if constant else (B, N, T) if groups is None else (B, groups, N, T)
    return {
        "u": torch.randn(B, D, T),
        "delta": torch.randn(B, D, T),
        "A": -torch.rand(D, N) - 0.1,
        "B": torch.randn(rows),
        "C": torch.randn(rows),
        "D": torch.randn(D),
        "z": torch.randn(B, D, T),
        "delta_bias": torch.randn(D),
    }


def theirs(u, delta, A, B, C, D, z, delta_bias):
    """A loop over the steps (.., T) of all channels."""

    def of_channels(w, t):
        if w.ndim == 2:
            return w
        w = w[..., t] if w.ndim == 4 else w[:, None, :, t]
        return w.repeat_interleave(len(A) // w.shape[1], 1)

    dt = nnf.softplus(delta + delta_bias[:, None])
    h, out = torch.zeros(len(u), *A.shape, dtype=A.dtype), []
    for t in range(u.shape[2]):
        drive = (dt * u)[..., t, None] * of_channels(B, t)
        h = (dt[..., t, None] * A).exp() * h + drive
        out.append((h * of_channels(C, t)).sum(-1))
    y = torch.stack(out, 2)
    y = 2 * y.real if y.is_complex() else y
    return (y + D[:, None] * u) * nnf.silu(z), h


@pytest.mark.parametrize("function", [compat.selective_scan_fn, compat.selective_scan_ref])
@pytest.mark.parametrize("options", [{}, {"groups": None}, {"constant": True}])
def test_selective_scan_fn(function, options):
    given = {name: t.requires_grad_() for name, t in tensors(**options).items()}
    y, state = function(*given.values(), True, return_last_state=True)
    expected, h = theirs(**given)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, h, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(y.square().sum() + state.sum(), list(given.values()))
    exact = torch.autograd.grad(expected.square().sum() + h.sum(), list(given.values()))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    only = function(*given.values(), delta_softplus=True)
    assert torch.equal(only, y)


def test_selective_scan_fn_of_a_complex_A():
    given = tensors(None)
    given["A"] = given["A"] + 1j * torch.randn(D, N)
    parts = {name: torch.randn(B, N, T, dtype=torch.complex64) for name in "BC"}
    flat = {name: torch.view_as_real(t).flatten(-2) for name, t in parts.items()}
    y, state = compat.selective_scan_fn(**given | flat, delta_softplus=True, return_last_state=True)
    expected, h = theirs(**given | parts)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, h, rtol=1e-5, atol=1e-5)


def test_parts_of_a_complex_scan_in_bf16():
    given = tensors(None)
    given["A"] = given["A"] + 1j * torch.randn(D, N)
    half = {name: torch.randn(B, N, 2 * T).bfloat16() for name in "BC"}
    y = compat.selective_scan_fn(**given | half, delta_softplus=True)
    exact = compat.selective_scan_fn(
        **given | {name: t.float() for name, t in half.items()}, delta_softplus=True
    )
    assert torch.equal(y, exact)


def test_selective_scan_fn_of_several_dtypes():
    given = tensors()
    mixed = given | {"u": given["u"].bfloat16(), "z": given["z"].bfloat16()}
    y = compat.selective_scan_fn(**mixed, delta_softplus=True)
    assert y.dtype == torch.bfloat16
    exact = compat.selective_scan_fn(
        **given | {name: mixed[name].float() for name in ("u", "z")}, delta_softplus=True
    )
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_update_the_state(dtype):
    given = tensors(None)
    expected, h = theirs(**given)
    state, out = torch.zeros(B, D, N, dtype=dtype), []
    for t in range(T):
        rows = {"x": "u", "dt": "delta", "B": "B", "C": "C", "z": "z"}
        step = {name: given[theirs_][..., t] for name, theirs_ in rows.items()}
        step |= {"A": given["A"], "D": given["D"], "dt_bias": given["delta_bias"]}
        out.append(compat.selective_state_update(state, **step, dt_softplus=True))
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(torch.stack(out, 2), expected, **bounds)
    torch.testing.assert_close(state, h.to(dtype), **bounds)


def test_a_step_of_heads_of_a_pool():
    """Heads are channels; the channels of a group are adjacent."""
    torch.manual_seed(0)
    heads, pool = 4, torch.randn(5, 4, 3, N)
    index = torch.tensor([3, 1])
    x, dt, z = torch.randn(3, B, heads, 3)
    a, d, bias = -torch.rand(heads, 3, N), torch.randn(heads, 3), torch.randn(heads, 3)
    b, c = torch.randn(2, B, G, N)
    before = pool.clone()
    y = compat.selective_state_update(
        pool, x, dt, a, b, c, d, z, bias, True, state_batch_indices=index
    )
    step = nnf.softplus(dt + bias)[..., None]
    b, c = (w.repeat_interleave(heads // G, 1)[:, :, None] for w in (b, c))
    h = (step * a).exp() * before[index] + step * b * x[..., None]
    torch.testing.assert_close(y, ((h * c).sum(-1) + d * x) * nnf.silu(z))
    torch.testing.assert_close(pool[index], h)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def step_of_rows(rows):
    given = [torch.ones(2, 3), torch.ones(2, 3), -torch.ones(3, 5), *[torch.ones(2, 5)] * 2]
    index = torch.tensor(rows)
    return compat.selective_state_update(torch.zeros(4, 3, 5), *given, state_batch_indices=index)


def step_of_heads(**changed):
    heads = {"state": torch.zeros(1, 4, 3, 5), "x": torch.ones(1, 4, 3), "dt": torch.ones(1, 4, 3)}
    heads |= {"A": -torch.ones(4, 3, 5), "B": torch.ones(1, 2, 5), "C": torch.ones(1, 2, 5)}
    return compat.selective_state_update(**heads | changed)


def convolution_of_rows(rows):
    given = torch.ones(2, 3), torch.zeros(4, 3, 4), torch.ones(3, 4)
    return compat.causal_conv1d_update(*given, conv_state_indices=torch.tensor(rows))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compat.selective_scan_fn(*[torch.ones(2, 3)] * 5),
            r"selective_scan_fn: u must have shape \(B, D, T\), got u.shape=\(2, 3\)",
        ),
        (
            lambda: compat.selective_scan_fn(**tensors() | {"B": torch.ones(3)}),
            r"selective_scan_fn: B must have shape \(B, N, T\), \(B, G, N, T\) or \(D, N\), got",
        ),
        (
            lambda: compat.selective_scan_fn(**tensors() | {"A": torch.ones(D, N) + 0j}),
            r"selective_scan_fn: B must have 2 T=18 as its last size with a complex A, got B.shape",
        ),
        (
            lambda: compat.selective_state_update(*[torch.ones(2, 3)] * 6),
            r"selective_state_update: x must have shape \(B, D\) or \(B, H, D\) and state",
        ),
        (
            lambda: compat.selective_state_update(torch.ones(2, 3, 4), *[torch.ones(1, 3)] * 5),
            r"selective_state_update: state must have the B and D of x, got state.shape=\(2, 3, 4",
        ),
        (
            lambda: step_of_rows([0, 4]),
            r"state_batch_indices must be in \[0, 4\), got .* from 0 to 4",
        ),
        (lambda: step_of_rows([-1, 1]), r"state_batch_indices must be in \[0, 4\), got .* from -1"),
        (
            lambda: step_of_rows([1, 1]),
            r"state_batch_indices must have no row twice, got .*\[1, 1\]",
        ),
        (lambda: step_of_heads(dt=torch.ones(1, 3, 4)), r"dt must have shape \(1, 4, 3\), got"),
        (lambda: step_of_heads(D=torch.ones(3, 4)), r"D must have shape \(4, 3\), got"),
        (lambda: step_of_heads(A=-torch.ones(3, 4, 5)), r"A must have shape \(4, 3, 5\), got"),
        (
            lambda: step_of_heads(A=-torch.ones(4, 3, 5) + 0j),
            "state must be complex where A is, got state.dtype=torch.float32",
        ),
        (lambda: step_of_heads(z=torch.ones(1, 4, 3) > 0), "z must be float64, .*=torch.bool"),
        (
            lambda: compat.selective_scan_fn(**tensors() | {"u": torch.ones(B, D, T).long()}),
            "selective_scan_fn: u must be float64, float32, .*=torch.int64",
        ),
        (lambda: convolution_of_rows([0.0, 1.0]), "conv_state_indices must be integers"),
        (lambda: step_of_rows([True, False]), "state_batch_indices must be integers, got"),
        (lambda: convolution_of_rows([0, 4]), r"conv_state_indices must be in \[0, 4\)"),
        (lambda: convolution_of_rows([2, 2]), r"conv_state_indices must have no row twice"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
@torch.no_grad()
def test_layers_have_the_states_of_mamba_ssm(kind):
    torch.manual_seed(0)
    options = {"headdim": 8, "ngroups": 2} if kind == "Mamba2" else {}
    layer = getattr(mamba_ssm, kind)(16, d_state=4, d_conv=3, layer_idx=2, **options)
    ours = getattr(modules, kind)(layer.config)
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, 16)
    whole = ours(x)
    torch.testing.assert_close(layer(x), whole)
    conv, matrix = layer.allocate_inference_cache(2, 7)
    assert conv.shape[2] == 3 and matrix.shape[0] == 2
    for n in range(7):
        y, *_ = layer.step(x[:, n : n + 1], conv, matrix)
        torch.testing.assert_close(y, whole[:, n : n + 1])
    params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    pieces = []
    for part in (x[:, :5], x[:, 5:6], x[:, 6:]):
        pieces.append(layer(part, inference_params=params))
        params.seqlen_offset += part.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(params.key_value_memory_dict[2], (conv, matrix))
    if kind == "Mamba2":
        torch.testing.assert_close(layer(x.flatten(0, 1), seqlen=7), whole.flatten(0, 1))
        boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
        packed = layer(x[:1], cu_seqlens=boundaries)
        torch.testing.assert_close(packed[:, 3:], layer(x[:1, 3:]))
        with pytest.raises(NotImplementedError, match="rmsnorm must be True"):
            mamba_ssm.Mamba2(16, rmsnorm=False)
    with pytest.raises(ValueError, match=f"{kind}: hidden_states must have one token"):
        layer.step(x, conv, matrix)
