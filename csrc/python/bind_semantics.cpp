// Development bindings of csrc/semantics, for the brute-force property tests.
#include <array>
#include <vector>

#include "bind.h"
#include "semantics/block_schedule.h"
#include "semantics/mask.h"
#include "semantics/philox.h"
#include "semantics/rope.h"
#include "semantics/score.h"
#include "semantics/seqlen.h"
#include "semantics/softmax.h"

namespace py = pybind11;

namespace omniattn::python {
namespace {

using Span = std::pair<int64_t, int64_t>;

Range range(Span s) { return {s.first, s.second}; }
Span span(Range r) { return {r.begin, r.end}; }

// A mask with its side tensors, numpy arrays with the shapes of semantics/mask_rules.h, which it
// keeps alive; the second tensor of a rule follows its first.
struct OwnedMask {
  AttentionMask mask;
  std::vector<py::array> side;

  OwnedMask(const std::vector<int64_t>& rules, std::vector<py::array> tensors, int64_t tq,
            int64_t tk)
      : mask{tq, tk, static_cast<int32_t>(rules.size()) / kMaskRuleInts, {}, {}},
        side(std::move(tensors)) {
    if (rules.size() % kMaskRuleInts != 0 || mask.count > kMaxMaskRules)
      throw py::value_error("mask: wrong number of integers");
    for (int32_t n = 0; n < mask.count; ++n) {
      const int64_t* code = rules.data() + n * kMaskRuleInts;
      MaskRule& rule = mask.rules[n];
      rule = {static_cast<MaskKind>(code[0]), code[1], code[2], nullptr, nullptr, 0, 0, 0, 0};
      if (!is_mask_kind(code[0]) || !mask_parameters_fit(rule.kind, rule.a, rule.b))
        throw py::value_error("mask: parameters without a meaning");
      const SideTensor kind = mask_side_tensor(rule.kind);
      if (kind == SideTensor::none) continue;
      const py::array& tensor = side.at(static_cast<size_t>(code[3]));
      rule.side = tensor.data();
      rule.stride_b = tensor.strides(0) / tensor.itemsize();
      if (tensor.ndim() == 4) {
        rule.stride_h = tensor.strides(1) / tensor.itemsize();
        rule.stride_q = tensor.strides(2) / tensor.itemsize();
      }
      if (kind != SideTensor::ids && kind != SideTensor::blocks) continue;
      const py::array& second = side.at(static_cast<size_t>(code[3]) + 1);
      rule.second = second.data();
      rule.second_stride_b = second.strides(0) / second.itemsize();
      if (kind == SideTensor::blocks) rule.b = second.shape(0);
    }
  }
};

template <class Cursor>
std::vector<int64_t> walk(Cursor cursor) {
  std::vector<int64_t> blocks;
  for (int64_t n; (n = cursor.next()) >= 0;) blocks.push_back(n);
  return blocks;
}

// The score for rules of these kinds.
Score score_of(const std::vector<int32_t>& kinds, double scale = 1, double c = 0) {
  uint32_t terms = 0;
  for (const int32_t kind : kinds) {
    if (!is_score_kind(kind)) throw py::value_error("score: no such rule");
    terms |= term(static_cast<ScoreKind>(kind));
  }
  return make_score(scale, terms, c);
}

// The value of a transform or normalizer at a number, and its derivative there.
std::pair<double, double> score_function(int32_t kind, double x) {
  const Score score = score_of({kind}, 1, 1);
  const auto f = score.transform != ScoreKind::none ? transform_at(score, x) : weight_at(score, x);
  return {f.value, f.slope};
}

}  // namespace

void bind_semantics(py::module_& m) {
  py::enum_<TileClass>(m, "TileClass")
      .value("skip", TileClass::skip)
      .value("full", TileClass::full)
      .value("partial", TileClass::partial);
  py::class_<OwnedMask>(m, "Mask")
      .def(py::init<const std::vector<int64_t>&, std::vector<py::array>, int64_t, int64_t>())
      .def("visible", [](const OwnedMask& o, int64_t b, int64_t h, int64_t q,
                         int64_t k) { return visible(o.mask, b, h, q, k); })
      .def("visible_bits", [](const OwnedMask& o, int64_t b, int64_t h, int64_t q,
                              int64_t k) { return visible_bits(o.mask, b, h, q, k); })
      .def("classify", [](const OwnedMask& o, int64_t b, int64_t h, Span q,
                          Span k) { return classify(o.mask, b, h, range(q), range(k)); })
      .def("visible_keys_in",
           [](const OwnedMask& o, int64_t b, int64_t h, Span q, Span k) {
             return span(visible_keys_in(o.mask, b, h, range(q), range(k)));
           })
      .def("visible_keys", [](const OwnedMask& o, int64_t b,
                              Span q) { return span(visible_keys(o.mask, b, range(q))); })
      .def("visible_queries", [](const OwnedMask& o, int64_t b,
                                 Span k) { return span(visible_queries(o.mask, b, range(k))); })
      .def("key_blocks", [](const OwnedMask& o, int64_t b, Span q,
                            int64_t size) { return span(key_blocks(o.mask, b, range(q), size)); })
      .def("query_blocks",
           [](const OwnedMask& o, int64_t b, Span k, int64_t size) {
             return span(query_blocks(o.mask, b, range(k), size));
           })
      .def("walk_keys",
           [](const OwnedMask& o, int64_t b, int64_t h, Span q, int64_t size) {
             return walk(Cursor<Along::keys>(o.mask, b, h, range(q), size));
           })
      .def("walk_queries", [](const OwnedMask& o, int64_t b, int64_t h, Span k, int64_t size) {
        return walk(Cursor<Along::queries>(o.mask, b, h, range(k), size));
      });
  m.def("t5_bucket", [](int64_t distance, bool both, int64_t buckets, int64_t max_distance) {
    return table_row({ScoreKind::buckets, both, max_distance, buckets, nullptr, 0}, 0, distance);
  });
  m.def("window_row", [](int64_t q, int64_t k, int64_t height, int64_t width) {
    return table_row({ScoreKind::window, height, width, 0, nullptr, 0}, q, k);
  });

  m.def("block",
        [](int64_t n, int64_t size, int64_t length) { return span(block(n, size, length)); });
  m.def("kv_head", [](int64_t h, int64_t hq, int64_t hkv) { return kv_head(h, hq, hkv); });

  m.def("philox", [](std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
    const PhiloxWords w = philox({{c[0], c[1], c[2], c[3]}}, {{k[0], k[1]}});
    return std::array<uint32_t, 4>{w.word[0], w.word[1], w.word[2], w.word[3]};
  });
  m.def("dropout_keep_bits",
        [](double p, int64_t seed, int64_t offset, int64_t row, int64_t query, int64_t key) {
          return keep_bits(make_dropout(p, seed, offset), row, query, key);
        });

  m.def("make_score", [](double scale, const std::vector<int32_t>& kinds, double c) {
    const Score s = score_of(kinds, scale, c);
    return py::make_tuple(s.pre, s.post, s.chain);
  });
  m.def("score_function", &score_function);
  m.def("softmax_shift", [](double x) { return softmax_shift(x); });
  m.def("softmax_normalizer", [](double x) { return softmax_normalizer(x); });
  m.def("softmax_lse", [](const std::vector<int32_t>& kinds, double x, double l, double ln_l) {
    const Lse<double> lse = softmax_lse(score_of(kinds), x, l, ln_l);
    return std::pair{lse.value, lse.tail};
  });
  m.def("softmax_backward_shift", [](const std::vector<int32_t>& kinds, double x, double tail) {
    const auto [shift, exponent] = softmax_backward_shift(score_of(kinds), Lse<double>{x, tail});
    return std::pair{shift, exponent};
  });

  m.def("rope_pair", [](int64_t n, int64_t half, bool interleaved) {
    const RopePair p = rope_pair(n, half, interleaved);
    return Span{p.x, p.y};
  });
  m.def("rope_rotate", [](double x, double y, double c, double s) {
    return std::pair{rope_x(x, y, c, s), rope_y(x, y, c, s)};
  });
}

}  // namespace omniattn::python
