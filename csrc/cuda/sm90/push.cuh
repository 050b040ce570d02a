// The pushing warp: sends finished tiles off while the consumer warps multiply the next ones, and counts them.
//
// To issue a store takes a lane some 100 ns and to count it a fence of the whole memory: when the consumer warps did that, the tensor cores
// idled for 3,000 cycles a tile. A tile comes in parts (Handover); a part may be overwritten, and its stage is free, once it has been read.
#pragma once
#include "../combine.cuh"
#include "../slots.cuh"

namespace mok::cuda::sm90 {

struct Outbox {
  uint32_t smem, empty_bar;  // lanes 0-7 and 8-15: the first empty barrier of CTA 0 and 1, for the eight consumer warps of this CTA
  Watch watch;
  RingPosition<1> full;

  __device__ __forceinline__ Outbox(const Limits& limits, uint32_t memory) : smem(memory), watch(watch_of(limits)) {
    const uint32_t lane = threadIdx.x % 32;
    empty_bar = lane < 2 * kConsumerWarps ? ptx::cluster_address(smem + Shared::kEmpty, lane / kConsumerWarps) : 0;
  }
  // The methods are for all 32 lanes. Waits for the next part and names its stage; kStages after an abort. `multiplied` may look at what the tile
  // was made of, which is not given away yet.
  template <class Multiplied>
  __device__ __forceinline__ uint32_t take(Multiplied multiplied) {
    wait_mbarrier(watch, smem + Shared::kOutFull, full.phase, kWaitOperand);
    full.advance();
    if (__any_sync(~0u, watch.dead)) return kStages;
    multiplied();
    dawdle_warp();
    return ptx::load_shared_4(smem + Shared::kOutStage);
  }
  // The part may be overwritten when all but the last kLeft groups of stores have read it.
  template <int kLeft = 0>
  __device__ __forceinline__ void release() {
    ptx::bulk_wait_read<kLeft>();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem + Shared::kOutFree);
  }
  __device__ __forceinline__ void give_back(uint32_t stage) {
    if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * stage);
  }
  // Counts what lane 0 has stored, when it is written, not merely read out of shared memory.
  __device__ __forceinline__ void count(const ColumnStamp& column, uint32_t* counter, uint32_t* sum = nullptr) {
    if (threadIdx.x % 32 == 0) {
      ptx::bulk_wait_all();
      column.end();
      ptx::fence_gpu();
      ptx::red_relaxed_gpu(counter, 1);
      if (sum != nullptr) ptx::red_relaxed_gpu(sum, 1);
    }
    __syncwarp();
  }
};

// The boxes of one side of a tile: 128 columns at `column`, of which `left` exist.
__device__ __forceinline__ void send_side(const CUtensorMap* map, uint32_t smem, uint32_t stage, int side, int column, int left, int row,
                                          uint64_t policy) {
  ptx::tensor_store_2d(map, out_box(smem, stage, 2 * side), column, row, policy);
  if (left > 64) ptx::tensor_store_2d(map, out_box(smem, stage, 2 * side + 1), column + 64, row, policy);
  ptx::bulk_commit();
}

// A gate+up tile: gate and up, then h in gate's place; either map may be null. Gate and up are for the backward and leave the L2 first, which is
// worth 1.5 % of the whole layer at kimi. False after an abort.
template <class Multiplied>
__device__ __forceinline__ bool push_gate_up(Outbox& box, const CUtensorMap* gate_up, const CUtensorMap* h, int column, int width, int row,
                                             Multiplied multiplied) {
  const bool sends = threadIdx.x % 32 == 0;
  const int left = width - column;
  uint32_t stage = kStages;
  if (gate_up != nullptr) {
    stage = box.take(multiplied);
    if (stage == kStages) return false;
    if (sends) {
      send_side(gate_up, box.smem, stage, 0, column, left, row, ptx::evict_first());
      send_side(gate_up, box.smem, stage, 1, width + column, left, row, ptx::evict_first());
    }
    if (h != nullptr) box.release<1>(); else box.release();
  }
  if (h != nullptr) {
    stage = box.take(multiplied);
    if (stage == kStages) return false;
    if (sends) send_side(h, box.smem, stage, 0, column, left, row, ptx::evict_normal());
    box.release();
  }
  box.give_back(stage);
  return true;
}

// Rows of a tile to their owners; `read`, if not null, counts tiles whose operands have been read.
template <class Multiplied>
__device__ __forceinline__ bool push_rows(Outbox& box, const OutputRows& rows, uint32_t* read, Multiplied multiplied) {
  const uint32_t stage = box.take(multiplied);
  if (stage == kStages) return false;
  if (read != nullptr && threadIdx.x % 32 == 0) ptx::red_release_gpu(read, 1);
  rows.send(box.smem, stage);
  box.release();
  box.give_back(stage);
  return true;
}

// All 32 lanes.
__device__ __forceinline__ void push_tiles(const ForwardParams& p, uint32_t smem) {
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  Outbox box(p.limits, smem);
  RingPosition<kTaskSlots> at;
  for (bool more = true; more;) {
    const Task task = read_task(smem, at, box.watch);
    if (__any_sync(~0u, task.is_end())) break;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    const uint32_t kind = task.kind();
    const bool shared = kind >= kTaskSharedGateUp, gate_up = kind == kTaskGateUp || kind == kTaskSharedGateUp;
    const int tile = task.tile_of(cta);
    const int column = task.column_of(cta) * (gate_up ? kGateUpColumns : kDownColumns);
    const int width = gate_up ? (shared ? p.shared_inter : p.inter) : p.hidden;
    if (column >= width) continue;  // this CTA only helped its neighbour to load
    const ColumnStamp written{p.stamps, kStampComputed, tile, column / kGateUpColumns, gate_up && !shared};
    const auto multiplied = [&] {
      if (!shared) check_slot<32>(p.stamps, gate_up ? kStampPulled : kStampComputed, tile, box.watch);
      written.begin();
    };
    if (gate_up) {
      // A box of half the rows lies where the first half of a whole one does. In a compact ring the next expert follows that half of a short tile.
      const int map = shared ? 2 : (p.ring.rows != nullptr && task.short_of(cta) ? 0 : 1);
      more = push_gate_up(box, p.stores_gate_up() ? p.gate_up_out + map : nullptr, p.stores_hidden() ? p.h_out + map : nullptr, column, width,
                          shared ? tile * kBlockM : p.ring.row(tile), multiplied);
      if (more) box.count(written, (shared ? p.shared_h_ready : p.h_ready) + tile);
    } else {
      const bool reused = !shared && tile >= p.ring.slots;  // another tile of h comes to its slot
      more = push_rows(box, OutputRows(p, tile, column, shared), reused ? p.down_done + tile : nullptr, multiplied);
    }
  }
  ptx::bulk_wait_all();
}

}  // namespace mok::cuda::sm90
