"""Raw ops with arguments that are wrong in one or two places: a clear error or a right result.

Valid calls are recorded from the OpSpecs, so that a new op is fuzzed without a line here. Run it
under ASan and UBSan with .ci/asan.
"""

import copy
import functools
import math
import os
import re

import hypothesis.strategies as st
import pytest
import torch
from fuzz_raw import (
    ERRORS,
    assert_like_fakes,
    check_raw_call,
    mutate,
    mutated_call,
    shapes,
    valid_calls,
)
from hypothesis import given, settings
from torch.utils._pytree import tree_map_only

from omniattn import compat, testing
from omniattn import functional as F
from omniattn.testing.spec import output_gradients

SPECS = testing.registry()
#: Ops that multiply blocks of steps or of powers, as their docstrings say.
BLOCKED = {"deltaformer_attention", "log_linear_attention", "mesa_net", "mlstm", "path_attention"}
BLOCKED |= {"atlas_linear", "titans_linear", "titans_mlp", "ttt_linear"}
BLOCKED |= {"gated_kalmanet", "vandermonde", "wall_attention"}
BLOCKED |= {n for n in SPECS if SPECS[n].family in ("recurrence", "delta variant", "state space")}
BLOCKED |= {n for n in SPECS if SPECS[n].family == "slot attention"}
#: Their definitions leave hidden keys out, where `attention` has NaN in the whole row.
HIDING = {"detsa_attention", "hub_spoke_attention", "routed_block_attention", "selective_attention"}
HIDING |= {"stick_breaking_attention"}
#: Made of several calls of `attention`. Under a softcap the gradient of an infinite logit is 0 inf,
#: and where that is NaN depends on the parts.
PARTS = {"dual_chunk_attention", "moba_attention"}
#: Arguments that must be finite; NaN passes.
FINITE = {("rwkv_quadratic", "w"), ("rwkv_recurrent", "w")}
#: Arguments that must not be below 0, and those that must not be above.
SIGNS = {("rwkv4", "w"): 1, ("linear_scan", "g"): -1}
SIGNS |= {(name, "A"): -1 for name in ("selective_scan", "ssd")}
#: Dtype of valid calls; test_emulated_isas.py sets it to the operand dtype of emulated levels.
DTYPE = getattr(torch, os.environ.get("OMNIATTN_FUZZ_DTYPE", "float32"))
#: Number of examples, the same in every run: few, as tests/fuzz_record.csv counts the calls that
#: tools/fuzz.py has made. Before a release, use more: OMNIATTN_FUZZ_EXAMPLES=1000.
EXAMPLES = int(os.environ.get("OMNIATTN_FUZZ_EXAMPLES", "40"))
FUZZ = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
CALLS = valid_calls(DTYPE)


class Drawn:
    """Adapts hypothesis' draws to the interface of random.Random."""

    def __init__(self, data):
        self.data = data

    def choice(self, values):
        return self.data.draw(st.sampled_from(values))

    def randint(self, low, high):
        return self.data.draw(st.integers(low, high))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small shapes: opening the thread pool would cost more than the work."""
    with testing.threads(1):
        yield


def test_every_op_is_fuzzed():
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "omniattn::" in n}
    twins = {n for n in names if n + "_raw" in names}  # the same implementation under two names
    library = {"public_functions", "built_cpu_isas", "constants"}
    settings = ("cpu_isa", "tile_state", "madds", "batch_invariance")
    machine = {n for n in names if n.endswith(settings) or "paths_" in n or "omit_path_" in n}
    assert names - twins - machine - library == set(CALLS)


@pytest.mark.parametrize("name", sorted(CALLS))
@FUZZ
@given(data=st.data())
def test_raw_op(name, data):
    check_raw_call(*mutated_call(CALLS[name], Drawn(data)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_have_the_shapes_and_dtypes_that_compile_is_told(dtype):
    """Gradients that nobody wants included."""
    for calls in valid_calls(dtype).values():
        for op, args in calls:
            args = tree_map_only(torch.Tensor, torch.clone, args) if op._schema.is_mutable else args
            assert_like_fakes(op, args, op(*args))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_tensor_without_memory_beside_others_is_refused(name):
    """One meta tensor suffices to choose the kernel of the meta device, which writes nothing.

    Tensors of an optional list choose no kernel; the kernel of the others refuses them.
    """
    op, args = CALLS[name][0]
    is_tensor = functools.partial(torch.utils._pytree.tree_any, lambda v: torch.is_tensor(v))
    places = [i for i, value in enumerate(args) if is_tensor(value)]
    for at in places:
        meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args[at])
        others = {op._schema.arguments[i].name for i in places if i != at}
        if at > 0 or others - {"seed"}:  # a seed may lie on the CPU
            with pytest.raises(RuntimeError, match=r"must be on the (device of .*=meta|CPU, with)"):
                op(*args[:at], meta, *args[at + 1 :])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_freed_memory_is_refused(name):
    """FSDP frees what it gathers; a subclass of Tensor without memory looks the same."""
    op, args = CALLS[name][0]
    for at, value in enumerate(args):
        values = value if isinstance(value, list) else [value]
        for i, t in enumerate(values):
            if not torch.is_tensor(t) or t.numel() == 0:
                continue
            freed = t.clone()
            freed.untyped_storage().resize_(0)
            changed = [*values[:i], freed, *values[i + 1 :]]
            changed = changed if isinstance(value, list) else freed
            with pytest.raises(RuntimeError, match=r"with memory of its own|seed must be"):
                op(*args[:at], changed, *args[at + 1 :])


@pytest.mark.parametrize("name", sorted(SPECS))
@FUZZ
@given(data=st.data())
def test_public_function(name, data):
    spec = SPECS[name]
    call = spec.call(data.draw(st.sampled_from(spec.cases[:6])), torch.float32)
    tensors, options = dict(call.tensors), dict(call.options)
    changed = data.draw(st.sampled_from(sorted(tensors) + sorted(options)))
    group = tensors if changed in tensors else options
    group[changed] = mutate(group[changed], Drawn(data))
    try:
        actual = spec.function(**tensors, **options)
    except ERRORS as error:
        assert str(error)
        return
    try:
        expected = spec.reference(**tensors, **options)
    except Exception:
        expected = None
    if expected is not None and actual is not None:
        assert [s for s, _ in shapes(actual)] == [s for s, _ in shapes(expected)]


@pytest.mark.parametrize(
    "name",
    sorted(n for n in SPECS if SPECS[n].differentiable and n not in BLOCKED | HIDING),
)
@FUZZ
@given(data=st.data())
def test_nan_and_inf_stay_in_their_rows(name, data):
    """Where the reference is finite we are finite and close, in outputs and gradients.

    Except the gradient of relu, which torch selects and we multiply: 0 where it is not NaN. And
    except keys that a bias of -inf hides: they are multiplied by 0, where a mask leaves them out.
    """
    spec = SPECS[name]
    cases = [case for case in spec.cases[:8] if "ends" not in case.tensors]
    call = spec.call(data.draw(st.sampled_from(cases)), torch.float32)
    tensors = dict(call.tensors)
    # The gradient of a state's maximum is found from its sums, and NaN where these are not finite.
    sums = ("initial_state",) if spec.family == "scan" else ()
    changed = data.draw(st.sampled_from([n for n in call.differentiable if n not in sums]))
    if tensors[changed].numel() == 0:
        return
    tensors[changed] = tensors[changed].clone(memory_format=torch.contiguous_format)
    at = data.draw(st.integers(0, tensors[changed].numel() - 1))
    value = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    if (name, changed) in FINITE or (name in PARTS and call.options.get("softcap")):
        value = math.nan
    sign = SIGNS.get((name, changed))
    tensors[changed].view(-1)[at] = value if sign is None else sign * abs(value)
    broken = testing.Call(tensors, call.options, call.differentiable)
    exact = broken.to(torch.float64)
    rounded, expected = broken.run(spec.reference), exact.run(spec.reference)
    actual = broken.run(spec.function)
    if name != "reglu":
        grads = output_gradients(rounded)
        rounded += broken.gradients(spec.reference, grads)
        expected += exact.gradients(spec.reference, tuple(g.double() for g in grads))
        actual += broken.gradients(spec.function, grads)
    for a, r, e in zip(actual, rounded, expected, strict=True):
        finite = r.isfinite()
        atol = 1e-4
        if name == "softpick_attention":  # large terms cancel, also in its definition in fp32
            own = (r - e)[finite].abs().nan_to_num(0, 0, 0)
            atol = max(atol, 2 * own.max().item()) if own.numel() else atol
        torch.testing.assert_close(a[finite], e[finite].to(a.dtype), rtol=1e-4, atol=atol)


def systems():
    """Functions without a kernel of their own, and those of `compat`: name, function, arguments."""
    A = F.ssm_init("s4d-lin", 4).expand(3, -1).clone()
    Lambda, P, B = (t.expand(3, -1).clone() for t in F.nplr(4)[:3])
    u, C, dt, D = torch.ones(1, 5, 3), torch.ones_like(A), torch.full((3,), 0.1), torch.ones(3)
    rows, square = torch.ones(1, 2, 5), -torch.eye(2)
    scan = {"u": torch.ones(1, 3, 5), "delta": torch.ones(1, 3, 5), "A": -torch.ones(3, 2)}
    step = {"state": torch.ones(1, 3, 2), "x": torch.ones(1, 3), "dt": torch.ones(1, 3)}
    step |= {"A": -torch.ones(3, 2), "B": torch.ones(1, 2), "C": torch.ones(1, 2), "D": D}
    heads = {"x": torch.ones(1, 5, 2, 4), "dt": torch.ones(1, 5, 2), "A": -torch.ones(2)}
    heads |= {"B": torch.ones(1, 5, 1, 3), "C": torch.ones(1, 5, 1, 3), "chunk_size": 4}
    inner = {"xz": torch.ones(1, 6, 5), "conv1d_weight": torch.ones(3, 1, 2), "conv1d_bias": D}
    inner |= {"x_proj_weight": torch.ones(5, 3), "delta_proj_weight": torch.ones(3, 1)}
    inner |= {"out_proj_weight": torch.ones(4, 3), "out_proj_bias": None, "A": -torch.ones(3, 2)}
    split = {
        "zxbcdt": torch.ones(1, 5, 24),
        "conv1d_weight": torch.ones(14, 2),
        "conv1d_bias": None,
    }
    split |= {"dt_bias": torch.ones(2), "A": -torch.ones(2), "D": torch.ones(2, 4), "chunk_size": 4}
    split |= {"rmsnorm_weight": torch.ones(8), "outproj_weight": torch.ones(3, 8)}
    packed = {"x": torch.ones(5, 3), "cu_seqlens": torch.tensor([0, 2, 5])}
    last_inputs = functools.partial(compat.causal_conv1d_varlen_states, state_len=3)
    return {
        "s4d": (F.s4d, {"u": u, "A": A, "C": C, "dt": dt, "D": D}),
        "s4": (F.s4, {"u": u, "Lambda": Lambda, "P": P, "B": B, "C": C, "dt": dt, "D": D}),
        "s4d_kernel": (F.s4d_kernel, {"A": A, "C": C, "dt": dt, "length": 5}),
        "fft_conv": (F.fft_conv, {"u": u, "kernel": torch.ones(3, 5), "D": D, "delayed": True}),
        "ssm_recurrence": (
            F.ssm_recurrence,
            {"u": u, "A": square, "B": torch.ones(2, 3), "C": torch.ones(1, 2)},
        ),
        "discretize": (F.discretize, {"A": square, "B": torch.ones(2), "dt": 0.1, "rule": "zoh"}),
        "selective_scan_fn": (
            compat.selective_scan_fn,
            {**scan, "B": rows, "C": rows, "D": D, "delta_bias": D, "delta_softplus": True},
        ),
        "selective_state_update": (compat.selective_state_update, step),
        "mamba_chunk_scan_combined": (compat.mamba_chunk_scan_combined, heads),
        "mamba_inner_fn": (compat.mamba_inner_fn, inner),
        "mamba_split_conv1d_scan_combined": (compat.mamba_split_conv1d_scan_combined, split),
        "causal_conv1d_varlen_states": (last_inputs, packed),
    }


@pytest.mark.parametrize("name", sorted(systems()))
@settings(FUZZ, max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_functions_without_a_spec(name, data):
    """An error that says in which function and what was wrong, or results of the usual shapes."""
    function, arguments = systems()[name]
    usual = shapes(function(**copy.deepcopy(arguments)))
    changed = data.draw(st.sampled_from(sorted(arguments)))
    arguments[changed] = mutate(arguments[changed], Drawn(data))
    try:
        results = function(**arguments)
    except ERRORS as error:
        op = name if hasattr(compat, name) else r"\w+"
        assert re.match(rf"{op}: .*got", str(error), re.DOTALL), repr(error)
        return
    assert len(shapes(results)) == len(usual)


@pytest.mark.parametrize("name", sorted(name for name in systems() if hasattr(F, name)))
def test_layouts_of_functions_without_a_spec(name):
    function, arguments = systems()[name]
    for key, t in arguments.items():
        if isinstance(t, torch.Tensor):
            for other in (t.to_sparse(), torch.nested.nested_tensor([t])):
                with pytest.raises(TypeError, match=rf"{name}: {key} must (be strided|not be nes)"):
                    function(**{**arguments, key: other})


def routers(scores, k, groups, top_groups, seed):
    limited = {"groups": groups, "top_groups": top_groups}
    return {
        "softmax_top_k": lambda: F.softmax_top_k(scores, k, **limited),
        "top_k_softmax": lambda: F.top_k_softmax(scores, k),
        "llama4_top_k": lambda: F.llama4_top_k(scores, k),
        "sigmoid_top_k": lambda: F.sigmoid_top_k(scores, k, **limited),
        "noisy_top_k": lambda: F.noisy_top_k(scores, scores, k, seed=seed)[0],
        "expert_choice": lambda: F.expert_choice(scores, k),
    }


@FUZZ
@given(data=st.data())
def test_routing(data):
    """A router either names what it wants or chooses experts that exist, none twice, and finite
    weights for tokens with finite logits; the capacity then holds."""

    def draw(*values):
        return data.draw(st.sampled_from(values))

    tokens, experts, k = draw(0, 1, 7), draw(1, 2, 6), draw(-1, 0, 1, 2, 3, 7, 2**40)
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    scores = scores.to(draw(torch.float32, torch.float32, torch.bfloat16, torch.int64))
    if tokens and scores.is_floating_point():
        scores[0, 0] = draw(0.0, math.nan, math.inf, -math.inf)
    seed = draw(None, torch.tensor([1, 0]))
    name = draw(*routers(scores, k, 1, 1, seed))
    capacity = draw(-1, 0, 1, 2)
    try:
        routing = routers(scores, k, draw(-1, 1, 1, 2), draw(0, 1, 1, 2), seed)[name]()
        kept, dropped = F.drop_over_capacity(routing, capacity)
    except ERRORS as error:
        assert str(error).startswith(("drop_over_capacity: ", f"{name}: ", "top_k"))
        return
    assert routing.experts.shape == routing.weights.shape == (tokens, routing.experts.shape[1])
    assert routing.scores.shape == scores.shape
    assert ((routing.experts >= -1) & (routing.experts < experts)).all()
    for row in routing.experts.tolist():
        chosen = [e for e in row if e >= 0]
        assert len(set(chosen)) == len(chosen)
    finite = scores.isfinite().all(-1)
    assert routing.weights[finite].isfinite().all()
    counts = F.expert_counts(kept.experts, experts)
    assert (counts <= capacity).all()
    assert counts.sum() + dropped == F.expert_counts(routing.experts, experts).sum()


@FUZZ
@given(data=st.data())
def test_experts_of_any_routing(data):
    """Repeated experts, none, out of range; NaN weights; no tokens; both layouts of the weights."""

    def draw(*values):
        return data.draw(st.sampled_from(values))

    tokens, experts, slots, dim, hidden = draw(0, 1, 5), draw(0, 1, 3), draw(0, 1, 4), 8, 8
    low, high = draw(-2, -1, 0), draw(experts - 1, experts - 1, experts)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    index = torch.randint(low, max(high, low) + 1, (tokens, slots), generator=random)
    weights = torch.rand(tokens, slots, generator=random)
    weights[weights < draw(0.0, 0.3)] = draw(math.nan, math.inf, 0.0)
    x = torch.randn(tokens, dim, generator=random)
    up = torch.randn(experts, 2 * hidden, dim, generator=random)
    down = torch.randn(experts, dim, hidden, generator=random)
    if draw(True, False):
        up, down = (testing.relayout(t, draw(*testing.LAYOUTS)) for t in (up, down))
    else:
        up, down = (t.mT.contiguous().mT for t in (up, down))
    arguments = (x, index, weights, up, down)
    if ((index < -1) | (index >= experts)).any():
        with pytest.raises(RuntimeError, match="moe_experts: index must be in"):
            F.moe_experts(*arguments)
        return
    exact = (t.double() if t.is_floating_point() else t for t in arguments)
    torch.testing.assert_close(
        F.moe_experts(*arguments),
        F.moe_experts(*exact, backend="reference").float(),
        equal_nan=True,
    )
