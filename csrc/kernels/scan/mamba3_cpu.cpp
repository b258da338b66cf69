// The inputs of Mamba-3's recurrence on the CPU, see mamba3.h. All heads of an item process a token
// before the next one: rows of one head lie pages apart in memory.
#include "kernels/scan/mamba3.h"

#include "kernels/recurrence/item_pass.h"
#include "runtime/vec_trig.h"
#include "semantics/rope.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

constexpr double kPi = 3.14159265358979323846;
// Tokens between a prefetch and its use.
constexpr int64_t kAhead = 4;

template <class C>
struct Pair {
  Vec<C> x, y;
};

// The step size of a token, the share sigmoid(trap) of its own input, and the factors of this input
// and of the one before.
template <class C>
struct Steps {
  C share, dt;

  C own() const { return share * dt; }
  C last() const { return (1 - share) * dt; }
};

// A sequence, some heads of it, and rows of the current token and head.
template <class C>
struct Heads {
  const Mamba3& p;
  ScanSequence s{};
  int64_t index = 0, first = 0, last = 0, head = 0;  // heads [first, last)
  Matrix<C> q, k;                                    // (R, N), with biases, before their rotation
  C *cos, *sin;

  Heads(const Mamba3& problem, Room<C>& room) : p(problem) {
    q = room.rows(p.rank, p.width), k = room.rows(p.rank, p.width);
    cos = room.take(p.pairs), sin = room.take(p.pairs);
  }

  void start(int64_t item) {
    const int64_t items = ceil_div(p.heads, p.block);
    index = item / items, first = item % items * p.block;
    last = smaller(first + p.block, p.heads);
    s = scan_sequence(p.rows, index);
  }
  // Place of a head in (S, H), and among the heads of an item.
  int64_t row() const { return index * p.heads + head; }
  int64_t own() const { return head - first; }
  int64_t end() const { return s.begin + s.count; }
  // Place of a token and head in (B, T, H), and of an input in (B, T, R, H).
  int64_t place(int64_t t) const { return (s.batch * p.rows.steps + t) * p.heads + head; }
  int64_t place(int64_t t, int64_t r) const {
    return ((s.batch * p.rows.steps + t) * p.rank + r) * p.heads + head;
  }
  Steps<C> steps(int64_t t) const {
    const double trap = static_cast<const C*>(p.trap)[place(t)];
    return {static_cast<C>(1 / (1 + __builtin_exp(-trap))), static_cast<const C*>(p.dt)[place(t)]};
  }
  // The last token has no following one, whose factors are 0.
  Steps<C> steps_after(int64_t t) const { return t + 1 < end() ? steps(t + 1) : Steps<C>{0, 0}; }
  const C* angles(int64_t t) const { return row_of<C>(p.angles, s.batch, t, head); }

  const char* source(const RankView& x, int64_t t) const {
    const int64_t at = s.batch * x.batch + t * x.step + head / p.group_heads() * x.group;
    return static_cast<const char*>(x.data) + at * size_of(p.dtype);
  }
  void prefetch(int64_t t) const {
    if (t < s.begin || t >= end()) return;
    for (const RankView* x : {&p.q, &p.k}) {
      for (int64_t r = 0; r < p.rank; ++r) {
        prefetch_row(source(*x, t) + r * x->rank * size_of(p.dtype), p.width * size_of(p.dtype));
      }
    }
  }
  void load(int64_t t) {
    load(p.q, p.q_bias, t, q);
    load(p.k, p.k_bias, t, k);
  }
  void load(const RankView& x, const void* bias, int64_t t, Matrix<C> to) const {
    load_rows(p.dtype, source(x, t), x.rank, p.rank, p.width, to);
    for (int64_t r = 0; r < p.rank; ++r) {
      const C* const added = static_cast<const C*>(bias) + (head * p.rank + r) * p.width;
      add(added, to.row(r));
    }
  }
  void add(const C* from, C* to) const {
    for_row<C>(p.width, [&](int64_t j, auto part) {
      part.store(to + j, part.load(to + j) + part.load(from + j));
    });
  }
  void waves(const C* phases) {
    for_row<C>(p.pairs, [&](int64_t i, auto part) {
      const auto [sine, cosine] = sincos(part.load(phases + i));
      part.store(sin + i, sine);
      part.store(cos + i, cosine);
    });
  }

  // Pairs i, i + 1, ... of a row.
  Pair<C> pairs(const C* row, int64_t i, auto part) const {
    if (!p.interleaved) return {part.load(row + i), part.load(row + p.width / 2 + i)};
    const auto [x, y] =
        deinterleave(part.first_of_pairs().load(row + 2 * i),
                     part.template second_of_pairs<C>().load(row + 2 * i + Vec<C>::kWidth));
    return {x, y};
  }
  void store_pairs(C* row, int64_t i, Pair<C> pair, auto part) const {
    if (!p.interleaved) {
      part.store(row + i, pair.x);
      return part.store(row + p.width / 2 + i, pair.y);
    }
    const auto [low, high] = interleave(pair.x, pair.y);
    part.first_of_pairs().store(row + 2 * i, low);
    part.template second_of_pairs<C>().store(row + 2 * i + Vec<C>::kWidth, high);
  }
  // Rotates a row, by the negative angles if `sign` is -1.
  void turn(const C* from, C* to, C sign) const {
    for_row<C>(p.pairs, [&](int64_t i, auto part) {
      const auto [x, y] = pairs(from, i, part);
      const Vec<C> c = part.load(cos + i), s_ = part.load(sin + i) * sign;
      store_pairs(to, i, {rope_x(x, y, c, s_), rope_y(x, y, c, s_)}, part);
    });
    if (p.interleaved) {
      return copy(from, to, 2 * p.pairs, p.width);
    }
    copy(from, to, p.pairs, p.width / 2);
    copy(from, to, p.width / 2 + p.pairs, p.width);
  }
  static void copy(const C* from, C* to, int64_t begin, int64_t end) {
    for_row<C>(end - begin, [&](int64_t j, auto part) {
      part.store(to + begin + j, part.load(from + begin + j));
    });
  }
  C dot(const C* a, const C* b) const {
    return row_sum<C>(p.width,
                      [&](int64_t j, auto part) { return part.load(a + j) * part.load(b + j); });
  }
};

template <class C>
struct Forward {
  const Mamba3Params& params;
  const Mamba3& p = params.problem;
  Room<C> room;
  Heads<C> heads;
  double* angles;   // theta of each head
  Steps<C>* steps;  // of the current token of each head

  Forward(const Mamba3Params& x, void* memory) : params(x), room(memory), heads(p, room) {
    angles = reinterpret_cast<double*>(room.take(2 * p.block * p.pairs));
    steps = reinterpret_cast<Steps<C>*>(room.take(2 * p.block));
  }

  void run(int64_t item) {
    heads.start(item);
    if (heads.s.count == 0) return;
    for (heads.head = heads.first; heads.head < heads.last; ++heads.head) {
      const C* const start = static_cast<const C*>(p.initial_state);
      for (int64_t i = 0; i < p.pairs; ++i) {
        angles[heads.own() * p.pairs + i] =
            start == nullptr ? 0 : static_cast<double>(start[heads.row() * p.pairs + i]);
      }
      steps[heads.own()] = heads.steps(heads.s.begin);
    }
    for (int64_t t = heads.s.begin; t < heads.end(); ++t) {
      for (heads.head = heads.first; heads.head < heads.last; ++heads.head) token(t);
    }
  }

 private:
  void token(int64_t t) {
    heads.prefetch(t + kAhead);
    const Steps<C> now = steps[heads.own()], next = heads.steps_after(t);
    C* const phases = static_cast<C*>(params.phases) + heads.place(t) * p.pairs;
    advance(heads.angles(t), now.dt, angles + heads.own() * p.pairs, phases);
    heads.waves(phases);
    heads.load(t);
    for (int64_t r = 0; r < p.rank; ++r) {
      const int64_t at = heads.place(t, r);
      heads.turn(heads.q.row(r), static_cast<C*>(params.queries) + at * p.width, 1);
      heads.turn(heads.k.row(r), static_cast<C*>(params.keys) + at * p.width, 1);
      C* const reads = static_cast<C*>(params.reads) + at * p.rank;
      for (int64_t s = 0; s < p.rank; ++s) {
        reads[s] = heads.dot(heads.q.row(r), heads.k.row(s)) * (s > r ? now.own() : -next.last());
      }
    }
    static_cast<C*>(params.weights)[heads.place(t)] = now.own() + next.last();
    steps[heads.own()] = next;
  }
  void advance(const C* turns, C dt, double* theta, C* phases) const {
    for_row<C>(p.pairs, [&](int64_t i, auto part) {
      part.store(phases + i, tanh(part.load(turns + i)) * static_cast<C>(kPi) * dt);
    });
    for (int64_t i = 0; i < p.pairs; ++i) {
      const double sum = theta[i] + static_cast<double>(phases[i]);
      const double rest = sum - 2 * kPi * __builtin_floor(sum * (0.5 / kPi));
      theta[i] = rest;
      phases[i] = static_cast<C>(rest);
    }
  }
};

template <class C>
struct Backward {
  const Mamba3BackwardParams& params;
  const Mamba3& p = params.problem;
  Room<C> room;
  Heads<C> heads;
  Matrix<C> dq, dk;
  C* slopes;        // gradients of the token's angles
  double* dangles;  // of the sums of each head

  Backward(const Mamba3BackwardParams& x, void* memory)
      : params(x),
        room(memory),
        heads(p, room),
        dq(room.rows(p.rank, p.width)),
        dk(room.rows(p.rank, p.width)),
        slopes(room.take(p.pairs)) {
    dangles = reinterpret_cast<double*>(room.take(2 * p.block * p.pairs));
  }

  void run(int64_t item) {
    heads.start(item);
    const int64_t bias = p.rank * p.width;
    for (heads.head = heads.first; heads.head < heads.last; ++heads.head) {
      for (void* to : {params.dq_bias, params.dk_bias}) {
        C* const sums = static_cast<C*>(to) + heads.row() * bias;
        for (int64_t i = 0; i < bias; ++i) sums[i] = 0;
      }
    }
    for (int64_t i = 0; i < p.block * p.pairs; ++i) dangles[i] = 0;
    for (int64_t t = heads.end() - 1; t >= heads.s.begin; --t) {
      for (heads.head = heads.first; heads.head < heads.last; ++heads.head) token(t);
    }
    if (params.dinitial_state == nullptr) return;
    C* const first = static_cast<C*>(params.dinitial_state);
    for (heads.head = heads.first; heads.head < heads.last; ++heads.head) {
      for (int64_t i = 0; i < p.pairs; ++i) {
        first[heads.row() * p.pairs + i] = static_cast<C>(dangles[heads.own() * p.pairs + i]);
      }
    }
  }

 private:
  void token(int64_t t) {
    heads.prefetch(t - kAhead);
    heads.waves(static_cast<const C*>(params.phases) + heads.place(t) * p.pairs);
    heads.load(t);
    turn_back(t);
    of_steps(t, of_angles(t));
    const int64_t bias = p.rank * p.width;
    for (int64_t r = 0; r < p.rank; ++r) {
      const int64_t at = heads.row() * bias + r * p.width;
      heads.add(dq.row(r), static_cast<C*>(params.dq_bias) + at);
      heads.add(dk.row(r), static_cast<C*>(params.dk_bias) + at);
    }
    store(dq, params.dq, t);
    store(dk, params.dk, t);
  }

  static const C* row(const void* x, int64_t at) {
    return x == nullptr ? nullptr : static_cast<const C*>(x) + at;
  }

  // Sets dq and dk to the gradients of the rows before their rotation, and slopes to the angles'
  // gradients: (x', y') = R(theta) (x, y) has d(x', y') / dtheta = R(theta) (-y, x).
  void turn_back(int64_t t) {
    for (int64_t i = 0; i < p.pairs; ++i) slopes[i] = 0;
    for (int64_t r = 0; r < p.rank; ++r) {
      turn_back(row(params.grad_queries, heads.place(t, r) * p.width), heads.q.row(r), dq.row(r));
      turn_back(row(params.grad_keys, heads.place(t, r) * p.width), heads.k.row(r), dk.row(r));
    }
  }
  void turn_back(const C* grad, const C* x, C* dx) {
    if (grad == nullptr) {
      for (int64_t j = 0; j < p.width; ++j) dx[j] = 0;
      return;
    }
    heads.turn(grad, dx, -1);
    for_row<C>(p.pairs, [&](int64_t i, auto part) {
      const Pair<C> d = heads.pairs(dx, i, part), at = heads.pairs(x, i, part);
      part.store(slopes + i, part.load(slopes + i) + (d.y * at.x - d.x * at.y));
    });
  }
  // Adds the token's gradients of angles to the sums over later tokens, and stores dangles. Returns
  // the part of ddt that comes from angles.
  C of_angles(int64_t t) {
    const C* const grad = row(params.grad_phases, heads.place(t) * p.pairs);
    double* const dtheta = dangles + heads.own() * p.pairs;
    for (int64_t i = 0; i < p.pairs; ++i) {
      dtheta[i] += static_cast<double>(slopes[i]);
      if (grad != nullptr) dtheta[i] += static_cast<double>(grad[i]);
      slopes[i] = static_cast<C>(dtheta[i] * kPi);
    }
    const C* const angles = heads.angles(t);
    const C dt = heads.steps(t).dt;
    C* const of_turns = static_cast<C*>(params.dangles) + heads.place(t) * p.pairs;
    return row_sum<C>(p.pairs, [&](int64_t i, auto part) {
      const Vec<C> turn = tanh(part.load(angles + i)), slope = part.load(slopes + i);
      part.store(of_turns + i, slope * dt * (Vec<C>(C{1}) - turn * turn));
      return slope * turn;
    });
  }
  // Adds the gradients by reads to dq and dk, and stores ddt and dtrap.
  void of_steps(int64_t t, C of_turns) {
    const Steps<C> now = heads.steps(t), next = heads.steps_after(t);
    const C* const weight = row(params.grad_weights, heads.place(t));
    C own = weight == nullptr ? 0 : *weight, following = own;
    for (int64_t r = 0; params.grad_reads != nullptr && r < p.rank; ++r) {
      const C* const grads = row(params.grad_reads, heads.place(t, r) * p.rank);
      for (int64_t s = 0; s < p.rank; ++s) {
        const C by_dot = grads[s] * heads.dot(heads.q.row(r), heads.k.row(s));
        (s > r ? own : following) += s > r ? by_dot : -by_dot;
        const C factor = grads[s] * (s > r ? now.own() : -next.last());
        add_scaled(factor, heads.k.row(s), dq.row(r));
        add_scaled(factor, heads.q.row(r), dk.row(s));
      }
    }
    C* const ddt = static_cast<C*>(params.ddt) + heads.place(t);
    C* const dtrap = static_cast<C*>(params.dtrap) + heads.place(t);
    ddt[0] = of_turns + own * now.share;
    dtrap[0] = own * now.dt * now.share * (1 - now.share);
    if (t + 1 == heads.end()) return;
    ddt[p.heads] += following * (1 - next.share);
    dtrap[p.heads] -= following * next.dt * next.share * (1 - next.share);
  }
  void add_scaled(C factor, const C* from, C* to) const {
    for_row<C>(p.width, [&](int64_t j, auto part) {
      part.store(to + j, fma(part.load(from + j), Vec<C>(factor), part.load(to + j)));
    });
  }
  void store(Matrix<C> rows, void* to, int64_t t) const {
    const int64_t members = p.group_heads(), group = heads.head / members;
    const int64_t batches = p.rows.boundaries != nullptr ? 1 : p.rows.sequences;
    const int64_t tokens = (heads.head % members * batches + heads.s.batch) * p.rows.steps + t;
    const int64_t at = (tokens * p.rank * p.groups + group) * p.width;
    store_rows(params.row_dtype, rows, p.rank, p.width,
               static_cast<char*>(to) + at * size_of(params.row_dtype), p.groups * p.width);
  }
};

using Forwards = ItemPass<Forward, Mamba3Params>;
using Backwards = ItemPass<Backward, Mamba3BackwardParams>;

}  // namespace

extern const Mamba3Kernels mamba3_kernels_table;
const Mamba3Kernels mamba3_kernels_table{Forwards::bytes, Forwards::run, Backwards::bytes,
                                         Backwards::run};

}  // namespace omniattn::OMNIATTN_ISA
