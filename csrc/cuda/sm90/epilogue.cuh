// What a consumer warp does with its 16 rows x 256 columns of a finished tile: round, SwiGLU, and put the rows where the pushing warp sends
// them from (push.cuh).
//
// A tile lies in the borrowed stage and the room behind it, in one of two ways. Rows that go each its own way (down, dgrad_up): 16 half windows.
// A rectangle of a matrix (gate, up, h, weight gradients): four boxes of 128 rows x 64 columns, as a tensor store takes them.
#pragma once
#include "../numerics.cuh"
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

// acc[4j + 2 half], acc[4j + 2 half + 1] of 16 blocks of 8 columns, rounded to bf16: columns 8j + 2 * (lane % 4), + 1 of row lane / 4.
__device__ __forceinline__ void round_block(const float (&acc)[128], int first, int half, uint32_t (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = ptx::pack_bf16(acc[4 * (first + j) + 2 * half], acc[4 * (first + j) + 2 * half + 1]);
}

// 8 rows x 128 columns, row-major.
__device__ __forceinline__ void put_rows(uint32_t rows, const uint32_t (&v)[16]) {
  const int lane = threadIdx.x % 32;
  const uint32_t mine = rows + lane % 8 * kOutPitch + lane / 8 * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) ptx::store_matrix_x4(mine + j * 64, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

// A warp's 16 rows in two boxes side by side.
struct BoxPair {
  uint32_t left, right;
  // 8 of them x 128 columns, with the 128-byte swizzle: bits 4-6 of the address ^= bits 7-9, which are the row's.
  __device__ __forceinline__ void put(int half, const uint32_t (&v)[16]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t row = (8 * half + lane % 8) * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::store_matrix_x4((j < 2 ? left : right) + row + ((4 * (j % 2) + lane / 8) ^ (lane % 8)) * 16, v[4 * j], v[4 * j + 1], v[4 * j + 2],
                           v[4 * j + 3]);
  }
};

// Columns 0-127 (side 0) or 128-255 of a tile's rows from `in_tile` on.
__device__ __forceinline__ BoxPair box_pair(uint32_t smem, uint32_t borrowed, int side, int in_tile) {
  return {out_box(smem, borrowed, 2 * side) + in_tile * 128, out_box(smem, borrowed, 2 * side + 1) + in_tile * 128};
}

// The consumer warps' end of the hand-over to the pushing warp. A part is a tile, or as much of it as fits.
struct Handover {
  RingPosition<1> out;
  bool sent = false;  // a part has been handed over and may still lie in shared memory

  // Before the next part is written where the last one lay, and before it is handed over.
  __device__ __forceinline__ void wait_free(uint32_t smem, Watch& watch) {
    if (!sent) return;
    wait_mbarrier(watch, smem + Shared::kOutFree, out.phase, kWaitOperand);
    out.advance();
    sent = false;
  }
  // What the warp has written into `stage` and the room behind it. Not after a wait that failed: warps that no longer wait for each other would
  // complete a part without the one that names its stage, or one that holds nothing.
  __device__ __forceinline__ void send(uint32_t smem, int in_tile, uint32_t stage, const Watch& watch) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && !watch.dead) {
      if (in_tile == 0) ptx::store_shared_4(smem + Shared::kOutStage, stage);
      ptx::mbarrier_arrive(smem + Shared::kOutFull);
    }
    sent = true;
  }
};

// gate, up: acc[0 .. 63], acc[64 .. 127]. They go first, h takes gate's place.
__device__ __forceinline__ void gate_up_epilogue(const float (&acc)[128], float limit, bool sends_gate_up, bool sends_hidden, uint32_t smem,
                                                 int in_tile, uint32_t borrowed, Handover& handover, Watch& watch) {
  const BoxPair places[2] = {box_pair(smem, borrowed, 0, in_tile), box_pair(smem, borrowed, 1, in_tile)};
  uint32_t hidden[2][16];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t gate[16], up[16];
    round_block(acc, 0, half, gate);
    round_block(acc, 16, half, up);
    if (sends_gate_up) {
      places[0].put(half, gate);
      places[1].put(half, up);
      if (half == 1) handover.send(smem, in_tile, borrowed, watch);
    }
    if (!sends_hidden) continue;
#pragma unroll
    for (int j = 0; j < 16; ++j)
      hidden[half][j] = ptx::pack_bf16(swiglu(ptx::bf16_low(gate[j]), ptx::bf16_low(up[j]), limit),
                                       swiglu(ptx::bf16_high(gate[j]), ptx::bf16_high(up[j]), limit));
  }
  if (!sends_hidden) return;
  handover.wait_free(smem, watch);  // gate was read during the arithmetic above
  places[0].put(0, hidden[0]);
  places[0].put(1, hidden[1]);
  handover.send(smem, in_tile, borrowed, watch);
}

__device__ __forceinline__ void rows_epilogue(const float (&acc)[128], uint32_t smem, int in_tile, uint32_t borrowed, Handover& handover,
                                              const Watch& watch) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      put_rows(half_window(smem, borrowed, in_tile / 8 + half) + 256 * side, v);
    }
  handover.send(smem, in_tile, borrowed, watch);
}

__device__ __forceinline__ void boxes_epilogue(const float (&acc)[128], uint32_t smem, int in_tile, uint32_t borrowed, Handover& handover,
                                               const Watch& watch) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const BoxPair place = box_pair(smem, borrowed, side, in_tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      place.put(half, v);
    }
  }
  handover.send(smem, in_tile, borrowed, watch);
}

}  // namespace mok::cuda::sm90
