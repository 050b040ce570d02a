// Combine, and reverse-dispatch: one warp in every CTA pushes the output rows of down (dgrad_up) tiles to their owners, while the next tile is
// multiplied.
//
// A row of a tile is 256 columns, 512 bytes: one bulk store to ROUTED[route] on the rank that owns the token, or, for the shared expert, to
// this rank's own buffer. Each address has one writer, so nothing needs a lock or an order.
#pragma once
#include "sm90/forward_params.cuh"

namespace mok::cuda {

// All 32 lanes; lane i sends rows i, i + 32, i + 64, i + 96.
template <class Params>
__device__ __forceinline__ void combine_rows(const Params& p, uint32_t smem) {
  using TaskType = typename Params::TaskType;
  using sm90::Shared;
  constexpr int kRowsPerLane = kRowsPerTile / 32;
  const int lane = threadIdx.x % 32;
  const uint32_t cta = ptx::cta_rank_in_cluster();
  // Lanes 0-7 and 8-15 give the borrowed stage back to CTA 0 and 1, in place of the eight consumer warps.
  const uint32_t empty_bar = lane < 2 * kConsumerWarps ? ptx::cluster_address(smem + Shared::kEmpty, lane / kConsumerWarps) : 0;
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  Watch watch = watch_of(p.limits);
  sm90::RingPosition<sm90::kTaskSlots> at;
  sm90::RingPosition<1> out;
  for (;;) {
    const TaskType task = sm90::read_task<TaskType>(smem, at, watch);
    if (__any_sync(~0u, task.is_end())) break;
    if (lane == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    const bool shared = task.kind() == Params::kSharedOutput;
    if (task.kind() != Params::kOutput && !shared) continue;
    const int tile = task.tile() + (task.two() ? cta : 0);
    const int column = (task.column() + (task.two() ? 0 : cta)) * kDownColumns;
    if (column >= p.hidden) continue;  // this CTA only helped its neighbour to load
    __nv_bfloat16* to[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int64_t row = static_cast<int64_t>(tile) * kRowsPerTile + 32 * i + lane;
      to[i] = nullptr;
      if (shared) {
        if (row < p.tokens) to[i] = p.shared_out + row * p.hidden + column;
      } else {
        const int64_t entry = p.rows[row];
        if (entry >= 0) to[i] = p.peer_routed[row_rank(entry)] + row_route(entry) * p.hidden + column;
      }
    }
    const uint32_t bytes = 2 * min(kDownColumns, p.hidden - column);
    wait_mbarrier(watch, smem + Shared::kOutFull, out.phase, kWaitOperand);
    if (__any_sync(~0u, watch.dead)) break;
    out.advance();
    const uint32_t borrowed = ptx::load_shared_4(smem + Shared::kOutStage);
    dawdle_warp();
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i)
      if (to[i] != nullptr) ptx::bulk_store(to[i], sm90::half_window(smem, borrowed, 4 * i + lane / 8) + lane % 8 * sm90::kOutPitch, bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem + Shared::kOutFree);
    if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
  }
  ptx::bulk_wait_all();
}

}  // namespace mok::cuda
