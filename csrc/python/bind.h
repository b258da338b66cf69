#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace omniattn::python {

void bind_gemm(pybind11::module_& m);
void bind_probe(pybind11::module_& m);
void bind_semantics(pybind11::module_& m);

}  // namespace omniattn::python
