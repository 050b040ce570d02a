// What one simulated group does: the routing of each rank's tokens, the schedule it gives every rank, and the settings.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/common/waits.h"

namespace protocol {

using mok::kTileRows;

// splitmix64: the whole simulation is a function of its seed.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int64_t percent) { return below(100) < percent; }
  int64_t any(std::initializer_list<int64_t> values) { return values.begin()[below(values.size())]; }
};

struct Launch {
  bool backward;
  int64_t call;  // the forward whose saved state it makes or uses
};

// One rank's local row order.
struct Schedule {
  std::vector<int64_t> prefix;    // first tile of each local expert, then the number of tiles
  std::vector<int64_t> rows;      // packed (rank, route) of each row, or padding
  std::vector<uint32_t> sources;  // bit r: the tile holds rows of rank r
  int64_t tiles() const { return prefix.back(); }
};

struct Scenario {
  int64_t ranks, experts, top_k;  // experts: of one rank
  std::vector<std::vector<int32_t>> ids;  // [rank][route] global expert, -1 masked
  std::vector<Schedule> schedules;

  int64_t ring, minibatch, h, y, lag;  // row tiles; lag before the clamp
  int64_t window;                      // the backward's ring
  int64_t shared_tiles;
  mok::Parts parts;
  bool dgrad, wgrad, shared_wgrad;
  int64_t comm_workers, compute_workers;  // of one rank
  std::vector<Launch> launches;

  bool replays() const {
    for (const Schedule& schedule : schedules) {
      if (schedule.tiles() > ring) return true;
    }
    return false;
  }
};

inline Schedule make_schedule(const Scenario& scenario, int64_t rank) {
  const int64_t ranks = scenario.ranks, experts = scenario.experts, first = rank * experts;
  std::vector<int64_t> counts(ranks * experts, 0);
  for (int64_t r = 0; r < ranks; ++r) {
    for (const int32_t id : scenario.ids[r]) {
      if (id >= first && id < first + experts) ++counts[r * experts + id - first];
    }
  }
  Schedule schedule;
  schedule.prefix.assign(experts + 1, 0);
  for (int64_t e = 0; e < experts; ++e) {
    int64_t rows = 0;
    for (int64_t r = 0; r < ranks; ++r) rows += counts[r * experts + e];
    schedule.prefix[e + 1] = schedule.prefix[e] + mok::ceil_div(rows, kTileRows);
  }
  schedule.rows.assign(schedule.tiles() * kTileRows, mok::kPaddingRow);
  schedule.sources.assign(schedule.tiles(), 0);
  for (int64_t r = 0; r < ranks; ++r) {
    std::vector<int64_t> ordinals(experts, 0);
    for (size_t route = 0; route < scenario.ids[r].size(); ++route) {
      const int64_t e = scenario.ids[r][route] - first;
      if (e < 0 || e >= experts) continue;
      const int64_t row = schedule.prefix[e] * kTileRows +
                          mok::row_in_expert(ordinals[e]++, r, counts.data() + e, ranks, experts);
      schedule.rows[row] = mok::pack_row(r, route);
      schedule.sources[row / kTileRows] |= 1u << r;
    }
  }
  return schedule;
}

inline Scenario make_scenario(Random& random) {
  Scenario s{};
  s.ranks = random.between(1, 3), s.experts = random.between(1, 4), s.top_k = random.between(1, 4);
  const int64_t all = s.ranks * s.experts, focus = random.below(all), routing = random.below(5);
  const int64_t masked = random.any({0, 0, 10, 75});
  for (int64_t r = 0; r < s.ranks; ++r) {
    const int64_t tokens = random.any({0, 1, 51, random.below(200), random.below(500), random.below(1000)});
    std::vector<int32_t> ids(tokens * s.top_k);
    for (int32_t& id : ids) {
      switch (routing) {
        case 0: id = random.below(all); break;                             // everywhere
        case 1: id = focus; break;                                         // one expert takes everything
        case 2: id = random.below(s.experts); break;                       // one rank takes everything
        case 3: id = random.below((all + 1) / 2) * 2 % all; break;         // every other expert is empty
        default: id = random.chance(70) ? focus : random.below(all);       // skewed
      }
      if (random.chance(masked)) id = -1;
    }
    s.ids.push_back(std::move(ids));
  }
  int64_t most = 1;
  for (int64_t r = 0; r < s.ranks; ++r) {
    s.schedules.push_back(make_schedule(s, r));
    most = mok::max_of(most, s.schedules.back().tiles());
  }
  s.ring = random.any({1, 2, 3, random.between(1, most), random.between(1, (most + 1) / 2), most, most + 2});
  s.window = s.replays() ? mok::backward_window(most, s.ring, random.between(1, s.ring)) : random.between(1, s.ring);
  if (random.chance(40)) s.window = s.ring;
  s.minibatch = random.any({1, mok::min_of<int64_t>(2, s.ring), random.between(1, s.ring), s.ring});
  s.h = random.any({1, 2, random.between(1, most), most});
  s.y = random.any({1, 2, random.between(1, most), most});
  s.lag = random.any({0, 1, random.below(most + 1), most});
  s.shared_tiles = random.any({0, 0, 1, 3});
  for (int64_t* part : {&s.parts.gate_up, &s.parts.down, &s.parts.shared, &s.parts.dgrad_down, &s.parts.dgrad_up,
                        &s.parts.wgrad, &s.parts.shared_dgrad, &s.parts.shared_wgrad}) {
    *part = random.any({1, 1, 2, 3});
  }
  s.dgrad = random.chance(75), s.wgrad = random.chance(75), s.shared_wgrad = random.chance(75);
  s.comm_workers = random.between(1, 3), s.compute_workers = random.between(1, 5);
  switch (random.below(5)) {
    case 0: s.launches = {{false, 0}, {true, 0}, {true, 0}}; break;              // backward twice: retain_graph
    case 1: s.launches = {{false, 0}, {false, 1}, {true, 1}, {true, 0}}; break;  // two layers
    case 2: s.launches = {{false, 0}, {false, 1}, {true, 0}, {true, 1}}; break;  // two micro-batches in flight
    default: s.launches = {{false, 0}, {true, 0}};
  }
  return s;
}

}  // namespace protocol
