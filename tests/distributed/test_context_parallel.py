"""context_parallel on two and four processes (gloo) against one process, in fp64."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import main, run, start
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as nnf

import omniattn
from omniattn import functional, modules
from omniattn.distributed import context, context_parallel, context_parallel_unshard
from omniattn.functional import masks, scores

T, HEADS, KV, DIM = 32, 4, 2, 8
#: (B, T, ...) of calls, by the names of tensors: heads and last sizes.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rows(*heads, batch=2, size=DIM):
    return [randn(batch, T, h, size) for h in heads]


def decays(*shape):
    return -randn(2, T, *shape).abs() / 4


def unit(t):
    return torch.nn.functional.normalize(t, dim=-1)


def mod(score, b, h, q, k):
    return score + (h + 1) * 0.1 * (q - k) * (b + 1)


def attention_cases():
    qkv = rows(HEADS, KV, KV)
    slopes, sinks, scale = randn(HEADS).abs(), randn(HEADS), randn(HEADS).abs()
    documents = masks.Documents((torch.arange(T)[None] // 9).expand(2, -1))
    seed = torch.tensor([5, 0])
    options = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (6, -1)},
        "both sides": {"window_size": (5, 9)},
        "documents": {"causal": True, "mask": documents},
        "tensor": {"mask": torch.rand(2, 1, T, T) < 0.5},
        "heads": {"mask": torch.rand(1, HEADS, T, T) < 0.5, "bias": randn(1, HEADS, 1, T)},
        "keys": {"mask": masks.KeyLengths(torch.tensor([20, 3])), "bias": randn(T, T)},
        "chunks": {"causal": True, "mask": masks.Chunked(7)},
        "strided": {"causal": True, "mask": masks.Strided(4, 3, split_heads=True), "softcap": 3.0},
        "alibi": {"causal": True, "alibi_slopes": slopes},
        "sinks": {"causal": True, "sinks": sinks, "head_scale": scale},
        "t5": {"relative": scores.T5Bias(randn(8, HEADS).requires_grad_(), max_distance=12)},
        "score_mod": {"causal": True, "score_mod": mod},
        "sigmoid": {"causal": True, "normalizer": "sigmoid"},
        "relu2": {"normalizer": "relu2"},
        "dropout": {"causal": True, "dropout_p": 0.3, "seed": seed},
        "softpick": {"causal": True, "normalizer": "softpick", "window_size": (9, -1)},
        "stick": {"causal": True, "normalizer": "stick_breaking"},
    }
    for name, given in options.items():
        yield name, functional.attention, qkv, given
    q, k, v = qkv
    forget = functional.forgetting_attention
    yield "forget", forget, (q, k, v, nnf.logsigmoid(randn(2, T, HEADS))), {"window_size": (9, 0)}
    # Keys wider than values, and one kv head, as in MLA.
    yield "latents", functional.attention, (q, randn(2, T, 1, DIM), randn(2, T, 1, 3)), {}
    hubs = {"window": 5, "global_index": (0, 17), "global_every": 9}
    yield "hubs", functional.hub_spoke_attention, qkv, hubs
    second = rows(HEADS, KV, KV)
    longformer = {**hubs, "dual": "longformer", "causal": False}
    yield "both hubs", functional.hub_spoke_attention, (*qkv, *second), longformer
    yield "detsa", functional.detsa_attention, qkv, {"window": 5, "stride": 4}


def of_values(q, k, v, g, gv, **options):
    return functional.gated_linear_attention(q, k, v, g, gv=gv, **options)


def mimo(*tensors, **options):
    *tensors, mimo_v, mimo_out = tensors
    return functional.mamba3(*tensors, mimo_v=mimo_v, mimo_out=mimo_out, **options)


def recurrence_cases():
    q, k, v = rows(2, 2, 4)
    beta = torch.rand(2, T, 4, dtype=torch.float64)
    a, b = unit(randn(2, T, 2, DIM)), unit(randn(2, T, 2, DIM))
    own = (q, unit(k), v)
    f = functional
    yield "linear", f.linear_attention, (q, k, v), {}
    yield "gla", f.gated_linear_attention, (q, k, v, decays(4, DIM)), {}
    yield "gla values", of_values, (q, k, v, decays(4), decays(4, DIM)), {}
    yield "retention", f.retention, (q, k, v), {}
    yield "retention mean", f.retention, (q, k, v), {"normalize": True}
    yield "delta", f.delta_rule, (*own, beta), {"l2norm": True}
    yield "gated delta", f.gated_delta_rule, (*own, decays(4), beta), {}
    yield "kda", f.kimi_delta_attention, (*own, decays(4, DIM), beta), {}
    yield "dplr", f.dplr_delta_rule, (q, k, v, -a, a * b.sigmoid(), decays(4, DIM)), {}
    yield "rwkv6", f.rwkv6, (q, k, v, decays(4, DIM), randn(4, DIM)), {}
    yield "rwkv7", f.rwkv7, (q, decays(4, DIM), k, v, -a, a * b.sigmoid()), {}
    yield "rwkv quadratic", f.rwkv_quadratic, (q, k, v, randn(4).abs()), {}
    yield "rwkv recurrent", f.rwkv_recurrent, (q, k, v, randn(4).abs()), {}
    erase, write = randn(2, T, 2, DIM).sigmoid(), randn(2, T, 4, DIM).sigmoid()
    g = decays(4)
    yield "gated delta 2", f.gated_delta_rule_2, (*own, decays(4, DIM), erase, write), {}
    yield "comba", f.comba, (*own, a, g, beta), {"l2norm": True, "erase_decayed": True}
    yield "oja", f.gated_oja_rule, (*own, decays(4, DIM), beta), {}
    slots, gates = randn(2, T, 2, 5), decays(2)
    atk = randn(2, T, 2).sigmoid()
    yield "preconditioned", f.preconditioned_delta_rule, (*own, g, beta, gates, atk), {}
    keys = (q, k, rows(2)[0])
    yield "slots", f.gated_slot_attention, (*keys, slots, decays(2, 5)), {}
    yield "abc", f.abc_attention, (*keys, slots), {}
    yield "lightnet", f.lightnet_attention, keys, {}
    clocks = (gates, randn(2, T, 2), atk, randn(2, 3, 3))
    yield "cyclic flow", f.cyclic_flow_attention, (*keys, *clocks), {}
    q, k, v = rows(2, 2, 2)
    yield "mlstm", f.mlstm, (q, k, v, randn(2, T, 2), randn(2, T, 2) + 2), {}
    yield "rwkv4", f.rwkv4, (randn(6).abs(), randn(6), randn(2, T, 6), randn(2, T, 6)), {}
    yield "slstm", f.slstm, (randn(2, T, 4, 2, 3), randn(4, 2, 3, 3)), {}
    yield "scan", f.linear_scan, (randn(2, T, 6), decays(6)), {}
    yield "conv", f.causal_conv1d, (randn(2, T, 6), randn(6, 4), randn(6)), {"activation": "silu"}
    yield "dynamic conv", f.dynamic_conv1d, (randn(2, T, 6), randn(2, T, 3, 4)), {"residual": True}
    u, delta, A = randn(2, T, 6), randn(2, T, 6).abs(), -randn(6, 3).abs()
    B, C, D, z = randn(2, T, 3), randn(2, T, 3), randn(6), randn(2, T, 6)
    yield "selective", f.selective_scan, (u, delta, A, B, C, D, z), {}
    x, dt, A = randn(2, T, 4, 3), randn(2, T, 4).abs(), -randn(4).abs()
    yield "ssd", f.ssd, (x, dt, A, randn(2, T, 2, 5), randn(2, T, 2, 5)), {"D": randn(4)}
    trap, angles, D, z = randn(2, T, 4), randn(2, T, 4, 2), randn(4), randn(2, T, 4, 3)
    q, k = randn(2, T, 2, 6), randn(2, T, 2, 6)
    steps = (decays(4), dt, trap)
    yield "mamba3", f.mamba3, (q, k, x, *steps, randn(4, 6), randn(4, 6), angles, D, z), {}
    q, k = randn(2, T, 3, 2, 6), randn(2, T, 3, 2, 6)
    biases, factors = (randn(4, 3, 6), randn(4, 3, 6)), (randn(4, 3, 3), randn(4, 3, 3))
    yield "mamba3 mimo", mimo, (q, k, x, *steps, *biases, angles, *factors), {}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def leaves(tensors):
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def further(options):
    """The tensors among the options that get gradients, and the options with new ones."""
    found, given = [], {}
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach().clone().requires_grad_()
            found.append(value)
        elif isinstance(value, scores.T5Bias):
            table = value.table.detach().clone().requires_grad_()
            value = scores.T5Bias(table, max_distance=value.max_distance)
            found.append(table)
        given[name] = value
    return found, given


def is_split(t):
    return t.dim() > 2 and t.shape[1] == T


def check(mesh, name, call, tensors, options, one_process=None, **how):
    """Compares a call and its gradients with those of one process."""
    whole, (more, given) = leaves(tensors), further(options)
    expected = first((one_process or call)(*whole, **given))
    pull = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [*whole, *more], pull)
    more, given = further(options)
    with context_parallel(mesh, **how) as region:
        mine = [region.shard(t.detach(), 1) if is_split(t) else t.detach() for t in tensors]
        mine = leaves(mine)
        out = first(call(*mine, **given))
        ours = torch.autograd.grad(out, [*mine, *more], region.shard(pull, 1))
    where = f"{name} {how}"
    torch.testing.assert_close(
        out, region.shard(expected, 1), **EXACT, msg=lambda m: f"{where}: {m}"
    )
    split = [is_split(t) for t in tensors] + [False] * len(more)
    for n, (grad, wanted, parts) in enumerate(zip(ours, gradients, split, strict=True)):
        if parts:
            wanted = region.shard(wanted, 1)
        else:
            grad = grad.clone()
            dist.all_reduce(grad)
        torch.testing.assert_close(
            grad, wanted, **EXACT, msg=lambda m, n=n: f"{where}, gradient {n}: {m}"
        )


def of_attention(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    for case in attention_cases():
        name = case[0]
        for order in ("zigzag", "contiguous"):
            if name != "stick":
                check(mesh, *case, order=order)
            if name != "dropout" and (name != "strided" or HEADS // ranks % 2 == 0):
                check(mesh, *case, order=order, method="all_to_all")
    dist.destroy_process_group()


def of_recurrences(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    for case in recurrence_cases():
        for order in ("zigzag", "contiguous"):
            check(mesh, *case, order=order)
    dist.destroy_process_group()


def of_states(rank, ranks, port):
    """Initial states, and losses of final ones: those of the rank with the last chunk."""
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    f, (q, k, v) = functional, rows(2, 2, 4)
    sums = {"feature_map": "elu1", "normalize": True}
    cases = {
        "gla": (functools.partial(f.gated_linear_attention, g=decays(4, DIM)), DIM),
        "weights": (functools.partial(f.linear_attention, **sums), DIM + 1),
        "delta": (functools.partial(f.delta_rule, beta=torch.rand(2, T, 4).double()), DIM),
    }
    for name, (call, width) in cases.items():
        state, of_final = randn(2, 4, DIM, width), randn(2, 4, DIM, width)
        whole = leaves([q, unit(k), v, state])
        out, final = call(*whole[:3], initial_state=whole[3])
        pull = randn(*out.shape)
        wanted = torch.autograd.grad((out * pull).sum() + (final * of_final).sum(), whole)
        for order in ("zigzag", "contiguous"):
            with context_parallel(mesh, order=order) as region:
                given = [region.shard(t.detach()) for t in whole[:3]]
                mine = leaves([*given, state])
                tokens = {
                    key: region.shard(t) if isinstance(t, torch.Tensor) else t
                    for key, t in call.keywords.items()
                }
                o, last = call.func(*mine[:3], initial_state=mine[3], **tokens)
                loss = (o * region.shard(pull)).sum()
                if region.layout.own[-1] + 1 == region.layout.count:
                    torch.testing.assert_close(last, final, **EXACT)
                    loss = loss + (last * of_final).sum()
                found = torch.autograd.grad(loss, mine, allow_unused=True)
                expected = [region.shard(t) for t in wanted[:3]]
            of_first = torch.zeros_like(state) if found[3] is None else found[3]
            dist.all_reduce(of_first)
            for grad, exact in zip((*found[:3], of_first), (*expected, wanted[3]), strict=True):
                where = f"{name} {order}"
                torch.testing.assert_close(grad, exact, **EXACT, msg=lambda m, w=where: f"{w}: {m}")
    dist.destroy_process_group()


#: Sequences of packed tokens: within a chunk, over several, empty, from a boundary of chunks on.
BOUNDARIES = torch.tensor([0, 3, 5, 5, 19, 24, 32])


#: Recurrences with two steps for each token, and with a state of the first token.
REFUSED_PACKED = ("rwkv quadratic", "oja")


def packed_cases():
    """Functions, tensors, options, and the options of one process that the context replaces."""
    f, cu = functional, {"cu_seqlens": BOUNDARIES}
    for name, call, tensors, options in recurrence_cases():
        if name not in REFUSED_PACKED:
            one = [t[:1] if is_split(t) else t for t in tensors]
            yield name, call, one, options, functools.partial(call, **cu)

    def varlen(q, k, v, **options):
        rows = (t[0] for t in (q, k, v))
        return f.attention_varlen(*rows, BOUNDARIES, BOUNDARIES, **options)[None]

    for given in ({"causal": True}, {"causal": True, "window_size": (4, -1)}, {"softcap": 2.0}):
        yield "attention", f.attention, rows(HEADS, KV, KV, batch=1), given, varlen


def of_packed(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    for name, call, tensors, options, one_process in packed_cases():
        for order in ("zigzag", "contiguous"):
            how = {"order": order, "cu_seqlens": BOUNDARIES}
            check(mesh, name, call, tensors, options, one_process, **how)
    ends, row = torch.tensor([0, 3, 32, 32]), rows(HEADS, batch=1)[0]
    with context_parallel(mesh, order="contiguous", cu_seqlens=ends) as split:
        own = split.shard(row, 1)
        for final in (
            functional.retention(own, own, own)[1],
            functional.delta_rule(own, own, own, own[..., 0].sigmoid())[1],
        ):
            assert final.any() == (rank + 1 < ranks)  # the last sequence is empty
    dist.destroy_process_group()


#: Layers, with arguments besides dim=8.
LAYERS: dict[str, dict] = {name: {"num_heads": 2} for name in sorted(context.LAYERS)}
LAYERS["Attention"] = {"num_heads": 2, "sinks": True, "window_size": (9, -1)}
LAYERS |= {"HGRN": {}, "Longhorn": {}, "Mamba": {}, "Mamba2": {"headdim": 4}, "RWKV4TimeMix": {}}
LAYERS["HubSpokeAttention"] |= {"window": 5, "global_every": 9}
LAYERS["DeterministicSparseAttention"] |= {"window": 5, "stride": 4}
LAYERS["DifferentialAttention"] |= {"depth": 1}
LAYERS["MultiHeadLatentAttention"] |= {"q_lora_rank": None, "kv_lora_rank": 6, "qk_nope_dim": 4}
LAYERS["MultiHeadLatentAttention"] |= {"qk_rope_dim": 4, "v_dim": 3}
LAYERS |= {"Rodimus": {"d_state": 4}, "ReBased": {"num_heads": 2, "feature_dim": 3}}
LAYERS["LightNet"] |= {"gate_rank": 3}
LAYERS["Mamba3"] = {"d_state": 8, "headdim": 4}
LAYERS |= {f"RWKV{n}TimeMix": {"head_dim": 4} for n in (5, 6, 7)}


#: Further forms of a layer.
FORMS = {
    "mimo": ("Mamba3", {"d_state": 8, "headdim": 4, "is_mimo": True, "mimo_rank": 2}),
    "forget gates": ("Attention", {"num_heads": 2, "forget_gate": True}),
    "sigmoid": ("Attention", {"num_heads": 2, "normalizer": "sigmoid"}),
    "softpick": ("Attention", {"num_heads": 2, "normalizer": "softpick"}),
    "latents": (
        "MultiHeadLatentAttention",
        {**LAYERS["MultiHeadLatentAttention"], "num_latents": 2, "num_branches": 2},
    ),
}


def rotation(layer, positions):
    """The argument `rope` of layers that must have one, with angles of the positions."""
    size = getattr(layer.config, "qk_rope_dim", 0)
    angles = positions[:, None] * 0.7 ** torch.arange(size // 2)
    return {"rope": (angles.cos().double(), angles.sin().double())} if size else {}


def gradients(layer, out, pull):
    layer.zero_grad()
    (out * pull).sum().backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def of_layers(rank, ranks, port):
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    forms = {name: (name, fields) for name, fields in LAYERS.items()} | FORMS
    for name, (kind, fields) in forms.items():
        torch.manual_seed(0)
        layer = getattr(modules, kind)(dim=8, **fields).double()
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.5)
        x, pull = randn(1, T, 8), randn(1, T, 8)
        for how in ({"order": "zigzag"}, {"order": "contiguous"}):
            expected = layer(x, **rotation(layer, torch.arange(T)))
            wanted = gradients(layer, expected, pull)
            with context_parallel(mesh, **how) as region:
                positions = region.positions(T // ranks, x.device)
                out = layer(region.shard(x), **rotation(layer, positions))
                found = gradients(layer, out, region.shard(pull))
                whole = region.unshard(out.detach())
            where = f"{name} {how}"
            torch.testing.assert_close(whole, expected, **EXACT, msg=lambda m, w=where: f"{w}: {m}")
            for key, grad in found.items():
                dist.all_reduce(grad)
                torch.testing.assert_close(
                    grad,
                    wanted[key],
                    rtol=1e-9,
                    atol=1e-10,
                    msg=lambda m, w=f"{where} {key}": f"{w}: {m}",
                )
    dist.destroy_process_group()


def of_model(rank, ranks, port):
    """The loss of a decoder, its positions, buffers in place, recomputation, and refusals."""
    start(rank, ranks, port)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
    for recompute in (False, True):
        config = replace(
            omniattn.models.PRESETS["llama"], **sizes, gradient_checkpointing=recompute
        )
        model = config.build(dtype=torch.float64)
        tokens = torch.randint(config.vocab_size, (2, T + 1))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        expected = model(inputs, targets)
        expected.backward()
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        buffers, whole = [inputs, targets], [inputs.clone(), targets.clone()]
        for method in ("ring", "all_to_all"):
            model.zero_grad()
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1], method=method):
                assert inputs.shape == targets.shape == (2, T // ranks)
                (loss := model(inputs, targets)).backward()
                here = inputs.clone()
            assert torch.equal(inputs, whole[0]) and torch.equal(targets, whole[1])
            assert torch.equal(context_parallel_unshard(mesh, [here], [1])[0], inputs)
            loss = loss.detach()
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / ranks, expected)
            for name, p in model.named_parameters():
                dist.all_reduce(p.grad)
                torch.testing.assert_close(p.grad / ranks, wanted[name], **EXACT)
    refuse(mesh, ranks)
    dist.destroy_process_group()


def refuse(mesh, ranks):
    """All ranks get the same error, before any message."""
    f, (q, k, v) = functional, rows(HEADS, HEADS, HEADS)
    x, layer = randn(1, T, 8), modules.Attention(dim=8, num_heads=2)
    boundaries = torch.tensor([0, T])
    cases = [
        ("moba_attention: has no form", lambda: f.moba_attention(q, k, v, block_size=4, topk=2)),
        ("longformer_attention: has no form", lambda: f.longformer_attention(q, k, v, window=2)),
        ("log_linear_attention: has no form", lambda: f.log_linear_attention(q, k, v, q, q)),
        ("MoBA: has no form", lambda: modules.MoBA(dim=8, num_heads=2, block_size=4)(x.float())),
        ("state must be None", lambda: layer(x.float(), state=layer.new_state(1, 2 * T))),
        ("queries and keys must be of the same", lambda: f.attention(q[:, :8], k, v)),
        ("backend must not be 'reference'", lambda: f.attention(q, k, v, backend="reference")),
        ("backend must not be 'reference'", lambda: f.retention(q, k, v, backend="reference")),
        ('needs method="all_to_all"', lambda: f.attention(q, k, v, normalizer="stick_breaking")),
        ("an even number of tokens", lambda: f.attention(q[:, 1:], k[:, 1:], v[:, 1:])),
        (
            "no derivatives of torch.func",
            lambda: torch.func.jvp(f.linear_attention, (q, k, v), (q, k, v)),
        ),
        (
            "cu_seqlens must be given to",
            lambda: f.delta_rule(q[:1], k[:1], v[:1], q[:1, :, :, 0], cu_seqlens=boundaries),
        ),
    ]
    for message, call in cases:
        with context_parallel(mesh), pytest.raises((NotImplementedError, ValueError)) as error:
            call()
        assert message in str(error.value), error.value
    for message, given in (
        (f"must be a multiple of {2 * ranks}", {"buffers": [x[:, 1:]], "buffer_seq_dims": [1]}),
        ("must have the same length", {"buffers": [x]}),
    ):
        with pytest.raises(ValueError, match=message), context_parallel(mesh, **given):
            pass
    with context_parallel(mesh, method="all_to_all"), pytest.raises(ValueError, match="Hq=3"):
        f.attention(*rows(3, 3, 3))
    f.attention(q[:, :8], k, v)  # nothing remains


WORK = {
    "of_layers": of_layers,
    "of_model": of_model,
    "of_packed": of_packed,
    "of_states": of_states,
    "of_attention": of_attention,
    "of_recurrences": of_recurrences,
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", WORK)
def test_processes(work, ranks):
    run(__file__, work, ranks)


if __name__ == "__main__":
    main(WORK)
