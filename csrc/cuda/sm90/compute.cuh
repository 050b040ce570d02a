// Consumer warpgroups: multiply what the producer brought, then hand the tile to its epilogue.
#pragma once
#include "epilogue.cuh"
#include "wgmma.cuh"

namespace mok::cuda::sm90 {

// One wgmma group (a k-block) stays in flight while the stage before it is given back. The last tile is counted on the way, when its stores
// have had two k-blocks of time, but before any wait that may block, because the operand waited for may depend on it.
// kAlongM, kAlongN: how A and B lie (wgmma.cuh). `continues`: acc holds what the sum starts from.
template <int kAlongM = 0, int kAlongN = 0>
__device__ __forceinline__ void multiply(float (&acc)[128], int blocks, bool idle, uint32_t smem, uint32_t group, uint32_t empty_bar,
                                         StageOrder& stage, Pending& pending, Watch& watch, bool continues = false) {
  constexpr uint32_t kSliceA = kAlongM ? 2048 : 32, kSliceB = kAlongN ? 2048 : 32;
  uint32_t previous = 0;
  for (int k = 0; k < blocks; ++k) {
    const uint32_t full = smem + Shared::kFull + 8 * stage.slot;
    if (pending.counter != nullptr && (k >= 2 || !__all_sync(~0u, ptx::mbarrier_try(full, stage.phase())))) pending.settle(empty_bar);
    wait_mbarrier(watch, full, stage.phase(), kWaitOperand);
    if (idle && k > 0) {  // padding rows only: zeros, so one k-block gives the result; zeroing acc here instead spills it
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
  Pending pending;
  float acc[128];
  for (;;) {
    if (pending.counter != nullptr && !__all_sync(~0u, ptx::mbarrier_try(smem + Shared::kTaskFull + 8 * at.slot, at.phase))) pending.settle(empty_bar);
    const Task task = read_task(smem, at, watch);
    if (any_of_group(task.is_end(), group)) break;
    const uint32_t kind = task.kind();
    const bool shared = kind >= kTaskSharedGateUp, gate_up = kind == kTaskGateUp || kind == kTaskSharedGateUp;
    const int tile_index = task.tile() + (task.two() ? cta : 0);
    const int column = task.column() + (task.two() ? 0 : cta);
    const Tile tile{(shared ? tile_index : tile_index % p.ring_tiles) * kBlockM + in_tile,
                    column * (gate_up ? kGateUpColumns : kDownColumns), gate_up ? (shared ? p.shared_inter : p.inter) : p.hidden};
    const int width = gate_up ? p.hidden : (shared ? p.shared_inter : p.inter);

    const bool idle = group == 1 && task.is_short() && (!task.two() || cta == 1);
    multiply(acc, width / kBlockK, idle, smem, group, empty_bar, stage, pending, watch);
    if (thread == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    pending.settle(empty_bar);  // only a tile of fewer than three k-blocks still owes anything here
    dawdle_warp();
    if (!shared && thread < 32 && tile.column < tile.columns) check_slot<32>(p.stamps, gate_up ? kStampPulled : kStampComputed, tile_index, watch);
    if (!gate_up && !shared && thread == 0 && tile_index >= p.ring_tiles && tile.column < tile.columns)
      ptx::red_release_gpu(p.down_done + tile_index, 1);
    wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);
    const uint32_t borrowed = stage.borrow(gate_up ? kPassedByGateUp : kPassedByDown);
    if (tile.column >= tile.columns) {  // this CTA only helped its neighbour to load
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
      continue;
    }
    const Windows windows{{half_window(smem, borrowed, in_tile / 8), half_window(smem, borrowed, in_tile / 8 + 1)}};
    handover.wait_free(smem, watch);
    if (gate_up) {
      if (!shared) pending.stamp.begin(p.stamps, kStampComputed, tile_index, column * kConsumerWarps + in_tile / 16);
      gate_up_epilogue(acc, windows, tile, p.swiglu_limit,
                       p.stores_gate_up() ? (shared ? &p.shared_gate_up_out : &p.ring_gate_up_out) : nullptr,
                       p.stores_hidden() ? (shared ? &p.shared_h_out : &p.ring_h_out) : nullptr);
      pending.counter = (shared ? p.shared_h_ready : p.h_ready) + tile_index;
      pending.borrowed = borrowed;
    } else {
      handover.send(acc, windows, smem, in_tile, borrowed);
    }
  }
  pending.settle(empty_bar);
  ptx::bulk_wait_all();
}

}  // namespace mok::cuda::sm90
