// The compute tasks of one forward, and the order in which clusters take them.
//
// A task is one output tile for each of the two CTAs of a cluster. The CTAs share an operand, which halves its L2 traffic:
//   two row tiles of one expert, one column tile   -> the weight tile is shared (16 of 48 KB a stage saved)
//   one row tile (an expert's odd one), two column tiles -> the row tile is shared (8 of 48 KB saved)
// A *unit* is such a pair of row tiles, or a single one. Tiles are walked from the last to the first; an expert with an odd number
// of tiles gives its last tile as a single, then pairs.
//
// Order:   shared gate+up | gate+up 0 | shared down | gate+up 1 | down 0 | gate+up 2 | down 1 | ... | down Q-1
// The numbers are minibatches: units whose first tile lies in the same `minibatch` tiles. Inside one, either column tiles are the outer loop, so
// clusters that run side by side read the same weights, which come from memory once; or, by unit, units are: then they read the whole width of
// an expert's matrix, memory pages in full, and the next unit finds it in the L2, if it fits (walks_by_unit). A task waits only for earlier ones:
//   gate+up(t)  x of tile t landed; the ring slot's previous occupant t + ring went through down
//   down(t)     all gate+up column tiles of t
// A pair may reach one tile into the next minibatch, hence the clamp ring >= 2 * minibatch + 1 for a lag of one; a ring too
// small for that runs without lag (gate+up m, down m).
#pragma once
#include <cstdint>

#include "../common/macros.h"
#include "../common/schedule.h"

namespace mok::cuda {

constexpr int kRowsPerTile = static_cast<int>(kTileRows);
constexpr int kHalfRows = kRowsPerTile / 2;  // what a consumer warpgroup has of a tile; a short tile has no more rows

// Whether so many rows, at least one, end with a short tile.
MOK_HD bool ends_short(int rows) { return (rows - 1) % kRowsPerTile < kHalfRows; }
constexpr int kGateUpColumns = 128;  // gate columns (and as many up columns) of a gate+up tile
constexpr int kDownColumns = 256;

enum TaskKind : uint32_t { kTaskGateUp = 0, kTaskDown = 1, kTaskSharedGateUp = 2, kTaskSharedDown = 3 };

// kind:2 | two tiles:1 | column:13 | expert:16 | tile:30 | short:1 | end:1. Short: the last tile has rows in its upper half only, so the
// second consumer warpgroup has nothing to multiply. For two tiles, `tile` is the lower one and CTA c takes tile + c; for
// one, `column` is even and CTA c takes column + c (which may lie beyond the matrix: then it only helps to load).
struct Task {
  uint64_t bits;

  MOK_HD static Task make(uint32_t kind, bool two, uint32_t column, uint32_t expert, uint32_t tile, bool is_short) {
    return {static_cast<uint64_t>(kind) | static_cast<uint64_t>(two) << 2 | static_cast<uint64_t>(column) << 3 |
            static_cast<uint64_t>(expert) << 16 | static_cast<uint64_t>(tile) << 32 | static_cast<uint64_t>(is_short) << 62};
  }
  MOK_HD static Task end() { return {1ull << 63}; }
  MOK_HD bool is_end() const { return bits >> 63; }
  MOK_HD uint32_t kind() const { return bits & 3; }
  MOK_HD bool two() const { return bits >> 2 & 1; }
  MOK_HD int column() const { return bits >> 3 & 0x1fff; }
  MOK_HD int expert() const { return bits >> 16 & 0xffff; }
  MOK_HD int tile() const { return bits >> 32 & 0x3fffffff; }
  MOK_HD bool is_short() const { return bits >> 62 & 1; }
  // What a CTA of the cluster has of it: its tile, its column, and whether its tile is the short one.
  MOK_HD int tile_of(uint32_t cta) const { return tile() + (two() ? static_cast<int>(cta) : 0); }
  MOK_HD int column_of(uint32_t cta) const { return column() + (two() ? 0 : static_cast<int>(cta)); }
  MOK_HD bool short_of(uint32_t cta) const { return is_short() && (!two() || cta == 1); }
};

// Tasks of a group of `pairs` pairs and `singles` singles over `columns` column tiles.
MOK_HD int tasks_of(int pairs, int singles, int columns) { return columns * pairs + (columns + 1) / 2 * singles; }

// Position, in such a group, of column `column` of a unit with `pairs_before` pairs and `singles_before` singles before it in the group.
// Odd columns hold pairs only.
MOK_HD int task_position(int pairs, int singles, int columns, bool by_unit, bool two, int column, int pairs_before, int singles_before) {
  if (by_unit) return tasks_of(pairs_before, singles_before, columns) + (two ? column : column / 2);
  return column * pairs + (column + 1) / 2 * singles + pairs_before + (column % 2 == 0 ? singles_before : 0);
}

struct Lag {
  int minibatch;  // tiles
  int lag;        // 1 or 0 minibatches
};

MOK_HD Lag choose_lag(int minibatch, int ring) {
  if (ring >= 3) {
    const int most = (ring - 1) / 2;
    return {minibatch < 1 ? 1 : (minibatch < most ? minibatch : most), 1};
  }
  return {1, 0};
}

// Row tiles by which dispatch may run ahead of gate+up (0 wanted: 48, at least three minibatches). Gate+up of a tile waits for its whole minibatch
// and the one before, so dispatch must be allowed that far.
MOK_HD int dispatch_lead(int wanted, int minibatch, int ring) {
  return min_of(max_of(wanted > 0 ? wanted : max_of(48, 3 * minibatch), 2 * minibatch + 1), ring);
}

// First task of a minibatch's gate+up and down, from the tasks of all earlier minibatches' gate+up and down.
struct TaskOrder {
  int shared_gate_up, shared_down, lag, minibatches;

  // gate_up_before[m] and down_before[m]: tasks of minibatches 0 .. m-1, m = 0 .. minibatches.
  template <class F, class G>
  MOK_HD int gate_up_base(int m, F gate_up_before, G down_before) const {
    if (lag == 0) return shared_gate_up + shared_down + gate_up_before(m) + down_before(m);
    return shared_gate_up + gate_up_before(m) + (m >= 1 ? shared_down + down_before(m - 1) : 0);
  }
  template <class F, class G>
  MOK_HD int down_base(int m, F gate_up_before, G down_before) const {
    const int lead = m + 1 + lag;
    return shared_gate_up + shared_down + gate_up_before(lead < minibatches ? lead : minibatches) + down_before(m);
  }
  template <class F>
  MOK_HD int shared_down_base(F gate_up_before) const {
    return shared_gate_up + (lag == 0 ? 0 : gate_up_before(minibatches < 1 ? minibatches : 1));
  }
};

}  // namespace mok::cuda
