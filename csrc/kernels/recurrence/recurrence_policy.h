// Selects the decay and the update of a call.
#pragma once

#include "kernels/recurrence/recurrence_channel_decay.h"
#include "kernels/recurrence/recurrence_update.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Calls f.operator()<C, Decay, Update>() for the dtype and the inputs of a call.
template <class F>
void choose(const Recurrence& p, const F& f) {
  dispatch_compute(p.dtype, [&]<class C>(C) {
    const auto with = [&]<class Update>(Update) {
      if constexpr (Update::kHeadDecay) {
        if (!p.channel_decay) return f.template operator()<C, HeadDecay<C>, Update>();
      }
      f.template operator()<C, ChannelDecay<C, Update>, Update>();
    };
    if (p.a.data != nullptr) return with(LowRankUpdate{});
    if (p.bonus != nullptr) return with(BonusUpdate{});
    p.delta ? with(DeltaUpdate{}) : with(PlainUpdate{});
  });
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
