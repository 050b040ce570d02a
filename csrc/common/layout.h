// The symmetric buffers of one rank: byte offsets inside its segment, equal on all ranks of a group.
#pragma once

#include "macros.h"

namespace mok {

constexpr int64_t kMaxRanks = 72;

struct Layout {
  int64_t x, dy, routed, ids[2], weight, dweight, bytes;
};

// tokens: most tokens a rank may publish (Nmax); element: bytes of an activation.
MOK_HD Layout make_layout(int64_t tokens, int64_t top_k, int64_t hidden, int64_t element) {
  Layout layout{};
  int64_t offset = 0;
  const auto take = [&offset](int64_t bytes) {
    const int64_t begin = offset;
    offset += ceil_div(bytes, 256) * 256;
    return begin;
  };
  layout.x = take(tokens * hidden * element);                // X [Nmax, D]
  layout.dy = take(tokens * hidden * element);               // DY [Nmax, D]
  layout.routed = take(tokens * top_k * hidden * element);   // ROUTED [Nmax * K, D]: combine, then dX
  for (int64_t& bank : layout.ids) bank = take(tokens * top_k * 4);  // IDS int32, banked by the schedule's epoch
  layout.weight = take(tokens * top_k * 4);                  // WEIGHT fp32
  layout.dweight = take(tokens * top_k * 4);                 // DWEIGHT fp32
  layout.bytes = offset;
  return layout;
}

}  // namespace mok
