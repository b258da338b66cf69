# torch_stable: torch's headers and libtorch_cpu, through the LibTorch Stable ABI only.
#
# find_package(Torch) is not used: it injects flags (C++ standard, ABI, -D_GLIBCXX..., CUDA look-ups)
# into every target. The include folder and one library are all that is needed.

if(DEFINED ENV{OMNIATTN_TORCH_DIR})
  set(OMNIATTN_TORCH_DIR "$ENV{OMNIATTN_TORCH_DIR}")
endif()
if(NOT OMNIATTN_TORCH_DIR)
  find_package(Python COMPONENTS Interpreter REQUIRED)
  execute_process(  # find_spec does not import torch: 0.05 s instead of 2 s
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin), end='')"
    OUTPUT_VARIABLE OMNIATTN_TORCH_DIR
    RESULT_VARIABLE failed
    ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "omniattn: torch >= 2.11 must be installed for ${Python_EXECUTABLE}; "
                        "try: ${Python_EXECUTABLE} -m pip install 'torch>=2.11'")
  endif()
endif()
if(NOT EXISTS "${OMNIATTN_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "omniattn: torch >= 2.11 is needed (its stable ABI headers), "
                      "got torch at ${OMNIATTN_TORCH_DIR}")
endif()
message(STATUS "torch: ${OMNIATTN_TORCH_DIR}")

# A stable path to the headers: pip builds with a torch in a folder with a random name, with which every look-up in
# the compiler cache would miss.
file(CREATE_LINK "${OMNIATTN_TORCH_DIR}/include" "${PROJECT_BINARY_DIR}/torch_include" SYMBOLIC)

add_library(torch_stable SHARED IMPORTED)
set_target_properties(torch_stable PROPERTIES
  IMPORTED_LOCATION "${OMNIATTN_TORCH_DIR}/lib/libtorch_cpu.so"
  INTERFACE_INCLUDE_DIRECTORIES "${PROJECT_BINARY_DIR}/torch_include"
  INTERFACE_COMPILE_DEFINITIONS TORCH_TARGET_VERSION=0x020b000000000000)  # 2.11: (2 << 56) | (11 << 48)
