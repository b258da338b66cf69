// Backward on tensor cores with a decay per channel, by panels of columns of values.
#include "kernels/recurrence_mma/recurrence_mma_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_channels_cuda.h"

namespace omniattn {
namespace {

// Blocks: value heads of slots, panels of columns.
template <class T, int kKeys>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_channels_errors_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                          const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count > 0) write_errors<ChannelPanel<T, kKeys, true, false>>(params, found, s);
}

// Blocks: value heads of sequences, panels of columns.
template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_channels_du_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                      const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  UpdatesByMma<ChannelPanel<T, kKeys, kDelta, true>, kDelta>(params, found, s).run();
}

}  // namespace

void launch_recurrence_channels_backward_mma(const RecurrenceBackwardParams& params, void* memory,
                                             Stream stream) {
  const Recurrence& p = params.recurrence;
  const Found<float> found(p, memory);
  with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
    if constexpr (kDelta) {
      if (const int64_t slots = recurrence_slots(p); slots > 0) {
        GPU_LAUNCH((recurrence_channels_errors_mma_kernel<T, kKeys>), panels_of(p, slots), kThreads,
                   sizeof(ChannelShared<T, kKeys, true, false>), stream, params, found);
      }
    }
    GPU_LAUNCH((recurrence_channels_du_mma_kernel<T, kKeys, kDelta>), panels_of(p, p.sequences),
               kThreads, sizeof(ChannelShared<T, kKeys, kDelta, true>), stream, params, found);
  });
}

}  // namespace omniattn
