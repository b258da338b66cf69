"""Norms, convolutions, gates and losses under fla's names, and mamba-ssm's norms and scans."""

import libraries
import pytest
import torch
from torch.nn import functional as nnf

from omniattn import functional as F
from omniattn.compat import fla, mamba_ssm

B, T, D, W = 2, 7, 6, 4


def same(found, wanted, leaves):
    """Values, and gradients of a sum of squares."""
    torch.testing.assert_close(found, wanted)
    found, wanted = (y if isinstance(y, tuple) else (y,) for y in (found, wanted))
    pairs = [
        torch.autograd.grad(sum(t.square().sum() for t in y), leaves, retain_graph=True)
        for y in (found, wanted)
    ]
    torch.testing.assert_close(*pairs)


def normalized(h, rms, groups=1, eps=1e-5):
    parts = h.unflatten(-1, (groups, -1))
    size = parts.shape[-1:]
    y = nnf.rms_norm(parts, size, eps=eps) if rms else nnf.layer_norm(parts, size, eps=eps)
    return y.flatten(-2)


@pytest.mark.parametrize("rms", [False, True])
def test_norms_of_fla(rms):
    torch.manual_seed(0)
    x, residual, g = torch.randn(3, B, T, D, requires_grad=True).unbind()
    w, b = torch.randn(2, D, requires_grad=True).unbind()
    function = fla.rms_norm if rms else fla.layer_norm
    h = x + residual
    wanted = normalized(h, rms) * w + b, h
    same(function(x, w, b, residual, prenorm=True), wanted, (x, residual, w, b))
    same(function(x, w, b), normalized(x, rms) * w + b, (x, w, b))
    found = fla.group_norm(x, w, b, residual, prenorm=True, is_rms_norm=rms, num_groups=2)
    same(found, (normalized(h, rms, 2) * w + b, h), (x, residual, w, b))
    gated = fla.rms_norm_gated if rms else fla.layer_norm_gated
    for name, act in (("swish", nnf.silu), ("sigmoid", torch.sigmoid)):
        wanted = normalized(x, rms, eps=1e-6) * w * act(g)
        same(gated(x, g, w, None, name), wanted, (x, g, w))
        wanted = (normalized(h, rms, eps=1e-6) * w + b) * act(g), h
        same(gated(x, g, w, b, name, residual, True), wanted, (x, g, w, b, residual))
    with pytest.raises(ValueError, match=r"rms_norm_gated: activation must be"):
        fla.rms_norm_gated(x, g, w, None, "gelu")


def test_layers_of_norms():
    torch.manual_seed(0)
    x, g, residual = torch.randn(3, B, T, D).unbind()
    torch.testing.assert_close(fla.RMSNorm(D)(x), normalized(x, True))
    torch.testing.assert_close(fla.LayerNorm(D, bias=True)(x), normalized(x, False))
    h = x + residual
    torch.testing.assert_close(fla.RMSNorm(D)(x, residual, True), (normalized(h, True), h))
    torch.testing.assert_close(fla.GroupNorm(3, D)(x), normalized(x, False, 3))
    torch.testing.assert_close(
        fla.GroupNorm(2, D, is_rms_norm=True, eps=0.1)(x), normalized(x, True, 2, 0.1)
    )
    for cls, rms in ((fla.FusedRMSNormGated, True), (fla.FusedLayerNormGated, False)):
        wanted = normalized(x, rms) * g.sigmoid()
        torch.testing.assert_close(cls(D, activation="sigmoid")(x, g), wanted)
    for cls, rms in ((fla.FusedRMSNormSwishGate, True), (fla.FusedLayerNormSwishGate, False)):
        torch.testing.assert_close(cls(D)(x, g), normalized(x, rms) * nnf.silu(g))
    assert list(fla.LayerNorm(D, bias=True).state_dict()) == ["weight", "bias"]
    assert not fla.RMSNorm(D, elementwise_affine=False).state_dict()
    half = x.bfloat16()
    y, h = fla.RMSNorm(D)(half, residual_in_fp32=True, prenorm=True)  # fp32 weights
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, normalized(half.float(), True).bfloat16())
    assert fla.FusedRMSNormGated(D)(half, g.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="hidden_size must be a multiple of num_groups"):
        fla.GroupNorm(4, D)


def convolved(x, weight, bias, state):
    """One sequence (T, D)."""
    whole = torch.cat((state, x.T), -1)
    if len(x) == 0:
        return x, state
    y = nnf.conv1d(whole[None, :, 1:], weight[:, None], bias, groups=D)[0].T
    return nnf.silu(y), whole[:, -W:]


@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution(packed):
    torch.manual_seed(0)
    lengths = [5, 0, 2, 7] if packed else [T] * B
    total = sum(lengths)
    x = torch.randn(total, D, requires_grad=True)
    state = torch.randn(len(lengths), D, W, requires_grad=True)
    cu = torch.tensor(lengths).cumsum(0)
    bounds = nnf.pad(cu, (1, 0)) if packed else None
    rows = x[None] if packed else x.view(B, T, D)
    layer = fla.ShortConvolution(D, W, bias=True)
    weight, bias = layer.weight[:, 0], layer.bias
    parts = [convolved(t, weight, bias, s) for t, s in zip(x.split(lengths), state, strict=True)]
    wanted = torch.cat([y for y, _ in parts]).view(rows.shape), torch.stack([s for _, s in parts])
    found = layer(rows, cache=state, output_final_state=True, cu_seqlens=bounds)
    same(found, wanted, (x, state, layer.weight, bias))
    given = rows, weight, bias, rows, state, True, "silu", "triton", bounds
    torch.testing.assert_close(fla.causal_conv1d(*given), (wanted[0] + rows, wanted[1]))
    plain, none = fla.causal_conv1d(rows, weight, bias, activation="silu", cu_seqlens=bounds)
    zeros = [convolved(t, weight, bias, torch.zeros(D, W))[0] for t in x.split(lengths)]
    torch.testing.assert_close(plain, torch.cat(zeros).view(rows.shape))
    assert none is None and list(layer.state_dict()) == ["weight", "bias"]
    ends = layer(rows, output_final_state=True, cu_seqlens=bounds)[1]
    assert torch.equal(ends[0][:, -1], x.split(lengths)[0][-1])


@torch.no_grad()
def test_steps_of_a_short_convolution_update_its_cache():
    torch.manual_seed(0)
    layer, x = fla.ShortConvolution(D, W), torch.randn(B, T, D)
    wanted, last = layer(x, output_final_state=True)
    cache, out = torch.zeros(B, D, W), []
    for t in range(T):
        y, same_cache = layer(x[:, t : t + 1], cache=cache, output_final_state=True)
        assert same_cache is cache
        out.append(y)
    torch.testing.assert_close(torch.cat(out, 1), wanted)
    torch.testing.assert_close(cache, last)
    y, _ = fla.causal_conv1d_update(
        x[:, 0], torch.zeros(B, D, W), x[:, 0], layer.weight[:, 0], activation="silu"
    )
    torch.testing.assert_close(y, wanted[:, 0] + x[:, 0])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * T])
    torch.testing.assert_close(layer(x, mask=mask)[0], layer(x * mask[..., None])[0])
    with pytest.raises(ValueError, match="mask must be None with cu_seqlens"):
        layer(x, mask=mask, cu_seqlens=torch.tensor([0, T]))


def test_token_shift():
    torch.manual_seed(0)
    x, cache = torch.randn(1, 9, D, requires_grad=True), torch.randn(3, D, requires_grad=True)
    bounds = torch.tensor([0, 4, 4, 9])
    before = torch.cat((cache[:1], x[0, :3], cache[2:], x[0, 4:8]))[None]
    found, last = fla.token_shift(x, bounds, cache, output_cache=True)
    same(found, before - x, (x, cache))
    torch.testing.assert_close(last, torch.stack((x[0, 3], cache[1], x[0, 8])))
    plain = nnf.pad(x, (0, 0, 1, 0))[:, :-1] - x
    same(fla.token_shift(x), plain, (x,))
    _, last = fla.token_shift(x, cache=cache[:1], output_cache=True)
    torch.testing.assert_close(last, x[:, -1])


def test_gates_and_boundaries():
    torch.manual_seed(0)
    g, a, bias = (torch.randn(*s, requires_grad=True) for s in ((B, T, 2, 3), (2,), (6,)))
    x = g + bias.view(2, 3)
    same(fla.fused_kda_gate(g, a, bias), -a.exp()[:, None] * nnf.softplus(x), (g, a, bias))
    bounded = -5 * (a.exp()[:, None] * x).sigmoid()
    same(fla.fused_kda_gate(g, a, bias, -5.0), bounded, (g, a, bias))
    torch.testing.assert_close(fla.fused_kda_gate(g, lower_bound=-2.0), -2 * g.sigmoid())
    with pytest.raises(ValueError, match="A_log must be given without a lower_bound"):
        fla.fused_kda_gate(g)
    wanted = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    same(fla.l2norm(x), wanted, (g,))
    assert fla.L2Norm(output_dtype=torch.float64)(x).dtype == torch.float64
    assert fla.l2_norm is fla.l2norm
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    assert fla.prepare_lens_from_mask(mask).tolist() == [2, 3]
    cu = fla.prepare_cu_seqlens_from_mask(mask)
    assert cu.tolist() == [0, 2, 5] and cu.dtype == torch.int32
    assert fla.prepare_lens(cu).tolist() == [2, 3]
    assert fla.prepare_position_ids(cu).tolist() == [0, 1, 0, 1, 2]
    assert fla.prepare_sequence_ids(cu).tolist() == [0, 0, 1, 1, 1]
    pairs = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    assert fla.prepare_token_indices(cu).tolist() == pairs


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_embedding_of_fla(scale_base):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, T, 2, 8)
    layer = fla.RotaryEmbedding(6, 100.0, scale_base)
    cu, offsets = torch.tensor([0, 3, T]), torch.tensor([2, 0])
    packed = layer(q, k, offsets, cu, max_seqlen=16)
    for first, last, offset in ((0, 3, 2), (3, T, 0)):
        part = layer(q[:, first:last], k[:, first:last], offset)
        torch.testing.assert_close([t[:, first:last] for t in packed], list(part))
    if scale_base is None:
        angles = torch.arange(16.0)[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
        wanted = libraries.apply_rotary_emb(q, angles.cos(), angles.sin(), seqlen_offsets=1)
        torch.testing.assert_close(layer(q, k, 1)[0], wanted)


def test_activations_mlp_and_losses():
    torch.manual_seed(0)
    x, y = torch.randn(2, B, T, D, requires_grad=True).unbind()
    weight, bias = torch.randn(5, D), torch.randn(5)
    swiglu = nnf.silu(x) * y
    same(fla.swiglu(x, y), swiglu, (x, y))
    torch.testing.assert_close(fla.swiglu_linear(x, y, weight, bias), swiglu @ weight.T + bias)
    same(fla.sigmoidglu(x, y), x.sigmoid() * y, (x, y))
    torch.testing.assert_close(fla.swish(x), nnf.silu(x))
    torch.testing.assert_close(fla.sigmoid(x), x.sigmoid())
    torch.testing.assert_close(fla.sqrelu(x), x.relu() ** 2)
    torch.testing.assert_close(fla.logsigmoid(x, 2.0), nnf.logsigmoid(x) / 2)
    layer = fla.GatedMLP(D)
    assert layer.intermediate_size == 256
    up = nnf.silu(layer.gate_proj(x)) * layer.up_proj(x)
    torch.testing.assert_close(layer(x), layer.down_proj(up))
    labels = torch.randint(5, (B, T))
    labels[0, 0] = -100
    logits = (2.0 * (x @ weight.T + bias)).flatten(0, 1)
    wanted = nnf.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)
    loss = fla.FusedLinearCrossEntropyLoss(label_smoothing=0.1, logit_scale=2.0)
    same(loss(x, labels, weight, bias), wanted, (x,))
    found = fla.FusedCrossEntropyLoss(label_smoothing=0.1)(logits, labels.flatten())
    torch.testing.assert_close(found, wanted)
    student, teacher = x.flatten(0, 1), y.flatten(0, 1).detach()
    wanted = nnf.kl_div(
        (student @ weight.T).log_softmax(-1),
        (teacher @ weight.T).softmax(-1),
        reduction="batchmean",
    )
    same(fla.FusedKLDivLoss()(student, teacher, weight, weight), wanted, (x,))
    with pytest.raises(NotImplementedError, match="use_l2warp is not supported"):
        fla.FusedLinearCrossEntropyLoss(use_l2warp=True)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_gated_norms_of_mamba(rms, before):
    torch.manual_seed(0)
    x, z = torch.randn(2, B, T, D, requires_grad=True).unbind()
    w, b = torch.randn(2, D, requires_grad=True).unbind()
    gate = nnf.silu(z)
    for size, groups in ((None, 1), (3, 2)):
        for bias in (None, b):
            shift = 0 if bias is None else bias
            h = x if before else x * gate
            wanted = normalized(h, rms, groups, 0.1) * w + shift
            wanted = wanted * gate if before else wanted
            found = mamba_ssm.layernorm_fn(x, w, bias, z, 0.1, size, before, rms)
            same(found, wanted, (x, z, w))
        wanted = normalized(x, True, groups, 1e-6) * w
        torch.testing.assert_close(mamba_ssm.rmsnorm_fn(x, w, None, group_size=size), wanted)
    cls = mamba_ssm.GatedRMSNorm if rms else mamba_ssm.GatedLayerNorm
    layer = cls(D, norm_before_gate=before)
    h = x if before else x * gate
    wanted = normalized(h, rms) * gate if before else normalized(h, rms)
    torch.testing.assert_close(layer(x, z), wanted)
    assert len(layer.state_dict()) == (1 if rms else 2)
    with pytest.raises(ValueError, match="rmsnorm_fn: group_size must divide 6"):
        mamba_ssm.rmsnorm_fn(x, w, None, group_size=4)


def test_norms_of_sums_of_mamba():
    torch.manual_seed(0)
    x, residual = torch.randn(2, B, T, D, requires_grad=True).unbind()
    w = torch.randn(D, requires_grad=True)
    h = x + residual
    found = mamba_ssm.rms_norm_fn(x, w, None, residual, prenorm=True)
    same(found, (normalized(h, True, eps=1e-6) * w, h), (x, residual, w))
    found = mamba_ssm.layer_norm_fn(x, w, None, residual)
    same(found, normalized(h, False, eps=1e-6) * w, (x, residual, w))
    torch.testing.assert_close(mamba_ssm.RMSNorm(D)(x), normalized(x, True))
    xy = torch.cat((x, residual), -1)
    torch.testing.assert_close(mamba_ssm.swiglu(xy), nnf.silu(x) * residual)


def test_scans_of_mamba():
    torch.manual_seed(0)
    x, z = torch.randn(2, B, T, 4, 3)
    dt, A, bias = torch.randn(B, T, 4), -torch.rand(4), torch.randn(4)
    k, q = torch.randn(2, B, T, 2, 5)
    skip = torch.randn(4, 3)
    options = {"D": skip, "z": z, "dt_bias": bias, "dt_softplus": True}
    wanted, _ = F.ssd(x, dt, A, k, q, **options)
    torch.testing.assert_close(mamba_ssm.mamba_chunk_scan(x, dt, A, k, q, 64, **options), wanted)
    found = mamba_ssm.ssd_selective_scan(x, dt, A, k, q, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    wide = dt[..., None].expand(-1, -1, -1, 3), A.repeat_interleave(3)[:, None].expand(-1, 5)
    options |= {"dt_bias": bias[:, None].expand(-1, 3)}
    found = mamba_ssm.ssd_selective_scan(x, *wide, k, q, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    limits = {"dt_limit": (0.1, 0.5), "dt_bias": bias}
    wanted, _ = F.ssd(x, dt, A, k, q, **options | limits)
    found = mamba_ssm.ssd_selective_scan(x, dt, A, k, q, **options | limits)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="ssd_selective_scan: A must have shape"):
        mamba_ssm.ssd_selective_scan(x, dt, A[:3], k, q)
    with pytest.raises(ValueError, match="mamba_chunk_scan: "):
        mamba_ssm.mamba_chunk_scan(x, dt[:1], A, k, q, 64)


def test_norms_and_gates_before_a_linear_map():
    torch.manual_seed(0)
    x, res, g = torch.randn(3, 2, 5, 8)
    scale, shift, weight, bias = (torch.randn(s) for s in (8, 8, (3, 8), 3))

    def mapped(y):
        return nnf.linear(y, weight, bias)

    after = x + res
    wanted = mapped(nnf.layer_norm(after, (8,), scale, shift, 1e-5))
    found = fla.layer_norm_linear(x, scale, shift, weight, bias, res, prenorm=True)
    torch.testing.assert_close(found, (wanted, after))
    found = fla.rms_norm_linear(x, scale, None, weight, bias)
    torch.testing.assert_close(found, mapped(nnf.rms_norm(x, (8,), scale, 1e-5)))
    found = fla.group_norm_linear(x, scale, shift, weight, bias, num_groups=2)
    grouped = nnf.group_norm(x.flatten(0, 1), 2, scale, shift, 1e-5).view_as(x)
    torch.testing.assert_close(found, mapped(grouped))
    found = fla.rms_norm_swish_gate_linear(x, g, scale, None, weight, bias)
    gated = nnf.rms_norm(x, (8,), scale, 1e-6) * nnf.silu(g)
    torch.testing.assert_close(found, mapped(gated))
    found = fla.layer_norm_swish_gate_linear(x, g, scale, shift, weight, bias)
    gated = nnf.layer_norm(x, (8,), scale, shift, 1e-6) * nnf.silu(g)
    torch.testing.assert_close(found, mapped(gated))
    for layer, given in (
        (fla.LayerNormLinear, (x,)),
        (fla.RMSNormLinear, (x,)),
        (fla.FusedRMSNormGatedLinear, (x, g)),
        (fla.FusedLayerNormGatedLinear, (x, g)),
    ):
        plain = getattr(fla, layer.__name__.removesuffix("Linear"))(8)
        torch.testing.assert_close(layer(8)(*given, weight, bias), mapped(plain(*given)))
    group = fla.GroupNormLinear(2, 8)(x, weight, bias)
    torch.testing.assert_close(group, mapped(fla.GroupNorm(2, 8)(x)))
    sigmoid = fla.sigmoidglu_linear(x, g, weight, bias)
    torch.testing.assert_close(sigmoid, mapped(x.sigmoid() * g))
    torch.testing.assert_close(fla.bias_gelu(x, scale), nnf.gelu(x + scale, approximate="tanh"))


def test_power_gates_and_the_penalty_of_logits():
    x, y = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    above = x.clamp(min=1e-9)
    gate = torch.where(x > 0, above ** (2.0 / (above.sqrt() + 1)), x) * x.sigmoid()
    torch.testing.assert_close(fla.powglu(x, y, 2.0), gate * y)
    weight = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(fla.powglu_linear(x, y, weight, None, 2.0), (gate * y) @ weight.T)
    assert torch.autograd.gradcheck(fla.powglu, (x, y))
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = logits.square().mean()
    warped = fla.l2_warp(loss, logits, 0.1)
    assert warped == loss
    penalty = 0.05 * logits.max(-1).values.square().mean()
    found, wanted = (
        torch.autograd.grad(t, logits, retain_graph=True)[0] for t in (warped, loss + penalty)
    )
    torch.testing.assert_close(found, wanted)
