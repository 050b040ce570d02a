// Task orders of the megakernel and what each task waits for.
//
// One total order covers all tasks of a rank; communication and compute each take theirs in it through a ticket. A task
// waits only for tasks that come earlier, so whoever holds a ticket makes progress and nothing can deadlock:
//   forward   dispatch(t) needs gate_up(t + ring); gate_up(t) needs its minibatch and down(t + h_ring);
//             down(t) needs gate_up(t) and combine(t + y_ring); combine(t) needs down(t)
//   backward  pull(t) needs the slot of t - ring; replay(t) needs its minibatch; dgrad_down(t) needs its minibatch,
//             replay(t), and the slot of t - ring; dgrad_up(t) needs dgrad_down(t) and push(t - y_ring);
//             push(t) needs dgrad_up(t); wgrad(e) of a macrobatch needs dgrad_down of that expert's tiles in it
// Counters are indexed by absolute tile, minibatch or expert, never by ring slot.
#pragma once

#include "ring.h"
#include "schedule.h"

namespace mok {

enum class Op : int32_t {
  kDispatch,     // pull a tile's rows into the ring
  kCombine,      // push a tile's outputs to their owners
  kShared,       // shared expert, forward, one tile of this rank's tokens
  kGateUp,       // gate and up projection and SwiGLU of a tile
  kDown,         // down projection of a tile
  kPull,         // reverse-combine: pull dOut (and, to replay, x) of a tile
  kPush,         // reverse-dispatch: push dX of a tile to its owners
  kSharedDgrad,  // shared expert, backward of one tile of this rank's tokens
  kSharedWgrad,  // shared expert, weight gradients
  kReplay,       // gate and up projection again
  kDgradDown,    // dOut @ W_down, dSwiGLU, router gradient
  kDgradUp,      // d_gate_up @ W_gate_up
  kWgrad,        // weight gradients of one expert over one macrobatch
};

struct Task {
  Op op;
  int64_t index;       // row tile, token tile (shared), or local expert (wgrad)
  int64_t part;        // column block within the task
  int64_t macrobatch;  // wgrad only
};

// Blocks that one operation on one tile (or expert) is divided into; a counter's full target.
struct Parts {
  int64_t gate_up = 1, down = 1, shared = 1;
  int64_t dgrad_down = 1, dgrad_up = 1, wgrad = 1, shared_dgrad = 1, shared_wgrad = 1;
};

// Two operations on tiles 0 .. tiles-1, `second` trailing `first` by `lag` tiles.
struct Trailing {
  int64_t tiles, lag, first_parts, second_parts;

  MOK_HD int64_t count() const { return tiles * (first_parts + second_parts); }
  // Sets position (0 .. tiles-1), part and whether the i-th task is of the second operation.
  MOK_HD void task(int64_t i, int64_t* position, int64_t* part, bool* second) const {
    const int64_t head = lag * first_parts;
    const int64_t both = first_parts + second_parts;
    const int64_t body = (tiles - lag) * both;
    if (i < head) {
      *second = false, *position = i / first_parts, *part = i % first_parts;
    } else if (i < head + body) {
      const int64_t step = (i - head) / both, rest = (i - head) % both;
      *second = rest >= first_parts;
      *position = *second ? step : step + lag;
      *part = *second ? rest - first_parts : rest;
    } else {
      const int64_t rest = i - head - body;
      *second = true, *position = tiles - lag + rest / second_parts, *part = rest % second_parts;
    }
  }
};

struct ForwardOrder {
  Ring ring;
  int64_t lag;           // row tiles by which the down projection trails gate+up, at most longest_lag (waits.h)
  int64_t shared_tiles;  // token tiles of the shared expert, 0 without one
  Parts parts;

  MOK_HD int64_t comm_count() const { return 2 * ring.tiles; }
  // Dispatch breadth-first until the ring is full, then one combine before each dispatch that may reuse its slot.
  MOK_HD Task comm(int64_t i) const {
    const int64_t last = ring.tiles - 1, filled = min_of(ring.size, ring.tiles);
    if (i < filled) return {Op::kDispatch, last - i, 0, 0};
    const int64_t rest = i - filled, paired = 2 * (ring.tiles - filled);
    if (rest >= paired) return {Op::kCombine, last - (ring.tiles - filled) - (rest - paired), 0, 0};
    if (rest % 2 == 0) return {Op::kCombine, last - rest / 2, 0, 0};
    return {Op::kDispatch, last - filled - rest / 2, 0, 0};
  }

  MOK_HD int64_t compute_count() const {
    return shared_tiles * parts.shared + ring.tiles * (parts.gate_up + parts.down);
  }
  MOK_HD Task compute(int64_t i) const {
    const int64_t shared = shared_tiles * parts.shared;
    if (i < shared) return {Op::kShared, i / parts.shared, i % parts.shared, 0};
    int64_t position, part;
    bool down;
    Trailing{ring.tiles, lag, parts.gate_up, parts.down}.task(i - shared, &position, &part, &down);
    return {down ? Op::kDown : Op::kGateUp, ring.tiles - 1 - position, part, 0};
  }
};

template <class Index>
struct BackwardOrder {
  Ring ring;             // the window: backward_window
  int64_t saved;         // row tiles the forward's ring held: a multiple of ring.size, or at least ring.tiles
  int64_t lag;           // row tiles by which dgrad_up trails dgrad_down
  int64_t shared_tiles;  // token tiles of the shared expert, 0 without one
  Parts parts;
  bool dgrad;           // dX is wanted: dgrad_up and push run
  bool wgrad;           // expert weight gradients are wanted
  bool shared_wgrad;    // shared expert weight gradients are wanted
  const Index* prefix;  // first tile of each local expert
  int64_t experts;

  MOK_HD bool survives(int64_t tile) const { return tile < saved; }
  MOK_HD int64_t replay_parts(int64_t macrobatch) const {
    return survives(ring.macrobatch_begin(macrobatch)) ? 0 : parts.gate_up;
  }
  MOK_HD int64_t tiles_in(int64_t macrobatch) const {
    return ring.macrobatch_end(macrobatch) - ring.macrobatch_begin(macrobatch);
  }
  MOK_HD int64_t comm_count() const { return ring.tiles * (dgrad ? 2 : 1); }
  // All pulls of a macrobatch, then all its pushes: a pull of the next one waits for this one's weight gradients.
  MOK_HD Task comm(int64_t i) const {
    if (!dgrad) return {Op::kPull, i, 0, 0};
    const int64_t macrobatch = min_of(i / (2 * ring.size), ring.macrobatches() - 1);
    const int64_t begin = ring.macrobatch_begin(macrobatch), rest = i - 2 * begin;
    const int64_t tiles = tiles_in(macrobatch);
    if (rest < tiles) return {Op::kPull, begin + rest, 0, 0};
    return {Op::kPush, begin + rest - tiles, 0, 0};
  }

  MOK_HD int64_t first_expert(int64_t macrobatch) const {
    return expert_of_tile(prefix, experts, ring.macrobatch_begin(macrobatch));
  }
  MOK_HD int64_t last_expert(int64_t macrobatch) const {
    return expert_of_tile(prefix, experts, ring.macrobatch_end(macrobatch) - 1);
  }
  // Tiles of an expert that a macrobatch holds, and the macrobatches up to and including it that hold some.
  MOK_HD int64_t wgrad_begin(int64_t expert, int64_t macrobatch) const {
    return max_of(static_cast<int64_t>(prefix[expert]), ring.macrobatch_begin(macrobatch));
  }
  MOK_HD int64_t wgrad_end(int64_t expert, int64_t macrobatch) const {
    return min_of(static_cast<int64_t>(prefix[expert + 1]), ring.macrobatch_end(macrobatch));
  }
  MOK_HD int64_t wgrad_rounds(int64_t expert, int64_t macrobatch) const {
    return macrobatch - ring.macrobatch_of(static_cast<int64_t>(prefix[expert])) + 1;
  }
  // Whether this macrobatch holds the expert's last tile: its gradient is then rounded and stored.
  MOK_HD bool wgrad_last(int64_t expert, int64_t macrobatch) const {
    return static_cast<int64_t>(prefix[expert + 1]) <= ring.macrobatch_end(macrobatch);
  }

  MOK_HD int64_t dgrad_count(int64_t macrobatch) const {
    return tiles_in(macrobatch) * (replay_parts(macrobatch) + parts.dgrad_down + (dgrad ? parts.dgrad_up : 0));
  }
  MOK_HD int64_t wgrad_count(int64_t macrobatch) const {
    return wgrad ? (last_expert(macrobatch) - first_expert(macrobatch) + 1) * parts.wgrad : 0;
  }
  MOK_HD int64_t shared_count() const {
    return shared_tiles * parts.shared_dgrad + (shared_tiles > 0 && shared_wgrad ? parts.shared_wgrad : 0);
  }
  MOK_HD int64_t compute_count() const {
    int64_t count = shared_count();
    for (int64_t m = 0; m < ring.macrobatches(); ++m) count += dgrad_count(m) + wgrad_count(m);
    return count;
  }
  MOK_HD Task compute(int64_t i) const {
    const int64_t shared_dgrads = shared_tiles * parts.shared_dgrad;
    if (i < shared_dgrads) return {Op::kSharedDgrad, i / parts.shared_dgrad, i % parts.shared_dgrad, 0};
    if (i < shared_count()) return {Op::kSharedWgrad, 0, i - shared_dgrads, 0};
    i -= shared_count();
    int64_t macrobatch = 0;
    while (i >= dgrad_count(macrobatch) + wgrad_count(macrobatch)) {
      i -= dgrad_count(macrobatch) + wgrad_count(macrobatch);
      ++macrobatch;
    }
    if (i >= dgrad_count(macrobatch)) {
      const int64_t rest = i - dgrad_count(macrobatch);
      return {Op::kWgrad, first_expert(macrobatch) + rest / parts.wgrad, rest % parts.wgrad, macrobatch};
    }
    // A replayed tile's gate+up comes straight before its dgrad_down: one leading step of both.
    const int64_t replay = replay_parts(macrobatch);
    int64_t position, part;
    bool up;
    Trailing{tiles_in(macrobatch), min_of(lag, tiles_in(macrobatch)), replay + parts.dgrad_down,
             dgrad ? parts.dgrad_up : 0}
        .task(i, &position, &part, &up);
    const int64_t tile = ring.macrobatch_begin(macrobatch) + position;
    if (up) return {Op::kDgradUp, tile, part, 0};
    if (part < replay) return {Op::kReplay, tile, part, 0};
    return {Op::kDgradDown, tile, part - replay, 0};
  }
};

}  // namespace mok
