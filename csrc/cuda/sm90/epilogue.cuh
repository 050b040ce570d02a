// What a consumer warp does with its 16 rows x 256 columns of a finished tile: round, SwiGLU, and send the rows off.
//
// Rows go registers -> borrowed stages -> bulk stores of whole row segments (512 bytes of output to the route's owner; 256 bytes of gate, up
// and h into the ring). The stores run while the next tile is multiplied; what is left to do once they have read (give the stages back) and
// once they have written (count the tile) is a `Pending`, settled between the next tile's first k-blocks. With ordinary stores instead,
// all SMs write at once and wait for it: 17 % of a down tile at K = 2048.
#pragma once
#include "../numerics.cuh"
#include "forward_params.cuh"

namespace mok::cuda::sm90 {

struct Tile {
  int row0;     // first of this warp's 16 rows within the operand (ring row or token)
  int rows;     // rows from there that exist (shared expert: the last token tile is short)
  int column;   // first output column (of gate, or of the output)
  int columns;  // width of the output matrix
};

// Where the tile's rows lie in shared memory; `group8` counts groups of 8 rows in the CTA's tile.
struct Room {
  uint32_t stage, rest, hidden;
  __device__ __forceinline__ uint32_t rows(int group8) const {
    return group8 < kGroupsInStage ? stage + group8 * 8 * kOutPitch : rest + (group8 - kGroupsInStage) * 8 * kOutPitch;
  }
  __device__ __forceinline__ uint32_t hidden_rows(int group8) const { return hidden + group8 * 8 * kHiddenPitch; }
};

// v[j] holds columns 8j + 2 * (lane % 4), + 1 of row lane / 4.
__device__ __forceinline__ void put_rows(uint32_t rows, int pitch, const uint32_t (&v)[16]) {
  const int lane = threadIdx.x % 32;
  const uint32_t mine = rows + lane % 8 * pitch + lane / 8 * 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) ptx::store_matrix_x4(mine + j * 64, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

// acc[4j + 2 half], acc[4j + 2 half + 1] of 16 blocks of 8 columns, rounded to bf16.
__device__ __forceinline__ void round_block(const float (&acc)[128], int first, int half, uint32_t (&v)[16]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = ptx::pack_bf16(acc[4 * (first + j) + 2 * half], acc[4 * (first + j) + 2 * half + 1]);
}

// gate, up: acc[0 .. 63], acc[64 .. 127]. gate_up and h may be null.
__device__ __forceinline__ void gate_up_epilogue(const float (&acc)[128], const Room& room, int group8, const Tile& tile, float limit,
                                                 __nv_bfloat16* gate_up, __nv_bfloat16* h) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t gate[16], up[16];
    round_block(acc, 0, half, gate);
    round_block(acc, 16, half, up);
    if (gate_up != nullptr) {
      put_rows(room.rows(group8 + half), kOutPitch, gate);
      put_rows(room.rows(group8 + half) + 256, kOutPitch, up);
    }
    if (h != nullptr) {
#pragma unroll
      for (int j = 0; j < 16; ++j)
        gate[j] = ptx::pack_bf16(swiglu(ptx::bf16_low(gate[j]), ptx::bf16_low(up[j]), limit),
                                 swiglu(ptx::bf16_high(gate[j]), ptx::bf16_high(up[j]), limit));
      put_rows(room.hidden_rows(group8 + half), kHiddenPitch, gate);
    }
  }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  // Lanes 0-15: h and gate of a row; lanes 16-31: up.
  const int lane = threadIdx.x % 32, row = lane % 16;
  if (row < tile.rows) {
    const int64_t width = tile.columns, at = static_cast<int64_t>(tile.row0 + row);
    const uint32_t bytes = 2 * min(kGateUpColumns, tile.columns - tile.column);
    if (h != nullptr && lane < 16)
      ptx::bulk_store(h + at * width + tile.column, room.hidden_rows(group8 + row / 8) + row % 8 * kHiddenPitch, bytes);
    if (gate_up != nullptr)
      ptx::bulk_store(gate_up + at * 2 * width + (lane < 16 ? 0 : width) + tile.column,
                      room.rows(group8 + row / 8) + row % 8 * kOutPitch + (lane < 16 ? 0 : 256), bytes);
  }
  ptx::bulk_commit();
}

// `destination`: lane r < 16 holds column 0 of row r's place (on its owner, for routed rows), or null.
__device__ __forceinline__ void output_epilogue(const float (&acc)[128], const Room& room, int group8, const Tile& tile,
                                                __nv_bfloat16* destination) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      uint32_t v[16];
      round_block(acc, 16 * side, half, v);
      put_rows(room.rows(group8 + half) + 256 * side, kOutPitch, v);
    }
  ptx::fence_proxy_async_shared();
  __syncwarp();
  const int row = threadIdx.x % 32;
  if (destination != nullptr)
    ptx::bulk_store(destination + tile.column, room.rows(group8 + row / 8) + row % 8 * kOutPitch,
                    2 * min(kDownColumns, tile.columns - tile.column));
  ptx::bulk_commit();
}

// What a warp still owes for its last tile.
struct Pending {
  uint32_t release = 0;  // slots to give back (a bit each)
  uint32_t* counter = nullptr;
  __device__ __forceinline__ bool any() const { return release != 0 || counter != nullptr; }

  // `empty_bar`: lanes 0 and 1 hold the first empty barrier of CTA 0 and 1, other lanes 0.
  __device__ __forceinline__ void give_back(uint32_t empty_bar) {
    if (release == 0) return;
    ptx::bulk_wait_read<0>();
    __syncwarp();
    for (int slot = 0; slot < kStages; ++slot)
      if ((release >> slot & 1) && empty_bar != 0) ptx::mbarrier_arrive_cluster(empty_bar + 8 * slot);
    release = 0;
  }
  __device__ __forceinline__ void count() {
    if (counter == nullptr) return;
    ptx::bulk_wait_all();  // every lane for its own stores: written, not merely read out of shared memory
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::red_release_gpu(counter, 1);
    counter = nullptr;
  }
  __device__ __forceinline__ void settle(uint32_t empty_bar) {
    give_back(empty_bar);
    count();
  }
};

}  // namespace mok::cuda::sm90
