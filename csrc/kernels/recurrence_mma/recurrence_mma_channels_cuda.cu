// Forward on tensor cores with a decay per channel.
#include "kernels/recurrence_mma/recurrence_mma_channels_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_forward_cuda.h"

namespace omniattn {
namespace {

template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_channels_forward_mma_kernel(const __grid_constant__ RecurrenceParams params) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  ForwardByMma<ChannelPanel<T, kKeys, kDelta, false>, kDelta>(params, s).run();
}

}  // namespace

void launch_recurrence_channels_mma(const RecurrenceParams& params, Stream stream) {
  const Recurrence& p = params.recurrence;
  with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
    GPU_LAUNCH((recurrence_channels_forward_mma_kernel<T, kKeys, kDelta>),
               panels_of(p, p.sequences), kThreads, sizeof(ChannelShared<T, kKeys, kDelta, false>),
               stream, params);
  });
}

}  // namespace omniattn
