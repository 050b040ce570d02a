// CTAs that only pull (fwd_comm_sms, bwd_comm_sms): the first `comm_ctas` of a rank, whole clusters, compute nothing until there is nothing left to
// pull, and then as all others; the dispatch warps of the others do not pull at all.
//
// Nine warps of such a CTA take dispatch tickets: the consumer warps through the pipeline's stages, which hold no operands yet (24 KB each, so an
// SM has some 200 KB on their way), and the dispatch warp through its own ring.
// Progress: pulls wait for tasks (a slot, the lead), so no task may wait behind a pull of the same cluster. Its scheduling lane takes no ticket
// before all warps of both CTAs have pulled their last row (`drained`); all that they wait for is held by clusters that compute. The same wait
// keeps operands out of the stages as long as rows lie there: nothing is loaded without a task.
#pragma once
#include "dispatch.cuh"

namespace mok::cuda {

// A CTA among those of its rank.
struct Place {
  int cta, ctas, dedicated;
  __device__ __forceinline__ bool only_pulls() const { return cta < dedicated; }
  __device__ __forceinline__ bool pulls() const { return dedicated == 0 || only_pulls(); }
};

__device__ __forceinline__ Place place_of(int ranks, int comm_ctas) {
  const int ctas = gridDim.x / ranks;
  return {static_cast<int>(blockIdx.x) % ctas, ctas, comm_ctas};
}

// A consumer warp's part of the stages; the barriers lie behind the stages, where a finished tile will.
constexpr int kWideBytes = sm90::kStages * sm90::kStageBytes / kConsumerWarps, kWideSlots = 8;
static_assert(kConsumerWarps * kWideSlots * 8 <= sm90::kRestBytes, "barriers do not fit");

template <class Params>
__device__ __forceinline__ CopyRing open_wide_ring(const Params& p, uint32_t smem) {
  const int warp = threadIdx.x / 32 - 4;
  const CopyRing ring{smem + warp * kWideBytes, smem + sm90::Shared::kRest + warp * kWideSlots * 8, p.copy_bytes,
                      min(kWideSlots, kWideBytes / p.copy_bytes), p.copies_per_row};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kWideSlots; ++i) ptx::mbarrier_init(ring.full + 8 * i, 1);
    ptx::mbarrier_init_fence();
    ptx::fence_proxy_async_shared();
  }
  __syncwarp();
  return ring;
}

// The barriers' room becomes ordinary memory. Not after an abort: copies may still arrive there, and nothing else will.
__device__ __forceinline__ void close_wide_ring(const Limits& limits, uint32_t smem) {
  __syncwarp();
  if (threadIdx.x % 32 != 0 || watch_of(limits).dead) return;
  const uint32_t full = smem + sm90::Shared::kRest + (threadIdx.x / 32 - 4) * kWideSlots * 8;
  for (int i = 0; i < kWideSlots; ++i) ptx::mbarrier_invalidate(full + 8 * i);
}

// This warp has pulled its last row, and its copies have left shared memory.
__device__ __forceinline__ void signal_drained(uint32_t smem) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_release_cluster(ptx::cluster_address(smem + sm90::Shared::kDrained, 0));
}

// The scheduling lane, before its first ticket.
__device__ __forceinline__ void wait_drained(const Limits& limits, uint32_t smem) {
  Watch watch = watch_of(limits);
  wait_for(watch, kWaitTask, 0, 0, [&](uint32_t&) { return ptx::mbarrier_try_cluster(smem + sm90::Shared::kDrained, 0); });
}

// What the roles do with it. `rows`(ring) takes tickets until there are none left; `head`(cta, ctas) is what the consumer warps fetch otherwise.
template <class Params, class Rows>
__device__ __forceinline__ void dispatch_role(const Params& p, const Place& place, uint32_t smem, Rows rows) {
  if (!place.pulls()) return;
  rows(CopyRing{smem + sm90::Shared::kCopy, smem + sm90::Shared::kCopyFull, p.copy_bytes, p.copy_slots, p.copies_per_row});
  if (place.only_pulls()) signal_drained(smem);
}

template <class Params, class Rows, class Head>
__device__ __forceinline__ void pull_before_computing(const Params& p, const Place& place, uint32_t smem, Rows rows, Head head) {
  if (place.only_pulls()) {
    rows(open_wide_ring(p, smem));
    close_wide_ring(p.limits, smem);
    signal_drained(smem);
  } else {
    head(place.cta - place.dedicated, place.ctas - place.dedicated);
  }
}

}  // namespace mok::cuda
