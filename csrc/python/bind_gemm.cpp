// _kernels.gemm: the blocked matrix product of one instruction set, on one thread.
#include <string>
#include <vector>

#include "bind.h"
#include "kernels/gemm/gemm.h"

namespace omniattn {

namespace python {
namespace {

#if defined(OMNIATTN_EMULATED_PROBES)
const struct {
  const char* isa;
  DType factors;
  const GemmKernels& kernels;
} kEmulated[] = {
    {"avx512_bf16_emulated", DType::bf16, isa_avx512_bf16_emulated::gemm_kernels_table},
    {"amx_bf16_emulated", DType::bf16, isa_amx_bf16_emulated::gemm_kernels_table},
    {"amx_bf16_portable", DType::bf16, isa_amx_bf16_portable::gemm_kernels_table},
    {"amx_fp16_emulated", DType::f16, isa_amx_fp16_emulated::gemm_kernels_table},
    {"amx_fp16_portable", DType::f16, isa_amx_fp16_portable::gemm_kernels_table},
};
#endif

const GemmKernels& kernels_of(const std::string& isa, DType factors) {
  Isa level = Isa::baseline;
#if defined(OMNIATTN_EMULATED_PROBES)
  for (const auto& emulated : kEmulated) {
    if (isa == emulated.isa && factors == emulated.factors) return emulated.kernels;
  }
  if (isa.ends_with("_emulated")) return gemm_kernels_on(Isa::avx512, factors);
  if (isa.ends_with("_portable")) return gemm_kernels_on(Isa::avx2, factors);
#endif
  parse_isa(isa.c_str(), level);
  return gemm_kernels_on(level, factors);
}

std::vector<float> exponents_of(const GemmKernels& kernels, const void* x, int64_t stride,
                                int64_t rows, int64_t count, bool of_columns) {
  std::vector<float> found(static_cast<size_t>(count));
  kernels.exponents(static_cast<const float*>(x), stride, rows, stride, of_columns, found.data(), 0,
                    count);
  return found;
}

// C = op(A) op(B) + bias; half types are uint16; `accumulate` adds to C in compute type;
// split_bf16 as in GemmParams.
void gemm(const std::string& isa, std::array<int32_t, 3> dtypes, pybind11::array a,
          bool a_transposed, pybind11::array b, bool b_transposed, pybind11::object bias,
          pybind11::array c, int64_t k, bool accumulate, int64_t split_bf16) {
  GemmParams p{};
  p.a_dtype = static_cast<DType>(dtypes[0]);
  p.b_dtype = static_cast<DType>(dtypes[1]);
  p.c_dtype = static_cast<DType>(dtypes[2]);
  p.m = c.shape(0);
  p.n = c.shape(1);
  p.k = k;
  p.a = a.data();
  p.b = b.data();
  p.bias = bias.is_none() ? nullptr : bias.cast<pybind11::array>().data();
  p.c = c.mutable_data();
  p.lda = a.shape(1);
  p.ldb = b.shape(1);
  p.ldc = p.n;
  p.a_transposed = a_transposed;
  p.b_transposed = b_transposed;
  p.accumulate = accumulate;
  p.split_bf16 = split_bf16;
  // The choice of ops/layers/gemm_cpu.cpp: tiles multiply B in its storage type.
  const DType factors = isa.starts_with("amx_") ? p.b_dtype : p.a_dtype;
  const GemmKernels& kernels = kernels_of(isa, split_bf16 > 0 ? DType::bf16 : factors);
  std::vector<float> a_exponents, b_exponents;
  if (split_bf16 > 0) {
    a_exponents = exponents_of(kernels, p.a, p.lda, a_transposed ? k : p.m, p.m, a_transposed);
    b_exponents = exponents_of(kernels, p.b, p.ldb, b_transposed ? p.n : k, p.n, !b_transposed);
    p.a_exponents = a_exponents.data();
    p.b_exponents = b_exponents.data();
  }
  std::vector<char> memory(static_cast<size_t>(kernels.workspace_bytes(p)) + 64, '\xff');
  const auto aligned = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63};
  kernels.run(p, reinterpret_cast<void*>(aligned), 0, kernels.items(p));
}

}  // namespace

void bind_gemm(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("gemm", &gemm, py::arg("isa"), py::arg("dtypes"), py::arg("a"), py::arg("a_transposed"),
        py::arg("b"), py::arg("b_transposed"), py::arg("bias"), py::arg("c"), py::arg("k"),
        py::arg("accumulate"), py::arg("split_bf16") = 0);
}

}  // namespace python
}  // namespace omniattn
