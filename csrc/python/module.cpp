// _kernels: the torch-free kernels, the semantics and the machine probes, for tests and benchmarks.
// Each file of this folder has one bind_<family> function.
#include "bind.h"

#include "runtime/cpu_isa.h"

PYBIND11_MODULE(_kernels, m) {
  using omniattn::Isa;
  m.doc() = "Torch-free kernels, semantics and machine probes of omniattn (development only)";
  m.def("detected_isa", [] { return omniattn::isa_name(omniattn::detected_isa()); });
  omniattn::python::bind_gemm(m);
  omniattn::python::bind_probe(m);
  omniattn::python::bind_semantics(m);
}
