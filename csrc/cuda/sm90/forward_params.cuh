// What one rank's megakernel reads: tensor maps, pointers, sizes; and the shared-memory layout of its CTAs.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "../layout.cuh"
#include "../wait.cuh"

namespace mok::cuda {

__device__ __forceinline__ Task load_task(uint32_t at, Task*) { return {ptx::load_shared_8(at)}; }

}  // namespace mok::cuda

namespace mok::cuda::sm90 {

constexpr int kStages = 4;
constexpr int kBlockK = 64;                       // 128 bytes of bf16: one swizzle atom
constexpr int kBlockM = kRowsPerTile;             // rows of a CTA's tile; 64 for each consumer warpgroup
constexpr int kBlockN = 256;                      // columns of a CTA's tile
constexpr int kBoxRows = kHalfRows;               // rows of an A box: half a tile, what one CTA multicasts of a shared row tile
constexpr int kBoxColumns = 128;                  // weight rows of a B box: half a tile, what one CTA multicasts of a shared weight tile
constexpr int kABytes = kBlockM * kBlockK * 2;
constexpr int kBBytes = kBlockN * kBlockK * 2;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kTaskSlots = 2;                     // the task in hand and the next
constexpr int kThreads = 384;
// A finished tile leaves through one stage borrowed from the pipeline and this room behind it, so that stores run while the next tile is
// multiplied: as 16 half windows of 8 rows of 256 bf16, 528 bytes apart (so the rows of a fragment start in different banks), two for each
// consumer warp, or as four boxes of 128 rows x 64 columns. The next tile's first k-blocks pass the borrowed stage by, until its stores have
// read it (StageOrder).
constexpr int kOutPitch = 528;
constexpr int kHalfWindow = 8 * kOutPitch;
constexpr int kHalvesInStage = 11;
constexpr int kRestBytes = (16 - kHalvesInStage) * kHalfWindow;
constexpr int kBoxBytes = kBlockM * 128;
constexpr int kBoxesInStage = 3;
constexpr int kPassedByGateUp = 5, kPassedByDown = 14;  // k-blocks; down rows take longer, since each is a store of its own
static_assert(kHalvesInStage * kHalfWindow <= kStageBytes && kBoxesInStage * kBoxBytes <= kStageBytes && kBoxBytes <= kRestBytes, "a tile does not fit");
constexpr int kCopyBytes = 14336;                 // dispatch ring
constexpr int kCopySlots = 8;

struct Shared {
  static constexpr int kRest = kStages * kStageBytes;
  static constexpr int kCopy = kRest + kRestBytes;
  static constexpr int kBarriers = kCopy + kCopyBytes;
  static constexpr int kFull = kBarriers;                      // [stages] 1 arrival: own producer, + bytes from both CTAs
  static constexpr int kEmpty = kFull + 8 * kStages;           // [stages] 16 arrivals: eight consumer warps of each CTA
  static constexpr int kTaskFull = kEmpty + 8 * kStages;       // [slots] 1 arrival: the leader's scheduler
  static constexpr int kTaskEmpty = kTaskFull + 8 * kTaskSlots; // [slots], leader's only: 8 arrivals, loads, pushes and two warpgroups of each CTA
  static constexpr int kCopyFull = kTaskEmpty + 8 * kTaskSlots; // [copy slots] 1 arrival + bytes
  static constexpr int kOutFull = kCopyFull + 8 * kCopySlots;  // 8 arrivals: consumer warps, a part of a tile is in place
  static constexpr int kOutFree = kOutFull + 8;                // 1 arrival: the pushing warp, its stores have read it
  static constexpr int kDrained = kOutFree + 8;                // leader's only, 18 arrivals: the warps that pull in a cluster that only pulls
  static constexpr int kTask = (kDrained + 8 + 15) / 16 * 16;  // [slots] 16 bytes
  static constexpr int kOutStage = kTask + 16 * kTaskSlots;    // 4 bytes: the stage that this part lies in
  static constexpr int kBytes = kOutStage + 8;
};
static_assert(Shared::kBytes <= 232448, "more shared memory than an SM has");

struct alignas(128) ForwardParams {
  CUtensorMap ring_x[2], ring_h[2], local_x[2], shared_h[2];  // boxes of half a row tile, and of a whole one
  CUtensorMap gate_up_proj, down_proj, shared_gate, shared_up, shared_down;
  CUtensorMap gate_up_out[3], h_out[3];                       // stores: likewise, and the shared expert's, boxes of a row tile

  const __nv_bfloat16* peer_x[MOK_MAX_RANKS];
  __nv_bfloat16* peer_routed[MOK_MAX_RANKS];

  const ScheduleHeader* header;
  const int64_t* rows;       // row table
  const uint64_t* tasks;
  uint32_t *tickets, *x_ready, *h_ready, *down_done, *shared_h_ready;
  __nv_bfloat16 *ring_x_out, *shared_out;
  Limits limits;
  Stamps stamps;

  Columns columns;
  Places ring;
  int tokens, topk, hidden, inter, shared_inter;
  int lead_tiles, head_tiles;  // how far dispatch may run ahead; tiles that the consumer warps fetch before they begin
  int comm_ctas;               // CTAs that only pull, as long as there is something to pull
  int ladder, store_gate_up;
  float swiglu_limit;
  int copy_bytes, copy_slots, copies_per_row;  // a row travels in copies_per_row pieces of at most copy_bytes

  __device__ __forceinline__ bool stores_gate_up() const { return store_gate_up != 0; }
  __device__ __forceinline__ bool stores_hidden() const { return ladder != kMokGateUpOnly; }
  __device__ __forceinline__ bool dispatches() const { return ladder == kMokWhole; }
};

// Position in a ring of `kDepth` slots and the parity its barriers are waited for with.
template <int kDepth>
struct RingPosition {
  uint32_t slot = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kDepth) slot = 0, phase ^= 1;
  }
};

// The stages in the order in which the producer fills and the consumers drain them; all roles of both CTAs step through it alike. A tile's
// epilogue takes the next stage out of the order for some k-blocks. Each stage has its own phase.
struct StageOrder {
  uint32_t slot = 0, phases = 0, borrowed = kStages;
  int passed_by = 0;

  __device__ __forceinline__ uint32_t phase() const { return phases >> slot & 1; }
  __device__ __forceinline__ void advance() {
    phases ^= 1u << slot;
    slot = (slot + 1) % kStages;
    if (passed_by > 0) {
      if (slot == borrowed) slot = (slot + 1) % kStages;
      --passed_by;
    }
  }
  // After the tile's last k-block; returns the stage, which the next `blocks` k-blocks pass by.
  __device__ __forceinline__ uint32_t borrow(int blocks) {
    const uint32_t taken = slot;
    passed_by = 0;
    advance();
    borrowed = taken, passed_by = blocks;
    return taken;
  }
};
static_assert((kStages & (kStages - 1)) == 0, "slot arithmetic");

__device__ __forceinline__ uint32_t half_window(uint32_t smem, uint32_t borrowed, int half) {
  return smem + (half < kHalvesInStage ? borrowed * kStageBytes + half * kHalfWindow : Shared::kRest + (half - kHalvesInStage) * kHalfWindow);
}

__device__ __forceinline__ uint32_t out_box(uint32_t smem, uint32_t borrowed, int box) {
  return smem + (box < kBoxesInStage ? borrowed * kStageBytes + box * kBoxBytes : Shared::kRest);
}

// The next task of this cluster; every role of both CTAs reads the same sequence.
template <class TaskType = Task>
__device__ __forceinline__ TaskType read_task(uint32_t smem, const RingPosition<kTaskSlots>& at, Watch& watch) {
  const uint32_t bar = smem + Shared::kTaskFull + 8 * at.slot;
  wait_for(watch, kWaitTask, at.slot, at.phase, [&](uint32_t&) { return ptx::mbarrier_try_cluster(bar, at.phase); });
  return watch.dead ? TaskType::end() : load_task(smem + Shared::kTask + 16 * at.slot, static_cast<TaskType*>(nullptr));
}

}  // namespace mok::cuda::sm90
