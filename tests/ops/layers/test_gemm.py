"""linear beyond what tests/ops/test_specs.py runs for every op: the choice of the kernel."""

import json

import pytest
import torch

from omniattn.config import CPU_ISAS
from omniattn.functional import linear
from omniattn.ops.dispatch import gemm_choice
from omniattn.ops.dispatch.cpu import cpu_family, cpuinfo, record_of_family

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype, m=70, n=300, k=280):
    generator = torch.Generator().manual_seed(0)
    make = [torch.randn(s, generator=generator).to(dtype) for s in ((m, k), (n, k), (n,))]
    return [t.requires_grad_() for t in make]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_kernels_agree(dtype):
    results = []
    for backend in ("cpu", None, "reference"):
        x, weight, bias = inputs(dtype)
        y = linear(x, weight, bias, backend=backend)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            tolerance = 20 * torch.finfo(dtype).eps * float(b.detach().abs().max())
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_free_choice_follows_the_table(monkeypatch):
    x, weight, _ = inputs(torch.float32)
    for native in (True, False):
        rule = next(r for r in gemm_choice.RULES if r.native is native)
        monkeypatch.setitem(gemm_choice.CHOICE, torch.float32, rule)
        assert ("MmBackward" in linear(x, weight).grad_fn.name()) is not native
    assert len(gemm_choice.describe()) == len(DTYPES)


RECORD = {
    "isa": "amx_bf16",
    "torch": "2.13.0",
    "threads": 2,
    "dtypes": {
        "float32": {"least": 1000, "most": 9000, "rows": [2, 3], "gains": []},
        "float64": {"least": 1, "most": 0, "gains": []},
    },
}


def test_a_record_decides_by_the_number_of_multiply_adds(monkeypatch):
    found = gemm_choice._recorded("here", "amx_bf16", {"here": RECORD})
    for dtype, choice in found.items():
        monkeypatch.setitem(gemm_choice.CHOICE, dtype, choice)
    for dtype, m, native in [
        (torch.float32, 9, False),  # 900 multiply-adds
        (torch.float32, 10, True),
        (torch.float32, 90, True),
        (torch.float32, 91, False),
        (torch.float64, 10, False),
    ]:
        x, weight = torch.ones(m, 10, dtype=dtype), torch.ones(10, 10, dtype=dtype)
        assert gemm_choice.native_is_faster(x, weight) is native
    for m, native in [(1, False), (2, True), (3, True), (4, False)]:
        x, weight = torch.ones(1, m, 10), torch.ones(10, 10, requires_grad=True)
        with torch.no_grad():
            assert gemm_choice.native_is_faster(x, weight) is native
        assert not gemm_choice.native_is_faster(x, weight)
    text = "\n".join(gemm_choice.describe())
    assert "measured on here, torch 2.13.0, 2 threads" in text
    assert "9.0e+03 multiply-adds, without gradients for 2 to 3 rows" in text
    assert "never ours" in text


def test_products_with_small_weights_without_gradients_are_torchs(monkeypatch):
    choice = gemm_choice.Crossings(0, gemm_choice.UNBOUNDED, (1, 0), "here", smallest=50)
    monkeypatch.setitem(gemm_choice.CHOICE, torch.float32, choice)
    for n, native in [(4, False), (5, True)]:
        weight = torch.ones(n, 10)
        assert gemm_choice.native_is_faster(torch.ones(9, 10), weight) is native
        assert gemm_choice.native_is_faster(torch.ones(9, 10, requires_grad=True), weight)
    assert "never without gradients for weights below 5.0e+01" in choice.measured


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(4), None, "weight"),
        (torch.ones(3, 4), torch.ones(1), "bias"),
        (torch.ones(3, 4).to_sparse(), None, "weight"),
        (torch.ones(3, 4).double(), None, "weight"),
        (torch.ones(3, 4), torch.ones(3).double(), "bias"),
    ],
)
def test_torchs_kernel_takes_no_more_than_ours(weight, bias, message, monkeypatch):
    choice = gemm_choice.Crossings(1, 0, (1, 0), "here")
    monkeypatch.setitem(gemm_choice.CHOICE, torch.float32, choice)
    with pytest.raises((TypeError, ValueError), match=message):
        linear(torch.ones(2, 4), weight, bias)


def test_a_record_holds_for_its_family_and_kernels_only():
    assert not gemm_choice._recorded("there", "amx_bf16", {"here": RECORD})
    assert not gemm_choice._recorded("here", "avx512", {"here": RECORD})


def test_records_are_of_known_kernels_and_dtypes():
    for family, record in json.loads(gemm_choice.RECORDS.read_text()).items():
        assert record["isa"] in CPU_ISAS
        assert set(gemm_choice._recorded(family, record["isa"], {family: record})) <= set(DTYPES)


@pytest.mark.parametrize(
    ("vendor", "family", "model", "name"),
    [
        ("GenuineIntel", 6, 106, "ice_lake"),
        ("GenuineIntel", 6, 143, "sapphire_rapids"),
        ("GenuineIntel", 6, 207, "emerald_rapids"),
        ("AuthenticAMD", 25, 1, "zen3"),
        ("AuthenticAMD", 25, 17, "zen4"),
        ("AuthenticAMD", 26, 2, "zen5"),
        ("GenuineIntel", 6, 42, "genuineintel_6_42"),
    ],
)
def test_families_have_names(tmp_path, vendor, family, model, name):
    text = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
    (tmp_path / "cpuinfo").write_text(text + "\n" + text.replace("family", "model"))
    assert cpu_family(cpuinfo(tmp_path / "cpuinfo")) == name
    assert cpu_family(cpuinfo(tmp_path / "missing")) == "unknown_0_0"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("avx2 amx_tile amx_int8 amx_bf16", "sapphire_rapids"),
        ("amx_bf16 amx_tile amx_fp16", "granite_rapids"),
        ("avx2", "genuineintel_6_167"),
    ],
)
def test_tiles_name_a_family_whose_model_a_hypervisor_hides(flags, name):
    entries = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "flags": flags}
    assert cpu_family(entries) == name


def test_nothing_of_a_row_reaches_the_one_before_it():
    """oneDNN multiplies pairs of terms on AMX, and reads on where their number is odd."""
    x, weight = torch.ones(2000, 33, dtype=torch.bfloat16), torch.ones(600, 33).bfloat16()
    x[5, 0] = weight[7, 0] = float("nan")
    bad = linear(x, weight).isnan()
    assert bad.sum() == 2000 + 599 and bad[5].all() and bad[:, 7].all()


def test_a_family_without_a_record_takes_that_of_the_same_cores():
    records = {"emerald_rapids": RECORD, "zen3": RECORD | {"isa": "avx2"}}
    assert record_of_family(records, "sapphire_rapids") is RECORD
    assert record_of_family(records, "zen4") is None
    own = {"sapphire_rapids": RECORD | {"threads": 4}}
    assert record_of_family(records | own, "sapphire_rapids")["threads"] == 4


@pytest.mark.parametrize("recorded", [False, True])
def test_a_free_choice_compiles_into_one_graph(monkeypatch, recorded):
    if recorded:
        record = RECORD | {"dtypes": {"bfloat16": {"least": 0, "most": 1 << 62}}}
        for dtype, choice in gemm_choice._recorded("here", "amx_bf16", {"here": record}).items():
            monkeypatch.setitem(gemm_choice.CHOICE, dtype, choice)
    x, weight, bias = inputs(torch.bfloat16)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=recorded)
    torch.testing.assert_close(compiled(x, weight, bias), linear(x, weight, bias))


def test_repeated_rows_of_a_gradient_are_read_in_place():
    x, weight, grad = torch.randn(130, 33), torch.randn(1, 33), torch.randn(1).expand(130, 1)
    grads = torch.ops.omniattn.linear_backward(grad, x, weight, 0, True, True, True)
    for actual, expected in zip(grads, (grad @ weight, grad.mT @ x, grad.sum(0)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_autocast_casts_like_torch():
    x, weight, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight, bias, backend="cpu")
    assert y.dtype == torch.bfloat16
    low = [t.detach().bfloat16() for t in (x, weight, bias)]
    torch.testing.assert_close(y, linear(*low, backend="cpu"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(3, 5)}, ValueError, r"weight \(N, K\), got .*weight.shape=\(3, 5\)"),
        ({"weight": torch.ones(3, 4).double()}, TypeError, r"weight must have the dtype of x"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \(3,\)"),
        ({"x": torch.ones(2, 4).int()}, TypeError, "x must be float64, float32"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x.shape=\(\)"),
        ({"backend": "mkl"}, ValueError, "backend must be one of"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"x": torch.ones(2, 4), "weight": torch.ones(3, 4), "bias": torch.ones(3)}
    with pytest.raises(error, match=f"linear: .*{message}"):
        linear(**(arguments | change))
