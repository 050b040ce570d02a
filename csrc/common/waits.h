// What each task waits for and what it signals, in one place: the CPU kernel, the CUDA kernels and the protocol
// simulator call these, so none of them can disagree about when a slot is free or a tile is ready.
//
// A counter counts completed tasks (parts) of one index. A task may start when every wait it lists holds, reads its
// inputs, writes its outputs, and then adds 1 to the counter that signal_of() names. A signal carries both directions:
// "my outputs are visible" and "I no longer read my inputs".
#pragma once

#include "tasks.h"

namespace mok {

enum class Counter : int32_t {
  kArrived,      // [minibatch] row tiles dispatched or pulled
  kGateUp,       // [tile] parts of gate_up, in the backward of replay
  kDown,         // [tile] parts of down
  kCombined,     // [tile] combines
  kDgradDown,    // [tile] parts of dgrad_down
  kDgradUp,      // [tile] parts of dgrad_up
  kPushed,       // [tile] pushes
  kWgrad,        // [expert] parts of wgrad, over all macrobatches so far
  kSharedDgrad,  // [token tile] parts of shared_dgrad
  kNone,         // nobody waits for this task
};
constexpr int64_t kCounters = static_cast<int64_t>(Counter::kNone);
constexpr int64_t kMaxWaits = 3;

// Holds when counter[i] >= target for every i in [begin, end); an empty range holds at once.
struct Wait {
  Counter counter;
  int64_t begin, end, target;
};

struct Signal {
  Counter counter;
  int64_t index;
};

// Buffers with fewer slots than the call has tiles. x, gate/up, dOut and d_gate_up have the ring's slots.
struct Slots {
  Minibatches minibatches;
  int64_t h;  // row tiles of h, >= 1: tile % h, written by gate_up, read by down
  int64_t y;  // row tiles of the staging that combine and push read, >= 1: tile % y
};

// Longest lag of the forward that makes progress. The gate_up of position p + lag comes before the down of p and needs
// its whole minibatch, up to position p + lag + minibatch - 1, while communication dispatches position p + ring only
// behind the combine of p. Hence lag <= ring - minibatch where slots are reused at all. And lag <= h - 1, because the
// down of p frees the slot of h that the gate_up of p + h writes.
MOK_HD int64_t longest_lag(const Slots& slots) {
  const Ring& ring = slots.minibatches.ring;
  const int64_t lag = min_of(ring.tiles, slots.h - 1);
  return ring.tiles <= ring.size ? lag : min_of(lag, ring.size - slots.minibatches.size);
}

MOK_HD int64_t counter_length(Counter counter, const Minibatches& minibatches, int64_t experts, int64_t shared_tiles) {
  switch (counter) {
    case Counter::kArrived: return minibatches.count();
    case Counter::kWgrad: return experts;
    case Counter::kSharedDgrad: return shared_tiles;
    case Counter::kNone: return 0;
    default: return minibatches.ring.tiles;
  }
}

MOK_HD Signal signal_of(const Minibatches& minibatches, const Task& task) {
  switch (task.op) {
    case Op::kDispatch:
    case Op::kPull: return {Counter::kArrived, minibatches.of(task.index)};
    case Op::kGateUp:
    case Op::kReplay: return {Counter::kGateUp, task.index};
    case Op::kDown: return {Counter::kDown, task.index};
    case Op::kCombine: return {Counter::kCombined, task.index};
    case Op::kDgradDown: return {Counter::kDgradDown, task.index};
    case Op::kDgradUp: return {Counter::kDgradUp, task.index};
    case Op::kPush: return {Counter::kPushed, task.index};
    case Op::kWgrad: return {Counter::kWgrad, task.index};
    case Op::kSharedDgrad: return {Counter::kSharedDgrad, task.index};
    default: return {Counter::kNone, 0};
  }
}

// The minibatch of a tile has landed.
MOK_HD Wait arrived(const Minibatches& minibatches, int64_t tile) {
  const int64_t minibatch = minibatches.of(tile);
  return {Counter::kArrived, minibatch, minibatch + 1, minibatches.target(minibatch)};
}

// Fills `waits` and returns how many there are.
MOK_HD int64_t forward_waits(const ForwardOrder& order, const Slots& slots, const Task& task, Wait waits[kMaxWaits]) {
  const int64_t tile = task.index;
  int64_t count = 0;
  const auto add = [&](Counter counter, int64_t index, int64_t target) {
    waits[count++] = {counter, index, index + 1, target};
  };
  switch (task.op) {
    case Op::kDispatch: {  // the x slot
      const int64_t previous = order.ring.forward_previous(tile);
      if (previous != kNoTile) add(Counter::kGateUp, previous, order.parts.gate_up);
      break;
    }
    case Op::kGateUp:
      waits[count++] = arrived(slots.minibatches, tile);
      if (tile + slots.h < order.ring.tiles) add(Counter::kDown, tile + slots.h, order.parts.down);  // the h slot
      break;
    case Op::kDown:
      add(Counter::kGateUp, tile, order.parts.gate_up);
      if (tile + slots.y < order.ring.tiles) add(Counter::kCombined, tile + slots.y, 1);  // the y slot
      break;
    case Op::kCombine: add(Counter::kDown, tile, order.parts.down); break;
    default: break;  // the shared expert reads this rank's own tokens
  }
  return count;
}

template <class Index>
MOK_HD int64_t backward_waits(const BackwardOrder<Index>& order, const Slots& slots, const Task& task,
                              Wait waits[kMaxWaits]) {
  const Ring& ring = order.ring;
  const int64_t tile = task.index;  // but for wgrad
  int64_t count = 0;
  const auto add = [&](Counter counter, int64_t index, int64_t target) {
    waits[count++] = {counter, index, index + 1, target};
  };
  switch (task.op) {
    case Op::kPull: {  // the x and dOut slots, read last by wgrad, or by replay and dgrad_down without it
      const int64_t previous = ring.backward_previous(tile);
      if (previous == kNoTile) break;
      if (order.wgrad) {
        const int64_t expert = expert_of_tile(order.prefix, order.experts, previous);
        add(Counter::kWgrad, expert, order.parts.wgrad * order.wgrad_rounds(expert, ring.macrobatch_of(previous)));
      } else {
        add(Counter::kDgradDown, previous, order.parts.dgrad_down);
      }
      break;
    }
    case Op::kReplay:  // its gate/up slot is free: pull waited for wgrad or dgrad_down, which come after its reader
      waits[count++] = arrived(slots.minibatches, tile);
      break;
    case Op::kDgradDown: {
      waits[count++] = arrived(slots.minibatches, tile);
      if (!order.survives(tile)) add(Counter::kGateUp, tile, order.parts.gate_up);
      // The d_gate_up slot has two readers: wgrad, which pull waited for, and dgrad_up, which it did not.
      const int64_t previous = ring.backward_previous(tile);
      if (previous != kNoTile && order.dgrad) add(Counter::kDgradUp, previous, order.parts.dgrad_up);
      break;
    }
    case Op::kDgradUp:
      add(Counter::kDgradDown, tile, order.parts.dgrad_down);
      if (tile >= slots.y) add(Counter::kPushed, tile - slots.y, 1);  // the staging slot
      break;
    case Op::kPush: add(Counter::kDgradUp, tile, order.parts.dgrad_up); break;
    case Op::kWgrad: {
      const int64_t expert = task.index, rounds = order.wgrad_rounds(expert, task.macrobatch);
      waits[count++] = {Counter::kDgradDown, order.wgrad_begin(expert, task.macrobatch),
                        order.wgrad_end(expert, task.macrobatch), order.parts.dgrad_down};
      if (rounds > 1) {  // its own carry
        add(Counter::kWgrad, expert, order.parts.wgrad * (rounds - 1));
      } else if (!order.wgrad_last(expert, task.macrobatch)) {
        // It is the first to store into the one carry: the expert that used it before, if any, has rounded and is done.
        for (int64_t m = task.macrobatch; m > 0; --m) {
          const int64_t before = order.first_expert(m);
          if (static_cast<int64_t>(order.prefix[before]) >= ring.macrobatch_begin(m)) continue;
          const int64_t last = ring.macrobatch_of(static_cast<int64_t>(order.prefix[before + 1]) - 1);
          add(Counter::kWgrad, before, order.parts.wgrad * order.wgrad_rounds(before, last));
          break;
        }
      }
      break;
    }
    case Op::kSharedWgrad:
      waits[count++] = {Counter::kSharedDgrad, 0, order.shared_tiles, order.parts.shared_dgrad};
      break;
    default: break;
  }
  return count;
}

}  // namespace mok
