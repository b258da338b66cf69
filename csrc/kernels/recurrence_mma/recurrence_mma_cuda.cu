// Forward on tensor cores with one decay for all channels, or none.
#include "kernels/recurrence_mma/recurrence_mma_forward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, kKeys == 64 && !kIsSplit<T> ? 3 : 2)
    recurrence_forward_mma_kernel(const __grid_constant__ RecurrenceParams params) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  ForwardByMma<HeadPanel<T, kKeys, kDelta, false>, kDelta>(params, s).run();
}

}  // namespace

Status launch_recurrence_mma(const RecurrenceParams& params, Stream stream) {
  const Recurrence& p = params.recurrence;
  if (p.sequences * p.value_heads == 0 || p.value_width == 0) return nullptr;
  if (p.channel_decay) {
    launch_recurrence_channels_mma(params, stream);
  } else {
    with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
      GPU_LAUNCH((recurrence_forward_mma_kernel<T, kKeys, kDelta>), panels_of(p, p.sequences),
                 kThreads, sizeof(HeadShared<T, kKeys, kDelta>), stream, params);
    });
  }
  return gpu::launch_status();
}

}  // namespace omniattn
