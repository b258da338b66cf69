"""Scans: direct sums, states, packed sequences, ends of the number range, errors, other code."""

import itertools

import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn import testing

BACKENDS = [None, "reference"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wkv_inputs(steps: int = 70, channels: int = 11, batch: int = 2):
    w, u = draw(channels).exp(), draw(channels, seed=1)
    return w, u, draw(batch, steps, channels, seed=2), draw(batch, steps, channels, seed=3)


def wkv_direct(w, u, k, v) -> torch.Tensor:
    """The mean with weights e^(k_i - (t - 1 - i) w), and e^(u + k_t) of the present token."""
    t = torch.arange(k.shape[1])
    age = (t[:, None] - t - 1)[:, :, None]
    score = torch.where(age < 0, u + k[:, None], k[:, None] - age * w)
    score = score.masked_fill((age < -1), -torch.inf)
    return (score.softmax(2) * v[:, None]).sum(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rwkv4_is_a_mean(backend):
    inputs = wkv_inputs()
    torch.testing.assert_close(F.rwkv4(*inputs, backend=backend)[0], wkv_direct(*inputs))


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4])
def test_rwkv4_of_large_keys(isa, size):
    """Sums that differ from each other by more than exp can hold, and decays below the spacing of
    the keys, which a maximum that is decremented at each step would lose."""
    w, u, k, v = (t.float() for t in wkv_inputs(200))
    k = torch.cat((k[:, :40] + size, k[:, 40:80] * 1e4, k[:, 80:] + size), 1)
    w = w * 1e-3
    inputs = [t.requires_grad_() for t in (w, u, k, v)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with testing.isa(isa):
        y, state = F.rwkv4(*inputs)
        grads = torch.autograd.grad(y.square().sum(), inputs)
    expected = wkv_direct(*wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    assert state.isfinite().all()
    exact = torch.autograd.grad(expected.square().sum(), wide)
    for ours, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [(0, 1, 2, 70), (0, 33, 64, 70), (0, 0, 70)])
def test_a_state_of_rwkv4_continues(backend, splits):
    w, u, k, v = wkv_inputs()
    y, final = F.rwkv4(w, u, k, v, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise(splits):
        part, state = F.rwkv4(w, u, k[:, a:b], v[:, a:b], initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("edges", [(0, 20, 20, 65, 70), (0, 0, 20, 65, 70)])
def test_packed_sequences_of_rwkv4_are_apart(edges):
    w, u, k, v = wkv_inputs(batch=1)
    leaves = [t.requires_grad_() for t in (w, u, k, v, draw(4, 3, 11, seed=5).abs())]
    *_, start = leaves
    cu = torch.tensor(edges)
    y, final = F.rwkv4(w, u, k, v, initial_state=start, cu_seqlens=cu)
    parts = [
        F.rwkv4(w, u, k[:, a:b], v[:, a:b], initial_state=start[n : n + 1])
        for n, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    alone = torch.cat([part for part, _ in parts], 1)
    ends = torch.cat([state for _, state in parts])
    torch.testing.assert_close(y, alone)
    torch.testing.assert_close(final, ends)
    found = torch.autograd.grad(y.square().sum() + final.square().sum(), leaves)
    expected = torch.autograd.grad(alone.square().sum() + ends.square().sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_rwkv4_does_not_depend_on_threads():
    inputs = [t.float().requires_grad_() for t in wkv_inputs(100, 300)]
    results = []
    for threads in (1, 3):
        with testing.threads(threads):
            y, state = F.rwkv4(*inputs)
            loss = y.square().sum() + state.square().sum()
            results.append((y, state, *torch.autograd.grad(loss, inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rwkv4_of_transformers():
    module = pytest.importorskip("transformers.models.rwkv.modeling_rwkv")
    w, u, k, v = (t.float() for t in wkv_inputs())
    theirs, state = module.rwkv_linear_attention_cpu(w.log(), u, k, v, return_state=True)
    y, final = F.rwkv4(w, u, k, v)
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(final.unbind(1), tuple(state))


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_scan_of_decayed_sums(backend):
    """h_t is the sum of x_s times the decays after s; also from a state, in parts and packed."""
    x, g, start = draw(1, 70, 11), -draw(1, 70, 11, seed=1).abs(), draw(3, 11, seed=2)
    span = g.cumsum(1)
    share = (span[:, :, None] - span[:, None]).masked_fill(
        ~torch.ones(70, 70, dtype=torch.bool).tril()[..., None], -torch.inf
    )
    expected = (share.exp() * x[:, None]).sum(2) + span.exp() * start[:1]
    h, final = F.linear_scan(x, g, initial_state=start[:1], backend=backend)
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(final, expected[:, -1])
    state, parts = start[:1], []
    for a, b in itertools.pairwise((0, 1, 33, 64, 64, 70)):
        part, state = F.linear_scan(x[:, a:b], g[:, a:b], initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    cu = torch.tensor([0, 33, 33, 70])
    h, final = F.linear_scan(x, g, initial_state=start, cu_seqlens=cu, backend=backend)
    alone = F.linear_scan(x[:, 33:], g[:, 33:], initial_state=start[2:], backend=backend)
    torch.testing.assert_close(h[:, :33], expected[:, :33])
    torch.testing.assert_close((h[:, 33:], final[2:]), alone)
    torch.testing.assert_close(final[1], start[1])


def test_linear_scan_does_not_depend_on_threads():
    inputs = [draw(2, 40, 300), -draw(2, 40, 300, seed=1).abs()]
    leaves = [t.float().requires_grad_() for t in inputs]
    results = []
    for threads in (1, 3):
        with testing.threads(threads):
            y, state = F.linear_scan(*leaves)
            loss = y.square().sum() + state.square().sum()
            results.append((y, state, *torch.autograd.grad(loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_linear_scan_of_gradients_alone():
    """The gradient of x is the same where that of g is not wanted."""
    x, g = draw(1, 70, 5).requires_grad_(), -draw(1, 70, 5, seed=1).abs()
    (alone,) = torch.autograd.grad(F.linear_scan(x, g)[0].square().sum(), x)
    g.requires_grad_()
    both = torch.autograd.grad(F.linear_scan(x, g)[0].square().sum(), (x, g))
    torch.testing.assert_close(alone, both[0])


@pytest.mark.parametrize(
    ("x", "g", "state", "error", "message"),
    [
        ((3, 4), (3, 4), None, ValueError, r"x must have shape \(B, T, C\), got x.shape=\(3, 4\)"),
        ((1, 3, 4), (1, 3), None, ValueError, r"g must have shape \(1, 3, 4\), got g.shape"),
        ((1, 3, 4), (1, 3, 4), (1, 3), ValueError, r"initial_state must have shape \(1, 4\)"),
    ],
)
def test_bad_input_of_linear_scan(x, g, state, error, message):
    with pytest.raises(error, match=f"linear_scan: {message}"):
        F.linear_scan(
            torch.ones(x),
            -torch.ones(g),
            initial_state=None if state is None else torch.ones(state),
        )


def test_growing_states_of_linear_scan_are_refused():
    with pytest.raises(ValueError, match=r"linear_scan: g must be <= 0, got g.max\(\)=1"):
        F.linear_scan(torch.ones(1, 2, 3), torch.ones(1, 2, 3))


W, K = torch.ones(4), torch.ones(1, 3, 4)
WKV = {"w": W, "u": W, "k": K, "v": K}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"k": torch.ones(3, 4)},
            ValueError,
            r"k must have shape \(B, T, C\), got k.shape=\(3, 4\)",
        ),
        ({"k": K.long()}, TypeError, "k must be float64"),
        ({"v": K.double()}, TypeError, "v must have the dtype of k"),
        ({"v": torch.ones(1, 2, 4)}, ValueError, r"v must have shape \(1, 3, 4\)"),
        ({"w": torch.ones(3)}, ValueError, r"w must have shape \(4,\), got w.shape=\(3,\)"),
        ({"u": torch.ones(4).long()}, TypeError, "u must be floating-point"),
        ({"initial_state": torch.ones(1, 2, 4)}, ValueError, r"must have shape \(1, 3, 4\)"),
        (
            {"cu_seqlens": torch.tensor([0, 5])},
            ValueError,
            "must grow from 0 to the number of tokens, 3, got cu",
        ),
        ({"cu_seqlens": torch.tensor([2, 1])}, ValueError, r"got cu_seqlens=\[2, 1\]"),
        ({"cu_seqlens": torch.tensor([0.0])}, TypeError, "cu_seqlens must be integers"),
    ],
)
def test_bad_input_of_rwkv4(arguments, error, message):
    with pytest.raises(error, match=f"rwkv4: .*{message}"):
        F.rwkv4(**(WKV | arguments))


def mlstm_inputs(steps: int = 70, batch: int = 2):
    q, k, v = (draw(batch, steps, 2, size, seed=n) for n, size in enumerate((8, 8, 5)))
    return q, k, v, draw(batch, steps, 2, seed=3), 3 + draw(batch, steps, 2, seed=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forget_gate", ["sigmoid", "exp"])
def test_mlstm_in_its_parallel_form(backend, forget_gate):
    q, k, v, i, f = mlstm_inputs()
    f = f - 4 if forget_gate == "exp" else f
    total = (nnf.logsigmoid(f) if forget_gate == "sigmoid" else f).cumsum(1)
    decay = (total[:, :, None] - total[:, None] + i[:, None]).exp().movedim(3, 1).tril()
    weight = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 * decay
    den = weight.sum(-1).abs().clamp(min=1)
    expected = torch.einsum("bhij,bjhv->bihv", weight / den[..., None], v)
    h, _ = F.mlstm(q, k, v, i, f, eps=0.0, forget_gate=forget_gate, backend=backend)
    torch.testing.assert_close(h, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_mlstm_continues(backend):
    inputs = mlstm_inputs()
    h, final = F.mlstm(*inputs, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 33, 70)):
        some = (t[:, a:b] for t in inputs)
        part, state = F.mlstm(*some, initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), h)
    torch.testing.assert_close(state, final)


def test_packed_sequences_of_mlstm_are_apart():
    inputs = mlstm_inputs(batch=1)
    start = (draw(3, 2, 8, 5, seed=5), draw(3, 2, 8, seed=6), draw(3, 2, seed=7))
    edges = (0, 20, 20, 70)
    h, final = F.mlstm(*inputs, initial_state=start, cu_seqlens=torch.tensor(edges))
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        part, state = F.mlstm(
            *(t[:, a:b] for t in inputs), initial_state=tuple(t[n : n + 1] for t in start)
        )
        torch.testing.assert_close(h[:, a:b], part)
        torch.testing.assert_close(tuple(t[n : n + 1] for t in final), state)


@pytest.mark.parametrize("size", [-1e4, -70.0, 70.0, 1e4])
def test_mlstm_of_large_gates(size):
    q, k, v, i, f = (t.float() for t in mlstm_inputs(40))  # a sum near 0 would have no digits
    inputs = [t.requires_grad_() for t in (q.abs(), k.abs(), v, i + size, f)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    h, state = F.mlstm(*inputs)
    expected, exact = F.mlstm(*wide, backend="reference")
    if size > -80:  # both are 0 to fp32 below
        torch.testing.assert_close(h.double(), expected, rtol=1e-3, atol=1e-5)
    assert all(t.isfinite().all() for t in (h, *state))
    torch.testing.assert_close(state[2].double(), exact[2], rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(h.square().sum(), inputs))


def test_mlstm_of_transformers():
    module = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    q, k, v, i, f = (t.float() for t in mlstm_inputs(9))
    h, (c, n, m) = F.mlstm(q, k, v, i, f)
    state = (torch.zeros(2, 2, 8, 5), torch.zeros(2, 2, 8), torch.zeros(2, 2, 1))
    for t in range(9):
        gates = (i[:, t, :, None], f[:, t, :, None])
        theirs, state = module.mlstm_recurrent_step_native(
            q[:, t], k[:, t], v[:, t], *gates, *state, eps=1e-6
        )
        torch.testing.assert_close(h[:, t], theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((c * 8**0.5, n * 8**0.5, m[..., None]), state)


def slstm_inputs(steps: int = 20, batch: int = 3, width: int = 6):
    x = draw(batch, steps, 4, 2, width)
    x[:, :, 1] += 2
    return x, draw(4, 2, width, width, seed=1) / width**0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forget_gate", ["sigmoid", "exp"])
def test_slstm_without_its_stabiliser(backend, forget_gate):
    x, r = slstm_inputs()
    if forget_gate == "exp":
        x[:, :, 1] -= 2.5
    h = c = n = torch.zeros(3, 2, 6, dtype=torch.float64)
    expected = []
    for t in range(20):
        i, f, z, o = (x[:, t] + torch.einsum("nha,ghab->nghb", h, r)).unbind(1)
        f = f.exp() if forget_gate == "exp" else f.sigmoid()
        c, n = f * c + i.exp() * z.tanh(), f * n + i.exp()
        h = o.sigmoid() * c / n
        expected.append(h)
    found, state = F.slstm(x, r, forget_gate=forget_gate, backend=backend)
    torch.testing.assert_close(found, torch.stack(expected, 1))
    torch.testing.assert_close(state[:, 0], h)
    torch.testing.assert_close(state[:, 2] * state[:, 3].exp(), n)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_slstm_continues(backend):
    x, r = slstm_inputs()
    h, final = F.slstm(x, r, backend=backend)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 1, 1, 7, 20)):
        part, state = F.slstm(x[:, a:b], r, initial_state=state, backend=backend)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), h)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("count", [4, 11])
def test_packed_sequences_of_slstm_are_apart(count):
    """Lengths in no order, in groups of 8."""
    x, r = slstm_inputs(60, 1)
    edges = [0, *(torch.arange(1, count) * 37 % 58).sort().values.tolist(), 60]
    start = draw(count, 4, 2, 6, seed=5).abs()
    leaves = [t.requires_grad_() for t in (x, r, start)]
    h, final = F.slstm(x, r, initial_state=start, cu_seqlens=torch.tensor(edges))
    parts = [
        F.slstm(x[:, a:b], r, initial_state=start[n : n + 1])
        for n, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    alone = torch.cat([part for part, _ in parts], 1)
    ends = torch.cat([state for _, state in parts])
    torch.testing.assert_close(h, alone)
    torch.testing.assert_close(final, ends)
    found = torch.autograd.grad(h.square().sum() + final.square().sum(), leaves)
    expected = torch.autograd.grad(alone.square().sum() + ends.square().sum(), leaves)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("isa", testing.isas())
@pytest.mark.parametrize("size", [-1e4, -80.0, 80.0, 1e4])
def test_slstm_of_large_gates(isa, size):
    x, r = (t.float() for t in slstm_inputs())
    x[:, :, :2] += torch.tensor([size, -size]).view(2, 1, 1)
    leaves = [t.requires_grad_() for t in (x, r)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with testing.isa(isa):
        h, state = F.slstm(*leaves)
        grads = torch.autograd.grad(h.square().sum(), leaves)
    expected, _ = F.slstm(*wide, backend="reference")
    torch.testing.assert_close(h.double(), expected, rtol=1e-3, atol=1e-3)
    assert state.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


def test_slstm_does_not_depend_on_threads():
    x, r = (t.float().requires_grad_() for t in slstm_inputs(20, 19, 20))
    results = []
    for threads in (1, 3):
        with testing.threads(threads):
            h, state = F.slstm(x, r)
            loss = h.square().sum() + state.square().sum()
            results.append((h, state, *torch.autograd.grad(loss, (x, r))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


Q, GATE = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2)
MLSTM = {"q": Q, "k": Q, "v": Q, "i": GATE, "f": GATE}
X = torch.ones(1, 3, 4, 2, 5)
SLSTM = {"x": X, "r": torch.ones(4, 2, 5, 5)}


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("mlstm", {"q": Q[0]}, ValueError, r"q must have shape \(B, T, H, K\)"),
        ("mlstm", {"k": Q[..., :3]}, ValueError, r"k must have shape \(1, 3, 2, 4\)"),
        ("mlstm", {"v": torch.ones(1, 3, 4, 4)}, ValueError, "v must have the heads of q"),
        ("mlstm", {"i": Q}, ValueError, r"i must have shape \(1, 3, 2\), got i.shape=\(1, 3, 2, 4"),
        ("mlstm", {"f": GATE.long()}, TypeError, "f must be floating-point"),
        ("mlstm", {"forget_gate": "relu"}, ValueError, 'forget_gate must be one of "sigmoid"'),
        ("mlstm", {"eps": -1.0}, ValueError, "eps must be"),
        ("mlstm", {"initial_state": Q}, TypeError, r"initial_state must be a tuple \(C, n, m\)"),
        ("mlstm", {"initial_state": (Q, Q, Q)}, ValueError, r"C must have shape \(1, 2, 4, 4\)"),
        (
            "mlstm",
            {"cu_seqlens": torch.tensor([0, 5])},
            ValueError,
            "must grow from 0 to the number of tokens, 3",
        ),
        ("slstm", {"x": X[0]}, ValueError, r"x must have shape \(B, T, 4, H, D\)"),
        ("slstm", {"x": X.mT}, ValueError, r"r must have shape \(4, 5, 2, 2\)"),
        ("slstm", {"x": X.int()}, TypeError, "x must be float64"),
        ("slstm", {"r": torch.ones(4, 2, 5, 4)}, ValueError, r"r must have shape \(4, 2, 5, 5\)"),
        ("slstm", {"r": torch.ones(4, 2, 5, 5).double()}, TypeError, "r must have the dtype of x"),
        ("slstm", {"forget_gate": None}, (ValueError, TypeError), "forget_gate must be one of"),
        ("slstm", {"initial_state": X[0]}, ValueError, r"must have shape \(1, 4, 2, 5\)"),
        ("slstm", {"cu_seqlens": torch.tensor([2, 1])}, ValueError, "must grow from 0"),
    ],
)
def test_bad_input(op, arguments, error, message):
    valid = MLSTM if op == "mlstm" else SLSTM
    with pytest.raises(error, match=f"{op}: .*{message}"):
        getattr(F, op)(**(valid | arguments))
