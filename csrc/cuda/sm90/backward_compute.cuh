// Consumer warpgroups of the backward: multiply, then hand the tile to the epilogue of its kind.
#pragma once
#include "backward_params.cuh"
#include "compute.cuh"
#include "dswiglu.cuh"

namespace mok::cuda::sm90 {

// A weight gradient's 16 rows x 256 columns, rounded, as boxes of 16 x 64.
__device__ __forceinline__ void weight_gradient_epilogue(const float (&acc)[128], const Windows& windows, const CUtensorMap* out, int rows, int columns,
                                                         int row, int column, int expert) {
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      put_boxes(windows.half[side], half, v);
    }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 == 0 && row < rows) {
    const uint64_t policy = ptx::evict_first();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + 64 * i < columns) ptx::tensor_store_3d(out, windows.half[i / 2] + i % 2 * 2048, column + 64 * i, row, expert, policy);
    ptx::bulk_commit();
  }
}

// The carry of one output tile: thread t of the 256 finds its 128 accumulators as 32 pieces of 16 bytes, 256 pieces apart.
__device__ __forceinline__ float4* carry_of(float* carry, int tile) {
  return reinterpret_cast<float4*>(carry) + static_cast<int64_t>(tile) * (kBlockM * kBlockN / 4) + (threadIdx.x - 128);
}
__device__ __forceinline__ void load_carry(float (&acc)[128], const float4* carry) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float4 v = __ldcg(carry + 256 * i);
    acc[4 * i] = v.x, acc[4 * i + 1] = v.y, acc[4 * i + 2] = v.z, acc[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
__device__ __forceinline__ void store_carry(const float (&acc)[128], float4* carry) {
#pragma unroll
  for (int i = 0; i < 32; ++i) __stcg(carry + 256 * i, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
}

__device__ __forceinline__ void compute_backward_tiles(const BackwardParams& p, uint32_t smem, uint32_t group) {
  Watch watch = watch_of(p.limits);
  const uint32_t cta = ptx::cta_rank_in_cluster();
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const int in_tile = group * 64 + thread / 32 * 16;  // this warp's first row in the tile
  const uint32_t empty_bar = lane < 2 ? ptx::cluster_address(smem + Shared::kEmpty, lane) : 0;
  const uint32_t task_empty = ptx::cluster_address(smem + Shared::kTaskEmpty, 0);
  RingPosition<kTaskSlots> at;
  StageOrder stage;
  Handover handover;
  Pending pending;
  float acc[128];
  for (;;) {
    if (pending.counter != nullptr && !__all_sync(~0u, ptx::mbarrier_try(smem + Shared::kTaskFull + 8 * at.slot, at.phase))) pending.settle(empty_bar);
    const BackwardTask task = read_task<BackwardTask>(smem, at, watch);
    if (any_of_group(task.is_end(), group)) break;
    const Product product(p, task);
    const bool wgrad = product.wgrad, shared = product.shared;
    const int tile = task.tile() + (task.two() && !wgrad ? cta : 0);
    const int column = (task.column() + (task.two() ? 0 : cta)) * (product.kind == kReplay ? kGateUpColumns : kWideColumns);
    const bool idle = group == 1 && task.is_short() && !wgrad && (!task.two() || cta == 1);
    float4* carry = nullptr;

    if (wgrad) {
      const bool of_gate_up = product.kind == kWgradGateUp;
      if (!task.first() || !task.last())
        carry = carry_of(of_gate_up ? p.carry_gate_up : p.carry_down,
                         (task.row() + cta) * (of_gate_up ? p.plan.gate_up.columns : p.plan.down.columns) + task.column());
      if (task.first()) {
        multiply<1, 1>(acc, product.blocks, false, smem, group, empty_bar, stage, pending, watch);
      } else {
        pending.settle(empty_bar);  // what follows may wait for it
        wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);  // the producer has seen the carry's counter
        load_carry(acc, carry);
        multiply<1, 1>(acc, product.blocks, false, smem, group, empty_bar, stage, pending, watch, true);
      }
    } else if (product.kind == kReplay) {
      multiply(acc, product.blocks, idle, smem, group, empty_bar, stage, pending, watch);
    } else {
      multiply<0, 1>(acc, product.blocks, idle, smem, group, empty_bar, stage, pending, watch);
    }
    if (thread == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();
    pending.settle(empty_bar);
    dawdle_warp();
    if (!shared && thread < 32 && (wgrad || column < (product.kind == kDgradUp ? p.hidden : p.inter))) check_inputs<32>(p, task, tile, watch);

    if (product.gradient_of_hidden) {
      if (!shared && column < p.inter) pending.stamp.begin(p.stamps, kStampComputed, tile, column / kWideColumns * kConsumerWarps + in_tile / 16);
      HiddenGradient g;
      g.width = shared ? p.shared_inter : p.inter;
      g.column = column, g.limit = p.swiglu_limit, g.parts = g.width / kDotColumns;
      g.d_gate_up = shared ? &p.shared_d_gate_up_out : &p.window_d_gate_up_out;
      g.weighted_h = shared ? &p.shared_weighted_h_out : &p.window_weighted_h_out;
      g.row0 = (shared ? tile : p.slot(tile)) * kBlockM + in_tile;
      const int64_t first = static_cast<int64_t>(tile) * kBlockM + in_tile;  // among all rows, or tokens
      g.rows = shared ? min(16, p.tokens - static_cast<int>(first)) : 16;
      g.dots = (shared ? p.shared_dots : p.dots) + first * g.parts;
      float weight[2] = {1.0f, 1.0f};
      if (!shared || p.shared_scale != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4 + 8 * half;
          weight[half] = row < g.rows ? __ldcg((shared ? p.shared_scale : p.weight_out) + g.row0 + row) : 0.0f;
        }
      }
      const uint32_t left = hidden_gradient_epilogue(acc, g, weight, smem, in_tile, empty_bar, idle, stage, watch);
      if (column < g.width) {
        if (!shared && task.replayed()) check_slot<32>(p.stamps, kStampReplayed, tile, watch);
        pending.counter = (shared ? p.shared_ready : p.d_gate_up_ready) + tile;
        pending.sum = shared ? p.shared_ready + ceil_div(p.tokens, kBlockM) : p.run_ready + p.plan.run_of(task.expert(), tile);
        pending.borrowed = left;
      }
      continue;
    }

    if (product.kind == kDgradUp && thread == 0 && column < p.hidden) ptx::red_release_gpu(p.up_done + tile, 1);
    wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);
    const uint32_t borrowed = stage.borrow(product.kind == kReplay ? kPassedByGateUp : (wgrad ? kPassedByGradient : kPassedByDown));
    if (!wgrad && column >= (product.kind == kReplay ? p.inter : p.hidden)) {  // this CTA only helped its neighbour to load
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
      continue;
    }
    const Windows windows{{half_window(smem, borrowed, in_tile / 8), half_window(smem, borrowed, in_tile / 8 + 1)}};
    handover.wait_free(smem, watch);
    if (wgrad) {
      if (task.last()) {
        const CUtensorMap* to = nullptr;
        int rows = 0, columns = p.hidden;
        switch (product.kind) {
          case kWgradGateUp: to = &p.d_gate_up_proj_out, rows = 2 * p.inter; break;
          case kWgradDown: to = &p.d_down_proj_out, rows = p.hidden, columns = p.inter; break;
          case kSharedWgradGate: to = &p.d_shared_gate_out, rows = p.shared_inter; break;
          case kSharedWgradUp: to = &p.d_shared_up_out, rows = p.shared_inter; break;
          default: to = &p.d_shared_down_out, rows = p.hidden, columns = p.shared_inter; break;
        }
        weight_gradient_epilogue(acc, windows, to, rows, columns, (task.row() + static_cast<int>(cta)) * kBlockM + in_tile, column, task.expert());
      } else {
        store_carry(acc, carry);
        __syncwarp();
      }
      // Shared weight gradients are nobody's input; they count where nobody looks.
      pending.counter = shared ? p.tickets + 48 : p.wgrad_done + task.expert();
      pending.borrowed = borrowed;
    } else if (product.kind == kReplay) {
      pending.stamp.begin(p.stamps, kStampReplayed, tile, column / kGateUpColumns * kConsumerWarps + in_tile / 16);
      gate_up_epilogue(acc, windows, Tile{p.slot(tile) * kBlockM + in_tile, column, p.inter}, p.swiglu_limit, &p.window_gate_up_out, nullptr);
      pending.counter = p.replayed + tile;
      pending.borrowed = borrowed;
    } else {
      handover.send(acc, windows, smem, in_tile, borrowed);
    }
  }
  pending.settle(empty_bar);
  ptx::bulk_wait_all();
}

}  // namespace mok::cuda::sm90
