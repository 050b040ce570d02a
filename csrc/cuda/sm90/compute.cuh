// Consumer warpgroups: multiply what the producer brought, then hand the tile to its epilogue.
#pragma once
#include "epilogue.cuh"
#include "wgmma.cuh"

namespace mok::cuda::sm90 {

// One wgmma group (a k-block) stays in flight while the stage before it is given back.
// kAlongM, kAlongN: how A and B lie (wgmma.cuh). `continues`: acc holds what the sum starts from.
template <int kAlongM = 0, int kAlongN = 0>
__device__ __forceinline__ void multiply(float (&acc)[128], int blocks, bool idle, uint32_t smem, uint32_t group, uint32_t empty_bar,
                                         StageOrder& stage, Watch& watch, bool continues = false) {
  constexpr uint32_t kSliceA = kAlongM ? 2048 : 32, kSliceB = kAlongN ? 2048 : 32;
  uint32_t previous = 0;
  for (int k = 0; k < blocks; ++k) {
    const uint32_t full = smem + Shared::kFull + 8 * stage.slot;
    wait_mbarrier(watch, full, stage.phase(), kWaitOperand);
    if (idle && k > 0) {  // padding rows only, which nobody stores: one k-block is enough; none, with acc zeroed here, spills it
      if (k == 1) {
        ptx::wgmma_wait<0>();
        if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * previous);
      }
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * stage.slot);
      stage.advance();
      continue;
    }
    const uint32_t a = smem + stage.slot * kStageBytes + group * (kABytes / 2);
    const uint32_t b = smem + stage.slot * kStageBytes + kABytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < kBlockK / 16; ++slice)
      ptx::wgmma_m64n256k16<kAlongM, kAlongN>(
          acc, kAlongM ? ptx::wgmma_descriptor_mn(a + slice * kSliceA, kABytes / 2) : ptx::wgmma_descriptor(a + slice * kSliceA),
          kAlongN ? ptx::wgmma_descriptor_mn(b + slice * kSliceB, kBBytes / 4) : ptx::wgmma_descriptor(b + slice * kSliceB),
          k | slice | static_cast<int>(continues));
    ptx::wgmma_commit();
    if (k > 0) {
      ptx::wgmma_wait<1>();
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * previous);
    }
    previous = stage.slot;
    stage.advance();
  }
  ptx::wgmma_wait<0>();
  if (empty_bar != 0 && !(idle && blocks > 1)) ptx::mbarrier_arrive_cluster(empty_bar + 8 * previous);
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// True in all 128 threads of a warpgroup if it is true in one: wgmma needs them to leave together.
__device__ __forceinline__ bool any_of_group(bool value, uint32_t group) {
  uint32_t result;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.or.pred q, %2, 128, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(result) : "r"(static_cast<uint32_t>(value)), "r"(group + 1) : "memory");
  return result != 0;
}

__device__ __forceinline__ void compute_tiles(const ForwardParams& p, uint32_t smem, uint32_t group) {
  Watch watch = watch_of(p.limits);
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
  const int in_tile = group * 64 + warp * 16;  // this warp's first row in the tile
  // Two lanes of a warp give stages back, one to each CTA.
  const uint32_t empty_bar = lane < 2 ? ptx::cluster_address(smem + Shared::kEmpty, lane) : 0;
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  RingPosition<kTaskSlots> at;
  StageOrder stage;
  Handover handover;
  float acc[128];
  for (;;) {
    const Task task = read_task(smem, at, watch);
    if (any_of_group(task.is_end(), group)) break;
    const uint32_t kind = task.kind();
    const bool shared = kind >= kTaskSharedGateUp, gate_up = kind == kTaskGateUp || kind == kTaskSharedGateUp;
    const int column = task.column_of(cta) * (gate_up ? kGateUpColumns : kDownColumns);
    const int inter = shared ? p.shared_inter : p.inter;

    const bool idle = group == 1 && task.short_of(cta);
    multiply(acc, (gate_up ? p.hidden : inter) / kBlockK, idle, smem, group, empty_bar, stage, watch);
    if (thread == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);
    const uint32_t borrowed = stage.borrow(gate_up ? kPassedByGateUp : kPassedByDown);
    if (column >= (gate_up ? inter : p.hidden)) {  // this CTA only helped its neighbour to load
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
      continue;
    }
    handover.wait_free(smem, watch);
    if (gate_up) {
      gate_up_epilogue(acc, p.swiglu_limit, p.stores_gate_up(), p.stores_hidden(), smem, in_tile, borrowed, handover, watch);
    } else {
      rows_epilogue(acc, smem, in_tile, borrowed, handover, watch);
    }
  }
}

}  // namespace mok::cuda::sm90
