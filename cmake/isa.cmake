# One OBJECT library of torch-free kernels per instruction set.
#
# Every kernel source is compiled once per ISA into its own namespace (OMNIATTN_ISA) and picked at run
# time by csrc/runtime/cpu_isa.cpp. The objects see no torch include path. Never -march=native.

set(OMNIATTN_ISAS baseline)
set(OMNIATTN_FLAGS_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND OMNIATTN_ISAS avx2 avx512 avx512_bf16)
  set(OMNIATTN_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(OMNIATTN_FLAGS_avx512 ${OMNIATTN_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
    -mprefer-vector-width=512)
  set(OMNIATTN_FLAGS_avx512_bf16 ${OMNIATTN_FLAGS_avx512} -mavx512bf16)
endif()

set(OMNIATTN_KERNEL_OPTIONS
  -fno-math-errno -fno-trapping-math  # neither errno nor FP exception flags are part of any contract
  -fno-strict-aliasing                # 16-bit storage is read as vectors
)

# omniattn_add_kernels(source...): defines kernels_<isa> for each ISA and OMNIATTN_KERNEL_OBJECTS.
function(omniattn_add_kernels)
  add_library(kernels_dispatch OBJECT csrc/runtime/cpu_isa.cpp)
  target_link_libraries(kernels_dispatch PRIVATE omniattn_options)
  set(objects $<TARGET_OBJECTS:kernels_dispatch>)
  foreach(isa ${OMNIATTN_ISAS})
    add_library(kernels_${isa} OBJECT ${ARGN})
    target_link_libraries(kernels_${isa} PRIVATE omniattn_options)
    target_compile_definitions(kernels_${isa} PRIVATE OMNIATTN_ISA=isa_${isa})
    target_compile_options(kernels_${isa} PRIVATE
      ${OMNIATTN_KERNEL_OPTIONS} ${OMNIATTN_FLAGS_${isa}})
    list(APPEND objects $<TARGET_OBJECTS:kernels_${isa}>)
  endforeach()
  set(OMNIATTN_KERNEL_OBJECTS ${objects} PARENT_SCOPE)
endfunction()
