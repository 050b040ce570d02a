#include <algorithm>
#include <stdexcept>
#include <vector>

#include "kernel.h"

namespace mok::cpu {

void build_schedule(const Group& group, const int32_t* ids, int64_t tokens, int64_t top_k, int64_t hidden,
                    int64_t element, int64_t experts, int64_t* table, int64_t capacity, int64_t* plan) {
  const Layout layout = make_layout(group.max_tokens, top_k, hidden, element);
  const uint32_t bank = group.next_epoch() & 1;
  const auto ids_of = [&](int64_t rank) {
    return reinterpret_cast<int32_t*>(group.data[rank] + layout.ids[bank]);
  };
  std::copy_n(ids, tokens * top_k, ids_of(group.rank));  // ids is null on a rank without tokens
  group.own().tokens[bank].store(tokens, std::memory_order_relaxed);
  group.barrier(Phase::kSchedule);

  // One pass over all routes counts them by source rank and local expert.
  const auto local = [&](int64_t rank, int64_t route) {
    const int64_t e = ids_of(rank)[route] - group.rank * experts;
    return e >= 0 && e < experts ? e : -1;
  };
  std::vector<int64_t> counts(group.ranks * experts, 0), routes(group.ranks);
  for (int64_t r = 0; r < group.ranks; ++r) {
    routes[r] = group.control[r]->tokens[bank].load(std::memory_order_relaxed) * top_k;
    for (int64_t j = 0; j < routes[r]; ++j) {
      const int64_t e = local(r, j);
      if (e >= 0) ++counts[r * experts + e];
    }
  }
  int64_t* prefix = plan;
  int64_t* rows = plan + experts + 1;
  prefix[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    rows[e] = 0;
    for (int64_t r = 0; r < group.ranks; ++r) rows[e] += counts[r * experts + e];
    prefix[e + 1] = prefix[e] + ceil_div(rows[e], kTileRows);
  }

  const int64_t used = prefix[experts] * kTileRows;
  if (used > capacity) throw std::length_error("the schedule table is too small");  // most_tiles rules it out
  for (int64_t row = 0; row < used; ++row) table[row] = kPaddingRow;
  std::vector<int64_t> seen(experts);
  for (int64_t r = 0; r < group.ranks; ++r) {
    std::fill(seen.begin(), seen.end(), 0);
    for (int64_t j = 0; j < routes[r]; ++j) {
      const int64_t e = local(r, j);
      if (e < 0) continue;
      const int64_t row = row_in_expert(seen[e]++, r, &counts[e], group.ranks, experts);
      table[prefix[e] * kTileRows + row] = pack_row(r, j);
    }
  }
}

}  // namespace mok::cpu
