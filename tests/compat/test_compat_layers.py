"""omniattn.compat: the layers of mamba-ssm after their first product, against loops over steps."""

import copy
import inspect
import re

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import compat

B, T, D, N, R, E = 2, 7, 4, 3, 2, 5  # of Mamba
H, P, G, M = 4, 3, 2, 3  # of Mamba-2
WIDTH = H * P + 2 * G * N


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def mamba(**changed):
    torch.manual_seed(0)
    return {
        "xz": randn(B, 2 * D, T),
        "conv1d_weight": randn(D, 1, 3),
        "conv1d_bias": randn(D),
        "x_proj_weight": randn(R + 2 * N, D),
        "delta_proj_weight": randn(D, R),
        "out_proj_weight": randn(E, D),
        "out_proj_bias": randn(E),
        "A": -randn(D, N).abs() - 0.1,
        "D": randn(D),
        "delta_bias": randn(D),
    } | changed


def mamba2(**changed):
    torch.manual_seed(0)
    return {
        "zxbcdt": randn(B, T, H * P + WIDTH + H),
        "conv1d_weight": randn(WIDTH, 3),
        "conv1d_bias": randn(WIDTH),
        "dt_bias": randn(H),
        "A": -randn(H).abs() - 0.1,
        "D": randn(H),
        "headdim": P,
        "ngroups": G,
        "outproj_weight": randn(E, H * P),
        "outproj_bias": randn(E),
    } | changed


def taps(x, weight, bias, act, numbers=None):
    """x (B, T, D); a tap reads steps of the same number alone."""
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x)
    for back in range(min(weight.shape[1], x.shape[1])):
        part = nnf.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        if numbers is not None:
            part = (
                part
                * (nnf.pad(numbers, (back, 0), value=-1)[:, : x.shape[1]] == numbers)[..., None]
            )
        y = y + weight[:, -1 - back] * part
    return nnf.silu(y) if act else y


def norm(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def inner_loop(
    xz,
    conv1d_weight,
    conv1d_bias,
    x_proj_weight,
    delta_proj_weight,
    out_proj_weight,
    out_proj_bias,
    A,
    B=None,
    C=None,
    D=None,
    delta_bias=None,
    B_proj_bias=None,
    C_proj_bias=None,
    delta_softplus=True,
    checkpoint_lvl=1,
    b_rms_weight=None,
    c_rms_weight=None,
    dt_rms_weight=None,
    b_c_dt_rms_eps=1e-6,
):
    x, z = xz.mT.chunk(2, -1)
    u = taps(x, conv1d_weight[:, 0], conv1d_bias, True)
    parts, rank = u @ x_proj_weight.T, delta_proj_weight.shape[1]

    def of_step(given, part, bias, weight, t):
        """(B, D, N)."""
        if given is not None:
            w = given if given.ndim == 2 else given[..., t]
            return w if w.ndim == 2 else w.repeat_interleave(len(A) // w.shape[1], 1)
        w = part[:, t] if bias is None else part[:, t] + bias
        w = w if weight is None else norm(w, weight, b_c_dt_rms_eps)
        w = torch.view_as_complex(w.unflatten(-1, (-1, 2))) if A.is_complex() else w
        return w[:, None]

    width = A.shape[1] * (2 if A.is_complex() else 1)
    delta = parts[..., :rank] @ delta_proj_weight.T
    delta = delta if dt_rms_weight is None else norm(delta, dt_rms_weight, b_c_dt_rms_eps)
    delta = delta if delta_bias is None else delta + delta_bias
    delta = nnf.softplus(delta) if delta_softplus else delta
    h, rows = A.new_zeros(len(xz), *A.shape), []
    for t in range(xz.shape[2]):
        step = delta[:, t, :, None]
        b = of_step(B, parts[..., rank : rank + width], B_proj_bias, b_rms_weight, t)
        c = of_step(C, parts[..., parts.shape[-1] - width :], C_proj_bias, c_rms_weight, t)
        h = (step * A).exp() * h + step * b * u[:, t, :, None]
        y = (h * c).sum(-1)
        rows.append(2 * y.real if A.is_complex() else y)
    y = torch.stack(rows, 1) + (0 if D is None else D * u)
    y = y * nnf.silu(z) @ out_proj_weight.T
    return y if out_proj_bias is None else y + out_proj_bias


def split_loop(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
    state_dtype=None,
):
    heads = len(D)
    size = headdim if D.ndim == 1 else D.shape[1]
    states = (len(conv1d_weight) - heads * size) // 2 // ngroups
    last = [heads * size, len(conv1d_weight), heads]
    first, z, xbc, dt = zxbcdt.split([zxbcdt.shape[-1] - sum(last), *last], -1)
    xbc = taps(xbc, conv1d_weight, conv1d_bias, activation is not None, seq_idx)
    x, b, c = xbc.split([heads * size, *[ngroups * states] * 2], -1)
    b, c = (
        w.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, 2) for w in (b, c)
    )
    x, dt = x.unflatten(-1, (heads, size)), nnf.softplus(dt + dt_bias).clamp(*dt_limit)
    h, rows = x.new_zeros(len(x), heads, size, states), []
    h = h if initial_states is None else initial_states
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            h = h * (seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1)
        drive = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        h = (dt[:, t] * A).exp()[..., None, None] * h + drive
        rows.append((h * c[:, t, :, None]).sum(-1))
    y = torch.stack(rows, 1) + (D if D.ndim == 2 else D[:, None]) * x
    y, gate = y.flatten(2), nnf.silu(z)
    if rmsnorm_weight is None:
        y = y * gate
    else:
        y = y if norm_before_gate else y * gate
        parts = y.unflatten(-1, (ngroups, -1))
        y = norm(parts, 1.0, rmsnorm_eps).flatten(2) * rmsnorm_weight
        y = y * gate if norm_before_gate else y
    g, u = first.chunk(2, -1)
    y = torch.cat((nnf.silu(g) * u, y), -1)
    if outproj_weight is not None:
        y = y @ outproj_weight.T + (0 if outproj_bias is None else outproj_bias)
    return (y, h) if return_final_states else y


def with_complex_A():
    A = torch.complex(mamba()["A"], randn(D, N))
    pairs = {"B_proj_bias": randn(2 * N), "C_proj_bias": randn(2 * N)}
    odd = {"x_proj_weight": randn(3 + 4 * N, D), "delta_proj_weight": randn(D, 3)}
    return mamba(A=A, **pairs, **odd)  # pairs at an odd column


INNER = {
    "usual": mamba(),
    "no-biases": mamba(conv1d_bias=None, out_proj_bias=None, D=None, delta_bias=None),
    "biases": mamba(
        B_proj_bias=randn(N),
        C_proj_bias=randn(N),
        delta_proj_weight=0.01 * randn(D, R),  # steps above 0
        delta_bias=0.5 + torch.rand(D).double(),
        delta_softplus=False,
    ),
    "complex": with_complex_A(),
    "constant-B": mamba(B=randn(D, N), x_proj_weight=randn(R + N, D)),
    "groups": mamba(B=randn(B, 2, N, T), C=randn(B, 2, N, T), x_proj_weight=randn(R, D)),
    "norms": mamba(
        b_rms_weight=randn(N), c_rms_weight=randn(N), dt_rms_weight=randn(D), b_c_dt_rms_eps=0.1
    ),
}
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5] * T])
SPLIT = {
    "usual": mamba2(),
    "no-product": mamba2(outproj_weight=None, outproj_bias=None, activation=None, conv1d_bias=None),
    "norm": mamba2(rmsnorm_weight=randn(H * P), rmsnorm_eps=0.1),
    "gate-first": mamba2(rmsnorm_weight=randn(H * P), norm_before_gate=False, outproj_bias=None),
    "two-branches": mamba2(
        zxbcdt=randn(B, T, 2 * M + H * P + WIDTH + H), outproj_weight=randn(E, M + H * P)
    ),
    "sequences": mamba2(
        seq_idx=NUMBERS, initial_states=randn(B, H, P, N), return_final_states=True
    ),
    "state": mamba2(initial_states=randn(B, H, P, N), return_final_states=True),
    "D-of-channels": mamba2(D=randn(H, P), headdim=None, dt_limit=(0.3, 1.2), activation="swish"),
}


def same(function, loop, given, **more):
    """Results, and gradients of all tensors, to a few roundings of float64."""
    found, exact = [], []
    for call, results in ((function, found), (loop, exact)):
        leaves = {
            name: t.detach().clone().requires_grad_()
            for name, t in given.items()
            if isinstance(t, torch.Tensor) and name != "seq_idx"
        }
        out = call(**given | leaves, **more)
        parts = out if isinstance(out, tuple) else (out,)
        loss = sum((part.flatten() * torch.arange(part.numel()).cos()).sum() for part in parts)
        results += [*parts, *torch.autograd.grad(loss, list(leaves.values()))]
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", INNER)
def test_mamba_inner_fn(case):
    same(compat.mamba_inner_fn, inner_loop, INNER[case])


@pytest.mark.parametrize("case", SPLIT)
def test_mamba_split_conv1d_scan_combined(case):
    same(compat.mamba_split_conv1d_scan_combined, split_loop, SPLIT[case], chunk_size=256)


@pytest.mark.parametrize(
    ("function", "loop"),
    [
        (compat.mamba_inner_fn, inner_loop),
        (compat.mamba_split_conv1d_scan_combined, split_loop),
    ],
)
def test_arguments_of_layers_are_in_their_order(function, loop):
    ours, theirs = (inspect.signature(f).parameters.values() for f in (function, loop))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_gradients_of_layers():
    small = mamba()
    small |= {"xz": randn(1, 2 * D, 3), "b_rms_weight": randn(N), "dt_rms_weight": randn(D)}
    names = list(small)

    def inner(*tensors):
        return compat.mamba_inner_fn(**dict(zip(names, tensors, strict=True)))

    leaves = [t.clone().requires_grad_() for t in small.values()]
    assert torch.autograd.gradcheck(inner, leaves, fast_mode=True)
    tensors = {name: t for name, t in mamba2().items() if isinstance(t, torch.Tensor)}
    tensors |= {"zxbcdt": randn(1, 3, H * P + WIDTH + H), "rmsnorm_weight": randn(H * P)}
    options = {"chunk_size": 4, "headdim": P, "ngroups": G, "seq_idx": torch.tensor([[0, 1, 1]])}

    def split(*given):
        return compat.mamba_split_conv1d_scan_combined(
            **dict(zip(tensors, given, strict=True)), **options
        )

    leaves = [t.clone().requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(split, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("function", "loop", "given"),
    [
        (compat.mamba_inner_fn, inner_loop, INNER["norms"]),
        (compat.mamba_split_conv1d_scan_combined, split_loop, SPLIT["norm"] | {"chunk_size": 8}),
    ],
)
def test_layers_of_half_tensors_with_wide_weights(function, loop, given):
    """As models have them: A, D, the convolution and the norm in float32."""
    half = {"xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias"}
    half |= {"zxbcdt", "outproj_weight", "outproj_bias"}

    def cast(dtype, names):
        chosen = {n: t for n, t in given.items() if n in names and isinstance(t, torch.Tensor)}
        return {n: t.to(dtype) for n, t in chosen.items()}

    mixed = given | cast(torch.float32, given) | cast(torch.bfloat16, half)
    y = function(**mixed)
    assert y.dtype == torch.bfloat16
    exact = loop(**{n: t.double() if isinstance(t, torch.Tensor) else t for n, t in mixed.items()})
    eager = loop(**given | cast(torch.bfloat16, given))
    floor = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (y - exact).abs().max() <= 2 * (eager - exact).abs().max() + floor


def test_causal_conv1d_varlen_states():
    x = randn(9, D).requires_grad_()
    bounds = torch.tensor([0, 2, 2, 7, 9]).int()
    states = compat.causal_conv1d_varlen_states(x, bounds, 3)
    assert states.shape == (4, D, 3) and states.stride(1) == 1
    for state, (first, last) in zip(states, ((0, 2), (2, 2), (2, 7), (7, 9)), strict=True):
        part = x[max(first, last - 3) : last]
        assert torch.equal(state, nnf.pad(part, (0, 0, 3 - len(part), 0)).T)
    assert torch.autograd.gradcheck(
        lambda x: compat.causal_conv1d_varlen_states(x, bounds, 3), (x,)
    )
    assert compat.causal_conv1d_varlen_states(x[:0], bounds[:1], 3).shape == (0, D, 3)
    weight, new = randn(D, 4), randn(4, D, 1)  # a step after each sequence
    step = compat.causal_conv1d_update(new[..., 0], states.detach().clone(), weight)
    whole = torch.cat((x[2:7].T, new[2]), 1)[None]
    torch.testing.assert_close(step[2], compat.causal_conv1d_fn(whole, weight)[0, :, -1])


def of_float32(**given):
    return {n: t.float() if isinstance(t, torch.Tensor) else t for n, t in given.items()}


def calls():
    """Valid arguments of the aliases, by name."""
    scan = {"u": randn(B, D, T), "delta": randn(B, D, T), "A": -randn(D, N).abs()}
    scan |= {"B": randn(B, 2, N, T), "C": randn(B, 2, N, T), "D": randn(D), "z": randn(B, D, T)}
    scan = of_float32(**scan, delta_bias=randn(D), delta_softplus=True, return_last_state=True)
    step = {"state": randn(B, H, P, N), "x": randn(B, H, P), "dt": randn(B, H, P)}
    step |= {"A": -randn(H, P, N).abs(), "B": randn(B, G, N), "C": randn(B, G, N)}
    step |= {"D": randn(H, P), "z": randn(B, H, P), "dt_bias": randn(H, P), "dt_softplus": True}
    heads = {"x": randn(B, T, H, P), "dt": randn(B, T, H), "A": -randn(H).abs()}
    heads |= {"B": randn(B, T, G, N), "C": randn(B, T, G, N), "chunk_size": 4, "D": randn(H)}
    heads |= {"z": randn(B, T, H, P), "dt_bias": randn(H), "initial_states": randn(B, H, P, N)}
    heads = of_float32(**heads) | {"seq_idx": NUMBERS, "dt_softplus": False, "dt_limit": (0.0, 1.0)}
    heads |= {"return_final_states": True, "return_varlen_states": False, "state_dtype": None}
    conv = {"x": randn(B, D, T), "weight": randn(D, 4), "bias": randn(D)}
    conv |= {"initial_states": randn(B, D, 3), "final_states_out": randn(B, D, 3)}
    conv = of_float32(**conv, return_final_states=True, activation="silu")
    update = of_float32(x=randn(B, D), conv_state=randn(5, D, 4), weight=conv["weight"])
    update |= {"bias": conv["bias"], "activation": None, "cache_seqlens": torch.tensor([3, 4])}
    update["conv_state_indices"] = torch.tensor([4, 1])
    split = of_float32(**SPLIT["two-branches"], rmsnorm_weight=randn(H * P), chunk_size=4)
    split |= {"seq_idx": NUMBERS, "norm_before_gate": False, "return_final_states": True}
    return {
        "selective_scan_fn": scan,
        "selective_scan_ref": scan,
        "selective_state_update": of_float32(**step),
        "mamba_chunk_scan_combined": heads,
        "mamba_inner_fn": of_float32(**INNER["norms"]),
        "mamba_split_conv1d_scan_combined": split | {"activation": "silu", "state_dtype": None},
        "causal_conv1d_fn": conv,
        "causal_conv1d_update": update,
        "causal_conv1d_varlen_states": {
            "x": update["x"],
            "cu_seqlens": torch.tensor([0, 2]),
            "state_len": 3,
        },
    }


def wrong(value):
    """Values that no argument like `value` may have, and whether the error must name it alone."""
    yield from ((other, True) for other in ("yes", [1.0], object()))
    if isinstance(value, bool):
        yield from ((other, True) for other in (1, 0, 2.5))
    if isinstance(value, torch.Tensor):
        yield from ((other, True) for other in (1, value.bool(), value.to_sparse(), value + 0j))
        yield from ((other, False) for other in (value.to("meta"), value[None], value.sum()))


@pytest.mark.parametrize("name", calls())
def test_errors_name_the_alias_and_its_argument(name):
    function, given = getattr(compat, name), calls()[name]
    function(**copy.deepcopy(given))
    for argument, value in given.items():
        for other, alone in wrong(value):
            if argument == "A" and isinstance(other, torch.Tensor) and other.is_complex():
                continue  # of a complex scan
            with pytest.raises((TypeError, ValueError)) as raised:
                function(**copy.deepcopy(given) | {argument: other})
            text = str(raised.value)
            assert text.startswith(f"{name}: ") and ", got " in text, text
            if alone:
                assert re.match(rf"{name}: {argument} must ", text), text
