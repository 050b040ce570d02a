// What one rank's backward megakernel reads. Shared memory and pipeline are the forward's (forward_params.cuh).
#pragma once
#include "../backward_layout.cuh"
#include "forward_params.cuh"

namespace mok::cuda {

__device__ __forceinline__ BackwardTask load_task(uint32_t at, BackwardTask*) {
  const uint64_t low = ptx::load_shared_8(at), high = ptx::load_shared_8(at + 8);
  return {static_cast<uint32_t>(low), static_cast<int32_t>(low >> 32), static_cast<uint32_t>(high), static_cast<int32_t>(high >> 32)};
}

}  // namespace mok::cuda

namespace mok::cuda::sm90 {

constexpr int kPassedByGradient = 4;   // k-blocks that pass by the stage through which a weight gradient's tile leaves
constexpr int kGateUpBlocks = 4;       // stages that bring gate and up of a dgrad_down tile, 64 columns each

struct alignas(128) BackwardParams {
  // Loads. A operands: boxes of 64 rows x 64 columns, and of a whole row tile (replay_x: the former; gate and up: the latter).
  CUtensorMap window_dout[2], d_gate_up[2], local_dout[2], shared_d_gate_up[2];
  CUtensorMap replay_x, ring_gate_up, replayed_gate_up, shared_gate_up;
  // A operands of the weight gradients, and B operands: two boxes of 64 x 64 side by side (replay_weights: 128 rows, as the forward's).
  CUtensorMap gate_up_proj, down_proj, ring_x, replayed_x, window_weighted_h, replay_weights;
  CUtensorMap shared_gate, shared_up, shared_down, local_x, shared_weighted_h;
  CUtensorMap columns_dout, columns_d_gate_up, shared_columns_dout, shared_columns_d_gate_up;
  // Stores, boxes of 64 columns and a row tile (replayed_gate_up too), or half a row tile of d_gate_up and w * h.
  CUtensorMap d_gate_up_out, window_weighted_h_out, shared_d_gate_up_out, shared_weighted_h_out;
  CUtensorMap d_gate_up_proj_out, d_down_proj_out, d_shared_gate_out, d_shared_up_out, d_shared_down_out;

  const __nv_bfloat16 *peer_x[MOK_MAX_RANKS], *peer_dout[MOK_MAX_RANKS];
  const float* peer_weight[MOK_MAX_RANKS];
  const int32_t* peer_tokens[MOK_MAX_RANKS];
  __nv_bfloat16* peer_routed[MOK_MAX_RANKS];

  const ScheduleHeader* header;
  const int64_t* rows;
  uint32_t *tickets, *landed, *replayed, *d_gate_up_ready, *run_ready, *up_done, *wgrad_done, *shared_ready;
  __nv_bfloat16 *dout_out, *x_out, *shared_out;
  float *weight_out, *dots, *shared_dots, *carry_gate_up, *carry_down;
  const float* shared_scale;
  float *gate_up_sum, *down_sum;  // fp32 [L, 2I, D] and [L, D, I] that weight gradients are added to, or null
  Limits limits;
  Stamps stamps;

  BackwardPlan plan;
  int ranks, tokens, topk, hidden, inter, shared_inter, wants_dx;
  Places ring, window, reused;    // reused: of d_gate_up and of what is replayed, the ring's or the window's
  int adds_gate_up, adds_down;    // 1: added to the bf16 values that are there
  int lead_tiles, head_tiles, comm_ctas;
  float swiglu_limit;
  int copy_bytes, copy_slots, copies_per_row;

  // A rank pushes dX rows to whoever wants them, whether it wants its own or not.
  __device__ __forceinline__ bool any_wants_dx() const {
    if (ranks == 1) return wants_dx != 0;
    bool any = false;
    for (int r = 0; r < ranks; ++r) any = any || peer_tokens[r][1] != 0;
    return any;
  }
  __device__ __forceinline__ float* sum_of(uint32_t kind) const {
    return kind == kWgradGateUp ? gate_up_sum : (kind == kWgradDown ? down_sum : nullptr);
  }
  __device__ __forceinline__ bool replays(int tile) const { return tile / plan.window * plan.window >= plan.saved; }
  // A tile's row among the weights, which are not worth being compact: the consumers wait for them.
  __device__ __forceinline__ int weight_row(int tile) const { return tile % plan.window * kBlockM; }
  __device__ __forceinline__ uint32_t wgrad_arrivals() const { return 2 * plan.wgrad_tasks(); }
};

// What a task multiplies: how many k-blocks, and how its operands lie.
struct Product {
  uint32_t kind;
  bool shared, wgrad, gradient_of_hidden;  // gradient_of_hidden: dgrad_down, with the SwiGLU epilogue
  int blocks;

  __device__ __forceinline__ Product(const BackwardParams& p, const BackwardTask& task) {
    kind = task.kind();
    shared = kind == kSharedDgradDown || kind == kSharedDgradUp || kind >= kSharedWgradGate;
    wgrad = is_wgrad(kind);
    gradient_of_hidden = kind == kDgradDown || kind == kSharedDgradDown;
    if (wgrad) {
      blocks = 2 * task.count - (task.is_short() ? 1 : 0);
    } else if (kind == kReplay || gradient_of_hidden) {
      blocks = p.hidden / kBlockK;
    } else {
      blocks = 2 * (shared ? p.shared_inter : p.inter) / kBlockK;
    }
  }
};

// Debug build: the slots that a routed task reads (slots.cuh).
template <int kLanes>
__device__ __forceinline__ void check_inputs(const BackwardParams& p, const BackwardTask& task, int tile, Watch& watch) {
  if constexpr (kStamped) {
    const uint32_t kind = task.kind();
    const int first = is_wgrad(kind) ? task.tile() : tile, count = is_wgrad(kind) ? task.count : 1;
    for (int t = first; t < first + count; ++t) {
      if (kind != kDgradUp) check_slot<kLanes>(p.stamps, kStampPulled, t, watch);
      // The stamps go by the window. In a reused ring d_gate_up keeps its place for longer.
      if ((kind == kDgradUp && p.reused.slots == p.plan.window) || is_wgrad(kind)) check_slot<kLanes>(p.stamps, kStampComputed, t, watch);
      if (kind == kDgradDown && task.replayed()) check_slot<kLanes>(p.stamps, kStampReplayed, t, watch);
    }
  }
}

}  // namespace mok::cuda::sm90
