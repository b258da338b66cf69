"""CUDA calls that cannot run say why in the package's own words."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omniattn import functional as F
from omniattn.ops.dispatch import library as _library

needs_no_gpu = pytest.mark.skipif("cuda" in _library.loaded, reason="the CUDA library is loaded")
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def native_ops():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return [name for name in names if name.startswith("omniattn::")]


def test_every_op_has_a_cuda_kernel_or_an_explanation():
    found = set(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"))
    assert native_ops() and found.issuperset(native_ops())


@needs_no_gpu
@pytest.mark.parametrize("op", ["norm", "norm_raw", "norm_only"])
def test_an_op_without_a_kernel_explains_itself(op):
    message = r"^rms_norm: no native kernel for device='cuda' \(torch .* sees no CUDA device\); "
    arguments = (torch.ones(2, 3), None, None, False, 1e-6, 0.0, False)
    with pytest.raises(NotImplementedError, match=message):
        getattr(torch.ops.omniattn, op).default.redispatch(CUDA, *arguments)


@needs_no_gpu
def test_a_loaded_library_says_what_it_has(monkeypatch):
    monkeypatch.setattr(_library, "cuda_unavailable", None)
    ops = ["add_norm", "norm", "norm_backward", "norm_only", "rope", "rope_"]
    monkeypatch.setattr(_library, "ops_of", lambda device: ops)
    message = r"attention: .*'cuda' \(there is one for apply_rotary, layer_norm, rms_norm\)"
    with pytest.raises(NotImplementedError, match=message):
        _library._explain("attention_raw")()


@needs_no_gpu
def test_a_library_that_does_not_load_is_named(monkeypatch, tmp_path):
    (tmp_path / _library.CUDA_LIBRARY).write_text("not a library")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_library, "find", lambda name: tmp_path / name)
    assert "libomniattn_cuda.so did not load" in _library._load_cuda()
    monkeypatch.setattr(_library, "find", lambda name: None)
    assert _library._load_cuda() == "this build of omniattn has no CUDA library"


@needs_no_gpu
def test_python_refuses_no_op_that_has_a_cuda_kernel(monkeypatch):
    monkeypatch.setitem(_library.loaded, "cuda", "pretended")
    with FakeTensorMode():
        q, tables = torch.empty(1, 3, 2, 8, device="cuda"), torch.empty(3, 4, device="cuda")
        for f in (F.apply_rotary, F.qk_norm_rotary):
            assert f(q, q, tables, tables)[1].device.type == "cuda"


def test_backend_cuda_wants_tensors_on_cuda():
    with pytest.raises(ValueError, match="backend='cuda', device='cpu'"):
        F.linear(torch.ones(2, 3), torch.ones(4, 3), backend="cuda")
