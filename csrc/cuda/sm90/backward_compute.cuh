// Consumer warpgroups of the backward: multiply, then hand the tile to the epilogue of its kind.
#pragma once
#include "backward_params.cuh"
#include "compute.cuh"
#include "dswiglu.cuh"

namespace mok::cuda::sm90 {

// Where a warp adds its 16 rows x 256 columns of a weight gradient to fp32 values: the first of them, null if there are none.
struct Sum {
  float* first = nullptr;
  int columns = 0, left = 0;  // of the matrix, and from the first one on

  __device__ __forceinline__ Sum(const BackwardParams& p, const BackwardTask& task, uint32_t kind, int row, int column) {
    float* base = p.sum_of(kind);
    const int rows = kind == kWgradGateUp ? 2 * p.inter : p.hidden;
    columns = kind == kWgradGateUp ? p.hidden : p.inter, left = columns - column;
    if (base != nullptr && task.last() && row < rows) first = base + (static_cast<int64_t>(task.expert()) * rows + row) * columns + column;
  }
  // Into the L2, while the tile is multiplied: four lines a lane.
  __device__ __forceinline__ void prefetch() const {
    const int lane = threadIdx.x % 32;
    if (first == nullptr || lane % 8 * 32 >= left) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::prefetch_l2(first + (4 * i + lane / 8) * columns + lane % 8 * 32);
  }
  // The rounded gradient. Nobody else comes to these addresses, so the sum is an ordinary one: red.add.f32 would flush subnormals.
  __device__ __forceinline__ void add(const float (&acc)[128]) const {
    if (first == nullptr) return;
    float* const mine = first + threadIdx.x % 32 / 4 * columns + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (64 * i >= left) continue;
      float2 old[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) old[j] = __ldcs(reinterpret_cast<const float2*>(mine + j % 2 * 8 * columns + 64 * i + j / 2 * 8));
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int at = 4 * (8 * i + j / 2) + 2 * (j % 2);  // as in round_block
        const uint32_t v = ptx::pack_bf16(acc[at], acc[at + 1]);
        __stcs(reinterpret_cast<float2*>(mine + j % 2 * 8 * columns + 64 * i + j / 2 * 8),
               make_float2(__fadd_rn(old[j].x, ptx::bf16_low(v)), __fadd_rn(old[j].y, ptx::bf16_high(v))));
      }
    }
  }
};

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
  float acc[128];
  for (;;) {
    const BackwardTask task = read_task<BackwardTask>(smem, at, watch);
    if (any_of_group(task.is_end(), group)) break;
    const Product product(p, task);
    const bool wgrad = product.wgrad, shared = product.shared;
    const int tile = task.tile_of(cta);
    const int column = task.column_of(cta) * (product.kind == kReplay ? kGateUpColumns : kWideColumns);
    const bool idle = group == 1 && task.short_of(cta);
    float4* carry = nullptr;

    const int output_row = task.row_of(cta) * kBlockM + in_tile;  // of a weight gradient
    if (wgrad) {
      Sum(p, task, product.kind, output_row, column).prefetch();
      const bool of_gate_up = product.kind == kWgradGateUp;
      if (!task.first() || !task.last())
        carry = carry_of(of_gate_up ? p.carry_gate_up : p.carry_down,
                         task.row_of(cta) * (of_gate_up ? p.plan.gate_up.columns : p.plan.down.columns) + task.column());
      if (task.first()) {
        multiply<1, 1>(acc, product.blocks, false, smem, group, empty_bar, stage, watch);
      } else {
        wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);  // the producer has seen the carry's counter
        load_carry(acc, carry);
        multiply<1, 1>(acc, product.blocks, false, smem, group, empty_bar, stage, watch, true);
      }
    } else if (product.kind == kReplay) {
      multiply(acc, product.blocks, idle, smem, group, empty_bar, stage, watch);
    } else {
      multiply<0, 1>(acc, product.blocks, idle, smem, group, empty_bar, stage, watch);
    }
    if (thread == 0) ptx::mbarrier_arrive_cluster(task_empty + 8 * at.slot);
    at.advance();

    if (product.gradient_of_hidden) {
      HiddenGradient g;
      g.width = shared ? p.shared_inter : p.inter;
      g.column = column, g.limit = p.swiglu_limit, g.parts = g.width / kDotColumns;
      const int64_t first = static_cast<int64_t>(tile) * kBlockM + in_tile;  // among all rows, or tokens
      g.rows = shared ? min(16, p.tokens - static_cast<int>(first)) : 16;
      g.dots = (shared ? p.shared_dots : p.dots) + first * g.parts;
      const int row0 = (shared ? tile * kBlockM : p.weight_row(tile)) + in_tile;
      float weight[2] = {1.0f, 1.0f};
      if (!shared || p.shared_scale != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4 + 8 * half;
          weight[half] = row < g.rows ? __ldcg((shared ? p.shared_scale : p.weight_out) + row0 + row) : 0.0f;
        }
      }
      hidden_gradient_epilogue(acc, g, weight, smem, in_tile, empty_bar, idle, stage, handover, watch);
      continue;
    }

    wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);
    const uint32_t borrowed = stage.borrow(product.kind == kReplay ? kPassedByGateUp : (wgrad ? kPassedByGradient : kPassedByDown));
    if (!wgrad && column >= (product.kind == kReplay ? p.inter : p.hidden)) {  // this CTA only helped its neighbour to load
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
      continue;
    }
    handover.wait_free(smem, watch);
    if (wgrad) {
      if (!task.last()) {
        store_carry(acc, carry);
        handover.send(smem, in_tile, borrowed, watch);
      } else if (p.sum_of(product.kind) != nullptr) {
        Sum(p, task, product.kind, output_row, column).add(acc);
        handover.send(smem, in_tile, borrowed, watch);
      } else {
        boxes_epilogue(acc, smem, in_tile, borrowed, handover, watch);
      }
    } else if (product.kind == kReplay) {
      gate_up_epilogue(acc, p.swiglu_limit, true, false, smem, in_tile, borrowed, handover, watch);
    } else {
      rows_epilogue(acc, smem, in_tile, borrowed, handover, watch);
    }
  }
}

}  // namespace mok::cuda::sm90
