// What a consumer warp does with its 16 rows x 256 columns of a finished tile: round, SwiGLU, and hand the rows to the copy engine.
//
// gate, up and h go into the ring as tensor stores of 16 rows x 64 columns, issued by the warp itself: six instructions a tile. Output rows
// are scattered, a bulk store each; issuing 16 of them costs a warp about 2 us during which the tensor cores idle, so the combine warp does
// it (combine.cuh). Gate and up are for the backward: written to leave the L2 first, which is worth 1.5 % of the whole layer at kimi (the same
// for output rows is worth nothing). Either way the next tile is multiplied while the stores run.
#pragma once
#include "../numerics.cuh"
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

struct Tile {
  int row0;     // first of this warp's 16 rows within the operand (ring row or token)
  int column;   // first output column (of gate, or of the output)
  int columns;  // width of the output matrix
};

// acc[4j + 2 half], acc[4j + 2 half + 1] of 16 blocks of 8 columns, rounded to bf16: columns 8j + 2 * (lane % 4), + 1 of row lane / 4.
__device__ __forceinline__ void round_block(const float (&acc)[128], int first, int half, uint32_t (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = ptx::pack_bf16(acc[4 * (first + j) + 2 * half], acc[4 * (first + j) + 2 * half + 1]);
}

struct Windows {
  uint32_t half[2];
};

// 8 rows x 128 columns, row-major.
__device__ __forceinline__ void put_rows(uint32_t rows, const uint32_t (&v)[16]) {
  const int lane = threadIdx.x % 32;
  const uint32_t mine = rows + lane % 8 * kOutPitch + lane / 8 * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) ptx::store_matrix_x4(mine + j * 64, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

// 8 rows x 128 columns into two boxes of 16 rows x 64 columns with the 128-byte swizzle, which goes by the address: bits 4-6 ^= bits 7-9.
__device__ __forceinline__ void put_boxes(uint32_t boxes, int half, const uint32_t (&v)[16]) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = boxes + (8 * half + lane % 8) * 128, flip = row >> 7 & 7;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    ptx::store_matrix_x4(row + j / 2 * 2048 + ((4 * (j % 2) + lane / 8) ^ flip) * 16, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

// The warp's stores so far are visible to the copy engine; lane 0 then issues two boxes.
__device__ __forceinline__ void send_boxes(const CUtensorMap* map, uint32_t boxes, int column, int columns_left, int row, uint64_t policy) {
  if (threadIdx.x % 32 != 0) return;
  ptx::tensor_store_2d(map, boxes, column, row, policy);
  if (columns_left > 64) ptx::tensor_store_2d(map, boxes + 2048, column + 64, row, policy);
}

// gate, up: acc[0 .. 63], acc[64 .. 127]. Either map may be null. The windows are free again when lane 0's stores have read.
__device__ __forceinline__ void gate_up_epilogue(const float (&acc)[128], const Windows& windows, const Tile& tile, float limit,
                                                 const CUtensorMap* gate_up, const CUtensorMap* h) {
  const int left = tile.columns - tile.column;
  uint32_t hidden[2][16];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t gate[16], up[16];
    round_block(acc, 0, half, gate);
    round_block(acc, 16, half, up);
    if (gate_up != nullptr) {
      put_boxes(windows.half[0], half, gate);
      put_boxes(windows.half[1], half, up);
    }
    if (half == 1 && gate_up != nullptr) {
      ptx::fence_proxy_async_shared();
      __syncwarp();
      send_boxes(gate_up, windows.half[0], tile.column, left, tile.row0, ptx::evict_first());
      send_boxes(gate_up, windows.half[1], tile.columns + tile.column, left, tile.row0, ptx::evict_first());
      ptx::bulk_commit();
    }
    if (h == nullptr) continue;
#pragma unroll
    for (int j = 0; j < 16; ++j)
      hidden[half][j] = ptx::pack_bf16(swiglu(ptx::bf16_low(gate[j]), ptx::bf16_low(up[j]), limit),
                                       swiglu(ptx::bf16_high(gate[j]), ptx::bf16_high(up[j]), limit));
  }
  if (h == nullptr) return;
  ptx::bulk_wait_read<0>();  // gate has left its place; the copy engine read it during the arithmetic above
  __syncwarp();
  put_boxes(windows.half[0], 0, hidden[0]);
  put_boxes(windows.half[0], 1, hidden[1]);
  ptx::fence_proxy_async_shared();
  __syncwarp();
  send_boxes(h, windows.half[0], tile.column, left, tile.row0, ptx::evict_normal());
  ptx::bulk_commit();
}

__device__ __forceinline__ void output_epilogue(const float (&acc)[128], const Windows& windows) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      put_rows(windows.half[half] + 256 * side, v);
    }
  ptx::fence_proxy_async_shared();
  __syncwarp();
}

// Output tiles of a consumer warp on their way through the combine warp.
struct Handover {
  RingPosition<1> out;
  bool sent = false;  // a tile has been handed over and may still lie in the windows

  // Before anything is written into the windows.
  __device__ __forceinline__ void wait_free(uint32_t smem, Watch& watch) {
    if (!sent) return;
    wait_mbarrier(watch, smem + Shared::kOutFree, out.phase, kWaitOperand);
    out.advance();
    sent = false;
  }
  __device__ __forceinline__ void send(const float (&acc)[128], const Windows& windows, uint32_t smem, int in_tile, uint32_t borrowed) {
    output_epilogue(acc, windows);
    if (threadIdx.x % 32 == 0) {
      if (in_tile == 0) ptx::store_shared_4(smem + Shared::kOutStage, borrowed);
      ptx::mbarrier_arrive(smem + Shared::kOutFull);
    }
    sent = true;
  }
};

// A tile whose stores are under way: once they have written, it counts and the stage they came from, if any, is free.
struct Pending {
  uint32_t* counter = nullptr;
  uint32_t* sum = nullptr;  // counts too, if not null
  uint32_t borrowed = kStages;
  LateStamp stamp;
  // `empty_bar`: lanes 0 and 1 hold the first empty barrier of CTA 0 and 1, other lanes 0.
  __device__ __forceinline__ void settle(uint32_t empty_bar) {
    if (counter == nullptr) return;
    if (threadIdx.x % 32 == 0) {
      ptx::bulk_wait_all();  // written, not merely read out of shared memory
      stamp.end();
      ptx::fence_gpu();
      ptx::red_relaxed_gpu(counter, 1);
      if (sum != nullptr) ptx::red_relaxed_gpu(sum, 1);
    }
    __syncwarp();
    if (empty_bar != 0 && borrowed < kStages) ptx::mbarrier_arrive_cluster(empty_bar + 8 * borrowed);
    counter = sum = nullptr;
  }
};

}  // namespace mok::cuda::sm90
