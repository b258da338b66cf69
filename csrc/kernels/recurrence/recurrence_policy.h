// The decay and the update of a call.
#pragma once

#include "kernels/recurrence/recurrence_decay.h"
#include "kernels/recurrence/recurrence_update.h"

namespace omniattn::OMNIATTN_ISA {
namespace {

// Calls f.operator()<T, Decay, Update>() for the inputs that a call has.
template <class T, class F>
void choose(const Recurrence& p, const F& f) {
  using C = compute_t<T>;
  const auto with = [&]<class Decay>(Decay*) {
    p.beta.data != nullptr ? f.template operator()<T, Decay, DeltaUpdate>()
                           : f.template operator()<T, Decay, PlainUpdate>();
  };
  p.channel_decay ? with(static_cast<ChannelDecay<C>*>(nullptr))
                  : with(static_cast<HeadDecay<C>*>(nullptr));
}

}  // namespace
}  // namespace omniattn::OMNIATTN_ISA
