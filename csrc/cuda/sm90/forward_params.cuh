// What one rank's megakernel reads: tensor maps, pointers, sizes; and the shared-memory layout of its CTAs.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "../layout.cuh"
#include "../wait.cuh"

namespace mok::cuda::sm90 {

constexpr int kStages = 4;
constexpr int kBlockK = 64;                       // 128 bytes of bf16: one swizzle atom
constexpr int kBlockM = kRowsPerTile;             // rows of a CTA's tile; 64 for each consumer warpgroup
constexpr int kBlockN = 256;                      // columns of a CTA's tile
constexpr int kBoxRows = 64;                      // rows of an A box: half a tile, what one CTA multicasts of a shared row tile
constexpr int kBoxColumns = 128;                  // weight rows of a B box: half a tile, what one CTA multicasts of a shared weight tile
constexpr int kABytes = kBlockM * kBlockK * 2;
constexpr int kBBytes = kBlockN * kBlockK * 2;
constexpr int kStageBytes = kABytes + kBBytes;
constexpr int kTaskSlots = 2;                     // the task in hand and the next
constexpr int kThreads = 384;
// A finished tile leaves through a borrowed pipeline stage (tile_rows below) plus this room behind the stages. Rows of 256 bf16 lie 528
// bytes apart, so that the eight rows of a fragment start in different banks; 88 of the 128 rows fit into a stage.
constexpr int kOutPitch = 528, kHiddenPitch = 272;
constexpr int kGroupsInStage = 11;                // groups of 8 rows
constexpr int kRestBytes = (kBlockM / 8 - kGroupsInStage) * 8 * kOutPitch;
static_assert(kGroupsInStage * 8 * kOutPitch <= kStageBytes && kBlockM * kHiddenPitch <= kStageBytes, "a tile does not fit");
constexpr int kCopyBytes = 14336;                 // dispatch ring
constexpr int kCopySlots = 8;

struct Shared {
  static constexpr int kRest = kStages * kStageBytes;
  static constexpr int kCopy = kRest + kRestBytes;
  static constexpr int kBarriers = kCopy + kCopyBytes;
  static constexpr int kFull = kBarriers;                      // [stages] 1 arrival: own producer, + bytes from both CTAs
  static constexpr int kEmpty = kFull + 8 * kStages;           // [stages] 16 arrivals: eight consumer warps of each CTA
  static constexpr int kTaskFull = kEmpty + 8 * kStages;       // [slots] 1 arrival: the leader's scheduler
  static constexpr int kTaskEmpty = kTaskFull + 8 * kTaskSlots; // [slots], leader's only: 6 arrivals, producer and two warpgroups of each CTA
  static constexpr int kCopyFull = kTaskEmpty + 8 * kTaskSlots; // [copy slots] 1 arrival + bytes
  static constexpr int kTask = kCopyFull + 8 * kCopySlots;     // [slots] 8 bytes
  static constexpr int kBytes = kTask + 8 * kTaskSlots;
};
static_assert(Shared::kBytes <= 232448, "more shared memory than an SM has");

struct alignas(128) ForwardParams {
  CUtensorMap ring_x, ring_h, gate_up_proj, down_proj;
  CUtensorMap local_x, shared_h, shared_gate, shared_up, shared_down;

  const __nv_bfloat16* peer_x[MOK_MAX_RANKS];
  __nv_bfloat16* peer_routed[MOK_MAX_RANKS];

  const ScheduleHeader* header;
  const int64_t* rows;       // row table
  const uint64_t* tasks;
  uint32_t *tickets, *x_ready, *h_ready, *down_done, *shared_h_ready;
  __nv_bfloat16 *ring_x_out, *ring_gate_up, *ring_h_out, *shared_gate_up, *shared_h_out, *shared_y;
  uint32_t* abort_word;
  MokTimeoutRecord* record;
  uint64_t timeout_ns;

  Columns columns;
  int rank, tokens, topk, hidden, inter, shared_inter, ring_tiles;
  int ladder, store_gate_up;
  float swiglu_limit;
  int copy_bytes, copy_slots, copies_per_row;  // a row travels in copies_per_row pieces of at most copy_bytes

  __device__ __forceinline__ Watch watch() const {
    return {abort_word, record, timeout_ns, static_cast<uint32_t>(rank), ptx::ld_relaxed_sys(abort_word) != 0};
  }
  __device__ __forceinline__ bool stores_gate_up() const { return store_gate_up != 0; }
  __device__ __forceinline__ bool stores_hidden() const { return ladder != kMokGateUpOnly; }
  __device__ __forceinline__ bool dispatches() const { return ladder == kMokWhole; }
};

// Stages that a task's epilogue borrows after its last k-block: one for 256 output columns (or for gate and up), one for h.
__device__ __forceinline__ int borrowed_stages(const ForwardParams& p, bool gate_up) {
  return gate_up ? (p.stores_gate_up() ? 1 : 0) + (p.stores_hidden() ? 1 : 0) : 1;
}

// Position in a ring of `kDepth` slots and the parity its barriers are waited for with.
template <int kDepth>
struct RingPosition {
  uint32_t slot = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kDepth) slot = 0, phase ^= 1;
  }
};

// The next task of this cluster; every role of both CTAs reads the same sequence.
__device__ __forceinline__ Task read_task(uint32_t smem, const RingPosition<kTaskSlots>& at, Watch& watch) {
  const uint32_t bar = smem + Shared::kTaskFull + 8 * at.slot;
  wait_for(watch, kWaitTask, at.slot, at.phase, [&](uint32_t&) { return ptx::mbarrier_try_cluster(bar, at.phase); });
  return watch.dead ? Task::end() : Task{ptx::load_shared_8(smem + Shared::kTask + 8 * at.slot)};
}

}  // namespace mok::cuda::sm90
