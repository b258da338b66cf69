// Tensors at the torch boundary: names, dtypes, allocation, row views. Stable ABI only.
//
// A library handles tensors of one device: the CPU, or CUDA if OMNIATTN_CUDA is defined.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <array>
#include <optional>
#include <vector>

#include "ops/checks.h"
#include "runtime/dtype.h"

namespace omniattn::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Types of arguments; schemas read their names (registry.cpp).
using Tensors = std::vector<Tensor>;
using OptTensors = std::optional<Tensors>;
using Written = Tensor;  // an argument that the op writes
using OptWritten = OptTensor;
using SymInt = int64_t;  // a symbol in compiled graphs
using Ints = std::vector<int64_t>;
using SymInts = Ints;
using OptInts = std::optional<Ints>;
using OptSymInts = OptInts;
using Floats = std::vector<double>;
using Bools = std::vector<bool>;
using OptScalarType = std::optional<ScalarType>;

inline ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ScalarType::Double;
    case DType::f32:
      return ScalarType::Float;
    case DType::bf16:
      return ScalarType::BFloat16;
    case DType::f16:
      return ScalarType::Half;
  }
  return ScalarType::Undefined;
}

// The name that torch prints, without "torch.".
inline const char* name_of(ScalarType type) {
  static constexpr const char* kNames[] = {"uint8",     "int8",      "int16",      "int32",
                                           "int64",     "float16",   "float32",    "float64",
                                           "complex32", "complex64", "complex128", "bool"};
  const auto number = static_cast<size_t>(type);
  if (number < std::size(kNames)) return kNames[number];
  return type == ScalarType::BFloat16 ? "bfloat16" : "another dtype";
}
inline const char* name_of(DType dtype) { return name_of(scalar_type(dtype)); }

// A floating-point dtype that kernels accept; an error naming the argument otherwise.
inline DType dtype_of(const char* op, const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      fail(op, name, " must be float64, float32, bfloat16 or float16, got ", name_of(type));
  }
}
// Avoids Tensor::scalar_type(), which calls a function of the shim for each dtype that it tries;
// the shim numbers dtypes as ScalarType does.
inline ScalarType scalar_type(const Tensor& t) {
  int32_t type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &type));
  return static_cast<ScalarType>(type);
}
inline DType dtype_of(const char* op, const char* name, const Tensor& t) {
  return dtype_of(op, name, scalar_type(t));
}

// The dtype that statistics and sums are kept in: fp32, or fp64 for fp64 inputs.
inline DType accumulator(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// False for freed storages and for subclasses of torch.Tensor that hold their data elsewhere; the
// dispatcher does not unwrap such subclasses in optional lists.
inline bool has_memory(const Tensor& t) { return t.const_data_ptr() != nullptr || t.numel() == 0; }

// is_here also accepts the undefined tensor that torch makes of None where a schema says Tensor.
#if defined(OMNIATTN_CUDA)
inline constexpr const char* kDeviceName =
    "the CUDA device of the first argument, with memory of its own";
inline int32_t device_index() { return torch::stable::accelerator::getCurrentDeviceIndex(); }
inline bool is_here(const Tensor& t) {
  return t.defined() && t.is_cuda() && t.get_device_index() == device_index() && has_memory(t);
}
inline int32_t device_type() { return aoti_torch_device_type_cuda(); }
// Makes the device of an op's first argument the current one.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& first) : guard_(first.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};
#else
inline constexpr const char* kDeviceName = "the CPU, with memory of its own";
inline int32_t device_index() { return 0; }
inline bool is_here(const Tensor& t) { return t.defined() && t.is_cpu() && has_memory(t); }
inline int32_t device_type() { return aoti_torch_device_type_cpu(); }
struct DeviceScope {
  explicit DeviceScope(const Tensor&) {}
};
#endif

// Requires `t` to be a tensor of this dtype on the device of this library.
inline void require_tensor(const char* op, const char* name, const Tensor& t, ScalarType want) {
  require(is_here(t), op, name, " must be on ", kDeviceName);
  const ScalarType got = scalar_type(t);
  require(got == want, op, name, " must be ", name_of(want), ", got ", name_of(got));
}
inline void require_tensor(const char* op, const char* name, const Tensor& t, DType want) {
  require_tensor(op, name, t, scalar_type(want));
}

// Requires `t` to have exactly these sizes.
inline void require_sizes(const char* op, const char* name, const Tensor& t, Sizes want) {
  const Sizes got = t.sizes();
  bool same = got.size() == want.size();
  for (size_t i = 0; same && i < got.size(); ++i) same = got[i] == want[i];
  require(same, op, name, " must have shape ", Shape{want.data(), want.size()}, ", got ",
          Shape{got.data(), got.size()});
}

// Requires dtype, sizes and contiguous memory, for tensors that kernels write.
inline void require_dense(const char* op, const char* name, const Tensor& t, DType dtype,
                          Sizes sizes) {
  require_tensor(op, name, t, dtype);
  require_sizes(op, name, t, sizes);
  require(t.is_contiguous(), op, name, " must be contiguous");
}

// Results of this size or more do not fit into the caches.
constexpr int64_t kLargeBytes = int64_t{32} << 20;
// Results of this size or more may be fresh memory at every call: glibc returns blocks of 32 MiB to
// the system when they are freed, and smaller ones if they are at the end of its heap.
constexpr int64_t kHugePageBytes = int64_t{4} << 20;

// Asks for 2 MiB pages for a large result: first touching 4 KiB pages costs more than writing
// them (2 us each where this was measured, 23 of 147 ms of a backward of experts).
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && !defined(OMNIATTN_CUDA)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// A new contiguous tensor on the device of this library, uninitialised.
inline Tensor empty_tensor(Sizes sizes, DType dtype) {
  constexpr size_t kMaxDims = 16;
  require(sizes.size() <= kMaxDims, "empty", "tensors have at most 16 dimensions, got ",
          sizes.size());
  std::array<int64_t, kMaxDims> strides;
  int64_t stride = 1, bytes = size_of(dtype);
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
    bytes *= sizes[i];
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      static_cast<int32_t>(scalar_type(dtype)), device_type(), device_index(), &handle));
  const Tensor result(handle);
  if (bytes >= kHugePageBytes) advise_huge_pages(result.mutable_data_ptr(), bytes);
  return result;
}

// Uninitialised working memory for a kernel.
inline Tensor scratch(int64_t elements, DType dtype) { return empty_tensor({elements}, dtype); }

// A result that is allocated only if it is wanted: otherwise kernels get null, and callers a tensor
// without elements.
class Output {
 public:
  Output(bool wanted, Sizes sizes, DType dtype) : dtype_(dtype) {
    if (wanted) tensor_ = empty_tensor(sizes, dtype);
  }

  DType dtype() const { return dtype_; }
  void* data() const { return tensor_.has_value() ? tensor_->mutable_data_ptr() : nullptr; }
  Tensor tensor() const { return tensor_.has_value() ? *tensor_ : empty_tensor({0}, dtype_); }

 private:
  OptTensor tensor_;
  DType dtype_;
};

inline const void* data_or_null(const OptTensor& t) {
  return t.has_value() ? t->const_data_ptr() : nullptr;
}

// `t`, or a contiguous copy.
inline Tensor as_dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}
inline OptTensor as_dense(const OptTensor& t) { return t.has_value() ? as_dense(*t) : t; }

inline bool has_unit_last_stride(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.size(last) <= 1 || t.stride(last) == 1;
}
// `t`, or a copy if the stride of its last dimension is not 1.
inline Tensor with_unit_last_stride(const Tensor& t) {
  return has_unit_last_stride(t) ? t : torch::stable::contiguous(t);
}

// Sizes of `t` with the last one replaced.
inline std::vector<int64_t> sizes_with_last(const Tensor& t, int64_t last) {
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
  sizes.back() = last;
  return sizes;
}

// A tensor seen as `rows` rows of `cols` elements, unit stride within a row and one stride between
// rows.
struct Rows {
  Tensor tensor;  // keeps the memory alive; a copy if the strides of the original do not fit
  int64_t rows;
  int64_t cols;
  int64_t stride;  // elements between rows

  const void* data() const { return tensor.const_data_ptr(); }
};

inline Rows as_rows(const char* op, const char* name, const Tensor& t) {
  const int64_t dims = t.dim();
  require(dims >= 1, op, name, " must have at least 1 dimension, got 0");
  const Sizes sizes = t.sizes(), strides = t.strides();
  const int64_t cols = sizes[dims - 1];
  int64_t rows = 1;
  int64_t stride = cols;  // of the innermost leading dimension with more than one element
  bool fits = cols <= 1 || strides[dims - 1] == 1;
  for (int64_t i = dims - 2; i >= 0; --i) {
    if (sizes[i] != 1) {
      if (rows == 1) {
        stride = strides[i];
      } else {
        fits = fits && strides[i] == stride * rows;
      }
    }
    rows *= sizes[i];
  }
  if (fits || rows == 0 || cols == 0) return {t, rows, cols, stride};
  return {torch::stable::contiguous(t), rows, cols, cols};
}

using OptRows = std::optional<Rows>;

// as_rows of a tensor that must have this dtype and, if given, these sizes.
inline Rows as_rows(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_tensor(op, name, t, dtype);
  return as_rows(op, name, t);
}
inline Rows as_rows(const char* op, const char* name, const Tensor& t, DType dtype, Sizes sizes) {
  require_sizes(op, name, t, sizes);
  return as_rows(op, name, t, dtype);
}
inline OptRows as_rows(const char* op, const char* name, const OptTensor& t, DType dtype,
                       Sizes sizes) {
  return t.has_value() ? OptRows(as_rows(op, name, *t, dtype, sizes)) : std::nullopt;
}
inline const void* data_or_null(const OptRows& rows) {
  return rows.has_value() ? rows->data() : nullptr;
}
inline int64_t stride_or_zero(const OptRows& rows) { return rows.has_value() ? rows->stride : 0; }

// A per-column vector with unit stride: a copy if `v` has another stride.
inline OptTensor as_vector(const char* op, const char* name, const OptTensor& v, DType dtype,
                           int64_t cols) {
  if (!v.has_value()) return v;
  require_tensor(op, name, *v, dtype);
  require_sizes(op, name, *v, {cols});
  return cols <= 1 || v->stride(0) == 1 ? v : torch::stable::contiguous(*v);
}

}  // namespace omniattn::ops
