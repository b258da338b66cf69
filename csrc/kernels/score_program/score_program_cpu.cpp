// Interpreter of score_mod programs on the CPU: each step is a loop over the lanes of a row, so
// that its decoding is paid once for 64 or 128 keys.
#include "kernels/score_program/score_program.h"

#include <type_traits>

#include "kernels/attention/attention_row.h"
#include "runtime/assert.h"
#include "runtime/dispatch.h"
#include "runtime/vec.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

using program_ops::int_of;

// Calls f(data, kind) with the elements of a table; kind is A{} for floats, an integer otherwise.
template <class A, class F>
OMNIATTN_INLINE void with_elements(const ProgramTable& t, const F& f) {
  switch (t.type) {
    case ElementType::f64:
      if constexpr (sizeof(A) == 8) {
        return f(static_cast<const double*>(t.data), A{});
      } else {
        OMNIATTN_FAIL("float64 tables of a program need float64 inputs");
      }
    case ElementType::f32:
      return f(static_cast<const float*>(t.data), A{});
    case ElementType::bf16:
      return f(static_cast<const bf16*>(t.data), A{});
    case ElementType::f16:
      return f(static_cast<const f16*>(t.data), A{});
    case ElementType::i64:
      return f(static_cast<const int64_t*>(t.data), int_of<A>{});
    case ElementType::i32:
      return f(static_cast<const int32_t*>(t.data), int_of<A>{});
    case ElementType::u8:
      return f(static_cast<const uint8_t*>(t.data), int_of<A>{});
  }
  OMNIATTN_FAIL("a table of a program has an unknown element type");
}

// Converts an element to a lane.
template <class A, class T, class Lane>
OMNIATTN_INLINE Lane lane_of(T x, Lane) {
  if constexpr (std::is_same_v<Lane, A>) {
    return static_cast<A>(widen(x));
  } else {
    return static_cast<Lane>(x);
  }
}

template <class A>
class Interpreter {
 public:
  explicit Interpreter(const ProgramRow& row)
      : row_(row), registers_(static_cast<A*>(row.registers)) {}

  void run(const ProgramRun& run, int32_t in, A* x) const {
    copy(x, numbers(in));
    for (const ProgramStep* step = run.steps; step != run.steps + run.count; ++step) take(*step);
    copy(numbers(run.result), x);
  }

 private:
  using V = Vec<A>;
  using I = int_of<A>;
  using U = typename program_ops::IntOf<A>::Unsigned;

  const ProgramRow& row_;
  A* const registers_;

  A* numbers(int64_t n) const { return registers_ + n * kProgramRow; }
  I* ints(int64_t n) const { return reinterpret_cast<I*>(numbers(n)); }
  const ProgramTable& table(int64_t n) const { return row_.program->tables[n]; }
  // Columns that are keys.
  Range real() const { return intersect(row_.columns, {0, row_.keys}); }

  template <class T>
  static void read_row(const T* from, A* to, Range columns) {
    for (int64_t i = columns.begin; i < columns.end; i += V::kWidth) {
      store(to + i, load_n(from + i, columns.end - i));
    }
  }
  // to[i] = f(i) for all columns. A step may read and write the same register. GCC
  // vectorises the inner loop, whose length it knows: 6 ns for an addition of 128 floats on
  // Zen 3, where a single loop took 78.
  template <class To, class F>
  OMNIATTN_INLINE void lanes(To* to, const F& f) const {
    for (int64_t first = row_.columns.begin; first < row_.columns.end; first += V::kWidth) {
#pragma GCC ivdep
      for (int64_t i = first; i < first + V::kWidth; ++i) to[i] = f(i);
    }
  }
  template <class F>
  OMNIATTN_INLINE void vectors(A* to, const A* from, const F& f) const {
    for (int64_t i = row_.columns.begin; i < row_.columns.end; i += V::kWidth) {
      store(to + i, f(load(from + i)));
    }
  }
  void copy(const A* from, A* to) const {
    vectors(to, from, [](V x) { return x; });
  }

  void take(const ProgramStep& s) const;
  void read(const ProgramStep& s) const;
  void place(const ProgramStep& s) const;
  void gather(const ProgramStep& s) const;
  void give(const ProgramStep& s) const;
  void give_at(const ProgramStep& s) const;
  void hide(A* x) const;
};

template <class A>
void Interpreter<A>::take(const ProgramStep& s) const {
  using namespace program_ops;
  const A *const x = numbers(s.a), *const y = numbers(s.b);
  const I *const m = ints(s.a), *const n = ints(s.b);
  switch (s.op) {
#define OMNIATTN_OP(name, number, reads, value)                      \
  case ProgramOp::name:                                              \
    return lanes(numbers(s.to), [=](int64_t i) {                     \
      [[maybe_unused]] const A a = x[i], b = reads > 1 ? y[i] : A(); \
      return static_cast<A>(value);                                  \
    });
    OMNIATTN_PROGRAM_FLOAT_OPS(OMNIATTN_OP)
    OMNIATTN_PROGRAM_LANE_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name:                         \
    return vectors(numbers(s.to), x, [](V a) { return value; });
    OMNIATTN_PROGRAM_VECTOR_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name:                         \
    return lanes(ints(s.to), [=](int64_t i) {   \
      const A a = x[i], b = y[i];               \
      return static_cast<I>(value);             \
    });
    OMNIATTN_PROGRAM_COMPARISONS(OMNIATTN_OP)
#undef OMNIATTN_OP
#define OMNIATTN_OP(name, number, reads, value) \
  case ProgramOp::name:                         \
    return lanes(ints(s.to), [=](int64_t i) {   \
      const I a = m[i], b = n[i];               \
      return static_cast<I>(value);             \
    });
    OMNIATTN_PROGRAM_INT_OPS(OMNIATTN_OP)
#undef OMNIATTN_OP
    case ProgramOp::where:
      return lanes(ints(s.to), [=, o = ints(s.c)](int64_t i) { return m[i] != 0 ? n[i] : o[i]; });
    case ProgramOp::to_float:
      return lanes(numbers(s.to), [=](int64_t i) { return static_cast<A>(m[i]); });
    case ProgramOp::to_int:
      return lanes(ints(s.to), [=](int64_t i) { return to_int(x[i]); });
    case ProgramOp::number:
      return lanes(numbers(s.to),
                   [c = static_cast<A>(row_.program->constants[s.a])](int64_t) { return c; });
    case ProgramOp::integer:
      return lanes(ints(s.to),
                   [c = static_cast<I>(row_.program->constants[s.a])](int64_t) { return c; });
    case ProgramOp::read:
      return read(s);
    case ProgramOp::place:
      return place(s);
    case ProgramOp::gather:
      return gather(s);
    case ProgramOp::give:
      return give(s);
    case ProgramOp::give_at:
      return give_at(s);
  }
  OMNIATTN_FAIL("a step of a program has an unknown op");
}

template <class A>
void Interpreter<A>::read(const ProgramStep& s) const {
  const ProgramTable& t = table(s.a);
  const int64_t stride = t.places.stride_k, first = t.places.at(row_.b, row_.h, row_.q, row_.key);
  with_elements<A>(t, [&]<class T, class Lane>(const T* data, Lane kind) {
    Lane* const to = reinterpret_cast<Lane*>(numbers(s.to));
    const T* const from = data + first;
    if (stride == 0) {
      const Lane value = lane_of<A>(*from, kind);
      return lanes(to, [=](int64_t) { return value; });
    }
    const Range columns = real();
    if constexpr (std::is_same_v<Lane, A>) {
      if constexpr (std::is_same_v<compute_t<T>, A>) {
        if (stride == 1) return read_row(from, to, columns);
      }
    }
    int64_t i = columns.begin;
    if constexpr (!std::is_same_v<Lane, A>) {
      using From [[gnu::vector_size(V::kWidth * sizeof(T)), gnu::aligned(alignof(T))]] = T;
      using To [[gnu::vector_size(V::kWidth * sizeof(Lane)), gnu::aligned(alignof(Lane))]] = Lane;
      for (; stride == 1 && i + V::kWidth <= columns.end; i += V::kWidth) {
        const From& some = *reinterpret_cast<const From*>(from + i);
        *reinterpret_cast<To*>(to + i) = __builtin_convertvector(some, To);
      }
    }
    for (; i < columns.end; ++i) to[i] = lane_of<A>(from[i * stride], kind);
  });
}

template <class A>
void Interpreter<A>::place(const ProgramStep& s) const {
  const ProgramTable& t = table(s.c / kMaxProgramDims);
  const int64_t dim = s.c % kMaxProgramDims, size = t.sizes[dim];
  const int64_t stride = program_ops::stride_of(t, dim);
  const I *const index = ints(s.b), *const before = s.a < 0 ? nullptr : ints(s.a);
  lanes(ints(s.to), [=](int64_t i) {
    const I place = before == nullptr ? I(0) : before[i];
    return static_cast<I>(program_ops::place_of(place, index[i], size, stride));
  });
}

template <class A>
void Interpreter<A>::gather(const ProgramStep& s) const {
  const ProgramTable& t = table(s.b);
  const int64_t elements = program_ops::elements_of(t);
  const I* const place = ints(s.a);
  with_elements<A>(t, [&]<class T, class Lane>(const T* data, Lane kind) {
    const Lane outside = std::is_same_v<Lane, A> ? static_cast<Lane>(__builtin_nan("")) : Lane(0);
    const Range columns = real();
    Lane* const to = reinterpret_cast<Lane*>(numbers(s.to));
    for (int64_t i = columns.begin; i < columns.end; ++i) {
      const I at = place[i];
      to[i] = at >= 0 && at < elements ? lane_of<A>(data[at], kind) : outside;
    }
  });
}

// Sets hidden keys, and columns past the last key, to 0.
template <class A>
void Interpreter<A>::hide(A* x) const {
  for (int64_t i = row_.columns.begin; i < row_.columns.end; i += V::kWidth) {
    const uint64_t* const words = row_.visible;
    const Mask<A> seen = lanes_of<A>(words == nullptr ? ~uint64_t{0} : words[i / 64] >> i % 64);
    const V kept = select(seen, load(x + i), zero<A>());
    store(x + i, select(lanes_below<A>(row_.keys - i), kept, zero<A>()));
  }
}

template <class A>
void Interpreter<A>::give(const ProgramStep& s) const {
  if (row_.gradients == nullptr || row_.gradients[s.b].data == nullptr) return;
  const ProgramGradient& grad = row_.gradients[s.b];
  A* const x = numbers(s.a);
  A* const to = static_cast<A*>(grad.data) + grad.places.at(row_.b, row_.h, row_.q, row_.key);
  hide(x);
  if (grad.places.stride_k == 0) {
    V sum = zero<A>();
    for (int64_t i = row_.columns.begin; i < row_.columns.end; i += V::kWidth) sum += load(x + i);
    *to += reduce_add(sum);
    return;
  }
  const Range columns = real();
  for (int64_t i = columns.begin; i < columns.end; i += V::kWidth) {
    const int64_t count = columns.end - i;
    store_n(to + i, load_n(to + i, count) + load(x + i), count);
  }
}

template <class A>
void Interpreter<A>::give_at(const ProgramStep& s) const {
  if (row_.gradients == nullptr || row_.gradients[s.c].data == nullptr) return;
  const ProgramGradient& grad = row_.gradients[s.c];
  const int64_t elements = program_ops::elements_of(table(s.c));
  A* const x = numbers(s.a);
  const I* const place = ints(s.b);
  hide(x);
  const Range columns = real();
  for (int64_t i = columns.begin; i < columns.end; ++i) {
    if (place[i] >= 0 && place[i] < elements && x[i] != A(0)) {
      static_cast<A*>(grad.data)[place[i]] += x[i];
    }
  }
}

template <class A>
void run_program(const ProgramRow& row, const ProgramRun& run, int32_t in, void* x) {
  Interpreter<A>(row).run(run, in, static_cast<A*>(x));
}

// Null if this object has no kernels for A.
template <class A>
constexpr RunProgram run_or_null() {
  if constexpr (kIsBuiltFor<A>) return run_program<A>;
  return nullptr;
}

void sum_parts(DType dtype, const void* parts, int64_t count, int64_t elements, void* out,
               int64_t begin, int64_t end) {
  OMNIATTN_ASSERT_ITEMS(begin, end, elements);
  dispatch_compute(dtype, [&]<class A>(A) {
    const auto* const from = static_cast<const A*>(parts);
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t n = 0; n < count; ++n) sum += from[n * elements + i];
      static_cast<A*>(out)[i] = static_cast<A>(sum);
    }
  });
}

}  // namespace

extern const ScoreProgramKernels score_program_kernels_table = {run_or_null<float>(),
                                                                run_or_null<double>(), sum_parts};

}  // namespace omniattn::OMNIATTN_ISA
