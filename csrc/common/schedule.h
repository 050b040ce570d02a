// Algorithm 1 of the paper: where each route lands in the local row order, and whose rows a tile holds.
//
// Rows are sorted by (local expert, ordinal of the route within its (source rank, expert), source rank). Each expert's
// region starts on a row-tile boundary; the rows that pad its last tile hold kPaddingRow and never move.
#pragma once

#include "macros.h"

namespace mok {

constexpr int64_t kPaddingRow = -1;

// One row of the schedule table: the source rank in the high half, route = token * K + slot in the low half.
MOK_HD int64_t pack_row(int64_t rank, int64_t route) {
  return rank << 32 | route;
}
MOK_HD int64_t row_rank(int64_t row) {
  return row >> 32;
}
MOK_HD int64_t row_route(int64_t row) {
  return row & 0xffffffff;
}

// Row, within its expert's region, of the `ordinal`-th route that `rank` sends to the expert.
// counts[r * stride] is the number of routes rank r sends to it: ranks take turns, so pulls spread over all peers.
template <class Count>
MOK_HD int64_t row_in_expert(int64_t ordinal, int64_t rank, const Count* counts, int64_t ranks, int64_t stride) {
  int64_t row = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t count = static_cast<int64_t>(counts[r * stride]);
    row += min_of(count, ordinal) + (r < rank && count > ordinal ? 1 : 0);
  }
  return row;
}

// Expert that owns a row tile. prefix[e] is the first tile of local expert e, prefix[experts] the number of tiles;
// experts without rows own no tile, so the search takes the last expert that starts at or before `tile`.
template <class Index>
MOK_HD int64_t expert_of_tile(const Index* prefix, int64_t experts, int64_t tile) {
  int64_t low = 0, high = experts - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (static_cast<int64_t>(prefix[middle]) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Rows of `tile` that carry a route: all of them, except in the last tile of an expert with `rows` rows.
MOK_HD int64_t rows_in_tile(int64_t tile, int64_t first_tile, int64_t rows) {
  return max_of<int64_t>(0, min_of(kTileRows, rows - (tile - first_tile) * kTileRows));
}

// Most row tiles that `routes` routes to `experts` experts can need, whatever the routing.
MOK_HD int64_t most_tiles(int64_t routes, int64_t experts) {
  return routes / kTileRows + min_of(routes, experts);
}

}  // namespace mok
