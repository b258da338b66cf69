// _kernels.Probe(isa): SIMD functions, register tiles and ceilings of one instruction set.
//
// Half types are passed as numpy uint16 arrays with a dtype name: "f64", "f32", "bf16", "f16".
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "bind.h"
#include "runtime/probe.h"

namespace omniattn {

namespace {

namespace py = pybind11;

DType parse_dtype(const std::string& name) {
  if (name == "f64") return DType::f64;
  if (name == "f32") return DType::f32;
  if (name == "bf16") return DType::bf16;
  if (name == "f16") return DType::f16;
  throw py::value_error("dtype must be f64, f32, bf16 or f16, got " + name);
}

const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"f64", "f32", "bf16", "f16"};
  return kNames[static_cast<int32_t>(dtype)];
}

#if defined(OMNIATTN_EMULATED_PROBES)
// Product-only levels, emulated by the instructions of another level.
struct Emulated {
  const char* isa;
  Isa by;
  DType factors;  // of the products
  const ProbeKernels* products;
};
const Emulated kEmulated[] = {
    {"avx512_bf16_emulated", Isa::avx512, DType::bf16,
     &isa_avx512_bf16_emulated::probe_kernels_table},
    {"amx_bf16_emulated", Isa::avx512, DType::bf16, &isa_amx_bf16_emulated::probe_kernels_table},
    {"amx_bf16_portable", Isa::avx2, DType::bf16, &isa_amx_bf16_portable::probe_kernels_table},
    {"amx_fp16_emulated", Isa::avx512, DType::f16, &isa_amx_fp16_emulated::probe_kernels_table},
    {"amx_fp16_portable", Isa::avx2, DType::f16, &isa_amx_fp16_portable::probe_kernels_table},
};
#endif

// The kernels that run a dtype on an ISA, null if this machine lacks it.
const ProbeKernels* find_table(const std::string& isa, DType dtype) {
#if defined(OMNIATTN_EMULATED_PROBES)
  for (const Emulated& emulated : kEmulated) {
    if (isa != emulated.isa || !has_isa(emulated.by)) continue;
    return dtype == emulated.factors ? emulated.products : &probe_kernels_on(emulated.by, dtype);
  }
#endif
  Isa level;
  if (!parse_isa(isa.c_str(), level) || !has_isa(level)) return nullptr;
  return &probe_kernels_on(level, dtype);
}

std::vector<std::string> probe_isas() {
  std::vector<std::string> found;
  for (int32_t i = 0; i < kIsaCount; ++i) {
    if (has_isa(static_cast<Isa>(i))) found.emplace_back(isa_name(static_cast<Isa>(i)));
  }
#if defined(OMNIATTN_EMULATED_PROBES)
  for (const Emulated& emulated : kEmulated) {
    if (find_table(emulated.isa, DType::f32) != nullptr) found.emplace_back(emulated.isa);
  }
#endif
  return found;
}

VecFunction parse_function(const std::string& name) {
  constexpr const char* kNames[] = {"copy", "exp",   "exp2",  "log", "tanh",   "normal", "sigmoid",
                                    "sqrt", "round", "floor", "abs", "negate", "sin",    "cos"};
  for (int32_t i = 0; i < static_cast<int32_t>(std::size(kNames)); ++i) {
    if (name == kNames[i]) return static_cast<VecFunction>(i);
  }
  throw py::value_error("unknown function " + name);
}

// Highest rate(work)/second over five runs of about `seconds` / 5, all threads at once.
template <class Run>
double best_rate(double seconds, int threads, const Run& run) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::vector<double> rates(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        double work = 0, elapsed = 0;
        const auto start = Clock::now();
        do {
          work += run(t);
          elapsed = std::chrono::duration<double>(Clock::now() - start).count();
        } while (elapsed < seconds / 5);
        rates[static_cast<size_t>(t)] = work / elapsed;
      });
    }
    double total = 0;
    for (int t = 0; t < threads; ++t) {
      workers[static_cast<size_t>(t)].join();
      total += rates[static_cast<size_t>(t)];
    }
    best = total > best ? total : best;
  }
  return best;
}

// numpy does not align to cache lines, but a kernel's workspace is aligned. The numbers are random,
// also as pairs of bf16: tiles multiply zeros, such as the low half of 1.0f, faster.
struct AlignedFloats {
  explicit AlignedFloats(int64_t n) : storage(static_cast<size_t>(n) + 16) {
    data = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) & ~63ull);
    uint32_t random = 1;
    for (float& x : storage) {
      random = random * 1664525u + 1013904223u;
      const uint32_t bits = (random & 0x80ff80ffu) | 0x3f003f00u;  // 0.5 to 2, either sign
      std::memcpy(&x, &bits, sizeof(x));
    }
  }
  std::vector<float> storage;
  float* data;
};

class Probe {
 public:
  explicit Probe(const std::string& isa) : isa_(isa) {
    if (find_table(isa, DType::f32) == nullptr) {
      throw py::value_error("this machine cannot run isa " + isa);
    }
  }

  const std::string& isa() const { return isa_; }
  std::string operand(const std::string& name) const {
    const DType dtype = parse_dtype(name);
    return dtype_name(table(dtype).operand(dtype));
  }

  void map(const std::string& f, const std::string& dtype, py::array x, py::array y,
           int64_t n) const {
    const DType type = parse_dtype(dtype);
    vectors(type).map(parse_function(f), type, x.data(), y.mutable_data(), n);
  }

  std::pair<double, double> reduce(const std::string& dtype, py::array x) const {
    double sum = 0, maximum = 0;
    const DType type = parse_dtype(dtype);
    vectors(type).reduce(type, x.data(), x.size(), &sum, &maximum);
    return {sum, maximum};
  }

  py::bytes pack(const std::string& dtype, const std::string& layout, py::array b, int64_t ldb,
                 int64_t n, int64_t k) const {
    TileProbe p = params(dtype, layout, 0, n, k);
    std::vector<char> packed(static_cast<size_t>(table(p.dtype).packed_bytes(p.dtype, k, n)),
                             '\xff');
    p.b = b.data();
    p.ldb = ldb;
    p.packed = packed.data();
    table(p.dtype).pack(p);
    return py::bytes(packed.data(), packed.size());
  }

  void tile(const std::string& dtype, const std::string& layout, py::array a, int64_t lda,
            bool a_transposed, py::array b, int64_t ldb, py::array c, int64_t ldc, int64_t m,
            int64_t n, int64_t k, bool accumulate) const {
    TileProbe p = params(dtype, layout, m, n, k);
    std::vector<char> packed(static_cast<size_t>(table(p.dtype).packed_bytes(p.dtype, k, n)),
                             '\xff');
    p.a = a.data();
    p.lda = lda;
    p.a_transposed = a_transposed;
    p.b = b.data();
    p.ldb = ldb;
    p.packed = packed.data();
    p.c = c.mutable_data();
    p.ldc = ldc;
    p.accumulate = accumulate;
    table(p.dtype).pack(p);
    table(p.dtype).tile(p, 1);
  }

  // GFLOP/s of the product without packing, on one block that stays in the caches.
  double tile_rate(const std::string& dtype, const std::string& layout, bool a_transposed,
                   int64_t m, int64_t n, int64_t k, double seconds) const {
    TileProbe p = params(dtype, layout, m, n, k);
    const int64_t size = size_of(p.dtype) < 4 ? 4 : size_of(p.dtype);
    const AlignedFloats a(m * (k + 1) * size / 4), b(n * (k + 1) * size / 4);
    AlignedFloats c(m * n * size / 4);
    AlignedFloats packed(table(p.dtype).packed_bytes(p.dtype, k, n) / 4);
    p.a = a.data;
    p.lda = a_transposed ? m : k;
    p.a_transposed = a_transposed;
    p.b = b.data;
    p.ldb = layout == "packed_transposed" ? k : n;
    p.packed = packed.data;
    p.c = c.data;
    p.ldc = n;
    p.accumulate = true;
    table(p.dtype).pack(p);
    const double flops = 2.0 * static_cast<double>(m * n * k);
    const auto repeats = static_cast<int64_t>(1e6 / flops) + 1;
    return 1e-9 * best_rate(seconds, 1, [&](int) {
             table(p.dtype).tile(p, repeats);
             return flops * static_cast<double>(repeats);
           });
  }

  // GFLOP/s of independent multiply-adds.
  double peak(const std::string& operand, int threads, double seconds) const {
    const DType dtype = parse_dtype(operand);
    return 1e-9 * best_rate(seconds, threads,
                            [&](int) { return vectors(dtype).multiply_adds(dtype, 10000); });
  }

  // 1e9 values of a function a second, from L1.
  double function_rate(const std::string& name, int threads, double seconds) const {
    constexpr int64_t kCount = 2048;
    const VecFunction f = parse_function(name);
    std::vector<AlignedFloats> data;
    for (int t = 0; t < 2 * threads; ++t) data.emplace_back(kCount);
    return 1e-9 * best_rate(seconds, threads, [&](int t) {
             const auto first = static_cast<size_t>(2 * t);
             for (int i = 0; i < 100; ++i) {
               table(DType::f32).map(f, DType::f32, data[first].data, data[first + 1].data, kCount);
             }
             return 100.0 * kCount;
           });
  }

  // GB/s of reading `bytes` per thread repeatedly.
  double read_bandwidth(int64_t bytes, int threads, double seconds) const {
    std::vector<AlignedFloats> data;
    for (int t = 0; t < threads; ++t) data.emplace_back(bytes / 4);
    return 1e-9 * best_rate(seconds, threads, [&](int t) {
             sink_ = table(DType::f32).read(data[static_cast<size_t>(t)].data, bytes / 4);
             return static_cast<double>(bytes);
           });
  }

  // GB/s of a = b + s c over `bytes` per array and thread, counting 12 bytes per element.
  double triad(int64_t bytes, int threads, bool stream, double seconds) const {
    std::vector<AlignedFloats> data;
    for (int t = 0; t < 3 * threads; ++t) data.emplace_back(bytes / 4);
    return 1e-9 * best_rate(seconds, threads, [&](int t) {
             const auto first = static_cast<size_t>(3 * t);
             table(DType::f32)
                 .triad(data[first].data, data[first + 1].data, data[first + 2].data, 0.5f,
                        bytes / 4, stream);
             return 3.0 * static_cast<double>(bytes);
           });
  }

 private:
  TileProbe params(const std::string& dtype, const std::string& layout, int64_t m, int64_t n,
                   int64_t k) const {
    TileProbe p{};
    p.dtype = parse_dtype(dtype);
    p.b_layout = layout == "rows"          ? BLayout::rows
                 : layout == "packed_rows" ? BLayout::packed_rows
                                           : BLayout::packed_transposed;
    p.m = m;
    p.n = n;
    p.k = k;
    return p;
  }

  const ProbeKernels& table(DType dtype) const { return *find_table(isa_, dtype); }
  // Vectors of double are tested on levels without kernels for f64, too.
  const ProbeKernels& vectors(DType dtype) const {
    return table(dtype == DType::f64 ? DType::f32 : dtype);
  }

  std::string isa_;
  mutable volatile float sink_ = 0;
};

}  // namespace

namespace python {

void bind_probe(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("probe_isas", &probe_isas, "Names that Probe accepts on this machine.");
  py::class_<Probe>(m, "Probe")
      .def(py::init<const std::string&>(), py::arg("isa"))
      .def_property_readonly("isa", &Probe::isa)
      .def("operand", &Probe::operand)
      .def("map", &Probe::map, py::arg("function"), py::arg("dtype"), py::arg("x"), py::arg("y"),
           py::arg("n"))
      .def("reduce", &Probe::reduce, py::arg("dtype"), py::arg("x"))
      .def("pack", &Probe::pack, py::arg("dtype"), py::arg("layout"), py::arg("b"), py::arg("ldb"),
           py::arg("n"), py::arg("k"))
      .def("tile", &Probe::tile, py::arg("dtype"), py::arg("layout"), py::arg("a"), py::arg("lda"),
           py::arg("a_transposed"), py::arg("b"), py::arg("ldb"), py::arg("c"), py::arg("ldc"),
           py::arg("m"), py::arg("n"), py::arg("k"), py::arg("accumulate"))
      .def("tile_rate", &Probe::tile_rate, Release(), py::arg("dtype"), py::arg("layout"),
           py::arg("a_transposed"), py::arg("m"), py::arg("n"), py::arg("k"),
           py::arg("seconds") = 0.1)
      .def("peak", &Probe::peak, Release(), py::arg("operand"), py::arg("threads") = 1,
           py::arg("seconds") = 0.25)
      .def("function_rate", &Probe::function_rate, Release(), py::arg("function"),
           py::arg("threads") = 1, py::arg("seconds") = 0.25)
      .def("read_bandwidth", &Probe::read_bandwidth, Release(), py::arg("bytes"),
           py::arg("threads") = 1, py::arg("seconds") = 0.25)
      .def("triad", &Probe::triad, Release(), py::arg("bytes"), py::arg("threads") = 1,
           py::arg("stream") = false, py::arg("seconds") = 0.25);
}

}  // namespace python
}  // namespace omniattn
