// The pushing warp of the backward.
#pragma once
#include "backward_params.cuh"
#include "push.cuh"

namespace mok::cuda::sm90 {

// d_gate, d_up and w * h of a dgrad_down tile, a stage for each 64 columns, to these rows. The upper half of a short tile holds nothing.
template <class Multiplied>
__device__ __forceinline__ bool push_hidden_gradient(Outbox& box, const CUtensorMap* d_gate_up, const CUtensorMap* weighted_h, int column, int width,
                                                     int d_gate_up_row, int row, bool is_short, Multiplied multiplied) {
  for (int x = column; x < min(column + kWideColumns, width); x += kDotColumns) {
    const uint32_t stage = box.take(multiplied);
    if (stage == kStages) return false;
    if (threadIdx.x % 32 == 0) {
      for (int y = 0; y < (is_short ? kBoxRows : kBlockM); y += kBoxRows) {
        const uint32_t from = box.smem + stage * kStageBytes + y * 128;
        ptx::tensor_store_2d(d_gate_up, from, x, d_gate_up_row + y, ptx::evict_normal());
        ptx::tensor_store_2d(d_gate_up, from + kABytes, width + x, d_gate_up_row + y, ptx::evict_normal());
        ptx::tensor_store_2d(weighted_h, from + 2 * kABytes, x, row + y, ptx::evict_normal());
      }
      ptx::bulk_commit();
    }
    box.release();
    box.give_back(stage);
  }
  return true;
}

// A finished output tile of a weight gradient. Of an unfinished one the consumers have stored the carry, and what goes into fp32 sums they have added.
template <class Multiplied>
__device__ __forceinline__ bool push_weight_gradient(Outbox& box, const BackwardParams& p, const BackwardTask& task, int row, Multiplied multiplied) {
  const uint32_t stage = box.take(multiplied);
  if (stage == kStages) return false;
  if (threadIdx.x % 32 == 0 && task.last() && p.sum_of(task.kind()) == nullptr) {
    const CUtensorMap* to = nullptr;
    bool add = false;
    int rows = 0, columns = p.hidden;
    switch (task.kind()) {
      case kWgradGateUp: to = &p.d_gate_up_proj_out, rows = 2 * p.inter, add = p.adds_gate_up != 0; break;
      case kWgradDown: to = &p.d_down_proj_out, rows = p.hidden, columns = p.inter, add = p.adds_down != 0; break;
      case kSharedWgradGate: to = &p.d_shared_gate_out, rows = p.shared_inter; break;
      case kSharedWgradUp: to = &p.d_shared_up_out, rows = p.shared_inter; break;
      default: to = &p.d_shared_down_out, rows = p.hidden, columns = p.shared_inter; break;
    }
    const int column = task.column() * kWideColumns;
    for (int i = 0; i < kWideColumns / 64; ++i) {
      if (row >= rows || column + 64 * i >= columns) break;
      if (add) {
        ptx::tensor_add_3d(to, out_box(box.smem, stage, i), column + 64 * i, row, task.expert(), ptx::evict_first());
      } else {
        ptx::tensor_store_3d(to, out_box(box.smem, stage, i), column + 64 * i, row, task.expert(), ptx::evict_first());
      }
    }
    ptx::bulk_commit();
  }
  box.release();
  box.give_back(stage);
  return true;
}

// All 32 lanes.
__device__ __forceinline__ void push_tiles(const BackwardParams& p, uint32_t smem) {
  const BackwardPlan& plan = p.plan;
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  const int tiles = p.header->tiles;
  Outbox box(p.limits, smem);
  RingPosition<kTaskSlots> at;
  for (bool more = true; more;) {
    const BackwardTask task = read_task<BackwardTask>(smem, at, box.watch);
    if (__any_sync(~0u, task.is_end())) break;
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    const Product product(p, task);
    const bool shared = product.shared, replay = product.kind == kReplay, of_hidden = replay || product.gradient_of_hidden;
    const int tile = task.tile_of(cta);
    const int column = task.column_of(cta) * (replay ? kGateUpColumns : kWideColumns);
    const int width = of_hidden ? (shared ? p.shared_inter : p.inter) : p.hidden;
    const int row = shared ? tile * kBlockM : p.window.row(tile), reused_row = shared ? tile * kBlockM : p.reused.row(tile);
    const ColumnStamp written{p.stamps, replay ? kStampReplayed : kStampComputed, tile, column / (replay ? kGateUpColumns : kWideColumns),
                              of_hidden && !shared};
    const auto multiplied = [&] {
      if (!shared) check_inputs<32>(p, task, tile, box.watch);
      written.begin();
    };
    if (product.wgrad) {
      more = push_weight_gradient(box, p, task, task.row_of(cta) * kBlockM, multiplied);
      if (more && !shared) box.count(written, p.wgrad_done + task.expert());
      continue;
    }
    if (column >= width) continue;  // this CTA only helped its neighbour to load
    if (replay) {
      more = push_gate_up(box, &p.replayed_gate_up, nullptr, column, width, reused_row, multiplied);
      if (more) box.count(written, p.replayed + tile);
    } else if (product.gradient_of_hidden) {
      more = push_hidden_gradient(box, shared ? &p.shared_d_gate_up_out : &p.d_gate_up_out,
                                  shared ? &p.shared_weighted_h_out : &p.window_weighted_h_out, column, width, reused_row, row,
                                  task.short_of(cta), multiplied);
      if (!more) break;
      if (shared) {
        box.count(written, p.shared_ready + tile, p.shared_ready + ceil_div(p.tokens, kBlockM));
      } else {
        box.count(written, p.d_gate_up_ready + tile, p.run_ready + plan.run_of(task.expert(), tile));
      }
    } else {
      const bool reused = !shared && tile + p.reused.slots < tiles;  // another tile of d_gate_up comes to its slot
      more = push_rows(box, OutputRows(p, tile, column, shared), reused ? p.up_done + tile : nullptr, multiplied);
    }
  }
  ptx::bulk_wait_all();
}

}  // namespace mok::cuda::sm90
