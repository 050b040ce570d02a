// The ring of row tiles (a macrobatch) and the minibatches inside it; paper, section 3.3.
//
// A tile's slot is tile % ring. The forward walks tiles from the last to the first, so the previous occupant of a slot
// is always tile + ring, at a distance of exactly `ring` tiles, and the ring ends holding tiles [0, ring): macrobatch
// 0, or everything. The backward walks macrobatches 0, 1, 2, ... through a ring of its own, a window, which may be
// smaller: what it stages lives only until its macrobatch's weight gradients. Tiles the forward's ring does not hold are
// replayed.
#pragma once

#include "macros.h"

namespace mok {

constexpr int64_t kNoTile = -1;

struct Ring {
  int64_t tiles;  // row tiles of this call, T
  int64_t size;   // row tiles the ring holds, >= 1

  MOK_HD int64_t slot(int64_t tile) const { return tile % size; }
  // Tile that held this tile's slot before it, in the forward's and in the backward's order.
  MOK_HD int64_t forward_previous(int64_t tile) const { return tile + size < tiles ? tile + size : kNoTile; }
  MOK_HD int64_t backward_previous(int64_t tile) const { return tile >= size ? tile - size : kNoTile; }

  MOK_HD int64_t macrobatches() const { return ceil_div(tiles, size); }
  MOK_HD int64_t macrobatch_of(int64_t tile) const { return tile / size; }
  MOK_HD int64_t macrobatch_begin(int64_t macrobatch) const { return macrobatch * size; }
  MOK_HD int64_t macrobatch_end(int64_t macrobatch) const { return min_of(tiles, (macrobatch + 1) * size); }
};

// Row tiles of the backward's window when the forward's ring held `saved` tiles of `tiles`: at most `most` where that
// can be. If tiles are replayed it divides `saved`, so that a macrobatch is replayed as a whole or not at all; a divisor
// far below `most` would make macrobatches of a few tiles, so then the window is the ring.
MOK_HD int64_t backward_window(int64_t tiles, int64_t saved, int64_t most) {
  if (saved <= most) return saved;
  if (tiles <= saved) return most;
  for (int64_t window = most; 4 * window >= most; --window) {
    if (saved % window == 0) return window;
  }
  return saved;
}

// Minibatches divide a macrobatch: none straddles two, or the backward would wait for a tile whose slot is not free.
struct Minibatches {
  Ring ring;
  int64_t size;  // row tiles a minibatch holds, 1 .. ring.size

  MOK_HD int64_t per_macrobatch() const { return ceil_div(ring.size, size); }
  MOK_HD int64_t count() const { return ring.macrobatches() * per_macrobatch(); }
  MOK_HD int64_t of(int64_t tile) const {
    return ring.macrobatch_of(tile) * per_macrobatch() + ring.slot(tile) / size;
  }
  // Row tiles of a minibatch: the arrivals its consumers wait for. The last one of a macrobatch may be short.
  MOK_HD int64_t target(int64_t minibatch) const {
    const int64_t macrobatch = minibatch / per_macrobatch();
    const int64_t begin = ring.macrobatch_begin(macrobatch) + minibatch % per_macrobatch() * size;
    const int64_t end = min_of(begin + size, ring.macrobatch_end(macrobatch));
    return max_of<int64_t>(0, end - begin);
  }
};

}  // namespace mok
