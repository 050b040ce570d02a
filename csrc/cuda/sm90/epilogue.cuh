// What consumer warps do with a finished tile: SwiGLU into the ring, or output rows pushed to their owners.
//
// A warp holds 16 rows x 256 columns in fragments. It writes 8 rows x 128 columns at a time through its own staging (no barrier
// wider than the warp), so that global stores are 256-byte runs of one row: half a warp to a row.
#pragma once
#include "../numerics.cuh"
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

struct Tile {
  int row0;     // first of this warp's 16 rows within the operand (ring row or token)
  int rows;     // rows of them that exist (shared expert: the last token tile is short)
  int column;   // first output column (of gate, or of the output)
  int columns;  // width of the output matrix
};

// v[j] holds columns 8j + 2 * (lane % 4), + 1 of row lane / 4. `row_pointer(r)` gives column 0 of the block in row r, or null.
template <class RowPointer>
__device__ __forceinline__ void store_rows(uint32_t staging, const uint32_t (&v)[16], int columns_left, RowPointer row_pointer) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // the last block has been read out of the staging
#pragma unroll
  for (int j = 0; j < 4; ++j)
    ptx::store_matrix_x4(staging + lane % 8 * kStagePitch + (4 * j + lane / 8) * 16, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * i + lane / 16, segment = lane % 16;
    const uint4 data = ptx::load_shared_16(staging + row * kStagePitch + segment * 16);
    __nv_bfloat16* out = row_pointer(row);
    if (out != nullptr && segment * 8 < columns_left) *reinterpret_cast<uint4*>(out + segment * 8) = data;
  }
}

// acc[4j + 2 half], acc[4j + 2 half + 1] of 16 blocks of 8 columns, rounded to bf16.
__device__ __forceinline__ void round_block(const float (&acc)[128], int first, int half, uint32_t (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = ptx::pack_bf16(acc[4 * (first + j) + 2 * half], acc[4 * (first + j) + 2 * half + 1]);
}

// gate, up: acc[0 .. 63], acc[64 .. 127]. Both may be null.
__device__ __forceinline__ void gate_up_epilogue(const float (&acc)[128], uint32_t staging, const Tile& tile, float limit,
                                                 __nv_bfloat16* gate_up, __nv_bfloat16* h) {
  const int64_t width = tile.columns;
  const int left = tile.columns - tile.column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row0 = tile.row0 + 8 * half, rows = tile.rows - 8 * half;
    uint32_t gate[16], up[16];
    round_block(acc, 0, half, gate);
    round_block(acc, 16, half, up);
    if (gate_up != nullptr) {
      __nv_bfloat16* out = gate_up + row0 * 2 * width + tile.column;
      store_rows(staging, gate, left, [&](int r) { return r < rows ? out + r * 2 * width : nullptr; });
      store_rows(staging, up, left, [&](int r) { return r < rows ? out + r * 2 * width + width : nullptr; });
    }
    if (h != nullptr) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        gate[j] = ptx::pack_bf16(swiglu(ptx::bf16_low(gate[j]), ptx::bf16_low(up[j]), limit),
                                 swiglu(ptx::bf16_high(gate[j]), ptx::bf16_high(up[j]), limit));
      __nv_bfloat16* out = h + row0 * width + tile.column;
      store_rows(staging, gate, left, [&](int r) { return r < rows ? out + r * width : nullptr; });
    }
  }
}

// `destination`: lane r < 16 holds column 0 of row r's place (on its owner, for routed rows), or null.
__device__ __forceinline__ void output_epilogue(const float (&acc)[128], uint32_t staging, const Tile& tile, __nv_bfloat16* destination) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      const int column = tile.column + 128 * side;
      store_rows(staging, v, tile.columns - column, [&](int r) {
        auto row = reinterpret_cast<__nv_bfloat16*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(destination), 8 * half + r));
        return row != nullptr ? row + column : nullptr;
      });
    }
  }
}

}  // namespace mok::cuda::sm90
