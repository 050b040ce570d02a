// Combine, and reverse-dispatch: the rows of a down (dgrad_up) tile go to their owners.
//
// A row of a tile is 256 columns, 512 bytes: one bulk store to ROUTED[route] on the rank that owns the token, or, for the shared expert, to
// this rank's own buffer. Each address has one writer, so nothing needs a lock or an order.
#pragma once
#include "sm90/forward_params.cuh"

namespace mok::cuda {

// Where the rows lane, lane + 32, lane + 64, lane + 96 of a tile go; null: nowhere.
struct OutputRows {
  static constexpr int kRowsPerLane = kRowsPerTile / 32;
  __nv_bfloat16* to[kRowsPerLane];
  uint32_t bytes;

  template <class Params>
  __device__ __forceinline__ OutputRows(const Params& p, int tile, int column, bool shared) : bytes(2 * min(kDownColumns, p.hidden - column)) {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int64_t row = static_cast<int64_t>(tile) * kRowsPerTile + 32 * i + threadIdx.x % 32;
      to[i] = nullptr;
      if (shared) {
        if (row < p.tokens) to[i] = p.shared_out + row * p.hidden + column;
      } else {
        const int64_t entry = p.rows[row];
        if (entry >= 0) to[i] = p.peer_routed[row_rank(entry)] + row_route(entry) * p.hidden + column;
      }
    }
  }

  // All 32 lanes, out of the half windows.
  __device__ __forceinline__ void send(uint32_t smem, uint32_t borrowed) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i)
      if (to[i] != nullptr) ptx::bulk_store(to[i], sm90::half_window(smem, borrowed, 4 * i + lane / 8) + lane % 8 * sm90::kOutPitch, bytes);
    ptx::bulk_commit();
  }
};

}  // namespace mok::cuda
