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
