// Selects the update, the decay and the compute type of a call.
#pragma once

#include "kernels/recurrence/recurrence_channel_decay.h"
#include "kernels/recurrence/recurrence_update.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Returns the argument of the update of a call.
template <class T>
const T& of_update(const Recurrence& p, const T& plain, const T& delta, const T& bonus,
                   const T& low_rank) {
  if (p.a.data != nullptr) return low_rank;
  if (p.bonus != nullptr) return bonus;
  return p.delta ? delta : plain;
}

// Calls f.operator()<C, Decay>() for the dtype and the decay of a call with this update.
template <class Update, class F>
void choose(const Recurrence& p, const F& f) {
  dispatch_compute(p.dtype, [&]<class C>(C) {
    if constexpr (Update::kHeadDecay) {
      if (!p.channel_decay) return f.template operator()<C, HeadDecay<C>>();
    }
    f.template operator()<C, ChannelDecay<C, Update>>();
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
