"""Inputs and options of attention, and its outputs and gradients against those in fp64."""

import torch

from omniattn import reference
from omniattn.functional import attention, masks

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F64: 1e-11, F32: 1e-5, BF16: 2e-2, F16: 3e-3}


def qkv(b, tq, tk, h, g, d, dv=None, dtype=F32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = ((b, tq, h, d), (b, tk, g, d), (b, tk, g, d if dv is None else dv))
    return [torch.randn(s, generator=make, dtype=F64).to(dtype) for s in shapes]


def gradients(function, inputs, **options):
    """Outputs and gradients of `inputs` for fixed random gradients of O and of the finite lse."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(
        *leaves[:3], **dict(zip(("bias",), leaves[3:], strict=False)), return_lse=True, **options
    )
    make = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=make, dtype=F64).to(out.dtype)
    finite = lse.isfinite()
    grad_lse = torch.randn(lse.shape, generator=make, dtype=F64).to(lse.dtype) * finite
    grads = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    return [out.detach(), lse.detach(), *grads]


def assert_matches_fp64(inputs, **options):
    got = gradients(attention, inputs, **options)
    want = gradients(reference.attention, [t.double() for t in inputs], **options)
    for a, w in zip(got, want, strict=True):
        scale = max([1.0, *w[w.isfinite()].abs().flatten().tolist()])
        torch.testing.assert_close(
            a.double(), w, rtol=0, atol=TOLERANCE[inputs[0].dtype] * scale, msg=str(options)
        )


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 7)},
    "softcap": {"softcap": 3.0, "scale": 0.4},
    "negative-scale": {"scale": -0.3},
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor([-5, 7])},
    "lengths": {"mask": masks.KeyLengths(torch.tensor([0, 70]))},
    "all": {
        "mask": masks.Causal(top_left=True) & masks.SlidingWindow(40, 40),
        "softcap": 5.0,
        "dropout_p": 0.5,
        "seed": torch.tensor([1, 2]),
    },
}
