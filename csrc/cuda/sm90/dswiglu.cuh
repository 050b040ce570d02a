// What a consumer warp does with its 16 rows x 256 columns of dh' = dOut @ W_down: router gradient, dSwiGLU, and w * h for the weight gradient.
//
// Gate and up come through the pipeline, 64 columns a stage: gate in the first third of it, up in the second. Each warp reads its 16 rows as
// fragments that lie like its accumulators, writes d_gate and d_up back in their places and w * h into the last third, and hands the stage over
// (push.cuh). Meanwhile the next stage is worked on, and the next tile's operands arrive.
#pragma once
#include "../numerics.cuh"
#include "epilogue.cuh"

namespace mok::cuda::sm90 {

// Rows lane / 4 and lane / 4 + 8 of the warp: their weights, and this block's part of <dh', h>.
struct RowPair {
  float weight[2], dot[2];
};

// dh: this block's quarter of the accumulators.
template <bool kClamped>
__device__ __forceinline__ void dswiglu_block(const float (&dh)[32], uint32_t stage, int in_tile, float limit, RowPair& rows) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = stage + (in_tile + lane / 8 % 2 * 8 + lane % 8) * 128;
  rows.dot[0] = rows.dot[1] = 0.0f;
#pragma unroll
  for (int q = 0; q < 4; ++q) {  // 16 columns
    const uint32_t place = row + (((2 * q + lane / 16) ^ (lane % 8)) << 4);
    uint32_t gate[4], up[4], weighted[4];
    ptx::load_matrix_x4(place, gate);
    ptx::load_matrix_x4(place + kABytes, up);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int half = r % 2, first = 4 * (2 * q + r / 2) + 2 * half;
      const float weight = rows.weight[half];
      const SwigluGradient low = dswiglu<kClamped>(dh[first], weight, ptx::bf16_low(gate[r]), ptx::bf16_low(up[r]), limit);
      const SwigluGradient high = dswiglu<kClamped>(dh[first + 1], weight, ptx::bf16_high(gate[r]), ptx::bf16_high(up[r]), limit);
      const uint32_t h = ptx::pack_bf16(low.h, high.h);
      rows.dot[half] = __fmaf_rn(dh[first], ptx::bf16_low(h), rows.dot[half]);
      rows.dot[half] = __fmaf_rn(dh[first + 1], ptx::bf16_high(h), rows.dot[half]);
      gate[r] = ptx::pack_bf16(low.d_gate, high.d_gate);
      up[r] = ptx::pack_bf16(low.d_up, high.d_up);
      weighted[r] = ptx::pack_bf16(__fmul_rn(weight, ptx::bf16_low(h)), __fmul_rn(weight, ptx::bf16_high(h)));
    }
    ptx::store_matrix_x4(place, gate[0], gate[1], gate[2], gate[3]);
    ptx::store_matrix_x4(place + kABytes, up[0], up[1], up[2], up[3]);
    ptx::store_matrix_x4(place + 2 * kABytes, weighted[0], weighted[1], weighted[2], weighted[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.dot[half] = __fadd_rn(rows.dot[half], __shfl_xor_sync(~0u, rows.dot[half], 1));
    rows.dot[half] = __fadd_rn(rows.dot[half], __shfl_xor_sync(~0u, rows.dot[half], 2));
  }
}

struct HiddenGradient {
  float* dots;   // of the warp's first row, column 0
  int parts;     // partials a row
  int rows;      // of this warp's 16 that exist
  int column, width;
  float limit;
};

template <int kBlock>
__device__ __forceinline__ void take_quarter(const float (&acc)[128], float (&dh)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) dh[i] = acc[32 * kBlock + i];
}

// The four blocks are a loop, over a copy of their quarter of acc: unrolled, they were 60 KB of instructions that each tile fetched once.
__device__ __forceinline__ void hidden_gradient_epilogue(const float (&acc)[128], const HiddenGradient& g, const float (&weight)[2], uint32_t smem,
                                                         int in_tile, uint32_t empty_bar, bool idle, StageOrder& stage, Handover& handover,
                                                         Watch& watch) {
  const int lane = threadIdx.x % 32;
  RowPair rows{{weight[0], weight[1]}, {}};
#pragma unroll 1
  for (int block = 0; block < kGateUpBlocks; ++block) {
    const int x = g.column + kDotColumns * block;
    wait_mbarrier(watch, smem + Shared::kFull + 8 * stage.slot, stage.phase(), kWaitOperand);
    const uint32_t slot = stage.slot, at = smem + slot * kStageBytes;
    stage.advance();
    if (x >= g.width) {
      if (empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * slot);
      continue;
    }
    if (!idle) {
      float dh[32];
      switch (block) {
        case 0: take_quarter<0>(acc, dh); break;
        case 1: take_quarter<1>(acc, dh); break;
        case 2: take_quarter<2>(acc, dh); break;
        default: take_quarter<3>(acc, dh); break;
      }
      if (g.limit > 0.0f) {
        dswiglu_block<true>(dh, at, in_tile, g.limit, rows);
      } else {
        dswiglu_block<false>(dh, at, in_tile, g.limit, rows);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if (lane % 4 == 0 && row < g.rows) g.dots[static_cast<int64_t>(row) * g.parts + x / kDotColumns] = rows.dot[half];
      }
    }
    handover.wait_free(smem, watch);
    handover.send(smem, in_tile, slot, watch);
  }
}

}  // namespace mok::cuda::sm90
