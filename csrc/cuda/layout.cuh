// What lies where in the two device buffers a forward uses besides the tensors: `schedule` (kept for the backward) and `scratch`.
#pragma once
#include "api.h"
#include "slots.cuh"
#include "tasks.cuh"

namespace mok::cuda {

constexpr int kRoutesPerChunk = 512;    // routes that one warp places
constexpr int kDispatchRows = 8;       // rows a dispatch ticket pulls
constexpr int kConsumerWarps = 8;

// Written by the schedule kernels, read by everything after them.
struct ScheduleHeader {
  int32_t tiles;         // T: row tiles, all experts
  int32_t units;         // pairs and singles
  int32_t minibatches;
  int32_t tasks;
  int32_t minibatch_tiles, lag;
  int32_t rows;          // routes, without padding
  int32_t routed_pairs;
};

MOK_HD int64_t align256(int64_t n) { return (n + 255) / 256 * 256; }

// Column tiles of each kind of task; zero where a rung of the ladder leaves the kind out.
struct Columns {
  int gate_up, down, shared_gate_up, shared_down;
};

MOK_HD Columns columns_of(const MokForwardArgs& a) {
  const bool whole = a.ladder == kMokWhole || a.ladder == kMokNoDispatch;
  const int shared = whole ? a.shared_inter : 0;
  const int hidden_tiles = static_cast<int>(ceil_div(a.hidden, kDownColumns));
  return {a.ladder == kMokDownOnly ? 0 : static_cast<int>(ceil_div(a.inter, kGateUpColumns)),
          a.ladder == kMokGateUpOnly ? 0 : hidden_tiles, static_cast<int>(ceil_div(shared, kGateUpColumns)),
          shared > 0 ? hidden_tiles : 0};
}

MOK_HD int64_t most_routes(const MokForwardArgs& a) { return static_cast<int64_t>(a.ranks) * a.max_tokens * a.topk; }
// Blocks of so many rows that the experts' rows fill at most, each beginning one of its own.
MOK_HD int64_t most_blocks(const MokForwardArgs& a, int rows) {
  const int64_t routes = most_routes(a);
  return routes / rows + (routes < a.local_experts ? routes : a.local_experts);
}
MOK_HD int64_t tile_capacity(const MokForwardArgs& a) { return most_blocks(a, kRowsPerTile); }
MOK_HD int64_t half_capacity(const MokForwardArgs& a) { return most_blocks(a, kHalfRows); }
// The ring holds everything, whatever the routing, with half a tile of rows for a short tile (ScheduleLayout::tile_rows). If it does not, tile t lies
// in slot t modulo the ring, 128 rows each.
MOK_HD bool is_compact(const MokForwardArgs& a) { return 2 * static_cast<int64_t>(a.ring_tiles) >= half_capacity(a); }
// Tiles that the ring has room for: more than its rows / 128 where it is compact.
MOK_HD int ring_slots(const MokForwardArgs& a) {
  return is_compact(a) ? max_of(static_cast<int>(tile_capacity(a)), a.ring_tiles) : a.ring_tiles;
}
MOK_HD int64_t shared_tiles(const MokForwardArgs& a) { return a.shared_inter > 0 ? ceil_div(a.tokens, kRowsPerTile) : 0; }
MOK_HD int64_t chunks_per_rank(const MokForwardArgs& a) {
  const int64_t n = ceil_div(static_cast<int64_t>(a.max_tokens) * a.topk, kRoutesPerChunk);
  return n > 0 ? n : 1;
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// The lag between gate+up and down. Automatic: two waves of gate+up tasks over the clusters that compute (paper, section 3.2), so that down finds
// its rows written and the weights of a wave are still in the L2 for the next.
inline Lag lag_of(const MokForwardArgs& a) {
  int minibatch = a.minibatch_tiles;
  if (minibatch <= 0) {
    int sms = device_attribute(cudaDevAttrMultiProcessorCount);
    if (a.sm_limit > 0 && a.sm_limit < sms) sms = a.sm_limit;
    sms = max_of(sms - a.comm_sms, 2);
    const int columns = static_cast<int>(ceil_div(a.inter, kGateUpColumns));
    minibatch = 2 * static_cast<int>(ceil_div(2 * (sms / 2), columns));
  }
  return choose_lag(minibatch, ring_slots(a));
}

// Gate and up of one expert take at most half of the L2. Measured (by unit / by column): forward 1.07 times as fast at q30b, 1.01 at air and qwen;
// backward 1.05, 1.03 and 1.02, but 0.99 at kimi, whose matrices are twice the L2.
inline bool walks_by_unit(int64_t hidden, int64_t inter) {
  return 4 * hidden * inter <= device_attribute(cudaDevAttrL2CacheSize) / 2;
}

// schedule: header | tile_prefix [L + 1] | unit_prefix [L + 1] | pair_prefix [L + 1] | counts [L] | first_unit [T + 2] (unit, pairs before it) |
// tile_rows [T + 1] (first row of each tile where short tiles have half of the rows, and the end) | rows [128 T] | tasks
struct ScheduleLayout {
  int64_t tile_prefix, unit_prefix, pair_prefix, expert_rows, first_unit, tile_rows, rows, tasks, bytes;

  MOK_HD static ScheduleLayout make(const MokForwardArgs& a) {
    const int64_t tiles = tile_capacity(a), prefix = align256((a.local_experts + 1) * 4);
    const Columns c = columns_of(a);
    ScheduleLayout l{};
    l.tile_prefix = 256;
    l.unit_prefix = l.tile_prefix + prefix;
    l.pair_prefix = l.unit_prefix + prefix;
    l.expert_rows = l.pair_prefix + prefix;
    l.first_unit = l.expert_rows + prefix;
    l.tile_rows = l.first_unit + align256((tiles + 2) * 8);
    l.rows = l.tile_rows + align256((tiles + 1) * 4);
    l.tasks = l.rows + align256(tiles * kRowsPerTile * 8);
    const int64_t tasks = tiles * (c.gate_up + c.down) + shared_tiles(a) * (c.shared_gate_up + c.shared_down);
    l.bytes = l.tasks + align256(tasks * 8);
    return l;
  }
};

// scratch: tickets | x_ready [T] | h_ready [T] | down_done [T] | shared_h_ready [Ts] | stamps (these are cleared by every schedule) |
// totals [R, L] | partial counts [R, chunks, L]
struct ScratchLayout {
  int64_t tickets, x_ready, h_ready, down_done, shared_h_ready, stamps, cleared_bytes, totals, partial, bytes;

  MOK_HD static ScratchLayout make(const MokForwardArgs& a) {
    const int64_t tiles = align256(tile_capacity(a) * 4);
    ScratchLayout l{};
    l.tickets = 0;
    l.x_ready = 256;
    l.h_ready = l.x_ready + tiles;
    l.down_done = l.h_ready + tiles;
    l.shared_h_ready = l.down_done + tiles;
    l.stamps = l.shared_h_ready + align256(shared_tiles(a) * 4);
    l.cleared_bytes = l.stamps + align256(stamp_bytes(ring_slots(a), kRowsPerTile, columns_of(a).gate_up, 0));
    l.totals = l.cleared_bytes;
    l.partial = l.totals + align256(static_cast<int64_t>(a.ranks) * a.local_experts * 4);
    l.bytes = l.partial + align256(static_cast<int64_t>(a.ranks) * chunks_per_rank(a) * a.local_experts * 4);
    return l;
  }
};

// Tickets: dispatch and compute counters lie 128 bytes apart, so their atomics do not share a line.
constexpr int kComputeTicket = 0, kDispatchTicket = 32;

// Where the row tiles of a buffer lie.
struct Places {
  const int32_t* rows;  // the first row of each (ScheduleLayout::tile_rows) where the buffer is compact, or null
  int slots;            // tiles that it has room for
  __device__ __forceinline__ int row(int tile) const { return rows != nullptr ? __ldg(rows + tile) : tile % slots * kRowsPerTile; }
  // Whether rows from `in_tile` on are the tile's own: the next expert's lie where a short tile has none.
  __device__ __forceinline__ bool owns(int tile, int in_tile) const {
    return rows == nullptr || in_tile < kHalfRows || __ldg(rows + tile + 1) - __ldg(rows + tile) > kHalfRows;
  }
};

template <class T>
MOK_HD T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace mok::cuda
