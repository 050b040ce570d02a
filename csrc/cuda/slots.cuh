// Debug build: every slot of a call says whose rows it holds, readers check it before their loads and after them, and roles dawdle at random. What
// a forward keeps for its backward, the carry and the shared expert's matrices have no stamps, nor has d_gate_up in a reused ring.
//
// -DMOK_DEBUG_SLOTS=1 (benchmarks/build.sh takes it in MOK_NVCC_FLAGS; tests/gpu/test_slots.py). Without it everything here is empty. With 2,
// dispatch does not wait for the slot that it overwrites: a fault that the checks must find.
//
// A row tile's slot has a stamp for each part that is written on its own: a row that is pulled, or a column tile that the pushing warp stores. It
// is the tile's number with the top bit set while the part is being written, and without it once it is there. Stamps are cleared with the
// call's counters, so those of an earlier call are found out too. A reader that comes too early meets the bit or another tile before its loads;
// one whose slot was given away too early meets them once its loads are complete, which it looks for before it says that the slot is free.
#pragma once
#include "../common/macros.h"
#include "wait.cuh"

#if !defined(MOK_DEBUG_SLOTS)
#define MOK_DEBUG_SLOTS 0
#endif

namespace mok::cuda {

constexpr bool kStamped = MOK_DEBUG_SLOTS > 0, kSlotFault = MOK_DEBUG_SLOTS == 2;
constexpr uint32_t kBeingWritten = 1u << 31;

// Rows of x or dOut (and what is pulled with them) | gate, up and h, or d_gate_up and w * h | gate and up computed again.
enum StampedRows { kStampPulled, kStampComputed, kStampReplayed, kStampTables };

struct Stamps {
#if MOK_DEBUG_SLOTS
  uint32_t* table[kStampTables];  // [slots, parts], null: not in use
  int parts[kStampTables], slots;

  __device__ __forceinline__ uint32_t* of(int which, int tile) const {
    return table[which] != nullptr ? table[which] + static_cast<int64_t>(tile % slots) * parts[which] : nullptr;
  }
#endif
};

MOK_HD int64_t stamp_bytes(int64_t slots, int pulled, int computed, int replayed) {
  return kStamped ? slots * (pulled + computed + replayed) * 4 : 0;
}

inline void place_stamps([[maybe_unused]] Stamps& s, [[maybe_unused]] uint32_t* at, [[maybe_unused]] int slots, [[maybe_unused]] int pulled,
                         [[maybe_unused]] int computed, [[maybe_unused]] int replayed) {
#if MOK_DEBUG_SLOTS
  const int parts[kStampTables] = {pulled, computed, replayed};
  s.slots = slots;
  for (int i = 0; i < kStampTables; ++i) s.parts[i] = parts[i], s.table[i] = at, at += static_cast<int64_t>(slots) * parts[i];
#endif
}

// A warp that is about to write parts first .. first + count - 1 of a tile (count <= 32), or, with `done`, has written them.
__device__ __forceinline__ void stamp(const Stamps& s, int which, int tile, int first, int count, bool done) {
#if MOK_DEBUG_SLOTS
  uint32_t* table = s.of(which, tile);
  const int lane = threadIdx.x % 32;
  __syncwarp();  // one lane waits for the warp's copies
  if (table != nullptr && lane < count) {
    *static_cast<volatile uint32_t*>(table + first + lane) = (tile + 1) | (done ? 0 : kBeingWritten);
    __threadfence();
    ptx::fence_proxy_async_global();
  }
  __syncwarp();
#endif
}

// Before or after loads of a tile: by one lane, or by the 32 of a warp. A mismatch ends the call.
template <int kLanes>
__device__ __forceinline__ void check_slot(const Stamps& s, int which, int tile, Watch& watch) {
#if MOK_DEBUG_SLOTS
  const uint32_t* table = s.of(which, tile);
  if (table == nullptr) return;
  __threadfence();
  const uint32_t expected = tile + 1;
  uint32_t other = expected;
#pragma unroll 8
  for (int i = threadIdx.x % kLanes; i < s.parts[which]; i += kLanes) {
    const uint32_t seen = *static_cast<const volatile uint32_t*>(table + i);
    if (seen != expected) other = seen;
  }
  if (other != expected) watch.give_up(kSlotMismatch, tile, expected, other);
  if constexpr (kLanes == 32) __syncwarp();
#endif
}

// A column tile on its way into a slot: all 32 lanes begin, one ends.
struct ColumnStamp {
  const Stamps& stamps;
  int which, tile, column;
  bool kept;  // in a slot, not in a matrix of the shared expert

  __device__ __forceinline__ void begin() const {
    if (kept) stamp(stamps, which, tile, column, 1, false);
  }
  __device__ __forceinline__ void end() const {
#if MOK_DEBUG_SLOTS
    uint32_t* table = stamps.of(which, tile);
    if (kept && table != nullptr) *static_cast<volatile uint32_t*>(table + column) = tile + 1;
#endif
  }
};

// One time in four, up to 20 us: one lane, or a warp that stays together.
__device__ __forceinline__ void dawdle() {
#if MOK_DEBUG_SLOTS
  uint32_t hash = static_cast<uint32_t>(clock64()) * 0x9e3779b1u ^ (blockIdx.x * 12 + threadIdx.x / 32) * 0x85ebca77u;
  hash = (hash ^ hash >> 15) * 0xc2b2ae3du;
  hash ^= hash >> 13;
  if (hash % 4 == 0) __nanosleep((hash >> 2) % 20000);
#endif
}
__device__ __forceinline__ void dawdle_warp() {
#if MOK_DEBUG_SLOTS
  __syncwarp();
  if (threadIdx.x % 32 == 0) dawdle();
  __syncwarp();
#endif
}

}  // namespace mok::cuda
