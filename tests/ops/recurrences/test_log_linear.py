"""Log-linear attention: all pairs of tokens, states at any position, steps, memory, errors."""

import functools
import warnings

import pytest
import torch

from omniattn import functional as F
from omniattn.compositions.recurrences import _log_linear_tree, log_linear

F64 = torch.float64
LEVELS = 9


def made(batch, steps, heads=2, group=1, key=4, value=3, seed=0):
    """q, k, v, g and scales; some decays are 0."""
    torch.manual_seed(seed)
    normal = functools.partial(torch.randn, dtype=F64)
    q, k = normal(2, batch, steps, heads, key)
    v = normal(batch, steps, heads * group, value)
    g = -normal(batch, steps, heads * group).abs()
    g = g.masked_fill(torch.rand(g.shape) < 0.05, -torch.inf)
    return [q, k, v, g, normal(batch, steps, heads * group, LEVELS)]


def by_pairs(q, k, v, g, scales):
    """The matrix of weights of all pairs of tokens, as `naive_log_linear_attn` of fla has it."""
    steps, group = q.shape[1], v.shape[2] // q.shape[2]
    weights = torch.zeros(*v.shape[:1], v.shape[2], steps, steps, dtype=q.dtype)
    for i in range(steps):
        for j in range(i + 1):
            level = (i ^ j).bit_length()
            decay = g[:, j + 1 : i + 1].sum(1).exp()
            both = (q[:, i] * k[:, j]).sum(-1).repeat_interleave(group, 1)
            weights[:, :, i, j] = scales[:, i, :, level] * decay * both
    return torch.einsum("bhij,bjhv->bihv", weights, v)


@pytest.fixture(params=["kernel", 4, 64])
def form(request, monkeypatch):
    """The kernels of the CPU, or the composition of other devices with chunks of some length."""
    if request.param == "kernel":
        yield
        return
    monkeypatch.setattr(_log_linear_tree, "CHUNK", request.param)
    library = torch.library.Library("omniattn", "IMPL")
    names = ("log_linear_attention", "log_linear_attention_raw", "log_linear_attention_backward")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in names:
            kernel = log_linear._backward if name.endswith("backward") else log_linear._forward
            library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.parametrize("steps", [1, 2, 5, 16, 37, 133])
@pytest.mark.parametrize("group", [1, 3])
def test_pairs_of_tokens(form, steps, group):
    x = made(2, steps, group=group)
    torch.testing.assert_close(F.log_linear_attention(*x)[0], by_pairs(*x))


@pytest.mark.parametrize("first", [1, 5, 13, 16, 31, 64, 129])
def test_states_at_any_position(form, first):
    """Parts of a sequence give what the whole gives, with gradients through the states."""
    x = [t.requires_grad_() for t in made(2, 150, group=2)]
    x[3] = x[3].detach().clamp(min=-2).requires_grad_()
    whole = F.log_linear_attention(*x)
    parts, state, at = [], None, 0
    for end in (first, first + 1, first + 18, 150):
        place = None if state is None else torch.full((2,), at)
        given = (t[:, at:end] for t in x)
        o, state = F.log_linear_attention(*given, initial_state=state, position=place)
        parts.append(o)
        at = end
    torch.testing.assert_close((torch.cat(parts, 1), state), whole)
    random = [torch.randn_like(t) for t in whole]
    expected = torch.autograd.grad(whole, x, random)
    found = torch.autograd.grad((torch.cat(parts, 1), state), x, random)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("position", [0, 37, 64])
def test_gradients_of_many_chunks(form, position):
    x = made(2, 150, group=2)
    torch.manual_seed(1)
    x.append(torch.randn(2, 4, LEVELS, 4, 3, dtype=F64))
    found = []
    for backend in (None, "reference"):
        given = [t.detach().requires_grad_() for t in x]
        place = torch.full((2,), position)
        out = F.log_linear_attention(
            *given[:5], initial_state=given[5], position=place, backend=backend
        )
        torch.manual_seed(2)
        found.append((out, torch.autograd.grad(out, given, [torch.randn_like(t) for t in out])))
    torch.testing.assert_close(*found)


def test_positions_differ_in_a_batch(form):
    x = made(2, 23)
    torch.manual_seed(1)
    state, places = torch.randn(2, 2, LEVELS, 4, 3, dtype=F64), torch.tensor([3, 12])
    for steps in (1, 23):
        given = [t[:, :steps] for t in x]
        together = F.log_linear_attention(*given, initial_state=state, position=places)
        for n in range(2):
            row = slice(n, n + 1)
            alone = F.log_linear_attention(
                *(t[row] for t in given), initial_state=state[row], position=places[row]
            )
            torch.testing.assert_close(tuple(t[row] for t in together), alone)


def test_memory_grows_linearly():
    """The backward keeps the inputs, and no weights."""
    saved = []
    x = [t.float().requires_grad_() for t in made(1, 256)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.log_linear_attention(*x)
    kept = {t.data_ptr(): t.numel() for t in saved}
    inputs = sum(t.numel() for t in x)
    assert sum(kept.values()) <= inputs + 2 * LEVELS * 4 * 3 + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level_scales": torch.ones(1, 5, 2, 3)}, "L >= 1 levels for at most .* L=3 for 5 tokens"),
        ({"level_scales": torch.ones(1, 5, 1, 4)}, "level_scales must have shape"),
        ({"g": torch.ones(1, 5, 2)}, "g must be <= 0"),
        ({"position": torch.zeros(1, dtype=torch.int64)}, "position must be given with"),
        ({"initial_state": torch.zeros(1, 2, 4, 4, 3)}, "position must be given with"),
        (
            {"initial_state": torch.zeros(1, 2, 4, 4, 3), "position": torch.tensor([9])},
            "L=4 for 14 tokens",
        ),
        (
            {"initial_state": torch.zeros(1, 2, 4, 4, 3), "position": torch.tensor([-1])},
            "position must be >= 0",
        ),
    ],
)
def test_errors(change, message):
    row = torch.ones(1, 5, 2, 4)
    given = {"q": row, "k": row, "v": row[..., :3], "g": -row[..., 0], "level_scales": row}
    with pytest.raises(ValueError, match=f"log_linear_attention: .*{message}"):
        F.log_linear_attention(**given | change)
