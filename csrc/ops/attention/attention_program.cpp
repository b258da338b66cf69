// Decodes and checks the program of a score_mod (written by encoding/score_program.py), so that
// kernels read no missing register, constant or table, and no register before it is written.
//
// Layout after the rule's kind, first table in aux and first constant in params: number of tables
// and the kind of each; number of constants; registers, result and number of steps of the forward;
// registers, result and number of steps of the value in the backward; result and number of steps of
// the gradient; then the steps of all three, 5 integers each.
#include <algorithm>
#include <array>
#include <utility>

#include "ops/attention/attention.h"

namespace omniattn::ops::attention {
namespace {

// Reads the integers of an encoded program one by one.
class Reader {
 public:
  Reader(const char* op, const Ints& code, size_t at) : op_(op), code_(code), at_(at) {}
  // Reads an integer that must be in [0, limit).
  int64_t next(const char* what, int64_t limit) {
    const int64_t value = next();
    require(value >= 0 && value < limit, op_, what, " of a program must be in [0, ", limit,
            "), got ", value);
    return value;
  }
  int64_t next() {
    require(at_ < code_.size(), op_, "the code of a program must be complete, got ", code_.size(),
            " integers");
    return code_[at_++];
  }
  bool is_at_end() const { return at_ == code_.size(); }

 private:
  const char* op_;
  const Ints& code_;
  size_t at_;
};

ElementType element_type(const char* op, const Tensor& t, DType dtype) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      require(dtype == DType::f64, op, "float64 tables of a program need float64 inputs");
      return ElementType::f64;
    case ScalarType::Float:
      return ElementType::f32;
    case ScalarType::BFloat16:
      return ElementType::bf16;
    case ScalarType::Half:
      return ElementType::f16;
    case ScalarType::Long:
      return ElementType::i64;
    case ScalarType::Int:
      return ElementType::i32;
    case ScalarType::Byte:
    case ScalarType::Bool:
      return ElementType::u8;
    default:
      fail(op, "tables of a program must be floats, int64, int32, uint8 or bool, got scalar type ",
           static_cast<int>(t.scalar_type()));
  }
}

// Table of a program, from aux[index].
ProgramTable table_of(const Arguments& given, Call& call, ProgramTableKind kind, int64_t index) {
  const char* const op = given.op;
  Tensor t = side_tensor(op, given.aux, index);
  require(is_here(t), op, "tables of a program must be on ", kDeviceName);
  ProgramTable table{};
  table.kind = kind;
  table.type = element_type(op, t, call.problem.dtype);
  if (kind == ProgramTableKind::gathered) {
    require(t.dim() <= kMaxProgramDims, op, "tables of a program have at most ", kMaxProgramDims,
            " dimensions, got ", t.dim());
    require(t.numel() < (int64_t{1} << 31), op, "tables of a program have less than 2^31 elements");
    t = as_dense(t);
    table.dims = t.dim();
    for (int64_t i = 0; i < t.dim(); ++i) table.sizes[i] = t.size(i);
  } else {
    const ProgramDomain domain = program_domain(call);
    const bool pairs = kind == ProgramTableKind::grid;
    const std::array<int64_t, 4> want = {
        call.problem.batch, call.problem.hq, pairs ? domain.queries : 1,
        pairs ? domain.keys : std::max<int64_t>(domain.queries + domain.keys - 1, 0)};
    require(t.dim() == 4, op, "a table of a program must have 4 dimensions, got ", t.dim());
    int64_t sizes[4], strides[4];
    for (int64_t i = 0; i < 4; ++i) {
      sizes[i] = t.size(i), strides[i] = t.stride(i);
      const int64_t size = want[static_cast<size_t>(i)];
      require(sizes[i] == size || sizes[i] == 1, op,
              "a table of a program must be broadcastable to ", Shape{want.data(), 4},
              ", got size ", sizes[i], " in dimension ", i);
    }
    table.places = program_places(kind, domain, sizes, strides);
  }
  call.kept.push_back(t);
  table.data = t.const_data_ptr();
  return table;
}

// Registers that have been written when a step is reached.
struct Written {
  std::array<bool, kMaxProgramRegisters> registers{};

  void require_at(const char* op, int64_t n) const {
    require(n >= 0 && n < kMaxProgramRegisters && registers[static_cast<size_t>(n)], op,
            "a program must read registers that it has written, got ", n);
  }
};

// Checks the table that a step refers to.
void require_table(const char* op, const ScoreProgram& p, int64_t n, bool gathered) {
  require(n >= 0 && n < p.table_count, op, "a program must read existing tables, got ", n);
  const bool is_gathered = p.tables[n].kind == ProgramTableKind::gathered;
  require(is_gathered == gathered, op, "a program must read table ", n, " by an op for its kind");
}

ProgramStep read_step(const char* op, Reader& code, const DecodedProgram& x, int32_t registers,
                      Written& written) {
  const int64_t number = code.next();
  require(is_program_op(number), op, "a step of a program must be one of score_program.h, got ",
          number);
  constexpr int64_t kLimit = 1 << 15;
  const auto operand = [&] {
    const int64_t value = code.next();
    require(value >= -1 && value < kLimit, op, "operands of a program must be small, got ", value);
    return static_cast<int16_t>(value);
  };
  ProgramStep s{static_cast<ProgramOp>(number), operand(), operand(), operand(), operand()};
  const int32_t reads = program_reads(s.op);
  const bool may_lack_first = s.op == ProgramOp::place && s.a < 0;
  if (reads > 0 && !may_lack_first) written.require_at(op, s.a);
  if (reads > 1) written.require_at(op, s.b);
  if (reads > 2) written.require_at(op, s.c);
  switch (s.op) {
    case ProgramOp::number:
    case ProgramOp::integer:
      require(s.a >= 0 && s.a < static_cast<int64_t>(x.constants.size()), op,
              "a program must read existing constants, got ", s.a);
      break;
    case ProgramOp::read:
      require_table(op, x.program, s.a, false);
      break;
    case ProgramOp::place:
      require_table(op, x.program, s.c < 0 ? -1 : s.c / kMaxProgramDims, true);
      require(s.c % kMaxProgramDims < x.program.tables[s.c / kMaxProgramDims].dims, op,
              "a program must index existing dimensions, got ", s.c);
      break;
    case ProgramOp::gather:
      require_table(op, x.program, s.b, true);
      break;
    case ProgramOp::give:
      require_table(op, x.program, s.b, false);
      return s;
    case ProgramOp::give_at:
      require_table(op, x.program, s.c, true);
      return s;
    default:
      break;
  }
  require(s.to >= 0 && s.to < registers, op, "a program must write existing registers, got ", s.to);
  written.registers[static_cast<size_t>(s.to)] = true;
  return s;
}

}  // namespace

ProgramDomain program_domain(const Call& call) {
  const bool cached = call.has_layout && !call.is_packed;
  return cached ? ProgramDomain{-call.whole_q, call.whole_q + call.whole_k, call.whole_k}
                : ProgramDomain{0, call.whole_q, call.whole_k};
}

bool has_program_table(const Call& call, int64_t index) {
  return call.program >= 0 && index >= call.program &&
         index < call.program + call.problem.program->table_count;
}

void set_program_gradient(const Call& call, int64_t index, const Tensor& grad,
                          ProgramGradients& to) {
  const ProgramTable& table = call.problem.program->tables[index - call.program];
  ProgramGradients::Table& found = to.tables[index - call.program];
  found.whole.data = grad.mutable_data_ptr();
  found.elements = grad.numel();
  if (table.kind == ProgramTableKind::gathered) return;
  int64_t sizes[4], strides[4];
  for (int64_t i = 0; i < 4; ++i) sizes[i] = grad.size(i), strides[i] = grad.stride(i);
  found.whole.places = program_places(table.kind, program_domain(call), sizes, strides);
  found.has_heads = sizes[1] > 1 || call.problem.hq == 1;
  // Items own rows of queries or columns of keys: a pair has its own element and needs no parts.
  if (table.kind == ProgramTableKind::grid && sizes[2] > 1 && sizes[3] > 1) {
    found.elements = 0;
    to.shares_batches = to.shares_batches || (sizes[0] == 1 && call.problem.batch > 1);
    to.shares_heads = to.shares_heads || (sizes[1] == 1 && call.problem.hq > 1);
  }
}

void decode_program(const Arguments& given, size_t at, Call& call) {
  const char* const op = given.op;
  Reader code(op, given.score, at + 1);
  const int64_t first_table = code.next(), first_constant = code.next();
  const auto made = std::make_shared<DecodedProgram>();
  ScoreProgram& p = made->program;
  const int64_t tables = code.next("tables", kMaxProgramTables + 1);
  for (int64_t n = 0; n < tables; ++n) {
    const auto kind = static_cast<ProgramTableKind>(code.next("kinds of tables", 3));
    p.tables[n] = table_of(given, call, kind, first_table + n);
  }
  p.table_count = tables;
  const int64_t constants = code.next("constants", kMaxProgramSteps);
  const auto count = static_cast<int64_t>(given.params.size());
  require(constants == 0 || (first_constant >= 0 && first_constant + constants <= count), op,
          "params must hold the constants of a program, got index ", first_constant, " of ", count);
  if (constants > 0) {
    const auto first = given.params.begin() + first_constant;
    made->constants.assign(first, first + constants);
  }
  const auto header = [&](ProgramRun& run, int32_t registers) {
    run.result = static_cast<int32_t>(code.next("results", registers));
    run.count = code.next("steps", kMaxProgramSteps + 1);
  };
  const auto read_registers = [&] {
    return static_cast<int32_t>(code.next("registers", kMaxProgramRegisters + 1));
  };
  p.forward_registers = read_registers();
  header(p.forward, p.forward_registers);
  p.backward_registers = read_registers();
  header(p.value, p.backward_registers);
  header(p.gradient, p.backward_registers);
  const auto read_steps = [&](const ProgramRun& run, int32_t registers, Written& written) {
    for (int64_t n = 0; n < run.count; ++n) {
      made->steps.push_back(read_step(op, code, *made, registers, written));
    }
    written.require_at(op, run.result);
  };
  Written forward, backward;
  forward.registers[0] = backward.registers[0] = true;
  require(p.forward_registers >= 1 && p.backward_registers >= 2, op,
          "a program must have registers for the score and its gradient");
  read_steps(p.forward, p.forward_registers, forward);
  read_steps(p.value, p.backward_registers, backward);
  backward.registers[1] = true;
  read_steps(p.gradient, p.backward_registers, backward);
  require(code.is_at_end(), op, "the code of a program must end with its steps");
  p.forward.steps = made->steps.data();
  p.value.steps = p.forward.steps + p.forward.count;
  p.gradient.steps = p.value.steps + p.value.count;
  p.constant_count = constants;
  p.constants = made->constants.data();
  call.program = first_table;
  call.problem.program = &p;
  call.problem.first_position = call.problem.mask.part.first_q;
  call.decoded = made;
}

}  // namespace omniattn::ops::attention
