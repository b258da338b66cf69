"""torch's own samples of its functions (OpInfo), on ours of the same meaning."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from omniattn import functional as F

OPS = {
    op.name: op for op in op_db if op.name.startswith("nn.functional.") and not op.variant_test_name
}


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    if dropout_p:
        return None  # other bits
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, **options)


def cross_entropy(logits, target, weight=None, ignore_index=-100, **options):
    if target.is_floating_point() or logits.dim() != 2:
        return None  # of probabilities, of classes in dimension 1
    options["ignore_index"] = ignore_index
    return F.cross_entropy(logits, target, class_weight=weight, **options)


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    if len(shape) != 1 or (bias is not None and weight is None):
        return None
    return F.layer_norm(x, weight, bias, eps=eps)


def rms_norm(x, shape, weight=None, eps=None):
    if len(shape) != 1:
        return None
    return F.rms_norm(x, weight, eps=torch.finfo(x.dtype).eps if eps is None else eps)


def glu(x, dim=-1):
    if dim not in (-1, x.dim() - 1):
        return None
    value, gate = x.chunk(2, -1)
    return F.glu(gate, value)


OURS = {
    "scaled_dot_product_attention": sdpa,
    "cross_entropy": cross_entropy,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "linear": F.linear,
    "glu": glu,
}


def derivatives(out, inputs):
    if not out.requires_grad:
        return ()
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
    return tuple(
        torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", OURS)
def test_samples_of_torch(name, dtype):
    op, count = OPS[f"nn.functional.{name}"], 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
        tensors = (sample.input, *sample.args, *sample.kwargs.values())
        inputs = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        ours = OURS[name](sample.input, *sample.args, **sample.kwargs)
        if ours is None:
            continue
        theirs = op(sample.input, *sample.args, **sample.kwargs)
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(ours, theirs, **close)
        grads = (derivatives(out, inputs) for out in (ours, theirs))
        torch.testing.assert_close(*grads, **close)
        count += 1
    assert count > 3
