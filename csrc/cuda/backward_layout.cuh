// What lies where in the backward's workspace, and its plan.
#pragma once
#include "backward_tasks.cuh"
#include "layout.cuh"

namespace mok::cuda {

constexpr int kWideColumns = 256;   // columns of every output tile of the backward
constexpr int kDotColumns = 64;     // of one partial sum of a router gradient

MOK_HD int window_tiles(const MokBackwardArgs& b) { return b.window_tiles > 0 ? b.window_tiles : ring_slots(b.forward); }
// The window holds everything as the ring does, with half a tile of rows for a short tile.
MOK_HD bool compact_window(const MokBackwardArgs& b) { return is_compact(b.forward) && window_tiles(b) >= tile_capacity(b.forward); }
MOK_HD int64_t window_rows(const MokBackwardArgs& b) {
  return static_cast<int64_t>(compact_window(b) ? b.forward.ring_tiles : window_tiles(b)) * kRowsPerTile;
}
MOK_HD bool may_replay(const MokBackwardArgs& b) { return tile_capacity(b.forward) > ring_slots(b.forward); }
MOK_HD int column_tiles(int width) { return static_cast<int>(ceil_div(width, kWideColumns)); }
MOK_HD int row_pairs(int width) { return static_cast<int>(ceil_div(width, 2 * kRowsPerTile)); }
MOK_HD int64_t grid_tiles(int rows, int columns) { return 2 * static_cast<int64_t>(row_pairs(rows)) * column_tiles(columns); }

// Parts of a tile of which gate and up are computed again: column tiles.
MOK_HD int replayed_parts(const MokBackwardArgs& b) {
  return may_replay(b) ? static_cast<int>(ceil_div(b.forward.inter, kGateUpColumns)) : 0;
}

// Counters (cleared by every call): tickets | landed, replayed, d_gate_up, runs, dgrad_up [tiles] | wgrad [L] | shared d_gate_up [token tiles + 1] | stamps
// Window: dOut, d_gate_up, w * h, and for replay x and gate_up, by tile % window or compact; the weights w, by tile % window
// Partial router gradients [rows, I / 64], by absolute row; the shared expert's d_gate_up, scale * h and partials; one expert's fp32 carry
// The ring, where it is reused, has room for all d_gate_up and for what is replayed.
struct BackwardLayout {
  int64_t tickets, landed, replayed, d_gate_up_ready, run_ready, up_done, wgrad_done, shared_ready, stamps, cleared_bytes;
  int64_t dout, d_gate_up, weighted_h, weight, x, gate_up;
  int64_t dots, shared_d_gate_up, shared_weighted_h, shared_dots, carry_gate_up, carry_down, bytes;

  MOK_HD static BackwardLayout make(const MokBackwardArgs& b) {
    const MokForwardArgs& a = b.forward;
    const int64_t tiles = tile_capacity(a), counters = align256(tiles * 4), rows = window_rows(b);
    const int64_t shared = a.shared_inter > 0 ? a.tokens : 0, own_rows = b.reuses_ring != 0 ? 0 : rows, own_shared = b.reuses_ring != 0 ? 0 : shared;
    const int64_t replay_rows = may_replay(b) ? own_rows : 0;
    const bool carries = tiles > window_tiles(b);
    int64_t end = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = end;
      end += align256(bytes);
      return at;
    };
    BackwardLayout l{};
    l.tickets = take(256);
    l.landed = take(counters), l.replayed = take(counters), l.d_gate_up_ready = take(counters);
    l.run_ready = take(counters), l.up_done = take(counters);
    l.wgrad_done = take(a.local_experts * 4), l.shared_ready = take((shared_tiles(a) + 1) * 4);
    l.stamps = take(stamp_bytes(window_tiles(b), kRowsPerTile, column_tiles(a.inter), replayed_parts(b)));
    l.cleared_bytes = end;
    l.dout = take(rows * a.hidden * 2), l.d_gate_up = take(own_rows * a.inter * 4), l.weighted_h = take(rows * a.inter * 2);
    l.weight = take(static_cast<int64_t>(window_tiles(b)) * kRowsPerTile * 4);
    l.x = take(replay_rows * a.hidden * 2), l.gate_up = take(replay_rows * a.inter * 4);
    l.dots = take(tiles * kRowsPerTile * (a.inter / kDotColumns) * 4);
    l.shared_d_gate_up = take(own_shared * a.shared_inter * 4), l.shared_weighted_h = take(shared * a.shared_inter * 2);
    l.shared_dots = take(shared * (a.shared_inter / kDotColumns) * 4);
    l.carry_gate_up = take(carries && b.d_gate_up_proj != nullptr ? grid_tiles(2 * a.inter, a.hidden) * kRowsPerTile * kWideColumns * 4 : 0);
    l.carry_down = take(carries && b.d_down_proj != nullptr ? grid_tiles(a.hidden, a.inter) * kRowsPerTile * kWideColumns * 4 : 0);
    l.bytes = end;
    return l;
  }
};

inline bool shared_needed(const MokBackwardArgs& b) {
  return b.forward.shared_inter > 0 && b.forward.tokens > 0 &&
         (b.shared_dx != nullptr || b.d_shared_gate != nullptr || b.d_shared_up != nullptr || b.d_shared_down != nullptr || b.d_shared_scale != nullptr);
}

// `tiles` is filled in on the device, and so is up_columns where other ranks have a say in it.
inline BackwardPlan plan_of(const MokBackwardArgs& b, int clusters) {
  const MokForwardArgs& a = b.forward;
  const ScheduleLayout s = ScheduleLayout::make(a);
  BackwardPlan p{};
  p.tile_prefix = at<const int32_t>(a.schedule, s.tile_prefix);
  p.unit_prefix = at<const int32_t>(a.schedule, s.unit_prefix);
  p.expert_rows = at<const int32_t>(a.schedule, s.expert_rows);
  p.experts = a.local_experts, p.window = window_tiles(b), p.saved = ring_slots(a), p.tokens = a.tokens;
  p.replay_columns = static_cast<int>(ceil_div(a.inter, kGateUpColumns));
  p.down_columns = column_tiles(a.inter), p.up_columns = column_tiles(a.hidden);
  const auto grid = [](const void* wanted, int rows, int columns) { return wanted != nullptr ? WgradGrid{row_pairs(rows), column_tiles(columns)} : WgradGrid{0, 0}; };
  p.gate_up = grid(b.d_gate_up_proj, 2 * a.inter, a.hidden), p.down = grid(b.d_down_proj, a.hidden, a.inter);
  if (shared_needed(b)) {
    p.shared_down_columns = column_tiles(a.shared_inter), p.shared_up_columns = b.shared_dx != nullptr ? column_tiles(a.hidden) : 0;
    p.shared_gate = grid(b.d_shared_gate, a.shared_inter, a.hidden), p.shared_up = grid(b.d_shared_up, a.shared_inter, a.hidden);
    p.shared_down = grid(b.d_shared_down, a.hidden, a.shared_inter);
  }
  const auto chunk = [&](int columns) { return b.chunk_units > 0 ? b.chunk_units : max_of(1, static_cast<int>(ceil_div(clusters, max_of(columns, 1)))); };
  p.chunk = chunk(p.down_columns), p.shared_chunk = chunk(p.shared_down_columns);
  p.by_unit = walks_by_unit(a.hidden, a.inter), p.shared_by_unit = walks_by_unit(a.hidden, a.shared_inter);
  return p;
}

}  // namespace mok::cuda
