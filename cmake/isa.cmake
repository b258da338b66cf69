# One OBJECT library of torch-free kernels per instruction set.
#
# Every kernel source is compiled once per ISA into its own namespace (OMNIATTN_ISA) and picked at run
# time by csrc/runtime/cpu_isa.cpp. The objects see no torch include path. Never -march=native.

set(OMNIATTN_ISAS baseline)
set(OMNIATTN_FLAGS_baseline "")
set(OMNIATTN_DOT_ISAS "")  # in addition, for sources that multiply in bf16
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND OMNIATTN_ISAS avx2 avx512)
  list(APPEND OMNIATTN_DOT_ISAS avx512_bf16)
  # What runs on processors older than 2013 shall not take most of the time of a build.
  set(OMNIATTN_FLAGS_baseline $<$<CONFIG:Release>:-O1>)
  set(OMNIATTN_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(OMNIATTN_FLAGS_avx512 ${OMNIATTN_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
    -mprefer-vector-width=512)
  set(OMNIATTN_FLAGS_avx512_bf16 ${OMNIATTN_FLAGS_avx512} -mavx512bf16)
endif()

set(OMNIATTN_KERNEL_OPTIONS
  -fno-math-errno -fno-trapping-math  # neither errno nor FP exception flags are part of any contract
  -fno-strict-aliasing                # 16-bit storage is read as vectors
)

# omniattn_isa_library(target isa flags source...): the sources in namespace isa_<isa>.
function(omniattn_isa_library target isa flags)
  add_library(${target} OBJECT ${ARGN})
  target_link_libraries(${target} PRIVATE omniattn_options)
  target_compile_definitions(${target} PRIVATE OMNIATTN_ISA=isa_${isa})
  target_compile_options(${target} PRIVATE ${OMNIATTN_KERNEL_OPTIONS} ${flags})
endfunction()

# omniattn_isa_libraries(prefix [SOURCES source...] [DOT source...]): <prefix>_<isa> for each ISA, the
# sources of DOT for those with a bf16 dot product too; their objects in <prefix>_OBJECTS.
function(omniattn_isa_libraries prefix)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DOT")
  set(objects "")
  foreach(isa ${OMNIATTN_ISAS} ${OMNIATTN_DOT_ISAS})
    set(sources ${arg_DOT})
    if(isa IN_LIST OMNIATTN_ISAS)
      list(APPEND sources ${arg_SOURCES})
    endif()
    omniattn_isa_library(${prefix}_${isa} ${isa} "${OMNIATTN_FLAGS_${isa}}" ${sources})
    list(APPEND objects $<TARGET_OBJECTS:${prefix}_${isa}>)
  endforeach()
  set(${prefix}_OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# omniattn_add_kernels(SOURCES ... DOT ...): the kernels of the product, in OMNIATTN_KERNEL_OBJECTS.
function(omniattn_add_kernels)
  add_library(kernels_dispatch OBJECT csrc/runtime/cpu_isa.cpp)
  target_link_libraries(kernels_dispatch PRIVATE omniattn_options)
  omniattn_isa_libraries(kernels ${ARGN})
  set(OMNIATTN_KERNEL_OBJECTS $<TARGET_OBJECTS:kernels_dispatch> ${kernels_OBJECTS} PARENT_SCOPE)
endfunction()
