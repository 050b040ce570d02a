// The forward megakernel on Hopper: shared expert, dispatch, gate+up, SwiGLU, down projection and combine in one launch.
//
// Grid      one CTA of 384 threads an SM, in clusters of two, launched cooperatively (all resident: whatever a task waits for is
//           owned by a CTA that runs). Block ranges are ranks; outside tests there is one.
// Roles     warp 0   lane 0: loads operands (load_operands)          40 registers
//           warp 1   dispatch: peer rows -> ring (dispatch_rows)     40
//           warp 2   lane 0 of the cluster's first CTA: takes tasks  40
//           warp 3   stores: gate, up and h -> ring, output rows -> their owners (push_tiles) 40
//           warps 4-7, 8-11   consumer warpgroups, 64 rows x 256 columns each   232
// Barriers  (shared memory; arrivals, and who frees what)
//           full[4]        1 + 48 KB: own producer's expectation; bytes come from both CTAs' producers
//           empty[4]       16: the consumer warps of both CTAs, after the wgmma group that read the stage is complete
//           Each tile ends with a stage that carries no operands: the producer hands it over (full, no bytes), consumers write the finished
//           tile into it, and the pushing warp frees it when its stores have read it, eight arrivals to each CTA.
//           task_full[2]   1: the scheduler, into both CTAs
//           task_empty[2]  8, in the first CTA: loads and pushes (task read) and two warpgroups (tile multiplied) of both CTAs
//           out_full       8: the consumer warps, a part of a tile is in place
//           out_free       1: the pushing warp, its stores have read it
//           copy_full[8]   1 + a piece of a row: the dispatch warp's own pulls
//           drained        18, in the first CTA: the nine warps of both CTAs that pull, in a cluster that does so first (dedicated.cuh)
// Counters  (global memory, cleared by mok_schedule, indexed by absolute row tile)
//           x_ready        128 rows landed                         dispatch -> load_operands
//           h_ready        gate+up column tiles, written           pushes -> load_operands of down; dispatch (x slot is free)
//           down_done      down column tiles, multiplied           pushes -> load_operands of gate+up (h slot is free)
//           shared_h_ready shared gate+up column tiles
// Nothing here waits for another rank: peers' x is complete before the launch, and pushes are waited for after it.
#include <cstring>

#include "../dedicated.cuh"
#include "../tensor_map.h"
#include "compute.cuh"
#include "launch.cuh"
#include "load.cuh"
#include "push.cuh"

namespace mok::cuda::sm90 {

template <int kRanks>
struct Launch {
  ForwardParams rank[kRanks];
};

template <int kRanks>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ Launch<kRanks> launch) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t smem = ptx::shared_address(shared_memory);
  const ForwardParams& p = launch.rank[kRanks == 1 ? 0 : blockIdx.x / (gridDim.x / kRanks)];
  const auto pull = [&](const CopyRing& ring) { dispatch_rows(p, ring); };
  run_roles(
      smem, p.limits, [&] { load_operands(p, smem); },
      [&] {
        if (p.dispatches()) dispatch_role(p, place_of(kRanks, p.comm_ctas), smem, pull);
      },
      [&] {
        if (place_of(kRanks, p.comm_ctas).only_pulls()) wait_drained(p.limits, smem);
        schedule_tasks(p, smem);
      },
      [&] { push_tiles(p, smem); },
      [&](uint32_t group) {
        if (p.dispatches())
          pull_before_computing(p, place_of(kRanks, p.comm_ctas), smem, pull, [&](int cta, int ctas) { dispatch_head(p, cta, ctas); });
        compute_tiles(p, smem, group);
      });
}

namespace {

cudaError_t fill_params(const MokForwardArgs& a, ForwardParams& p) {
  if (a.store_gate_up ? a.ring_gate_up == nullptr : a.ladder == kMokGateUpOnly) return cudaErrorInvalidValue;  // a tile that goes nowhere
  memset(&p, 0, sizeof p);
  const int64_t ring_rows = static_cast<int64_t>(a.ring_tiles) * kRowsPerTile;
  const ScheduleLayout s = ScheduleLayout::make(a);
  const ScratchLayout c = ScratchLayout::make(a);
  bool ok = true;
  const auto rows = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count, int box_rows = kBoxRows) {
    if (base != nullptr && count > 0) ok = ok && make_row_map(map, base, width, count, kBlockK, box_rows);
  };
  const auto weights = [&](CUtensorMap& map, const void* base, int64_t width, int64_t count, int64_t depth) {
    if (base != nullptr) ok = ok && make_weight_map(map, base, width, count, depth, kBlockK, kBoxColumns);
  };
  const auto boxes = [&](CUtensorMap* maps, const void* base, int64_t width, int64_t count) {
    rows(maps[0], base, width, count);
    rows(maps[1], base, width, count, kBlockM);
  };
  boxes(p.ring_x, a.ring_x, a.hidden, ring_rows);
  boxes(p.ring_h, a.ring_h, a.inter, ring_rows);
  boxes(p.gate_up_out, a.ring_gate_up, 2 * static_cast<int64_t>(a.inter), ring_rows);
  boxes(p.h_out, a.ring_h, a.inter, ring_rows);
  weights(p.gate_up_proj, a.gate_up_proj, a.hidden, a.inter, 2 * static_cast<int64_t>(a.local_experts));
  weights(p.down_proj, a.down_proj, a.inter, a.hidden, a.local_experts);
  if (a.shared_inter > 0) {
    boxes(p.local_x, a.peer_x[a.rank], a.hidden, a.tokens);
    boxes(p.shared_h, a.shared_h, a.shared_inter, a.tokens);
    rows(p.gate_up_out[2], a.shared_gate_up, 2 * static_cast<int64_t>(a.shared_inter), a.tokens, kBlockM);
    rows(p.h_out[2], a.shared_h, a.shared_inter, a.tokens, kBlockM);
    weights(p.shared_gate, a.shared_gate, a.hidden, a.shared_inter, 1);
    weights(p.shared_up, a.shared_up, a.hidden, a.shared_inter, 1);
    weights(p.shared_down, a.shared_down, a.shared_inter, a.hidden, 1);
  }
  if (!ok) return cudaErrorInvalidValue;

  for (int r = 0; r < a.ranks; ++r) {
    p.peer_x[r] = static_cast<const __nv_bfloat16*>(a.peer_x[r]);
    p.peer_routed[r] = static_cast<__nv_bfloat16*>(a.peer_routed[r]);
  }
  p.header = at<const ScheduleHeader>(a.schedule, 0);
  p.rows = at<const int64_t>(a.schedule, s.rows);
  p.tasks = at<const uint64_t>(a.schedule, s.tasks);
  p.tickets = at<uint32_t>(a.scratch, c.tickets);
  p.x_ready = at<uint32_t>(a.scratch, c.x_ready);
  p.h_ready = at<uint32_t>(a.scratch, c.h_ready);
  p.down_done = at<uint32_t>(a.scratch, c.down_done);
  p.shared_h_ready = at<uint32_t>(a.scratch, c.shared_h_ready);
  p.ring_x_out = static_cast<__nv_bfloat16*>(a.ring_x);
  p.shared_out = static_cast<__nv_bfloat16*>(a.shared_y);
  p.limits = {a.abort_word, a.record, a.timeout_ns, static_cast<uint32_t>(a.rank)};
  p.columns = columns_of(a);
  p.ring = {is_compact(a) ? at<const int32_t>(a.schedule, s.tile_rows) : nullptr, ring_slots(a)};
  if (a.ladder == kMokWhole) place_stamps(p.stamps, at<uint32_t>(a.scratch, c.stamps), p.ring.slots, kRowsPerTile, p.columns.gate_up, 0);
  p.tokens = a.tokens, p.topk = a.topk, p.hidden = a.hidden, p.inter = a.inter;
  p.shared_inter = a.shared_inter, p.ladder = a.ladder, p.store_gate_up = a.store_gate_up, p.swiglu_limit = a.swiglu_limit;
  const Lag lag = lag_of(a);
  p.lead_tiles = dispatch_lead(a.lead_tiles, lag.minibatch, p.ring.slots);
  p.comm_ctas = a.ladder == kMokWhole ? a.comm_sms : 0;
  p.head_tiles = a.ladder == kMokWhole && a.shared_inter == 0 ? min_of(kHeadTiles, p.lead_tiles) : 0;
  choose_copies(a.hidden, p);
  return cudaSuccess;
}

template <int kRanks>
cudaError_t launch(const MokForwardArgs* args, cudaStream_t stream) {
  static thread_local Launch<kRanks> params;
  cudaError_t status;
  const int clusters = resident_clusters(forward_kernel<kRanks>, kRanks, args[0].sm_limit, &status);
  if (clusters == 0) return status;
  for (int r = 0; r < kRanks; ++r) {
    if (computing_clusters(clusters / kRanks, args[r].comm_sms) == 0) return cudaErrorInvalidValue;
    status = fill_params(args[r], params.rank[r]);
    if (status != cudaSuccess) return status;
  }
  return launch_clusters(forward_kernel<kRanks>, params, clusters, stream);
}

}  // namespace
}  // namespace mok::cuda::sm90

extern "C" cudaError_t mok_forward(const MokForwardArgs* args, int count, cudaStream_t stream) {
  switch (count) {
    case 1: return mok::cuda::sm90::launch<1>(args, stream);
    case 2: return mok::cuda::sm90::launch<2>(args, stream);
    case 4: return mok::cuda::sm90::launch<4>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}
