// Schedule (paper, Algorithm 1): every rank's expert ids -> row table, expert prefix and the megakernel's task table.
//
// Three launches, no host sync, one pass over the routes for counting and one for placing:
//   count   a warp per chunk of 512 routes of one source rank: routes to each local expert; also clears the call's counters
//   prefix  one CTA: chunk counts -> offsets, rows an expert and source rank, tile / unit / pair prefixes, each expert's first row, header
//   place   a warp per chunk: each route's ordinal within (source rank, expert) -> its row; further CTAs write padding rows, tiles' rows and tasks
// Ids are read from the peers' buffers directly. A route whose id is not an expert of this rank is skipped, whatever its value.
#include "../common/ring.h"
#include "../common/schedule.h"
#include "layout.cuh"

namespace mok::cuda {
namespace {

constexpr int kCountThreads = 128, kPrefixThreads = 1024, kPlaceWarps = 4;

struct ScheduleArgs {
  MokForwardArgs a;
  ScheduleLayout s;
  ScratchLayout c;
  Columns columns;
  int chunks, shared_tiles;
  Lag lag;
  bool by_unit, shared_by_unit;

  __device__ int32_t* partial(int rank, int chunk) const {
    return at<int32_t>(a.scratch, c.partial) + (static_cast<int64_t>(rank) * chunks + chunk) * a.local_experts;
  }
  __device__ int32_t* totals() const { return at<int32_t>(a.scratch, c.totals); }
  __device__ int32_t* tile_prefix() const { return at<int32_t>(a.schedule, s.tile_prefix); }
  __device__ int32_t* unit_prefix() const { return at<int32_t>(a.schedule, s.unit_prefix); }
  __device__ int32_t* pair_prefix() const { return at<int32_t>(a.schedule, s.pair_prefix); }
  __device__ int32_t* expert_rows() const { return at<int32_t>(a.schedule, s.expert_rows); }
  __device__ int2* first_unit() const { return at<int2>(a.schedule, s.first_unit); }
  __device__ int32_t* tile_rows() const { return at<int32_t>(a.schedule, s.tile_rows); }
  __device__ int64_t* rows() const { return at<int64_t>(a.schedule, s.rows); }
  __device__ uint64_t* tasks() const { return at<uint64_t>(a.schedule, s.tasks); }
  __device__ ScheduleHeader* header() const { return at<ScheduleHeader>(a.schedule, 0); }
  __device__ int routes(int rank) const { return min(*a.peer_tokens[rank], a.max_tokens) * a.topk; }
  __device__ int local(int rank, int route) const {
    const int id = a.peer_ids[rank][route] - a.first_expert;
    return id >= 0 && id < a.local_experts ? id : -1;
  }
};

// grid (chunks, ranks), shared memory: one count an expert.
__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ ScheduleArgs s) {
  extern __shared__ int32_t counts[];
  const int experts = s.a.local_experts, rank = blockIdx.y, begin = blockIdx.x * kRoutesPerChunk;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  const int end = min(begin + kRoutesPerChunk, s.routes(rank));
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const int e = s.local(rank, i);
    if (e >= 0) atomicAdd(counts + e, 1);
  }
  __syncthreads();
  int32_t* out = s.partial(rank, blockIdx.x);
  for (int e = threadIdx.x; e < experts; e += blockDim.x) out[e] = counts[e];

  const int block = blockIdx.y * gridDim.x + blockIdx.x, blocks = gridDim.x * gridDim.y;
  uint4* clear = at<uint4>(s.a.scratch, 0);
  for (int64_t i = static_cast<int64_t>(block) * blockDim.x + threadIdx.x; i < s.c.cleared_bytes / 16; i += static_cast<int64_t>(blocks) * blockDim.x)
    clear[i] = uint4{0, 0, 0, 0};
}

// Units are numbered from the last expert to the first; unit u of an expert with n tiles is its last tile if n is odd and u is 0.
struct Unit {
  int expert, tile, pairs_before, singles_before;  // tile: the lower one of a pair; before: among all units
  bool two, is_short;
};

// The prefix arrays, each [L + 1], wherever they lie: searches through global memory took most of the place kernel's time (23 us at 128
// experts), so its CTAs copy them to shared memory first.
struct Prefixes {
  const int32_t *tiles, *units, *pairs;
};

__device__ Unit find_unit(const ScheduleArgs& s, const Prefixes& prefixes, int unit) {
  const int experts = s.a.local_experts;
  const auto [tiles, units, pairs] = prefixes;
  // units[e]: units of experts before e. Counted from the end: expert e owns [U - units[e + 1], U - units[e]).
  const int total = units[experts];
  const int e = static_cast<int>(expert_of_tile(units, experts, total - 1 - unit));
  const int within = unit - (total - units[e + 1]), count = tiles[e + 1] - tiles[e], odd = count & 1;
  Unit u;
  u.expert = e;
  u.two = !(odd && within == 0);
  u.tile = u.two ? tiles[e + 1] - odd - 2 * (within - odd) - 2 : tiles[e + 1] - 1;
  u.pairs_before = pairs[experts] - pairs[e + 1] + (u.two ? within - odd : 0);
  u.singles_before = unit - u.pairs_before;
  // The expert's last tile, and at most half of it used.
  u.is_short = within == 0 && ends_short(s.expert_rows()[e]);
  return u;
}

__device__ int first_position(const Unit& u, int tiles) { return tiles - 1 - (u.tile + (u.two ? 1 : 0)); }

__device__ int inclusive_scan(int v) {
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, v, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) v += other;
  }
  return v;
}

// One CTA.
__global__ void __launch_bounds__(kPrefixThreads) prefix_kernel(const __grid_constant__ ScheduleArgs s) {
  const int experts = s.a.local_experts, pairs_of_ranks = s.a.ranks * experts;
  for (int i = threadIdx.x; i < pairs_of_ranks; i += blockDim.x) {
    int32_t* p = s.partial(i / experts, 0) + i % experts;
    int running = 0, c = 0;
    for (; c + 8 <= s.chunks; c += 8) {  // eight loads in flight
      int v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = p[static_cast<int64_t>(c + j) * experts];
#pragma unroll
      for (int j = 0; j < 8; ++j) p[static_cast<int64_t>(c + j) * experts] = running, running += v[j];
    }
    for (; c < s.chunks; ++c) {
      const int v = p[static_cast<int64_t>(c) * experts];
      p[static_cast<int64_t>(c) * experts] = running, running += v;
    }
    s.totals()[i] = running;
  }
  __syncthreads();
  __shared__ int sums[4];
  if (threadIdx.x < 32) {
    int tile_base = 0, unit_base = 0, pair_base = 0, row_base = 0, half_base = 0;
    for (int first = 0; first < experts; first += 32) {
      const int e = first + threadIdx.x;
      int rows = 0;
      for (int r = 0; r < s.a.ranks && e < experts; ++r) rows += s.totals()[r * experts + e];
      const int tiles = (rows + kRowsPerTile - 1) / kRowsPerTile;
      const int t = inclusive_scan(tiles), u = inclusive_scan((tiles + 1) / 2), q = inclusive_scan(tiles / 2), n = inclusive_scan(rows);
      const int h = inclusive_scan((rows + kHalfRows - 1) / kHalfRows);
      if (e < experts) {
        s.expert_rows()[e] = rows;
        s.tile_prefix()[e + 1] = tile_base + t, s.unit_prefix()[e + 1] = unit_base + u, s.pair_prefix()[e + 1] = pair_base + q;
        s.tile_rows()[tile_base + t] = (half_base + h) * kHalfRows;  // of the next expert's first tile
      }
      tile_base += __shfl_sync(~0u, t, 31), unit_base += __shfl_sync(~0u, u, 31);
      pair_base += __shfl_sync(~0u, q, 31), row_base += __shfl_sync(~0u, n, 31);
      half_base += __shfl_sync(~0u, h, 31);
    }
    if (threadIdx.x == 0) {
      s.tile_prefix()[0] = s.unit_prefix()[0] = s.pair_prefix()[0] = s.tile_rows()[0] = 0;
      sums[0] = tile_base, sums[1] = unit_base, sums[2] = pair_base, sums[3] = row_base;
    }
  }
  __syncthreads();
  const int tiles = sums[0], units = sums[1], pairs = sums[2];
  const Prefixes prefixes{s.tile_prefix(), s.unit_prefix(), s.pair_prefix()};
  const int minibatches = (tiles + s.lag.minibatch - 1) / s.lag.minibatch;
  // first_unit[m]: first unit whose first tile lies in minibatch m or later. A pair may swallow a minibatch of one tile.
  for (int u = threadIdx.x; u <= units; u += blockDim.x) {
    const Unit unit = u < units ? find_unit(s, prefixes, u) : Unit{};
    const int own = u < units ? first_position(unit, tiles) / s.lag.minibatch : minibatches;
    const int before = u > 0 ? first_position(find_unit(s, prefixes, u - 1), tiles) / s.lag.minibatch : -1;
    for (int m = before + 1; m <= own; ++m) s.first_unit()[m] = int2{u, u < units ? unit.pairs_before : pairs};
  }
  if (threadIdx.x == 0) {
    const int singles = units - pairs, ts = s.shared_tiles;
    const int tasks = tasks_of(pairs, singles, s.columns.gate_up) + tasks_of(pairs, singles, s.columns.down) +
                      tasks_of(ts / 2, ts % 2, s.columns.shared_gate_up) + tasks_of(ts / 2, ts % 2, s.columns.shared_down);
    *s.header() = {tiles, units, minibatches, tasks, s.lag.minibatch, s.lag.lag, sums[3], pairs};
  }
}

// One warp writes the tasks of one unit (or, behind the routed units, of one unit of the shared expert).
__device__ void write_tasks(const ScheduleArgs& s, const Prefixes& prefixes, int index) {
  const int lane = threadIdx.x % 32;
  const ScheduleHeader h = *s.header();
  const int ts = s.shared_tiles;
  const TaskOrder order{tasks_of(ts / 2, ts % 2, s.columns.shared_gate_up), tasks_of(ts / 2, ts % 2, s.columns.shared_down), h.lag, h.minibatches};
  const auto before = [&](int m, int columns) {  // tasks of one kind in minibatches 0 .. m-1
    const int2 first = s.first_unit()[m];
    return tasks_of(first.y, first.x - first.y, columns);
  };
  const auto gate_up_before = [&](int m) { return before(m, s.columns.gate_up); };
  const auto down_before = [&](int m) { return before(m, s.columns.down); };
  const auto write = [&](int base, uint32_t kind, int columns, bool by_unit, const Unit& u, int pairs, int singles, int pairs_before,
                         int singles_before) {
    for (int c = lane; c < columns; c += 32)
      if (u.two || c % 2 == 0)
        s.tasks()[base + task_position(pairs, singles, columns, by_unit, u.two, c, pairs_before, singles_before)] =
            Task::make(kind, u.two, c, u.expert, u.tile, u.is_short).bits;
  };
  if (index < h.units) {
    const Unit u = find_unit(s, prefixes, index);
    const int m = first_position(u, h.tiles) / h.minibatch_tiles;
    const int2 begin = s.first_unit()[m], end = s.first_unit()[m + 1];
    const int pairs = end.y - begin.y, singles = end.x - begin.x - pairs;
    const int p = u.pairs_before - begin.y, q = u.singles_before - (begin.x - begin.y);
    write(order.gate_up_base(m, gate_up_before, down_before), kTaskGateUp, s.columns.gate_up, s.by_unit, u, pairs, singles, p, q);
    write(order.down_base(m, gate_up_before, down_before), kTaskDown, s.columns.down, s.by_unit, u, pairs, singles, p, q);
  } else if (index - h.units < (ts + 1) / 2) {
    const int i = index - h.units;
    const bool last = i == (ts + 1) / 2 - 1;
    const Unit u{0, 2 * i, i, 0, 2 * i + 1 < ts, last && ends_short(s.a.tokens)};
    write(0, kTaskSharedGateUp, s.columns.shared_gate_up, s.shared_by_unit, u, ts / 2, ts % 2, i, 0);
    write(order.shared_down_base(gate_up_before), kTaskSharedDown, s.columns.shared_down, s.shared_by_unit, u, ts / 2, ts % 2, i, 0);
  }
}

// grid (blocks for chunks and then for padding, tiles' rows and tasks, ranks); a warp per chunk. Shared memory: offsets [warps][experts].
__global__ void __launch_bounds__(kPlaceWarps * 32) place_kernel(const __grid_constant__ ScheduleArgs s, int chunk_blocks) {
  extern __shared__ int32_t offsets[];
  const int experts = s.a.local_experts, warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.y;
  if (static_cast<int>(blockIdx.x) >= chunk_blocks) {
    const int worker = ((blockIdx.x - chunk_blocks) * gridDim.y + rank) * kPlaceWarps + warp;
    const int workers = (gridDim.x - chunk_blocks) * gridDim.y * kPlaceWarps;
    for (int e = worker; e < experts; e += workers) {
      const int first = s.tile_prefix()[e], last = s.tile_prefix()[e + 1];
      const int64_t begin = static_cast<int64_t>(first) * kRowsPerTile + s.expert_rows()[e];
      const int64_t end = static_cast<int64_t>(last) * kRowsPerTile;
      for (int64_t row = begin + lane; row < end; row += 32) s.rows()[row] = kPaddingRow;
      const int first_row = s.tile_rows()[first];
      for (int tile = first + 1 + lane; tile < last; tile += 32) s.tile_rows()[tile] = first_row + (tile - first) * kRowsPerTile;
    }
    int32_t* copy = offsets;
    for (int i = threadIdx.x; i <= experts; i += blockDim.x) {
      copy[i] = s.tile_prefix()[i];
      copy[experts + 1 + i] = s.unit_prefix()[i];
      copy[2 * (experts + 1) + i] = s.pair_prefix()[i];
    }
    __syncthreads();
    const Prefixes prefixes{copy, copy + experts + 1, copy + 2 * (experts + 1)};
    const int units = s.header()->units + (s.shared_tiles + 1) / 2;
    for (int u = worker; u < units; u += workers) write_tasks(s, prefixes, u);
    return;
  }
  const int chunk = blockIdx.x * kPlaceWarps + warp;
  const int begin = chunk * kRoutesPerChunk, end = min(begin + kRoutesPerChunk, s.routes(rank));
  if (chunk >= s.chunks || begin >= end) return;
  int32_t* ordinal_base = offsets + warp * experts;
  int expert[kRoutesPerChunk / 32];  // all ids in flight at once
#pragma unroll
  for (int i = 0; i < kRoutesPerChunk / 32; ++i) expert[i] = begin + 32 * i + lane < end ? s.local(rank, begin + 32 * i + lane) : -1;
  for (int e = lane; e < experts; e += 32) ordinal_base[e] = s.partial(rank, chunk)[e];
  __syncwarp();
  // Ordinals in route order (shared memory only), then all rows' loads at once, then the stores.
  int ordinal[kRoutesPerChunk / 32];
#pragma unroll
  for (int i = 0; i < kRoutesPerChunk / 32; ++i) {
    const int e = expert[i];
    const uint32_t same = __match_any_sync(~0u, e);
    const int earlier = __popc(same & ((1u << lane) - 1));
    ordinal[i] = e >= 0 ? ordinal_base[e] + earlier : 0;
    __syncwarp();
    if (e >= 0 && earlier == 0) ordinal_base[e] += __popc(same);
    __syncwarp();
  }
  int64_t row[kRoutesPerChunk / 32];
#pragma unroll
  for (int i = 0; i < kRoutesPerChunk / 32; ++i) {
    const int e = max(expert[i], 0);
    row[i] = static_cast<int64_t>(s.tile_prefix()[e]) * kRowsPerTile +
             (s.a.ranks == 1 ? ordinal[i] : row_in_expert(ordinal[i], rank, s.totals() + e, s.a.ranks, experts));
  }
#pragma unroll
  for (int i = 0; i < kRoutesPerChunk / 32; ++i)
    if (expert[i] >= 0) s.rows()[row[i]] = pack_row(rank, begin + 32 * i + lane);
}

}  // namespace
}  // namespace mok::cuda

extern "C" {

int64_t mok_schedule_bytes(const MokForwardArgs* args) { return mok::cuda::ScheduleLayout::make(*args).bytes; }
int64_t mok_scratch_bytes(const MokForwardArgs* args) { return mok::cuda::ScratchLayout::make(*args).bytes; }

cudaError_t mok_schedule(const MokForwardArgs* args, cudaStream_t stream) {
  using namespace mok::cuda;
  const MokForwardArgs& a = *args;
  if (a.ranks < 1 || a.ranks > MOK_MAX_RANKS || a.topk < 1 || a.topk > MOK_MAX_TOPK || a.local_experts < 1 || a.ring_tiles < 2)
    return cudaErrorInvalidValue;
  ScheduleArgs s{a, ScheduleLayout::make(a), ScratchLayout::make(a), columns_of(a), static_cast<int>(chunks_per_rank(a)),
                 static_cast<int>(shared_tiles(a)), lag_of(a), walks_by_unit(a.hidden, a.inter), walks_by_unit(a.hidden, a.shared_inter)};
  const size_t count_shared = a.local_experts * 4, place_shared = kPlaceWarps * (count_shared + 4);
  if (place_shared > 48 * 1024) return cudaErrorInvalidValue;
  count_kernel<<<dim3(s.chunks, a.ranks), kCountThreads, count_shared, stream>>>(s);
  prefix_kernel<<<1, kPrefixThreads, 0, stream>>>(s);
  const int chunk_blocks = static_cast<int>(mok::ceil_div(s.chunks, kPlaceWarps));
  const int more = static_cast<int>(mok::ceil_div(64, a.ranks));  // 256 warps for padding, tiles' rows and tasks
  place_kernel<<<dim3(chunk_blocks + more, a.ranks), kPlaceWarps * 32, place_shared, stream>>>(s, chunk_blocks);
  return cudaGetLastError();
}

}  // extern "C"
