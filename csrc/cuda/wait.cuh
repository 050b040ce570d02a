// Bounded waits. Every spin in a kernel goes through here.
#pragma once
#include "api.h"
#include "ptx.cuh"

namespace mok::cuda {

enum WaitPhase : uint32_t {
  kWaitBarrier = 1,    // a peer's epoch
  kWaitOperand = 2,    // a pipeline stage of the GEMM
  kWaitTask = 3,       // a task from the cluster's scheduler
  kWaitDispatched = 4, // rows of a tile
  kWaitHidden = 5,     // gate+up column tiles of a row tile
  kWaitSlot = 6,       // a ring slot's previous occupant
  kWaitCopy = 7,       // a pull from a peer
  kWaitReplayed = 8,   // gate and up computed again
  kWaitCarry = 9,      // a weight gradient's earlier rounds
  kSlotMismatch = 10,  // not a wait: a slot holds another row tile than it should (slots.cuh)
};

struct Limits {
  uint32_t* abort_word;
  MokTimeoutRecord* record;
  uint64_t timeout_ns;
  uint32_t rank;
};

// One per role and thread. After a wait has failed `dead` stays true, all later waits return at once, and the role leaves its loop.
// The limits stay where they are, in the kernel's parameters: consumer warps have no register left for them.
struct Watch {
  const Limits& limits;
  bool dead;

  __device__ __forceinline__ void give_up(uint32_t phase, uint32_t waiting_for, uint32_t expected, uint32_t seen) {
    MokTimeoutRecord* record = limits.record;
    if (atomicExch(limits.abort_word, 1u) == 0 && record != nullptr) {
      record->rank = limits.rank, record->phase = phase, record->waiting_for = waiting_for;
      record->expected = expected, record->seen = seen;
      __threadfence_system();
      record->set = 1;
    }
    dead = true;
  }
};

// How a role begins.
__device__ __forceinline__ Watch watch_of(const Limits& limits) { return {limits, ptx::ld_relaxed_sys(limits.abort_word) != 0}; }

// A wait inside a CTA lasts because another wait does, so it gets twice the time: the record then names the cause.
__device__ __forceinline__ bool own_cause(uint32_t phase) { return phase != kWaitOperand && phase != kWaitTask; }

// Polls `ready` until it holds, the time is up or another role gave up. `seen` is what goes into the record.
template <class Ready>
__device__ __forceinline__ bool wait_for(Watch& watch, uint32_t phase, uint32_t waiting_for, uint32_t expected, Ready ready) {
  uint32_t seen = 0;
  if (ready(seen)) return true;
  uint64_t start = 0;
  for (uint32_t spin = 1; !watch.dead; ++spin) {
    if (ready(seen)) return true;
    if (spin % 64 == 0) {
      const uint64_t now = ptx::globaltimer_ns();
      if (start == 0) start = now;
      if (ptx::ld_relaxed_sys(watch.limits.abort_word) != 0) {
        watch.dead = true;
      } else if (now - start > (watch.limits.timeout_ns << (own_cause(phase) ? 0 : 1))) {
        watch.give_up(phase, waiting_for, expected, seen);
      }
    }
  }
  return false;
}

__device__ __forceinline__ bool wait_mbarrier(Watch& watch, uint32_t bar, uint32_t parity, uint32_t phase) {
  return wait_for(watch, phase, bar, parity, [&](uint32_t&) { return ptx::mbarrier_try(bar, parity); });
}

// Waits until *counter, which only grows within a call, has reached `target`.
__device__ __forceinline__ bool wait_counter(Watch& watch, const uint32_t* counter, uint32_t target, uint32_t phase, uint32_t index) {
  return wait_for(watch, phase, index, target, [&](uint32_t& seen) {
    seen = ptx::ld_acquire_gpu(counter);
    if (static_cast<int32_t>(seen - target) >= 0) return true;
    __nanosleep(100);  // a dispatch warp may wait here for most of the kernel
    return false;
  });
}

}  // namespace mok::cuda
