// The compute tasks of one backward, and the order in which clusters take them.
//
// A task is one output tile of 128 rows x 256 columns for each of the two CTAs of a cluster, as in the forward (tasks.cuh): a pair of row tiles
// shares the weights, a single row tile is shared by two column tiles, a weight gradient's two tiles share their columns.
//
// Order:   shared dgrads | shared weight gradients | macrobatch 0: dgrads, weight gradients | macrobatch 1: ...
// The dgrads of a macrobatch walk its units (pairs, singles) in chunks; each operation trails the one before by a chunk. Inside a chunk column
// tiles are the outer loop or, by unit, units are, as in the forward:
//          replay 0 | replay 1, down 0 | replay 2, down 1, up 0 | ...          (replay only beyond the forward's ring, up only for dX)
// Units never straddle a macrobatch, or a tile would wait for a slot that its own pair keeps. A task waits only for earlier ones, and pulls
// (dispatch.cuh) walk the tiles upward:
//   pull(t)        the slot of t - window: the weight gradients that read it, or its dgrad_down where none are wanted
//   replay(t)      rows of t landed; dgrad_up has read d_gate_up of the tile before in its slot, a window or a ring (of the forward) ago
//   dgrad_down(t)  the same; replay(t)
//   dgrad_up(t)    dgrad_down(t)
//   wgrad(e, m)    dgrad_down of e's tiles in m, and of no others: those of m + 1 may come first; e's earlier rounds, whose carry it goes on
//                  from; for the first store into the one carry, the expert that used it before
#pragma once
#include "tasks.cuh"

namespace mok::cuda {

enum BackwardKind : uint32_t {
  kReplay, kDgradDown, kDgradUp, kSharedDgradDown, kSharedDgradUp,
  kWgradGateUp, kWgradDown, kSharedWgradGate, kSharedWgradUp, kSharedWgradDown,
};
MOK_HD bool is_wgrad(uint32_t kind) { return kind >= kWgradGateUp; }

struct alignas(16) BackwardTask {
  // kind:4 | two:1 | short:1 | first:1 | last:1 | end:1 | replayed:1 | expert from bit 16. Two, column, tile and short as in Task. Of a weight
  // gradient: row and column say which output tile (CTA c takes row + c), tile and `count` the row tiles summed over, `first` that it starts
  // from zero and `last` that it ends, or else the carry; short that the last of these tiles has rows in its upper half only.
  uint32_t head;
  int32_t first_tile;
  uint32_t place;  // column:16 | row:16
  int32_t count;

  MOK_HD static BackwardTask end() { return {1u << 8, 0, 0, 0}; }
  MOK_HD static BackwardTask make(uint32_t kind, bool two, bool is_short, bool first, bool last, bool replayed, int expert, int tile, int column,
                                  int row, int count) {
    return {kind | uint32_t(two) << 4 | uint32_t(is_short) << 5 | uint32_t(first) << 6 | uint32_t(last) << 7 | uint32_t(replayed) << 9 |
                uint32_t(expert) << 16,
            tile, uint32_t(column) | uint32_t(row) << 16, count};
  }
  MOK_HD bool is_end() const { return head >> 8 & 1; }
  MOK_HD uint32_t kind() const { return head & 15; }
  MOK_HD bool two() const { return head >> 4 & 1; }
  MOK_HD bool is_short() const { return head >> 5 & 1; }
  MOK_HD bool first() const { return head >> 6 & 1; }
  MOK_HD bool last() const { return head >> 7 & 1; }
  MOK_HD bool replayed() const { return head >> 9 & 1; }
  MOK_HD int expert() const { return static_cast<int>(head >> 16); }
  MOK_HD int tile() const { return first_tile; }
  MOK_HD int column() const { return place & 0xffff; }
  MOK_HD int row() const { return static_cast<int>(place >> 16); }
  // As Task's. Of a weight gradient both CTAs sum over the same tiles, and it is the row that differs.
  MOK_HD int tile_of(uint32_t cta) const { return tile() + (two() && !is_wgrad(kind()) ? static_cast<int>(cta) : 0); }
  MOK_HD int column_of(uint32_t cta) const { return column() + (two() ? 0 : static_cast<int>(cta)); }
  MOK_HD bool short_of(uint32_t cta) const { return is_short() && !is_wgrad(kind()) && (!two() || cta == 1); }
  MOK_HD int row_of(uint32_t cta) const { return row() + static_cast<int>(cta); }
};

// Output tiles of a weight gradient: pairs of 128 rows, and 256 columns. No tasks where it is not wanted. Walked in bands of eight pairs, column
// by column, so that some 64 clusters side by side read 8 x 256 columns of each operand, the least for their number.
struct WgradGrid {
  int row_pairs, columns;
  MOK_HD int tasks() const { return row_pairs * columns; }
  MOK_HD void place(int i, int* row_pair, int* column) const {
    const int first = i / (8 * columns) * 8, band = min_of(8, row_pairs - first), within = i - first * columns;
    *row_pair = first + within % band, *column = within / band;
  }
};

// All that the order depends on. The prefixes are the schedule's, [L + 1].
struct BackwardPlan {
  const int32_t *tile_prefix, *unit_prefix, *expert_rows;
  int tiles, experts;
  int window, saved;  // row tiles of a macrobatch, and of the forward's ring: a multiple of it, or at least `tiles`
  int chunk, shared_chunk;  // units
  bool by_unit, shared_by_unit;
  int tokens;
  int replay_columns, down_columns, up_columns;  // column tiles; up: 0 without dX
  int shared_down_columns, shared_up_columns;    // 0 where nothing of it is wanted
  WgradGrid gate_up, down, shared_gate, shared_up, shared_down;

  MOK_HD int shared_tiles() const { return shared_down_columns > 0 ? static_cast<int>(ceil_div(tokens, kRowsPerTile)) : 0; }
  MOK_HD int macrobatches() const { return static_cast<int>(ceil_div(tiles, window)); }
  MOK_HD int wgrad_tasks() const { return gate_up.tasks() + down.tasks(); }  // of one expert in one macrobatch
  MOK_HD int expert_of(int tile) const { return static_cast<int>(expert_of_tile(tile_prefix, experts, tile)); }
  // Macrobatches up to and including `macrobatch` that hold tiles of the expert, which that one does.
  MOK_HD int rounds(int expert, int macrobatch) const { return macrobatch - tile_prefix[expert] / window + 1; }
  // A run: an expert's tiles in one macrobatch, named by the first of them. What a weight gradient sums over.
  MOK_HD int run_of(int expert, int tile) const { return max_of(tile_prefix[expert], tile / window * window); }
  MOK_HD bool short_tile(int expert, int tile) const {
    return tile == tile_prefix[expert + 1] - 1 && ends_short(expert_rows[expert]);
  }
  // The expert whose carry was in use before the one that macrobatch `macrobatch` leaves open: that one must have ended. -1: none.
  MOK_HD int carry_before(int macrobatch) const {
    for (int m = macrobatch; m > 0; --m) {
      const int first = expert_of(m * window);
      if (tile_prefix[first] < m * window) return first;
    }
    return -1;
  }
};

// Units of one macrobatch, in order of their tiles.
struct Units {
  int begin, end;      // tiles
  int first, last;     // experts
  int of_first, units;

  MOK_HD static Units of(const BackwardPlan& p, int macrobatch) {
    Units u;
    u.begin = macrobatch * p.window, u.end = min_of(p.tiles, u.begin + p.window);
    u.first = p.expert_of(u.begin), u.last = p.expert_of(u.end - 1);
    u.of_first = (min_of(p.tile_prefix[u.first + 1], u.end) - u.begin + 1) / 2;
    u.units = u.of_first;
    if (u.last > u.first) u.units += p.unit_prefix[u.last] - p.unit_prefix[u.first + 1] + (u.end - p.tile_prefix[u.last] + 1) / 2;
    return u;
  }
  MOK_HD void find(const BackwardPlan& p, int unit, int* expert, int* tile, bool* two) const {
    int within = unit, from = begin;
    *expert = first;
    if (unit >= of_first) {
      const int all = unit - of_first + p.unit_prefix[first + 1];  // among whole experts
      *expert = static_cast<int>(expert_of_tile(p.unit_prefix, p.experts, all));
      within = all - p.unit_prefix[*expert], from = p.tile_prefix[*expert];
    }
    *tile = from + 2 * within;
    *two = *tile + 1 < min_of(p.tile_prefix[*expert + 1], end);
  }
};

// Up to three operations on `units` units, each a chunk behind the one before.
struct Steps {
  int units, chunk, operations;
  bool by_unit;
  int columns[3];

  MOK_HD int before(int step) const {
    int tasks = 0;
    for (int j = 0; j < operations; ++j) tasks += columns[j] * min_of(units, chunk * max_of(0, step - j));
    return tasks;
  }
  MOK_HD int steps() const { return units > 0 ? (units + chunk - 1) / chunk + operations - 1 : 0; }
  MOK_HD int tasks() const { return before(steps()); }
  MOK_HD void find(int i, int* operation, int* unit, int* column) const {
    int low = 0, high = steps() - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (before(middle) <= i) low = middle; else high = middle - 1;
    }
    int rest = i - before(low);
    for (int j = 0; j < operations; ++j) {
      const int from = chunk * (low - j), members = low < j ? 0 : max_of(0, min_of(units - from, chunk));
      if (rest < members * columns[j]) {
        *operation = j;
        *unit = from + (by_unit ? rest / columns[j] : rest % members), *column = by_unit ? rest % columns[j] : rest / members;
        return;
      }
      rest -= members * columns[j];
    }
  }
};

// Walks the order. Tickets must not decrease. A ticket may name no task (the second column of a single row tile, whose CTAs take two at a time).
struct BackwardWalk {
  const BackwardPlan& p;
  int section = 0;  // 0, 1: the shared expert's dgrads and weight gradients; then two for each macrobatch
  int base = 0;     // the section's first ticket
  Steps steps{};
  Units units{};
  int size;

  MOK_HD explicit BackwardWalk(const BackwardPlan& plan) : p(plan) { enter(); }

  MOK_HD int macrobatch() const { return section / 2 - 1; }
  MOK_HD bool replayed() const { return macrobatch() * p.window >= p.saved; }
  MOK_HD void enter() {
    if (section == 0) {
      steps = {(p.shared_tiles() + 1) / 2, p.shared_chunk, p.shared_up_columns > 0 ? 2 : 1, p.shared_by_unit, {p.shared_down_columns, p.shared_up_columns, 0}};
      size = steps.tasks();
    } else if (section == 1) {
      size = p.tokens > 0 ? p.shared_gate.tasks() + p.shared_up.tasks() + p.shared_down.tasks() : 0;
    } else if (section % 2 == 0) {
      units = Units::of(p, macrobatch());
      steps = {units.units, p.chunk, 0, p.by_unit, {}};
      if (replayed()) steps.columns[steps.operations++] = p.replay_columns;
      steps.columns[steps.operations++] = p.down_columns;
      if (p.up_columns > 0) steps.columns[steps.operations++] = p.up_columns;
      size = steps.tasks();
    } else {
      size = (units.last - units.first + 1) * p.wgrad_tasks();
    }
  }

  // True with a task, or with BackwardTask::end() behind the last; false if this ticket names none.
  MOK_HD bool take(int ticket, BackwardTask* task) {
    const int sections = 2 + 2 * p.macrobatches();
    while (section < sections && ticket >= base + size) {
      base += size, ++section;
      if (section < sections) enter();
    }
    if (section >= sections) {
      *task = BackwardTask::end();
      return true;
    }
    const int i = ticket - base;
    return section % 2 == 0 ? dgrad(i, task) : (section == 1 ? shared_wgrad(i, task) : wgrad(i, task));
  }

 private:
  MOK_HD bool dgrad(int i, BackwardTask* task) const {
    int operation = 0, unit = 0, column = 0, expert = 0, tile;
    bool two, is_short;
    steps.find(i, &operation, &unit, &column);
    uint32_t kind;
    if (section == 0) {
      const int tiles = p.shared_tiles();
      tile = 2 * unit, two = tile + 1 < tiles;
      is_short = unit == steps.units - 1 && ends_short(p.tokens);
      kind = operation == 0 ? kSharedDgradDown : kSharedDgradUp;
    } else {
      units.find(p, unit, &expert, &tile, &two);
      is_short = p.short_tile(expert, tile + (two ? 1 : 0));
      kind = kReplay + operation + (replayed() ? 0 : 1);
    }
    if (!two && column % 2 != 0) return false;
    *task = BackwardTask::make(kind, two, is_short, false, false, section > 0 && replayed(), expert, tile, column, 0, 0);
    return true;
  }
  MOK_HD bool shared_wgrad(int i, BackwardTask* task) const {
    const WgradGrid grids[3] = {p.shared_gate, p.shared_up, p.shared_down};
    int which = 0;
    while (i >= grids[which].tasks()) i -= grids[which++].tasks();
    int pair, column;
    grids[which].place(i, &pair, &column);
    *task = BackwardTask::make(kSharedWgradGate + which, true, ends_short(p.tokens), true, true, false, 0, 0, column,
                               2 * pair, static_cast<int>(ceil_div(p.tokens, kRowsPerTile)));
    return true;
  }
  MOK_HD bool wgrad(int i, BackwardTask* task) const {
    const int expert = units.first + i / p.wgrad_tasks();
    i %= p.wgrad_tasks();
    const int begin = max_of(p.tile_prefix[expert], units.begin), end = min_of(p.tile_prefix[expert + 1], units.end);
    if (begin >= end) return false;  // no tokens
    const bool of_down = i >= p.gate_up.tasks();
    if (of_down) i -= p.gate_up.tasks();
    int pair, column;
    (of_down ? p.down : p.gate_up).place(i, &pair, &column);
    *task = BackwardTask::make(of_down ? kWgradDown : kWgradGateUp, true, p.short_tile(expert, end - 1), begin == p.tile_prefix[expert],
                               end == p.tile_prefix[expert + 1], replayed(), expert, begin, column, 2 * pair, end - begin);
    return true;
  }
};

}  // namespace mok::cuda
