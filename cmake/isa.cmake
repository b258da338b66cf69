# One OBJECT library of torch-free kernels per instruction set.
#
# Every kernel source is compiled once per ISA into its own namespace (OMNIATTN_ISA) and picked at run
# time by csrc/runtime/cpu_isa.h. The objects see no torch include path. Never -march=native.

# Parses the table of csrc/runtime/isa.h and omits the levels that OMNIATTN_LEVELS does not name.
# OMNIATTN_ISAS are the levels that have all kernels (the first one for fp64, too), OMNIATTN_PRODUCT_ISAS the product-only levels,
# OMNIATTN_LEVEL_MASK has one bit for each. OMNIATTN_FLAGS_<isa> enables the compiler's
# extensions of a level and of all before it. OMNIATTN_TILE_ISAS use AMX tiles, by the statements of
# tiles.h; OMNIATTN_BF16_TILE_ISAS among them multiply bf16.
set(OMNIATTN_LEVELS native CACHE STRING
  "Instruction sets to compile kernels for: native (those that this machine would use), all, or a list")
if(OMNIATTN_LEVELS STREQUAL "native" AND NOT OMNIATTN_NATIVE_LEVELS AND NOT CMAKE_CROSSCOMPILING)
  # Prints the levels that the library's own choice would run on this machine.
  try_run(ran compiled "${PROJECT_BINARY_DIR}/native_levels"
    SOURCES "${CMAKE_CURRENT_LIST_DIR}/native_levels.cpp" "${CMAKE_CURRENT_LIST_DIR}/../csrc/runtime/cpu_isa.cpp"
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_LIST_DIR}/../csrc"
    CXX_STANDARD 20 COMPILE_OUTPUT_VARIABLE log RUN_OUTPUT_VARIABLE native)
  if(NOT compiled OR NOT ran EQUAL 0)
    message(FATAL_ERROR "omniattn: cannot tell which instruction sets this machine has; name them with "
                        "-DOMNIATTN_LEVELS=all or a list such as avx2;avx512\n${log}")
  endif()
  set(OMNIATTN_NATIVE_LEVELS "${native}" CACHE INTERNAL "Levels of this machine")
endif()
if(OMNIATTN_LEVELS STREQUAL "native")
  set(levels "${OMNIATTN_NATIVE_LEVELS}")
else()
  set(levels "${OMNIATTN_LEVELS}")
endif()

set(isa_table "${CMAKE_CURRENT_LIST_DIR}/../csrc/runtime/isa.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${isa_table}")
file(READ "${isa_table}" isa_table)
string(REGEX MATCHALL "level\\([a-z0-9_]+, [^,]+,[^,]+,[^,)]*__VA_ARGS__" isa_table "${isa_table}")
set(OMNIATTN_ISAS "")
set(OMNIATTN_PRODUCT_ISAS "")
set(OMNIATTN_TILE_ISAS "")
set(OMNIATTN_BF16_TILE_ISAS "")
set(OMNIATTN_LEVEL_MASK 0)
set(OMNIATTN_ALL_LEVELS ON)
set(names "")
set(flags "")
set(tuning_avx512 -mprefer-vector-width=512)
foreach(level IN LISTS isa_table)
  string(REGEX MATCH "level\\(([a-z0-9_]+), ([^,]+)," _ "${level}")
  set(isa ${CMAKE_MATCH_1})
  set(operands ${CMAKE_MATCH_2})
  string(REGEX MATCHALL "HAS\\([^)]+" extensions "${level}")
  list(TRANSFORM extensions REPLACE "HAS\\(" "-m")
  if(extensions AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    break()
  endif()
  if(level MATCHES "TILES" AND NOT "-DOMNIATTN_TILES" IN_LIST flags)
    list(APPEND extensions -DOMNIATTN_TILES)
  endif()
  list(APPEND flags ${extensions} ${tuning_${isa}})
  set(OMNIATTN_FLAGS_${isa} ${flags})
  list(LENGTH names number)
  list(APPEND names ${isa})
  if(levels AND NOT levels STREQUAL "all" AND NOT isa IN_LIST levels)
    set(OMNIATTN_ALL_LEVELS OFF)
    continue()
  endif()
  math(EXPR OMNIATTN_LEVEL_MASK "${OMNIATTN_LEVEL_MASK} | (1 << ${number})")
  if(level MATCHES "TILES")
    list(APPEND OMNIATTN_TILE_ISAS ${isa})
    if(operands MATCHES "bf16")
      list(APPEND OMNIATTN_BF16_TILE_ISAS ${isa})
    endif()
  endif()
  if(operands MATCHES "f32")
    list(APPEND OMNIATTN_ISAS ${isa})
  else()
    list(APPEND OMNIATTN_PRODUCT_ISAS ${isa})
  endif()
endforeach()
string(JOIN ", " every ${names})
foreach(level IN LISTS levels)
  if(NOT level IN_LIST names AND NOT level STREQUAL "all")
    message(FATAL_ERROR "omniattn: OMNIATTN_LEVELS must be native, all or some of ${every}, got ${OMNIATTN_LEVELS}")
  endif()
endforeach()
if(NOT OMNIATTN_ISAS)
  message(FATAL_ERROR "omniattn: OMNIATTN_LEVELS must name baseline, avx2 or avx512, since the other levels have "
                      "products only, got ${OMNIATTN_LEVELS}")
endif()
string(JOIN ", " built ${OMNIATTN_ISAS} ${OMNIATTN_PRODUCT_ISAS})
message(STATUS "omniattn: kernels for ${built}; OMNIATTN_LEVELS=all builds them for ${every}")

if("avx2" IN_LIST names)
  # Keep baseline objects small: few users have processors from before 2013.
  # With -Os gcc does not see that loops run at least once, and warns of variables that they set.
  # Functions called once are nearly identical for several types and compress better out of line.
  set(OMNIATTN_FLAGS_baseline $<$<CONFIG:Release>:-Os> $<$<CONFIG:Release>:-fno-inline-functions-called-once>
    -Wno-maybe-uninitialized)
endif()

# For tests: product-only levels emulated by other instructions. The portable form builds its vectors from shorter
# ones. No call between objects passes them, so gcc's note on their ABI does not apply.
set(OMNIATTN_FLAGS_emulated ${OMNIATTN_FLAGS_avx512})
set(OMNIATTN_FLAGS_portable ${OMNIATTN_FLAGS_avx2} -DOMNIATTN_WIDE_VECTORS -Wno-psabi)

set(OMNIATTN_KERNEL_OPTIONS
  -fno-math-errno -fno-trapping-math  # neither errno nor FP exception flags are part of any contract
  -fno-strict-aliasing                # 16-bit storage is read as vectors
  -fno-exceptions                     # objects of kernels need no C++ runtime
  # No exception passes through kernels; unwind tables would be a thirtieth of the wheel.
  $<$<CONFIG:Release>:-fno-asynchronous-unwind-tables>
)

# omniattn_isa_library(target isa flags source...): compiles the sources into namespace isa_<isa>.
function(omniattn_isa_library target isa flags)
  add_library(${target} OBJECT ${ARGN})
  target_link_libraries(${target} PRIVATE omniattn_options omniattn_levels)
  target_compile_definitions(${target} PRIVATE OMNIATTN_ISA=isa_${isa})
  target_compile_options(${target} PRIVATE ${OMNIATTN_KERNEL_OPTIONS} ${flags})
  if(OMNIATTN_PRECOMPILE AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_precompile_headers(${target} PRIVATE <immintrin.h>)
    # gcc forgets that a precompiled header is the system's and warns of its intrinsics.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
  endif()
endfunction()

# omniattn_isa_libraries(prefix [SOURCES source...] [PRODUCTS source...] [BF16_TILES source...]) adds <prefix>_<isa>
# for each ISA. Product-only levels compile the sources of PRODUCTS alone; levels with bf16 tiles compile those of
# BF16_TILES as well. All objects are listed in <prefix>_OBJECTS.
function(omniattn_isa_libraries prefix)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;PRODUCTS;BF16_TILES")
  set(objects "")
  foreach(isa ${OMNIATTN_ISAS} ${OMNIATTN_PRODUCT_ISAS})
    set(sources ${arg_PRODUCTS})
    if(isa IN_LIST OMNIATTN_ISAS)
      list(APPEND sources ${arg_SOURCES})
    endif()
    if(isa IN_LIST OMNIATTN_BF16_TILE_ISAS)
      list(APPEND sources ${arg_BF16_TILES})
    endif()
    omniattn_isa_library(${prefix}_${isa} ${isa} "${OMNIATTN_FLAGS_${isa}}" ${sources})
    list(APPEND objects $<TARGET_OBJECTS:${prefix}_${isa}>)
  endforeach()
  set(${prefix}_OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# omniattn_add_kernels(SOURCES ... PRODUCTS ... BF16_TILES ...): the released kernels, in OMNIATTN_KERNEL_OBJECTS.
# Kernels and objects that choose among the levels link to omniattn_levels.
function(omniattn_add_kernels)
  add_library(omniattn_levels INTERFACE)
  if(NOT OMNIATTN_ALL_LEVELS)
    target_compile_definitions(omniattn_levels INTERFACE OMNIATTN_LEVELS=${OMNIATTN_LEVEL_MASK})
  endif()
  add_library(kernels_dispatch OBJECT csrc/runtime/cpu_isa.cpp)
  target_link_libraries(kernels_dispatch PRIVATE omniattn_options omniattn_levels)
  omniattn_isa_libraries(kernels ${ARGN})
  set(OMNIATTN_KERNEL_OBJECTS $<TARGET_OBJECTS:kernels_dispatch> ${kernels_OBJECTS} PARENT_SCOPE)
endfunction()
