// Backward on tensor cores: the steps of recurrence_backward_cuda.cu, with one decay for all
// channels, or none.
#include "kernels/recurrence_mma/recurrence_mma_backward_cuda.h"
#include "kernels/recurrence_mma/recurrence_mma_scores_cuda.h"

namespace omniattn {
namespace {

// Blocks: value heads of slots, panels of columns.
template <class T, int kKeys>
__global__ void __launch_bounds__(kThreads, kKeys == 64 ? 3 : 2)
    recurrence_errors_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                                 const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = chunk_of_slot(p, blockIdx.x / p.value_heads);
  if (s.count > 0) write_errors<HeadPanel<T, kKeys, true, false>>(params, found, s);
}

// Blocks: value heads of sequences, panels of columns.
template <class T, int kKeys, bool kDelta>
__global__ void __launch_bounds__(kThreads, 2)
    recurrence_du_mma_kernel(const __grid_constant__ RecurrenceBackwardParams params,
                             const __grid_constant__ Found<float> found) {
  const Recurrence& p = params.recurrence;
  const RecurrenceSequence s = checked_sequence(p, blockIdx.x / p.value_heads);
  UpdatesByMma<HeadPanel<T, kKeys, kDelta, true>, kDelta>(params, found, s).run();
}

}  // namespace

int64_t recurrence_backward_mma_bytes(const Recurrence& p) {
  return Found<float>(p, nullptr).bytes_without_dg;
}

Status launch_recurrence_backward_mma(const RecurrenceBackwardParams& params, void* memory,
                                      Stream stream) {
  const Recurrence& p = params.recurrence;
  const Found<float> found(p, memory);
  if (p.sequences * p.value_heads > 0 && p.value_width > 0) {
    if (p.channel_decay) {
      launch_recurrence_channels_backward_mma(params, memory, stream);
    } else {
      with_rows(p, [&]<class T, int kKeys, bool kDelta>() {
        constexpr size_t kBytes = sizeof(HeadShared<T, kKeys, kDelta>);
        if constexpr (kDelta) {
          if (const int64_t slots = recurrence_slots(p); slots > 0) {
            GPU_LAUNCH((recurrence_errors_mma_kernel<T, kKeys>), panels_of(p, slots), kThreads,
                       kBytes, stream, params, found);
          }
        }
        GPU_LAUNCH((recurrence_du_mma_kernel<T, kKeys, kDelta>), panels_of(p, p.sequences),
                   kThreads, kBytes, stream, params, found);
      });
    }
  }
  if (p.sequences * p.value_heads > 0 && p.key_width > 0) {
    p.channel_decay ? launch_recurrence_channels_rows_mma(params, memory, stream)
                    : launch_recurrence_rows_mma(params, memory, stream);
  }
  RecurrenceBackwardParams rest = params;
  rest.dg = nullptr;  // the rows have computed it
  launch_recurrence_finish(rest, memory, stream);
  return gpu::launch_status();
}

}  // namespace omniattn
