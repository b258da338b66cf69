"""Liger's functional losses are those of its modules; its layers of models.

The code compared with is Liger-Kernel 0.8.2, commit ead96b618e5c.
"""

import inspect
import types

import pytest
import torch
from torch.nn import functional as nnf

from omniattn.compat import liger


def same(found, wanted):
    torch.testing.assert_close(found, wanted)
    for t in found if isinstance(found, tuple) else (found,):
        assert not isinstance(t, torch.Tensor) or t.isfinite().all()


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(*s) for s in shapes]


def test_losses_of_logits():
    logits, other = tensors((6, 9), (6, 9))
    target = torch.tensor([1, 2, -100, 3, 8, 0])
    options = dict(label_smoothing=0.1, lse_square_scale=1e-3, softcap=3.0, reduction="sum")
    wanted = liger.LigerCrossEntropyLoss(**options)(logits, target)
    same(liger.liger_cross_entropy(logits, target, **options), wanted)
    found = liger.liger_cross_entropy(logits, target, return_token_accuracy=True)
    assert isinstance(found, liger.CrossEntropyOutput) and found.token_accuracy is not None
    q, p = logits.log_softmax(-1), other.log_softmax(-1)
    same(liger.liger_jsd(q, p, target, 0.2), liger.LigerJSD(0.2)(q, p, target))
    found = liger.liger_kl_div(q, p.exp(), reduction="batchmean")
    same(found, nnf.kl_div(q, p.exp(), reduction="batchmean"))


def test_losses_of_hidden_states():
    x, weight, y, other, bias = tensors((6, 4), (9, 4), (6, 5), (9, 5), (9,))
    target = torch.tensor([1, 2, -100, 3, 8, 0])
    options = dict(use_token_scaling=True, softcap=3.0)
    wanted = liger.LigerFusedLinearCrossEntropyLoss(**options)(weight, x, target, bias)
    same(liger.liger_fused_linear_cross_entropy(x, weight, target, bias, **options), wanted)
    wanted = liger.LigerFusedLinearJSD(0.3, temperature=2.0)(x, weight, y, other, target)
    found = liger.liger_fused_linear_jsd(x, weight, y, other, target, 0.3, temperature=2.0)
    same(found, wanted)
    wanted = liger.LigerFusedLinearJSDLoss(0.2, 0.8, return_soft_hard_loss=True)
    wanted = wanted(x, weight, y, other, target, bias, None)
    call = liger.chunked_liger_fused_linear_jsd
    options = dict(weight_hard_loss=0.2, weight_soft_loss=0.8, return_soft_hard_loss=True)
    same(call(x, weight, y, other, target, bias, None, **options), wanted)


@pytest.mark.parametrize("name", ("dpo", "cpo", "simpo", "orpo", "kto", "grpo"))
def test_losses_of_preferences(name):
    x, weight, ref = tensors((4, 3, 5), (7, 5), (4, 3, 5))
    ids = torch.randint(7, (4, 3))
    call = getattr(liger, f"liger_fused_linear_{name}")
    title = {"simpo": "SimPO"}.get(name, name.upper())
    create = getattr(liger, f"LigerFusedLinear{title}Loss")
    reference = dict(ref_input=ref, ref_weight=weight.flip(0))
    if name == "grpo":
        rest = ids, torch.ones(4, 3), torch.randn(4)
        options = dict(beta=0.1, loss_type="dr_grpo", max_completion_length=3, delta=2.0)
        wanted = create(**options)(x, weight, *rest, **reference)
        found = call(x, weight, *rest, **options, **reference)
    elif name == "kto":
        labels = torch.tensor([True, False, True, True])
        options = dict(beta=0.2, use_ref_model=True)
        wanted = create(**options)(x, weight, ids, None, labels, **reference)
        found = call(x, weight, ids, labels, **options, **reference)
    else:
        options = {"dpo": dict(loss_type="apo_zero"), "simpo": dict(compute_nll_loss=True)}
        options = {"beta": 0.2, **options.get(name, {})}
        reference = reference if name == "dpo" else {}
        wanted = create(**options)(weight, x, ids, **reference)
        found = call(x, weight, ids, **options, **reference)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])
    shared = inspect.signature(create.__init__).parameters.keys() - {"self"}
    assert shared <= inspect.signature(call).parameters.keys()


def test_layers_of_models():
    (x,) = tensors((2, 3, 8))
    config = types.SimpleNamespace(
        hidden_size=8, intermediate_size=6, hidden_act="silu", mlp_multipliers=(0.5, 2.0)
    )
    layer = liger.LigerPhi3SwiGLUMLP(config)
    gate, up = layer.gate_up_proj(x).chunk(2, -1)
    torch.testing.assert_close(layer(x), layer.down_proj(nnf.silu(gate) * up))
    layer = liger.LigerFalconH1SwiGLUMLP(config)
    inner = nnf.silu(layer.gate_proj(x) * 0.5) * layer.up_proj(x)
    torch.testing.assert_close(layer(x), layer.down_proj(inner) * 2)
    torch.testing.assert_close(
        liger.LigerHunyuanV1SwiGLUMLP(config, 3)(x).shape, torch.Size((2, 3, 8))
    )
    plain = nnf.rms_norm(x, (8,), eps=1e-6)
    for norm in (
        liger.LigerRMSNormForGemma(8), liger.LigerRMSNormForGemma2(8),
        liger.LigerRMSNormForGemma3(8), liger.LigerRMSNormForGemma4(8, with_scale=False),
        liger.LigerRMSNormForOlmo2(8), liger.LigerRMSNormForGlm4(8),
        liger.LigerRMSNormForQwen3Next(8),
    ):  # fmt: skip
        torch.testing.assert_close(norm(x), plain)
    assert not list(liger.LigerRMSNormForGemma4(8, with_scale=False).parameters())
    assert (liger.LigerRMSNormForGemma3(8).weight == 0).all()


def test_positions_of_time_height_and_width():
    q, k, angles = tensors((2, 4, 5, 8), (2, 2, 5, 8), (3, 2, 5, 4))
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    sections = [1, 2, 1]
    found = liger.liger_qwen2vl_mrope(q, k, cos, sin, sections)
    picked = torch.cat([angles[0, ..., :1], angles[1, ..., 1:3], angles[2, ..., 3:]], -1)
    picked = torch.cat([picked, picked], -1)[:, None]
    for x, y in zip((q, k), found, strict=True):
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        torch.testing.assert_close(y, x * picked.cos() + turned * picked.sin())
    with pytest.raises(ValueError, match="mrope_section"):
        liger.liger_multimodal_rotary_pos_emb(q, k, cos, sin, [1, 1])
