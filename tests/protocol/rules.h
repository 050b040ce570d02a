// The rules the simulated machine follows: csrc/common as it is, or with one deliberate mistake. A simulator that does
// not fail under each of them would prove nothing.
#pragma once

#include <cstring>
#include <iterator>

#include "csrc/common/waits.h"

namespace protocol {

enum class Bug {
  kNone,
  kSlotFreedEarly,         // dispatch does not wait for the readers of the x slot
  kLagEqualsRing,          // down trails gate_up by the whole ring
  kLagIgnoresMinibatch,    // lag ring - 1, right for minibatches of one tile only
  kPartialMacrobatch,      // a short minibatch has the target of a full one
  kShortTarget,            // a minibatch counts as landed one tile too soon
  kCombineAfterReuse,      // down overwrites a staging slot that combine has not read
  kDispatchFirst,          // communication dispatches every tile before it combines the first
  kWgradNotAwaited,        // pull overwrites x and dOut that wgrad still has to read
  kDgradUpNotAwaited,      // dgrad_down overwrites d_gate_up under a slow dgrad_up
  kStraddlingMinibatch,    // minibatches of consecutive tiles, across macrobatches
  kCarryShared,            // an expert starts a carry while the previous one still reads it
  kCarryNotAwaited,        // a split expert goes on before its earlier macrobatch is summed
  kNoBarrier,              // a rank does not wait for its peers after the megakernel
  kMutatedWait,            // one wait of one operation left out, or one signal too soon (mok::Op, wait, shortfall)
};

constexpr const char* kBugNames[] = {
    "none", "slot-freed-early", "lag-equals-ring", "lag-ignores-minibatch", "partial-macrobatch", "short-target",
    "combine-after-reuse", "dispatch-first", "wgrad-not-awaited", "dgrad-up-not-awaited", "straddling-minibatch",
    "carry-shared", "carry-not-awaited", "no-barrier", "mutated-wait",
};

struct Rules {
  Bug bug = Bug::kNone;
  mok::Op mutated_op{};
  mok::Counter mutated_counter{};  // the wait on it
  int64_t shortfall = 0;           // taken off the wait's target; 0 removes the wait

  static bool parse(const char* name, Bug* bug) {
    for (size_t i = 0; i < std::size(kBugNames); ++i) {
      if (std::strcmp(kBugNames[i], name) == 0) return *bug = static_cast<Bug>(i), true;
    }
    return false;
  }

  int64_t forward_lag(int64_t lag, const mok::Slots& slots) const {
    const mok::Ring& ring = slots.minibatches.ring;
    if (bug == Bug::kLagEqualsRing) return mok::min_of(ring.tiles, ring.size);
    if (bug == Bug::kLagIgnoresMinibatch) return mok::min_of(mok::min_of(ring.tiles, slots.h - 1), ring.size - 1);
    return mok::min_of(lag, mok::longest_lag(slots));
  }

  mok::Task forward_comm(const mok::ForwardOrder& order, int64_t i) const {
    if (bug != Bug::kDispatchFirst) return order.comm(i);
    const int64_t tiles = order.ring.tiles, last = tiles - 1;
    if (i < tiles) return {mok::Op::kDispatch, last - i, 0, 0};
    return {mok::Op::kCombine, last - (i - tiles), 0, 0};
  }

  mok::Signal signal(const mok::Slots& slots, const mok::Task& task) const {
    mok::Signal signal = mok::signal_of(slots.minibatches, task);
    if (signal.counter == mok::Counter::kArrived && bug == Bug::kStraddlingMinibatch) {
      signal.index = task.index / slots.minibatches.size;
    }
    return signal;
  }

  // Applies the mistake to the waits of one task; returns how many are left.
  int64_t distort(const mok::Slots& slots, const mok::Task& task, mok::Wait* waits, int64_t count) const {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      mok::Wait wait = waits[i];
      if (wait.counter == mok::Counter::kArrived) distort_arrival(slots, task, &wait);
      if (!drops(task, &wait)) waits[kept++] = wait;
    }
    return kept;
  }

 private:
  void distort_arrival(const mok::Slots& slots, const mok::Task& task, mok::Wait* wait) const {
    const mok::Minibatches& minibatches = slots.minibatches;
    if (bug == Bug::kPartialMacrobatch) wait->target = minibatches.size;
    if (bug == Bug::kShortTarget) wait->target -= 1;
    if (bug == Bug::kStraddlingMinibatch) {
      const int64_t minibatch = task.index / minibatches.size, begin = minibatch * minibatches.size;
      wait->begin = minibatch, wait->end = minibatch + 1;
      wait->target = mok::min_of(minibatches.size, minibatches.ring.tiles - begin);
    }
  }

  bool drops(const mok::Task& task, mok::Wait* wait) const {
    using mok::Counter;
    using mok::Op;
    switch (bug) {
      case Bug::kSlotFreedEarly: return task.op == Op::kDispatch;
      case Bug::kCombineAfterReuse: return task.op == Op::kDown && wait->counter == Counter::kCombined;
      case Bug::kWgradNotAwaited: return task.op == Op::kPull && wait->counter == Counter::kWgrad;
      case Bug::kDgradUpNotAwaited: return task.op == Op::kDgradDown && wait->counter == Counter::kDgradUp;
      case Bug::kCarryShared:
        return task.op == Op::kWgrad && wait->counter == Counter::kWgrad && wait->begin != task.index;
      case Bug::kCarryNotAwaited:
        return task.op == Op::kWgrad && wait->counter == Counter::kWgrad && wait->begin == task.index;
      case Bug::kMutatedWait:
        if (task.op != mutated_op || wait->counter != mutated_counter) return false;
        wait->target -= shortfall;
        return shortfall == 0;
      default: return false;
    }
  }
};

}  // namespace protocol
