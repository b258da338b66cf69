# libomniattn_cuda.so: the CUDA implementations of the ops, loaded where torch sees a GPU. Optional: built where
# nvcc works and the torch of this environment could use it, and with OMNIATTN_BUILD_ALL, whose tests read it. It
# builds against any torch.
if(NOT DEFINED OMNIATTN_CUDA AND NOT OMNIATTN_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
endif()
set(cuda_useful OFF)
if(CMAKE_CUDA_COMPILER)
  file(STRINGS "${OMNIATTN_TORCH_DIR}/version.py" torch_cuda REGEX "^cuda[ :].*= *'")
  if(torch_cuda OR OMNIATTN_BUILD_ALL)
    set(cuda_useful ON)
  else()
    message(STATUS "omniattn: no CUDA library, because this torch is built without CUDA; "
                   "pip install -C cmake.define.OMNIATTN_CUDA=ON builds it all the same")
  endif()
endif()
option(OMNIATTN_CUDA "Build libomniattn_cuda.so (needs nvcc >= 12)" ${cuda_useful})
# Machine code for Ampere to Hopper, and PTX that newer GPUs compile when they load it.
set(OMNIATTN_CUDA_ARCHS "80;90a-real" CACHE STRING "GPU architectures, as CMAKE_CUDA_ARCHITECTURES")
if(NOT OMNIATTN_CUDA)
  return()
endif()

enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
  message(WARNING "omniattn: no CUDA library, it needs nvcc >= 12, got ${CMAKE_CUDA_COMPILER_VERSION}")
  return()
endif()
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

# The only function taken from libtorch_cuda.so, which a CPU-only torch lacks. Linking against a
# stub of that name puts it into DT_NEEDED; leaving the symbol open instead would fail at load time,
# because torch does not make libtorch_cuda's symbols global.
set(stub "${PROJECT_BINARY_DIR}/torch_cuda_stub")
file(CONFIGURE OUTPUT "${stub}/torch_cuda_stub.c" CONTENT
  "int aoti_torch_get_current_cuda_stream(int device, void** stream) { return device && stream; }\n")
enable_language(C)
add_library(torch_cuda_stub SHARED "${stub}/torch_cuda_stub.c")
set_target_properties(torch_cuda_stub PROPERTIES
  OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY "${stub}" C_VISIBILITY_PRESET default)

# CMake 3.25 does not know the C++20 option of nvcc 13.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

# Torch-free kernels.
add_library(kernels_cuda OBJECT ${OMNIATTN_CUDA_KERNELS})
target_include_directories(kernels_cuda PRIVATE csrc)
target_compile_options(kernels_cuda PRIVATE -Xptxas=-warn-spills
  $<$<BOOL:${OMNIATTN_WERROR}>:-Werror=all-warnings -Xptxas=-Werror>)
set_target_properties(kernels_cuda PROPERTIES
  CUDA_ARCHITECTURES "${OMNIATTN_CUDA_ARCHS}" CUDA_VISIBILITY_PRESET hidden)

find_package(CUDAToolkit REQUIRED)
add_library(omniattn_cuda SHARED
  $<TARGET_OBJECTS:kernels_cuda> ${OMNIATTN_CUDA_OPS})
string(REPLACE ";" ", " architectures "${OMNIATTN_CUDA_ARCHS}")
target_compile_definitions(omniattn_cuda PRIVATE
  OMNIATTN_CUDA USE_CUDA OMNIATTN_CUDA_ARCHS="${architectures}")
target_link_libraries(omniattn_cuda PRIVATE
  omniattn_options torch_stable torch_cuda_stub CUDA::cudart_static)
target_link_options(omniattn_cuda PRIVATE -Wl,--as-needed -Wl,-z,defs)
set_target_properties(omniattn_cuda PROPERTIES
  CUDA_RUNTIME_LIBRARY Static SKIP_BUILD_RPATH ON INSTALL_RPATH "")
install(TARGETS omniattn_cuda LIBRARY DESTINATION . COMPONENT omniattn)

if(OMNIATTN_BUILD_DEV)  # the wrappers of runtime/gpu.h, for tests on a GPU
  add_library(gpu_fixtures SHARED tests/cuda/fixtures.cu)
  target_include_directories(gpu_fixtures PRIVATE csrc)
  set_target_properties(gpu_fixtures PROPERTIES
    CUDA_ARCHITECTURES "${OMNIATTN_CUDA_ARCHS}" CUDA_RUNTIME_LIBRARY Static
    SKIP_BUILD_RPATH ON INSTALL_RPATH "")
  install(TARGETS gpu_fixtures LIBRARY DESTINATION . COMPONENT dev)
endif()
