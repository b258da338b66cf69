import pytest
import torch

import omniattn.functional as F
from omniattn import reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_gradcheck(name, dtype, residual):
    if dtype != torch.float64:
        return
    x, r = (torch.randn(3, 7, dtype=dtype, requires_grad=True) for _ in range(2))
    w = torch.randn(7, dtype=dtype, requires_grad=True)
    f = getattr(F, name)
    torch.autograd.gradcheck(lambda x, w, r: f(x, w, residual=r if residual else None), (x, w, r))
    g = getattr(reference, name)
    torch.testing.assert_close(f(x, w), g(x, w))


@pytest.mark.parametrize("op", [F.rms_norm, F.layer_norm])
def test_autocast_promotes_a_half_branch_to_the_stream(op):
    x, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    with pytest.raises(TypeError, match="residual must have the dtype of x"):
        op(x, residual=residual)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = op(x, residual=residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, op(x + residual))
