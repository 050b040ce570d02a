// Producer warp: brings the operands of every task into the stages; and the scheduler warp: takes the cluster's tasks.
#pragma once
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

// One lane of the cluster's first CTA. Takes one task ahead of the consumers, so the ticket's latency is hidden.
__device__ __forceinline__ void schedule_tasks(const ForwardParams& p, uint32_t smem) {
  Watch watch = p.watch();
  const uint32_t tasks = p.header->tasks;
  RingPosition<kTaskSlots> at;
  for (bool more = true; more;) {
    wait_mbarrier(watch, smem + Shared::kTaskEmpty + 8 * at.slot, at.phase ^ 1, kWaitTask);
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
      if (ok && tile + p.ring_tiles < p.header->tiles)
        ok = wait_counter(watch, p.down_done + tile + p.ring_tiles, 2 * p.columns.down, kWaitSlot, tile);
      break;
    case kTaskDown:
      ok = wait_counter(watch, p.h_ready + tile, kConsumerWarps * p.columns.gate_up, kWaitHidden, tile);
      break;
    case kTaskSharedDown:
      ok = wait_counter(watch, p.shared_h_ready + tile, kConsumerWarps * p.columns.shared_gate_up, kWaitHidden, tile);
      break;
    default: break;
  }
  ptx::fence_proxy_async();  // the counter was read by an ordinary load, the rows are read by the copy engine
  return ok;
}

// One lane of each CTA. For every k-block: its own operand, and half of the operand that both CTAs use (multicast to both).
__device__ __forceinline__ void load_operands(const ForwardParams& p, uint32_t smem) {
  Watch watch = p.watch();
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
    const int tile = task.tile() + (two ? cta : 0);
    const int column = task.column() + (two ? 0 : cta);
    const int row = (shared ? tile : tile % p.ring_tiles) * kBlockM;
    const CUtensorMap* rows = shared ? (gate_up ? &p.local_x : &p.shared_h) : (gate_up ? &p.ring_x : &p.ring_h);
    // The two halves of the weight tile: gate and up rows, or the lower and the upper 128 output columns.
    const CUtensorMap* half0 = shared ? (gate_up ? &p.shared_gate : &p.shared_down) : (gate_up ? &p.gate_up_proj : &p.down_proj);
    const CUtensorMap* half1 = shared && gate_up ? &p.shared_up : half0;
    const int y0 = gate_up ? column * kGateUpColumns : column * kDownColumns;
    const int y1 = gate_up ? y0 : y0 + kBoxColumns;
    const int z0 = shared ? 0 : (gate_up ? 2 * task.expert() : task.expert());
    const int z1 = !shared && gate_up ? z0 + 1 : z0;
    const int width = gate_up ? p.hidden : (shared ? p.shared_inter : p.inter);

    if (!wait_rows(p, task, tile, watch)) break;
    for (int k = 0; k < width; k += kBlockK) {
      if (!wait_mbarrier(watch, smem + Shared::kEmpty + 8 * stage.slot, stage.phase() ^ 1, kWaitOperand)) break;
      const uint32_t full = smem + Shared::kFull + 8 * stage.slot;
      const uint32_t a = smem + stage.slot * kStageBytes, b = a + kABytes;
      ptx::mbarrier_expect(full, kStageBytes);
      if (two) {
        ptx::tensor_load_2d(a, rows, full, k, row);
        ptx::tensor_load_2d(a + kABytes / 2, rows, full, k, row + kBoxRows);
        ptx::tensor_load_3d_multicast(b + cta * (kBBytes / 2), cta ? half1 : half0, full, k, cta ? y1 : y0, cta ? z1 : z0, 3);
      } else {
        ptx::tensor_load_2d_multicast(a + cta * (kABytes / 2), rows, full, k, row + cta * kBoxRows, 3);
        ptx::tensor_load_3d(b, half0, full, k, y0, z0);
        ptx::tensor_load_3d(b + kBBytes / 2, half1, full, k, y1, z1);
      }
      stage.advance();
    }
    if (watch.dead) break;
    // A stage without operands: the epilogue's room, once every consumer of both CTAs is through with it.
    wait_mbarrier(watch, smem + Shared::kEmpty + 8 * stage.slot, stage.phase() ^ 1, kWaitOperand);
    ptx::mbarrier_arrive(smem + Shared::kFull + 8 * stage.slot);
    stage.borrow(gate_up ? kPassedByGateUp : kPassedByDown);
  }
  if (watch.dead) __nanosleep(1000000);  // loads that are under way land before the cluster may exit
}

}  // namespace mok::cuda::sm90
