// The backward megakernel on Hopper: shared expert, reverse-combine, replay, dgrads, dSwiGLU, weight gradients and reverse-dispatch in one launch.
//
// Grid, roles, registers, barriers and pipeline are the forward's (forward.cu): loads, pulls (reverse-combine), tasks, stores (reverse-dispatch)
// and two consumer warpgroups of 64 rows x 256 columns. What differs:
//   Operands   data gradients read the weights as they lie, N-major; weight gradients read both operands along their outputs (wgmma.cuh).
//   Tasks      computed by the scheduling lane from the schedule's prefixes (backward_tasks.cuh), no table.
//   Stages     a dgrad_down tile is followed by four stages that bring its gate and up and take away the three results (dswiglu.cuh).
// Counters   (global memory, cleared by every call, indexed by absolute row tile)
//           landed           128 rows of dOut (and x) and their weights    pull_rows -> loads
//           replayed         gate+up column tiles, written                 pushes -> dgrad_down
//           d_gate_up_ready  dgrad_down column tiles, written              pushes -> dgrad_up, pull_rows (lead)
//           run_ready        the same, over an expert's tiles in a macrobatch  pushes -> weight gradients
//           up_done          dgrad_up column tiles, multiplied             pushes -> dgrad_down, replay (d_gate_up slot is free)
//           wgrad_done [L]   2 CTAs x tasks, for every round               pushes -> pull_rows (slots are free), later rounds (carry)
//           shared_ready     shared dgrad_down column tiles; behind the last, over all token tiles
#include <cstring>

#include "../dedicated.cuh"
#include "../tensor_map.h"
#include "backward_compute.cuh"
#include "backward_load.cuh"
#include "backward_push.cuh"
#include "launch.cuh"

namespace mok::cuda::sm90 {

template <int kRanks>
struct BackwardLaunch {
  BackwardParams rank[kRanks];
};

template <int kRanks>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ BackwardLaunch<kRanks> launch) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t smem = ptx::shared_address(shared_memory);
  const BackwardParams& p = launch.rank[kRanks == 1 ? 0 : blockIdx.x / (gridDim.x / kRanks)];
  const auto pull = [&](const CopyRing& ring) { pull_rows(p, ring); };
  run_roles(
      smem, p.limits, [&] { load_backward_operands(p, smem); }, [&] { dispatch_role(p, place_of(kRanks, p.comm_ctas), smem, pull); },
      [&] {
        if (place_of(kRanks, p.comm_ctas).only_pulls()) wait_drained(p.limits, smem);
        schedule_backward_tasks(p, smem);
      },
      [&] { push_tiles(p, smem); },
      [&](uint32_t group) {
        pull_before_computing(p, place_of(kRanks, p.comm_ctas), smem, pull, [&](int cta, int ctas) { pull_head(p, cta, ctas); });
        compute_backward_tiles(p, smem, group);
      });
}

namespace {

cudaError_t fill_params(const MokBackwardArgs& b, int clusters, BackwardParams& p) {
  memset(&p, 0, sizeof p);
  const MokForwardArgs& a = b.forward;
  const int window = window_tiles(b);
  if (window < 1 || (may_replay(b) && a.ring_tiles % window != 0)) return cudaErrorInvalidValue;
  const int64_t ring_rows = static_cast<int64_t>(a.ring_tiles) * kRowsPerTile, rows = window_rows(b);
  const int64_t hidden = a.hidden, inter = a.inter, shared = a.shared_inter;
  const ScheduleLayout s = ScheduleLayout::make(a);
  const BackwardLayout l = BackwardLayout::make(b);
  const auto buffer = [&](int64_t offset) { return at<__nv_bfloat16>(b.workspace, offset); };
  // Where d_gate_up lies, and what is replayed: in the ring, or like the window in the workspace.
  const bool reuses = b.reuses_ring != 0;
  const int64_t reused_rows = reuses ? ring_rows : rows;
  void* d_gate_up = reuses ? a.ring_gate_up : buffer(l.d_gate_up);
  void* shared_d_gate_up = reuses ? a.shared_gate_up : buffer(l.shared_d_gate_up);
  void* replayed_x = reuses ? a.ring_x : buffer(l.x);
  void* replayed_gate_up = reuses ? a.ring_gate_up : buffer(l.gate_up);
  const int32_t* tile_rows = at<const int32_t>(a.schedule, s.tile_rows);
  p.ring = {is_compact(a) ? tile_rows : nullptr, ring_slots(a)};
  p.window = {compact_window(b) ? tile_rows : nullptr, window};
  p.reused = reuses ? p.ring : p.window;
  bool ok = true;
  const auto rows_of = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count, int box_rows) {
    if (base != nullptr && count > 0) ok = ok && make_row_map(map, base, width, count, kBlockK, box_rows);
  };
  const auto load = [&](CUtensorMap (&maps)[2], const void* base, int64_t width, int64_t count) {
    rows_of(maps[0], base, width, count, kBoxRows);
    rows_of(maps[1], base, width, count, kBlockM);
  };
  const auto store = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count) { rows_of(map, base, width, count, kBoxRows); };
  const auto matrices = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count, int64_t depth, int box_rows) {
    if (base != nullptr) ok = ok && make_weight_map(map, base, width, count, depth, kBlockK, box_rows);
  };
  const auto chunks = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count, int64_t depth = 1) {
    if (base != nullptr && count > 0) ok = ok && make_chunk_map(map, base, width, count, depth, 2);
  };
  chunks(p.ring_x, a.ring_x, hidden, ring_rows);
  rows_of(p.ring_gate_up, a.ring_gate_up, 2 * inter, ring_rows, kBlockM);
  load(p.window_dout, buffer(l.dout), hidden, rows);
  load(p.d_gate_up, d_gate_up, 2 * inter, reused_rows);
  chunks(p.columns_dout, buffer(l.dout), hidden, rows);
  chunks(p.columns_d_gate_up, d_gate_up, 2 * inter, reused_rows);
  chunks(p.window_weighted_h, buffer(l.weighted_h), inter, rows);
  store(p.d_gate_up_out, d_gate_up, 2 * inter, reused_rows);
  store(p.window_weighted_h_out, buffer(l.weighted_h), inter, rows);
  if (may_replay(b)) {
    rows_of(p.replay_x, replayed_x, hidden, reused_rows, kBoxRows);
    chunks(p.replayed_x, replayed_x, hidden, reused_rows);
    rows_of(p.replayed_gate_up, replayed_gate_up, 2 * inter, reused_rows, kBlockM);
    matrices(p.replay_weights, a.gate_up_proj, hidden, inter, 2 * static_cast<int64_t>(a.local_experts), kBoxColumns);
  }
  chunks(p.gate_up_proj, a.gate_up_proj, hidden, inter, 2 * static_cast<int64_t>(a.local_experts));
  chunks(p.down_proj, a.down_proj, inter, hidden, a.local_experts);
  const auto weight_gradient = [&](CUtensorMap& map, float*& sum, int& adds, void* to, int into, int64_t width, int64_t count) {
    adds = into == kMokAddBf16;
    if (into == kMokAddFp32)
      sum = static_cast<float*>(to);
    else
      matrices(map, to, width, count, a.local_experts, kBlockM);
  };
  weight_gradient(p.d_gate_up_proj_out, p.gate_up_sum, p.adds_gate_up, b.d_gate_up_proj, b.d_gate_up_into, hidden, 2 * inter);
  weight_gradient(p.d_down_proj_out, p.down_sum, p.adds_down, b.d_down_proj, b.d_down_into, inter, hidden);
  if (shared_needed(b)) {
    chunks(p.local_x, b.x, hidden, a.tokens);
    load(p.local_dout, b.dout, hidden, a.tokens);
    rows_of(p.shared_gate_up, a.shared_gate_up, 2 * shared, a.tokens, kBlockM);
    load(p.shared_d_gate_up, shared_d_gate_up, 2 * shared, a.tokens);
    chunks(p.shared_columns_dout, b.dout, hidden, a.tokens);
    chunks(p.shared_columns_d_gate_up, shared_d_gate_up, 2 * shared, a.tokens);
    chunks(p.shared_weighted_h, buffer(l.shared_weighted_h), shared, a.tokens);
    store(p.shared_d_gate_up_out, shared_d_gate_up, 2 * shared, a.tokens);
    store(p.shared_weighted_h_out, buffer(l.shared_weighted_h), shared, a.tokens);
    chunks(p.shared_gate, a.shared_gate, hidden, shared);
    chunks(p.shared_up, a.shared_up, hidden, shared);
    chunks(p.shared_down, a.shared_down, shared, hidden);
    matrices(p.d_shared_gate_out, b.d_shared_gate, hidden, shared, 1, kBlockM);
    matrices(p.d_shared_up_out, b.d_shared_up, hidden, shared, 1, kBlockM);
    matrices(p.d_shared_down_out, b.d_shared_down, shared, hidden, 1, kBlockM);
  }
  if (!ok) return cudaErrorInvalidValue;

  for (int r = 0; r < a.ranks; ++r) {
    p.peer_x[r] = static_cast<const __nv_bfloat16*>(a.peer_x[r]);
    p.peer_dout[r] = static_cast<const __nv_bfloat16*>(b.peer_dout[r]);
    p.peer_weight[r] = b.peer_weight[r];
    p.peer_tokens[r] = a.peer_tokens[r];
    p.peer_routed[r] = static_cast<__nv_bfloat16*>(a.peer_routed[r]);
  }
  p.header = at<const ScheduleHeader>(a.schedule, 0);
  p.rows = at<const int64_t>(a.schedule, s.rows);
  const auto counter = [&](int64_t offset) { return at<uint32_t>(b.workspace, offset); };
  p.tickets = counter(l.tickets), p.landed = counter(l.landed), p.replayed = counter(l.replayed);
  p.d_gate_up_ready = counter(l.d_gate_up_ready), p.run_ready = counter(l.run_ready), p.up_done = counter(l.up_done);
  p.wgrad_done = counter(l.wgrad_done), p.shared_ready = counter(l.shared_ready);
  p.dout_out = buffer(l.dout), p.x_out = static_cast<__nv_bfloat16*>(replayed_x), p.shared_out = static_cast<__nv_bfloat16*>(b.shared_dx);
  p.weight_out = at<float>(b.workspace, l.weight), p.dots = at<float>(b.workspace, l.dots), p.shared_dots = at<float>(b.workspace, l.shared_dots);
  p.carry_gate_up = at<float>(b.workspace, l.carry_gate_up), p.carry_down = at<float>(b.workspace, l.carry_down);
  p.shared_scale = b.shared_scale;
  p.limits = {a.abort_word, a.record, a.timeout_ns, static_cast<uint32_t>(a.rank)};
  p.plan = plan_of(b, clusters);
  place_stamps(p.stamps, at<uint32_t>(b.workspace, l.stamps), window, kRowsPerTile, p.plan.down_columns, replayed_parts(b));
  p.ranks = a.ranks, p.tokens = a.tokens, p.topk = a.topk, p.hidden = a.hidden, p.inter = a.inter, p.shared_inter = a.shared_inter;
  p.wants_dx = b.wants_dx, p.swiglu_limit = a.swiglu_limit, p.comm_ctas = b.comm_sms;
  // A tile's rows are multiplied when its chunk is, and with replay a chunk is replayed before: pulls must be allowed that far.
  p.lead_tiles = min_of(max_of(a.lead_tiles > 0 ? a.lead_tiles : 48, 6 * p.plan.chunk + 2), window);
  p.head_tiles = p.plan.shared_down_columns == 0 ? min_of(kHeadTiles, p.lead_tiles) : 0;
  choose_copies(a.hidden, p);
  return cudaSuccess;
}

template <int kRanks>
cudaError_t launch(const MokBackwardArgs* args, cudaStream_t stream) {
  static thread_local BackwardLaunch<kRanks> params;
  cudaError_t status;
  const int clusters = resident_clusters(backward_kernel<kRanks>, kRanks, args[0].forward.sm_limit, &status);
  if (clusters == 0) return status;
  for (int r = 0; r < kRanks; ++r) {
    const int computing = computing_clusters(clusters / kRanks, args[r].comm_sms);
    if (computing == 0) return cudaErrorInvalidValue;
    status = fill_params(args[r], computing, params.rank[r]);
    if (status != cudaSuccess) return status;
    status = cudaMemsetAsync(args[r].workspace, 0, BackwardLayout::make(args[r]).cleared_bytes, stream);
    if (status != cudaSuccess) return status;
  }
  return launch_clusters(backward_kernel<kRanks>, params, clusters, stream);
}

}  // namespace

cudaError_t launch_backward(const MokBackwardArgs* args, int count, cudaStream_t stream) {
  switch (count) {
    case 1: return launch<1>(args, stream);
    case 2: return launch<2>(args, stream);
    case 4: return launch<4>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace mok::cuda::sm90
