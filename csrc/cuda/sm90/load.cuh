// Producer warp: brings the operands of every task into the stages; and the scheduler warp: takes the cluster's tasks.
#pragma once
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

// One lane of the cluster's first CTA. Takes one task ahead of the consumers, so the ticket's latency is hidden.
__device__ __forceinline__ void schedule_tasks(const ForwardParams& p, uint32_t smem) {
  Watch watch = watch_of(p.limits);
  const uint32_t tasks = p.header->tasks;
  RingPosition<kTaskSlots> at;
  for (bool more = true; more;) {
    wait_mbarrier(watch, smem + Shared::kTaskEmpty + 8 * at.slot, at.phase ^ 1, kWaitTask);
    dawdle();
    const uint32_t ticket = atomicAdd(p.tickets + kComputeTicket, 1u);
    more = ticket < tasks && !watch.dead;
    const uint64_t task = more ? p.tasks[ticket] : Task::end().bits;
    for (uint32_t cta = 0; cta < 2; ++cta) {
      ptx::store_cluster_8(ptx::cluster_address(smem + Shared::kTask + 16 * at.slot, cta), task);
      ptx::mbarrier_release_cluster(ptx::cluster_address(smem + Shared::kTaskFull + 8 * at.slot, cta));
    }
    at.advance();
  }
}

// Blocks until the rows this CTA reads are there and the rows it writes are free (tasks.cuh says which tasks those are).
__device__ __forceinline__ bool wait_rows(const ForwardParams& p, const Task& task, int tile, Watch& watch) {
  if (p.ladder == kMokGateUpOnly || p.ladder == kMokDownOnly) return true;
  bool ok = true;
  switch (task.kind()) {
    case kTaskGateUp:
      if (p.dispatches()) ok = wait_counter(watch, p.x_ready + tile, kRowsPerTile, kWaitDispatched, tile);
      if (ok && tile + p.ring.slots < p.header->tiles)
        ok = wait_counter(watch, p.down_done + tile + p.ring.slots, p.columns.down, kWaitSlot, tile);
      break;
    case kTaskDown:
      ok = wait_counter(watch, p.h_ready + tile, p.columns.gate_up, kWaitHidden, tile);
      break;
    case kTaskSharedDown:
      ok = wait_counter(watch, p.shared_h_ready + tile, p.columns.shared_gate_up, kWaitHidden, tile);
      break;
    default: break;
  }
  ptx::fence_proxy_async();  // the counter was read by an ordinary load, the rows are read by the copy engine
  return ok;
}

// Hands each k-block's stage to `issue`(barrier, stage, first column), which starts its loads. A loop of its own for each layout of operands:
// the loading lane has about as many cycles for a k-block as the tensor cores have (the backward lost a fifth to a loop with branches).
template <class Issue>
__device__ __forceinline__ void each_block(uint32_t smem, int blocks, StageOrder& stage, Watch& watch, Issue issue) {
  for (int block = 0, k = 0; block < blocks; ++block, k += kBlockK) {
    if (!wait_mbarrier(watch, smem + Shared::kEmpty + 8 * stage.slot, stage.phase() ^ 1, kWaitOperand)) return;
    const uint32_t full = smem + Shared::kFull + 8 * stage.slot;
    ptx::mbarrier_expect(full, kStageBytes);
    issue(full, smem + stage.slot * kStageBytes, k);
    stage.advance();
  }
}

// One lane of each CTA. For every k-block: its own operand, and half of the operand that both CTAs use (multicast to both).
__device__ __forceinline__ void load_operands(const ForwardParams& p, uint32_t smem) {
  Watch watch = watch_of(p.limits);
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  RingPosition<kTaskSlots> at;
  StageOrder stage;
  for (;;) {
    const Task task = read_task(smem, at, watch);
    if (task.is_end()) break;
    ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();

    const uint32_t kind = task.kind();
    const bool shared = kind >= kTaskSharedGateUp, gate_up = kind == kTaskGateUp || kind == kTaskSharedGateUp;
    const bool two = task.two();
    const int tile = task.tile_of(cta);
    const int column = task.column_of(cta);
    const int row = shared ? tile * kBlockM : p.ring.row(tile);
    const CUtensorMap* rows = shared ? (gate_up ? p.local_x : p.shared_h) : (gate_up ? p.ring_x : p.ring_h);
    // The two halves of the weight tile: gate and up rows, or the lower and the upper 128 output columns.
    const CUtensorMap* half0 = shared ? (gate_up ? &p.shared_gate : &p.shared_down) : (gate_up ? &p.gate_up_proj : &p.down_proj);
    const CUtensorMap* half1 = shared && gate_up ? &p.shared_up : half0;
    const int y0 = gate_up ? column * kGateUpColumns : column * kDownColumns;
    const int y1 = gate_up ? y0 : y0 + kBoxColumns;
    const int z0 = shared ? 0 : (gate_up ? 2 * task.expert() : task.expert());
    const int z1 = !shared && gate_up ? z0 + 1 : z0;
    const int width = gate_up ? p.hidden : (shared ? p.shared_inter : p.inter);

    dawdle();
    if (!wait_rows(p, task, tile, watch)) break;
    if (!shared) check_slot<1>(p.stamps, gate_up ? kStampPulled : kStampComputed, tile, watch);
    dawdle();
    if (two) {
      const CUtensorMap *half = cta ? half1 : half0, *whole_rows = rows + 1;  // the same rows in boxes of a whole tile
      const int y = cta ? y1 : y0, z = cta ? z1 : z0;
      const uint32_t to_b = kABytes + cta * (kBBytes / 2);
      each_block(smem, width / kBlockK, stage, watch, [&](uint32_t full, uint32_t to, int k) {
        ptx::tensor_load_2d(to, whole_rows, full, k, row);
        ptx::tensor_load_3d_multicast(to + to_b, half, full, k, y, z, 3);
      });
    } else {
      const uint32_t to_a = cta * (kABytes / 2);
      const int row_of_half = row + cta * kBoxRows;
      each_block(smem, width / kBlockK, stage, watch, [&](uint32_t full, uint32_t to, int k) {
        ptx::tensor_load_2d_multicast(to + to_a, rows, full, k, row_of_half, 3);
        ptx::tensor_load_3d(to + kABytes, half0, full, k, y0, z0);
        ptx::tensor_load_3d(to + kABytes + kBBytes / 2, half1, full, k, y1, z1);
      });
    }
    if (watch.dead) break;
    // A stage without operands: the epilogue's room, once every consumer of both CTAs is through with it.
    if (!wait_mbarrier(watch, smem + Shared::kEmpty + 8 * stage.slot, stage.phase() ^ 1, kWaitOperand)) break;
    ptx::mbarrier_arrive(smem + Shared::kFull + 8 * stage.slot);
    stage.borrow(gate_up ? kPassedByGateUp : kPassedByDown);
  }
}

}  // namespace mok::cuda::sm90
