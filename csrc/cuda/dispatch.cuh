// Dispatch: one warp in every CTA pulls routed rows from their owners into the ring, while the other warps multiply; or CTAs set aside for it do
// (dedicated.cuh).
//
// A ticket is kDispatchRows consecutive rows of the row table; tickets walk the tiles from the last to the first. Rows of one ticket
// come from different peers by the order of the table. A row travels as bulk copies peer -> shared memory -> ring, in pieces of at most
// 7 KB (beside a full-rate GEMM, pieces of 2 KB cost four times as many tensor cycles as pieces of 7 KB), several in flight.
#pragma once
#include "sm90/forward_params.cuh"

namespace mok::cuda {

struct CopyRing {
  uint32_t buffer, full;  // shared memory: slots, mbarriers
  int piece, slots, pieces_per_row;
  uint32_t issued = 0, landed = 0;

  __device__ __forceinline__ uint32_t bar(uint32_t i) const { return full + 8 * (i % slots); }
  __device__ __forceinline__ uint32_t data(uint32_t i) const { return buffer + (i % slots) * piece; }

  // All 32 lanes. Lane r holds the source of row r, for the rows of the mask; they go to row r of `to`. Every lane follows the copies, since the
  // sources lie across lanes; lane 0 issues them, and has to wait for its stores.
  __device__ __forceinline__ void copy_rows(Watch& watch, uint32_t rows, const void* source, void* to, uint32_t row_bytes) {
    const int lane = threadIdx.x % 32, copies = __popc(rows) * pieces_per_row;
    uint32_t rows_in = rows, rows_out = rows;
    int piece_in = 0, piece_out = 0;
    for (int i = 0, stored = 0; stored < copies;) {
      if (i < copies && i - stored < slots) {
        const int r = __ffs(rows_in) - 1;
        const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(source), r));
        const uint32_t offset = piece_in * piece;
        const uint32_t bytes = min(row_bytes - offset, static_cast<uint32_t>(piece));
        if (lane == 0 && !watch.dead) {  // a slot that was not waited for takes no other copy
          // The slot's last store has been issued; wait until it has read the slot. Stores complete in order.
          if (i >= slots || issued >= static_cast<uint32_t>(slots)) ptx::bulk_wait_read<0>();
          ptx::mbarrier_expect(bar(issued), bytes);
          ptx::bulk_load(data(issued), from + offset, bytes, bar(issued));
        }
        ++issued, ++i;
        if (++piece_in == pieces_per_row) piece_in = 0, rows_in &= rows_in - 1;
        continue;
      }
      const int r = __ffs(rows_out) - 1;
      const uint32_t offset = piece_out * piece;
      const uint32_t bytes = min(row_bytes - offset, static_cast<uint32_t>(piece));
      if (lane == 0 && wait_mbarrier(watch, bar(landed), landed / slots & 1, kWaitCopy)) {
        ptx::bulk_store(static_cast<char*>(to) + r * row_bytes + offset, data(landed), bytes);
        ptx::bulk_commit();
      }
      ++landed, ++stored;
      if (++piece_out == pieces_per_row) piece_out = 0, rows_out &= rows_out - 1;
    }
  }
};

// All 32 lanes: clears the rows of the mask.
__device__ __forceinline__ void clear_rows(uint32_t rows, void* to, uint32_t row_bytes) {
  for (uint32_t left = rows; left != 0; left &= left - 1) {
    char* row = static_cast<char*>(to) + (__ffs(left) - 1) * row_bytes;
    for (uint32_t i = threadIdx.x % 32 * 16; i < row_bytes; i += 32 * 16) *reinterpret_cast<uint4*>(row + i) = uint4{0, 0, 0, 0};
  }
  if (rows != 0) ptx::fence_proxy_async_global();
}

// All 32 lanes, 16 bytes each, eight loads in flight; without a source, zeros.
__device__ __forceinline__ void copy_row(uint4* to, const uint4* from, int pieces) {
  int j = threadIdx.x % 32;
  if (from == nullptr) {
    for (; j < pieces; j += 32) to[j] = uint4{0, 0, 0, 0};
    return;
  }
  for (; j + 7 * 32 < pieces; j += 8 * 32) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = __ldg(from + j + 32 * u);
#pragma unroll
    for (int u = 0; u < 8; ++u) to[j + 32 * u] = v[u];
  }
  for (; j < pieces; j += 32) to[j] = __ldg(from + j);
}

// Row `entry` of the table in the array that `peers` hold, [tokens, hidden]; null for padding.
template <class T>
__device__ __forceinline__ const T* source_row(const T* const* peers, int64_t entry, int topk, int hidden) {
  return entry < 0 ? nullptr : peers[row_rank(entry)] + static_cast<int64_t>(row_route(entry) / topk) * hidden;
}

// Without a shared expert to begin with, the first gate+up tiles would wait for the dispatch warps' narrow rings (29 MB at kimi: 32 us). So
// the consumer warps, idle until then, fetch those tiles themselves, two rows at a time.
constexpr int kHeadRows = 2;

template <class Fetch>
__device__ __forceinline__ void for_head_rows(const Watch& watch, int head_tiles, int cta, int ctas, uint32_t* landed, int first, int step, Fetch fetch) {
  if (__any_sync(~0u, watch.dead)) return;  // there may be no schedule
  const int warp = threadIdx.x / 32 - 4;
  for (int i = cta * kConsumerWarps + warp; i < head_tiles * (kRowsPerTile / kHeadRows); i += ctas * kConsumerWarps) {
    const int tile = first + step * (i / (kRowsPerTile / kHeadRows));
    const int in_tile = i % (kRowsPerTile / kHeadRows) * kHeadRows;
    for (int r = in_tile; r < in_tile + kHeadRows; ++r) fetch(tile, r);
    ptx::fence_proxy_async_global();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::red_release_gpu(landed + tile, kHeadRows);
  }
}

__device__ __forceinline__ void dispatch_head(const sm90::ForwardParams& p, int cta, int ctas) {
  const int tiles = p.header->tiles;
  for_head_rows(watch_of(p.limits), min(p.head_tiles, tiles), cta, ctas, p.x_ready, tiles - 1, -1, [&](int tile, int r) {
    const int64_t entry = p.rows[static_cast<int64_t>(tile) * kRowsPerTile + r];
    stamp(p.stamps, kStampPulled, tile, r, 1, false);
    if (p.ring.owns(tile, r))
      copy_row(reinterpret_cast<uint4*>(p.ring_x_out + (static_cast<int64_t>(p.ring.row(tile)) + r) * p.hidden),
               reinterpret_cast<const uint4*>(source_row(p.peer_x, entry, p.topk, p.hidden)), p.hidden / 8);
    stamp(p.stamps, kStampPulled, tile, r, 1, true);
  });
}

// A ticket: kDispatchRows consecutive rows of a tile. False when there are no more.
struct Ticket {
  int index, in_tile;  // tiles before it; first row in the tile
  __device__ __forceinline__ bool take(uint32_t* counter, int head_tiles, int tiles) {
    uint32_t ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counter, 1u);
    ticket = __shfl_sync(~0u, ticket, 0) + head_tiles * (kRowsPerTile / kDispatchRows);
    index = ticket / (kRowsPerTile / kDispatchRows), in_tile = ticket % (kRowsPerTile / kDispatchRows) * kDispatchRows;
    return index < tiles;
  }
};
constexpr uint32_t kTicketRows = (1u << kDispatchRows) - 1;

// A warp that pulls, all 32 lanes, until there are no tickets left.
__device__ __forceinline__ void dispatch_rows(const sm90::ForwardParams& p, CopyRing ring) {
  const int lane = threadIdx.x % 32;
  const int tiles = p.header->tiles;
  const uint32_t row_bytes = p.hidden * 2;
  Watch watch = watch_of(p.limits);
  Ticket ticket;
  while (ticket.take(p.tickets + kDispatchTicket, p.head_tiles, tiles) && !__any_sync(~0u, watch.dead)) {
    const int tile = tiles - 1 - ticket.index;
    const int64_t entry = lane < kDispatchRows ? p.rows[static_cast<int64_t>(tile) * kRowsPerTile + ticket.in_tile + lane] : 0;
    __nv_bfloat16* to = p.ring_x_out + (static_cast<int64_t>(p.ring.row(tile)) + ticket.in_tile) * p.hidden;
    dawdle_warp();
    if (!kSlotFault && lane == 0 && tile + p.lead_tiles < tiles) {
      // lead_tiles <= ring.slots. Running further ahead only pushes rows out of the L2 before they are multiplied.
      wait_counter(watch, p.h_ready + tile + p.lead_tiles, p.columns.gate_up, kWaitSlot, tile);
      // The slot's previous occupant comes earlier in the order, but tiles do not end in the order they began in.
      if (p.lead_tiles < p.ring.slots && tile + p.ring.slots < tiles)
        wait_counter(watch, p.h_ready + tile + p.ring.slots, p.columns.gate_up, kWaitSlot, tile);
      ptx::fence_proxy_async();
    }
    __syncwarp();
    stamp(p.stamps, kStampPulled, tile, ticket.in_tile, kDispatchRows, false);
    const uint32_t padding = __ballot_sync(~0u, lane < kDispatchRows && entry < 0);
    if (padding != 0 && p.ring.owns(tile, ticket.in_tile)) clear_rows(padding, to, row_bytes);
    ring.copy_rows(watch, ~padding & kTicketRows, source_row(p.peer_x, entry, p.topk, p.hidden), to, row_bytes);
    if (lane == 0) ptx::bulk_wait_all();  // the rows are in memory, not merely read out of shared memory
    stamp(p.stamps, kStampPulled, tile, ticket.in_tile, kDispatchRows, true);
    __syncwarp();
    if (lane == 0 && !watch.dead) ptx::red_release_gpu(p.x_ready + tile, kDispatchRows);
  }
}

}  // namespace mok::cuda
