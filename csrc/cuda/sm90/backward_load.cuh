// Producer, scheduler and dispatch warps of the backward.
#pragma once
#include "../dispatch.cuh"
#include "backward_params.cuh"
#include "load.cuh"

namespace mok::cuda::sm90 {

// One lane of the cluster's first CTA.
__device__ __forceinline__ void schedule_backward_tasks(const BackwardParams& p, uint32_t smem) {
  Watch watch = watch_of(p.limits);
  BackwardPlan plan = p.plan;
  plan.tiles = p.header->tiles;
  if (!p.any_wants_dx()) plan.up_columns = 0;
  BackwardWalk walk(plan);
  RingPosition<kTaskSlots> at;
  for (bool more = true; more;) {
    wait_mbarrier(watch, smem + Shared::kTaskEmpty + 8 * at.slot, at.phase ^ 1, kWaitTask);
    dawdle();
    BackwardTask task = BackwardTask::end();
    while (!watch.dead && !walk.take(atomicAdd(p.tickets + kComputeTicket, 1u), &task)) {}
    more = !task.is_end();
    for (uint32_t cta = 0; cta < 2; ++cta) {
      const uint32_t to = ptx::cluster_address(smem + Shared::kTask + 16 * at.slot, cta);
      ptx::store_cluster_8(to, task.head | static_cast<uint64_t>(static_cast<uint32_t>(task.tile())) << 32);
      ptx::store_cluster_8(to + 8, task.place | static_cast<uint64_t>(static_cast<uint32_t>(task.count)) << 32);
      ptx::mbarrier_release_cluster(ptx::cluster_address(smem + Shared::kTaskFull + 8 * at.slot, cta));
    }
    at.advance();
  }
}

// Blocks until what this CTA reads is there and what it writes is free (backward_tasks.cuh says what that is).
__device__ __forceinline__ bool wait_inputs(const BackwardParams& p, const BackwardTask& task, int tile, bool dx, Watch& watch) {
  const BackwardPlan& plan = p.plan;
  bool ok = true;
  switch (task.kind()) {
    case kReplay:
    case kDgradDown:
      ok = wait_counter(watch, p.landed + tile, kRowsPerTile, kWaitDispatched, tile);
      if (ok && task.kind() == kDgradDown && task.replayed()) ok = wait_counter(watch, p.replayed + tile, plan.replay_columns, kWaitReplayed, tile);
      if (ok && dx && tile >= p.reused.slots) ok = wait_counter(watch, p.up_done + tile - p.reused.slots, plan.up_columns, kWaitSlot, tile);
      break;
    case kDgradUp: ok = wait_counter(watch, p.d_gate_up_ready + tile, plan.down_columns, kWaitHidden, tile); break;
    case kSharedDgradUp: ok = wait_counter(watch, p.shared_ready + tile, plan.shared_down_columns, kWaitHidden, tile); break;
    case kSharedDgradDown: break;
    case kWgradGateUp:
    case kWgradDown:
      ok = wait_counter(watch, p.run_ready + task.tile(), plan.down_columns * task.count, kWaitHidden, task.tile());
      if (ok && !task.first()) {
        ok = wait_counter(watch, p.wgrad_done + task.expert(), p.wgrad_arrivals() * (plan.rounds(task.expert(), task.tile() / plan.window) - 1),
                          kWaitCarry, task.expert());
      } else if (ok && !task.last()) {
        const int before = plan.carry_before(task.tile() / plan.window);
        if (before >= 0)
          ok = wait_counter(watch, p.wgrad_done + before,
                            p.wgrad_arrivals() * plan.rounds(before, (plan.tile_prefix[before + 1] - 1) / plan.window), kWaitCarry, before);
      }
      break;
    default:
      ok = wait_counter(watch, p.shared_ready + task.count, plan.shared_down_columns * task.count, kWaitHidden, tile);
  }
  ptx::fence_proxy_async();
  return ok;
}

// One lane of each CTA. For every k-block its own operand and half of the one that both CTAs use, multicast to both.
__device__ __forceinline__ void load_backward_operands(const BackwardParams& p, uint32_t smem) {
  Watch watch = watch_of(p.limits);
  const bool dx = p.any_wants_dx();
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  RingPosition<kTaskSlots> at;
  StageOrder stage;
  const auto stage_free = [&] { return wait_mbarrier(watch, smem + Shared::kEmpty + 8 * stage.slot, stage.phase() ^ 1, kWaitOperand); };
  for (;;) {
    const BackwardTask task = read_task<BackwardTask>(smem, at, watch);
    if (task.is_end()) break;
    ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();

    const Product product(p, task);
    const uint32_t kind = product.kind;
    const bool two = task.two(), shared = product.shared;
    const int tile = task.tile_of(cta);
    const int column = task.column_of(cta) * (kind == kReplay ? kGateUpColumns : kWideColumns);
    // Of the row tile, in the window or among this rank's tokens; of its d_gate_up; and of its x, gate and up.
    const int row = shared ? tile * kBlockM : p.window.row(tile);
    const int reused_row = shared ? tile * kBlockM : p.reused.row(tile);
    const int kept_row = shared || task.replayed() ? reused_row : p.ring.row(tile);
    dawdle();
    if (!wait_inputs(p, task, tile, dx, watch)) break;
    if (!shared) check_inputs<1>(p, task, tile, watch);
    dawdle();
    // Gate and up of a dgrad_down tile, for its epilogue.
    const CUtensorMap* kept = shared ? &p.shared_gate_up : (task.replayed() ? &p.replayed_gate_up : &p.ring_gate_up);
    const int kept_width = shared ? p.shared_inter : p.inter;
    if (product.gradient_of_hidden) {
      // All clusters come to their epilogues together: unless these lie in the L2 by then, they wait for the memory together.
      for (int x = column; x < min(column + kWideColumns, kept_width); x += 64) {
        ptx::tensor_prefetch_2d(kept, x, kept_row);
        ptx::tensor_prefetch_2d(kept, kept_width + x, kept_row);
      }
    }

    if (product.wgrad) {
      // An expert's tiles in a macrobatch lie one behind the other, in the window and in the ring.
      const int output_row = task.row_of(cta) * kBlockM + (kind == kSharedWgradUp ? p.shared_inter : 0);
      const CUtensorMap *a_map, *b_map;
      int a_row = row, b_row = row;
      switch (kind) {
        case kWgradGateUp:
          a_map = &p.columns_d_gate_up, b_map = task.replayed() ? &p.replayed_x : &p.ring_x, a_row = reused_row, b_row = kept_row;
          break;
        case kWgradDown: a_map = &p.columns_dout, b_map = &p.window_weighted_h; break;
        case kSharedWgradDown: a_map = &p.shared_columns_dout, b_map = &p.shared_weighted_h; break;
        default: a_map = &p.shared_columns_d_gate_up, b_map = &p.local_x; break;
      }
      const int a_chunk = output_row / 64, b_chunk = column / 64 + 2 * cta;
      const uint32_t half = kABytes + cta * (kBBytes / 2);
      each_block(smem, product.blocks, stage, watch, [&](uint32_t full, uint32_t a, int k) {
        ptx::tensor_load_4d(a, a_map, full, 0, a_row + k, a_chunk, 0);
        ptx::tensor_load_4d_multicast(a + half, b_map, full, 0, b_row + k, b_chunk, 0, 3);
      });
    } else if (kind == kReplay) {
      const int matrix = 2 * task.expert();
      each_block(smem, product.blocks, stage, watch, [&](uint32_t full, uint32_t a, int k) {
        if (two) {
          ptx::tensor_load_2d(a, &p.replay_x, full, k, reused_row);
          ptx::tensor_load_2d(a + kABytes / 2, &p.replay_x, full, k, reused_row + kBoxRows);
          ptx::tensor_load_3d_multicast(a + kABytes + cta * (kBBytes / 2), &p.replay_weights, full, k, column, matrix + cta, 3);
        } else {
          ptx::tensor_load_2d_multicast(a + cta * (kABytes / 2), &p.replay_x, full, k, reused_row + kBoxRows * cta, 3);
          ptx::tensor_load_3d(a + kABytes, &p.replay_weights, full, k, column, matrix);
          ptx::tensor_load_3d(a + kABytes + kBBytes / 2, &p.replay_weights, full, k, column, matrix + 1);
        }
      });
    } else {
      // The k-blocks of dgrad_up run over gate's weights, then over up's.
      const bool up = !product.gradient_of_hidden;
      const CUtensorMap* a_map = shared ? (up ? p.shared_d_gate_up : p.local_dout) : (up ? p.d_gate_up : p.window_dout);
      const int blocks = up ? product.blocks / 2 : product.blocks, chunk = column / 64 + (two ? 2 * cta : 0);
      const int a_row = up ? reused_row : row;
      for (int side = 0; side <= static_cast<int>(up); ++side) {
        const CUtensorMap* b_map = shared ? (up ? (side == 0 ? &p.shared_gate : &p.shared_up) : &p.shared_down) : (up ? &p.gate_up_proj : &p.down_proj);
        const int matrix = shared ? 0 : (up ? 2 * task.expert() + side : task.expert()), first = side * blocks * kBlockK;
        if (two) {
          const uint32_t half = kABytes + cta * (kBBytes / 2);
          each_block(smem, blocks, stage, watch, [&](uint32_t full, uint32_t a, int k) {
            ptx::tensor_load_2d(a, a_map + 1, full, first + k, a_row);
            ptx::tensor_load_4d_multicast(a + half, b_map, full, 0, k, chunk, matrix, 3);
          });
        } else {
          each_block(smem, blocks, stage, watch, [&](uint32_t full, uint32_t a, int k) {
            ptx::tensor_load_2d_multicast(a + cta * (kABytes / 2), a_map, full, first + k, a_row + kBoxRows * cta, 3);
            ptx::tensor_load_4d(a + kABytes, b_map, full, 0, k, chunk, matrix);
            ptx::tensor_load_4d(a + kABytes + kBBytes / 2, b_map, full, 0, k, chunk + 2, matrix);
          });
        }
      }
    }
    if (watch.dead) break;
    if (product.gradient_of_hidden) {
      // They follow through the pipeline, 64 columns a stage, and leave it as their gradients (dswiglu.cuh).
      for (int i = 0; i < kGateUpBlocks; ++i) {
        if (!stage_free()) break;
        const uint32_t full = smem + Shared::kFull + 8 * stage.slot, to = smem + stage.slot * kStageBytes;
        const int x = column + 64 * i;
        if (x < kept_width) {
          ptx::mbarrier_expect(full, 2 * kABytes);
          ptx::tensor_load_2d(to, kept, full, x, kept_row);
          ptx::tensor_load_2d(to + kABytes, kept, full, kept_width + x, kept_row);
        } else {
          ptx::mbarrier_arrive(full);
        }
        stage.advance();
      }
    } else {
      // A stage without operands: the epilogue's room, once every consumer of both CTAs is through with it.
      if (!stage_free()) break;
      ptx::mbarrier_arrive(smem + Shared::kFull + 8 * stage.slot);
      stage.borrow(kind == kReplay ? kPassedByGateUp : (product.wgrad ? kPassedByGradient : kPassedByDown));
    }
    if (watch.dead) break;
  }
}

// Reverse-combine, and dispatch again where a tile is replayed: rows of dOut (and x) from their owners, with the routes' weights. A warp that
// pulls, until there are no tickets left.
__device__ __forceinline__ void pull_rows(const BackwardParams& p, CopyRing ring) {
  const int lane = threadIdx.x % 32;
  const int tiles = p.header->tiles;
  const uint32_t row_bytes = p.hidden * 2;
  const BackwardPlan& plan = p.plan;
  Watch watch = watch_of(p.limits);
  Ticket ticket;
  while (ticket.take(p.tickets + kDispatchTicket, p.head_tiles, tiles) && !__any_sync(~0u, watch.dead)) {
    const int tile = ticket.index;
    const int64_t entry = lane < kDispatchRows ? p.rows[static_cast<int64_t>(tile) * kRowsPerTile + ticket.in_tile + lane] : 0;
    const int64_t row = static_cast<int64_t>(p.window.row(tile)) + ticket.in_tile;
    dawdle_warp();
    if (!kSlotFault && lane == 0) {
      if (tile >= p.lead_tiles)
        wait_counter(watch, p.d_gate_up_ready + tile - p.lead_tiles, plan.down_columns, kWaitSlot, tile);
      const int previous = tile - plan.window;
      if (previous >= 0) {
        if (plan.wgrad_tasks() > 0) {
          const int expert = plan.expert_of(previous);
          wait_counter(watch, p.wgrad_done + expert, p.wgrad_arrivals() * plan.rounds(expert, previous / plan.window), kWaitSlot, tile);
        } else {
          wait_counter(watch, p.d_gate_up_ready + previous, plan.down_columns, kWaitSlot, tile);
        }
      }
      ptx::fence_proxy_async();
    }
    __syncwarp();
    stamp(p.stamps, kStampPulled, tile, ticket.in_tile, kDispatchRows, false);
    const uint32_t padding = __ballot_sync(~0u, lane < kDispatchRows && entry < 0), routed = ~padding & kTicketRows;
    if (padding != 0 && p.window.owns(tile, ticket.in_tile)) clear_rows(padding, p.dout_out + row * p.hidden, row_bytes);
    ring.copy_rows(watch, routed, source_row(p.peer_dout, entry, p.topk, p.hidden), p.dout_out + row * p.hidden, row_bytes);
    if (p.replays(tile)) {
      __nv_bfloat16* to = p.x_out + static_cast<int64_t>(p.reused.row(tile) + ticket.in_tile) * p.hidden;
      clear_rows(padding, to, row_bytes);
      ring.copy_rows(watch, routed, source_row(p.peer_x, entry, p.topk, p.hidden), to, row_bytes);
    }
    if (lane < kDispatchRows)
      p.weight_out[p.weight_row(tile) + ticket.in_tile + lane] = entry < 0 ? 0.0f : p.peer_weight[row_rank(entry)][row_route(entry)];
    if (lane == 0) ptx::bulk_wait_all();
    stamp(p.stamps, kStampPulled, tile, ticket.in_tile, kDispatchRows, true);
    __syncwarp();
    if (lane == 0 && !watch.dead) ptx::red_release_gpu(p.landed + tile, kDispatchRows);
  }
}

// The first tiles, of macrobatch 0, by the consumer warps.
__device__ __forceinline__ void pull_head(const BackwardParams& p, int cta, int ctas) {
  for_head_rows(watch_of(p.limits), min(p.head_tiles, p.header->tiles), cta, ctas, p.landed, 0, 1, [&](int tile, int r) {
    const int64_t entry = p.rows[static_cast<int64_t>(tile) * kRowsPerTile + r];
    stamp(p.stamps, kStampPulled, tile, r, 1, false);
    if (p.window.owns(tile, r))
      copy_row(reinterpret_cast<uint4*>(p.dout_out + (static_cast<int64_t>(p.window.row(tile)) + r) * p.hidden),
               reinterpret_cast<const uint4*>(source_row(p.peer_dout, entry, p.topk, p.hidden)), p.hidden / 8);
    if (threadIdx.x % 32 == 0) p.weight_out[p.weight_row(tile) + r] = entry < 0 ? 0.0f : p.peer_weight[row_rank(entry)][row_route(entry)];
    stamp(p.stamps, kStampPulled, tile, r, 1, true);
  });
}

}  // namespace mok::cuda::sm90
