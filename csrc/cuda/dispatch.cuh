// Dispatch: one warp in every CTA pulls routed rows from their owners into the ring, while the other warps multiply.
//
// A ticket is kDispatchRows consecutive rows of the row table; tickets walk the tiles from the last to the first. Rows of one ticket
// come from different peers by the order of the table. A row travels as bulk copies peer -> shared memory -> ring, in pieces of at most
// 7 KB (beside a full-rate GEMM, pieces of 2 KB cost four times as many tensor cycles as pieces of 7 KB), several in flight.
#pragma once
#include "sm90/forward_params.cuh"

namespace mok::cuda {

struct CopyRing {
  uint32_t buffer, full;  // shared memory: slots, mbarriers
  int piece, slots;
  uint32_t issued = 0, landed = 0;

  __device__ __forceinline__ uint32_t bar(uint32_t i) const { return full + 8 * (i % slots); }
  __device__ __forceinline__ uint32_t data(uint32_t i) const { return buffer + (i % slots) * piece; }
};

// Without a shared expert to begin with, the first gate+up tiles would wait for the dispatch warps' narrow rings (29 MB at kimi: 32 us). So
// the consumer warps, idle until then, fetch those tiles themselves: two rows a warp, 16 bytes a lane, eight loads in flight.
__device__ __forceinline__ void dispatch_head(const sm90::ForwardParams& p, int cta, int ctas) {
  constexpr int kRows = 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  const int tiles = p.header->tiles, head = min(p.head_tiles, tiles);
  const int pieces = p.hidden / 8;
  for (int i = cta * kConsumerWarps + warp; i < head * (kRowsPerTile / kRows); i += ctas * kConsumerWarps) {
    const int tile = tiles - 1 - i / (kRowsPerTile / kRows);
    const int in_tile = i % (kRowsPerTile / kRows) * kRows;
    for (int r = in_tile; r < in_tile + kRows; ++r) {
      const int64_t entry = p.rows[static_cast<int64_t>(tile) * kRowsPerTile + r];
      uint4* to = reinterpret_cast<uint4*>(p.ring_x_out + (static_cast<int64_t>(tile % p.ring_tiles) * kRowsPerTile + r) * p.hidden);
      if (entry < 0) {
        for (int j = lane; j < pieces; j += 32) to[j] = uint4{0, 0, 0, 0};
        continue;
      }
      const uint4* from = reinterpret_cast<const uint4*>(p.peer_x[row_rank(entry)] + static_cast<int64_t>(row_route(entry) / p.topk) * p.hidden);
      int j = lane;
      for (; j + 7 * 32 < pieces; j += 8 * 32) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; ++u) v[u] = __ldg(from + j + 32 * u);
#pragma unroll
        for (int u = 0; u < 8; ++u) to[j + 32 * u] = v[u];
      }
      for (; j < pieces; j += 32) to[j] = __ldg(from + j);
    }
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (lane == 0) ptx::red_release_gpu(p.x_ready + tile, kRows);
  }
}

// The dispatch warp, all 32 lanes; lane 0 copies, all lanes clear padding rows.
__device__ __forceinline__ void dispatch_rows(const sm90::ForwardParams& p, uint32_t smem) {
  const int lane = threadIdx.x % 32;
  const int tiles = p.header->tiles;
  const uint32_t tickets = static_cast<uint32_t>(tiles) * (kRowsPerTile / kDispatchRows);
  const uint32_t row_bytes = p.hidden * 2;
  Watch watch = p.watch();
  CopyRing ring{smem + sm90::Shared::kCopy, smem + sm90::Shared::kCopyFull, p.copy_bytes, p.copy_slots};
  for (;;) {
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.tickets + kDispatchTicket, 1u);
    ticket = __shfl_sync(~0u, ticket, 0) + p.head_tiles * (kRowsPerTile / kDispatchRows);
    if (ticket >= tickets || __any_sync(~0u, watch.dead)) break;
    const int tile = tiles - 1 - ticket / (kRowsPerTile / kDispatchRows);
    const int in_tile = ticket % (kRowsPerTile / kDispatchRows) * kDispatchRows;
    const int64_t entry = lane < kDispatchRows ? p.rows[static_cast<int64_t>(tile) * kRowsPerTile + in_tile + lane] : 0;
    char* ring_rows = reinterpret_cast<char*>(p.ring_x_out) +
                      (static_cast<int64_t>(tile % p.ring_tiles) * kRowsPerTile + in_tile) * row_bytes;
    if (lane == 0 && tile + p.lead_tiles < tiles) {
      // lead_tiles <= ring_tiles. Running further ahead only pushes rows out of the L2 before they are multiplied.
      wait_counter(watch, p.h_ready + tile + p.lead_tiles, kConsumerWarps * p.columns.gate_up, kWaitSlot, tile);
      ptx::fence_proxy_async();
    }
    __syncwarp();

    uint32_t padding = __ballot_sync(~0u, lane < kDispatchRows && entry < 0);
    const int copies = __popc(~padding & ((1u << kDispatchRows) - 1)) * p.copies_per_row;
    for (uint32_t left = padding; left != 0; left &= left - 1) {
      char* row = ring_rows + (__ffs(left) - 1) * row_bytes;
      for (uint32_t i = lane * 16; i < row_bytes; i += 32 * 16) *reinterpret_cast<uint4*>(row + i) = uint4{0, 0, 0, 0};
    }
    if (padding != 0) ptx::fence_proxy_async_global();

    // Every lane follows the copies, since the entries lie across lanes; lane 0 issues them.
    const char* source = nullptr;
    if (lane < kDispatchRows && entry >= 0)
      source = reinterpret_cast<const char*>(p.peer_x[row_rank(entry)]) + static_cast<int64_t>(row_route(entry) / p.topk) * row_bytes;
    uint32_t rows_left = ~padding & ((1u << kDispatchRows) - 1), rows_out = rows_left;
    int piece_in = 0, piece_out = 0;
    for (int i = 0, stored = 0; stored < copies;) {
      if (i < copies && i - stored < ring.slots) {
        const int r = __ffs(rows_left) - 1;
        const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(source), r));
        const uint32_t offset = piece_in * p.copy_bytes;
        const uint32_t bytes = min(row_bytes - offset, static_cast<uint32_t>(p.copy_bytes));
        if (lane == 0) {
          // The slot's last store has been issued; wait until it has read the slot. Stores complete in order.
          if (i >= ring.slots || ring.issued >= static_cast<uint32_t>(ring.slots)) ptx::bulk_wait_read<0>();
          ptx::mbarrier_expect(ring.bar(ring.issued), bytes);
          ptx::bulk_load(ring.data(ring.issued), from + offset, bytes, ring.bar(ring.issued));
        }
        ++ring.issued, ++i;
        if (++piece_in == p.copies_per_row) piece_in = 0, rows_left &= rows_left - 1;
        continue;
      }
      const int r = __ffs(rows_out) - 1;
      const uint32_t offset = piece_out * p.copy_bytes;
      const uint32_t bytes = min(row_bytes - offset, static_cast<uint32_t>(p.copy_bytes));
      if (lane == 0) {
        wait_mbarrier(watch, ring.bar(ring.landed), ring.landed / ring.slots & 1, kWaitCopy);
        ptx::bulk_store(ring_rows + r * row_bytes + offset, ring.data(ring.landed), bytes);
        ptx::bulk_commit();
      }
      ++ring.landed, ++stored;
      if (++piece_out == p.copies_per_row) piece_out = 0, rows_out &= rows_out - 1;
    }
    if (lane == 0) ptx::bulk_wait_all();  // the rows are in memory, not merely read out of shared memory
    __syncwarp();
    if (lane == 0) ptx::red_release_gpu(p.x_ready + tile, kDispatchRows);
  }
  if (__any_sync(~0u, watch.dead)) __nanosleep(1000000);
}

}  // namespace mok::cuda
