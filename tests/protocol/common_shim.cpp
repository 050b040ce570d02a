// The pure functions of csrc/common behind a C interface, for ctypes (test_properties.py).
#include <type_traits>

#include "csrc/common/layout.h"
#include "csrc/common/waits.h"

using namespace mok;

// Rows times columns pass 2^31: every factor of an index is 64 bits wide.
static_assert(std::is_same_v<decltype(Ring{}.slot(0) * kTileRows), int64_t>);
static_assert(std::is_same_v<decltype(Task{}.index), int64_t> && std::is_same_v<decltype(Wait{}.target), int64_t>);
static_assert(std::is_same_v<decltype(row_route(0)), int64_t> && std::is_same_v<decltype(Layout{}.routed), int64_t>);

struct Settings {
  int64_t tiles, ring, saved, minibatch, h, y, lag, shared_tiles;
  int64_t gate_up, down, shared, dgrad_down, dgrad_up, wgrad, shared_dgrad, shared_wgrad;  // parts
  int64_t want_dgrad, want_wgrad, want_shared_wgrad, experts;
  const int64_t* prefix;
};

// One task as test_properties.py reads it.
struct Record {
  int64_t op, index, part, macrobatch;
  int64_t counter, counter_index;
  int64_t wait_count, waits[kMaxWaits][4];
  int64_t begin, end, last;  // wgrad: tiles it sums, and whether it rounds
};

namespace {

Slots slots_of(const Settings& s) {
  return {{{s.tiles, s.ring}, s.minibatch}, s.h, s.y};
}
Parts parts_of(const Settings& s) {
  return {s.gate_up, s.down, s.shared, s.dgrad_down, s.dgrad_up, s.wgrad, s.shared_dgrad, s.shared_wgrad};
}

void put(Record* record, const Slots& slots, const Task& task, const Wait* waits, int64_t count) {
  const Signal signal = signal_of(slots.minibatches, task);
  *record = {static_cast<int64_t>(task.op), task.index, task.part, task.macrobatch,
             static_cast<int64_t>(signal.counter), signal.index, count, {}, 0, 0, 0};
  for (int64_t w = 0; w < count; ++w) {
    const int64_t values[] = {static_cast<int64_t>(waits[w].counter), waits[w].begin, waits[w].end, waits[w].target};
    for (int i = 0; i < 4; ++i) record->waits[w][i] = values[i];
  }
}

BackwardOrder<int64_t> backward_of(const Settings& s) {
  return {slots_of(s).minibatches.ring, s.saved, s.lag, s.shared_tiles, parts_of(s), s.want_dgrad != 0, s.want_wgrad != 0,
          s.want_shared_wgrad != 0, s.prefix, s.experts};
}
ForwardOrder forward_of(const Settings& s) {
  return {slots_of(s).minibatches.ring, min_of(s.lag, longest_lag(slots_of(s))), s.shared_tiles, parts_of(s)};
}

}  // namespace

extern "C" {

int64_t shim_record_size() { return sizeof(Record); }
int64_t shim_tile_rows() { return kTileRows; }

int64_t shim_pack_row(int64_t rank, int64_t route) { return pack_row(rank, route); }
int64_t shim_row_rank(int64_t row) { return row_rank(row); }
int64_t shim_row_route(int64_t row) { return row_route(row); }
int64_t shim_row_in_expert(int64_t ordinal, int64_t rank, const int64_t* counts, int64_t ranks, int64_t stride) {
  return row_in_expert(ordinal, rank, counts, ranks, stride);
}
int64_t shim_expert_of_tile(const int64_t* prefix, int64_t experts, int64_t tile) {
  return expert_of_tile(prefix, experts, tile);
}
int64_t shim_rows_in_tile(int64_t tile, int64_t first, int64_t rows) { return rows_in_tile(tile, first, rows); }
int64_t shim_most_tiles(int64_t routes, int64_t experts) { return most_tiles(routes, experts); }

// out: slot, forward_previous, backward_previous, macrobatch, its begin, its end, macrobatches.
void shim_ring(int64_t tiles, int64_t size, int64_t tile, int64_t* out) {
  const Ring ring{tiles, size};
  const int64_t m = ring.macrobatch_of(tile);
  const int64_t values[] = {ring.slot(tile), ring.forward_previous(tile), ring.backward_previous(tile), m,
                            ring.macrobatch_begin(m), ring.macrobatch_end(m), ring.macrobatches()};
  for (int i = 0; i < 7; ++i) out[i] = values[i];
}
int64_t shim_backward_window(int64_t tiles, int64_t saved, int64_t most) {
  return backward_window(tiles, saved, most);
}
int64_t shim_minibatch_count(int64_t tiles, int64_t ring, int64_t size) {
  return Minibatches{{tiles, ring}, size}.count();
}
int64_t shim_minibatch_of(int64_t tiles, int64_t ring, int64_t size, int64_t tile) {
  return Minibatches{{tiles, ring}, size}.of(tile);
}
int64_t shim_minibatch_target(int64_t tiles, int64_t ring, int64_t size, int64_t minibatch) {
  return Minibatches{{tiles, ring}, size}.target(minibatch);
}

// Offset in a ring of rows `columns` wide, and in a peer's published rows, as the kernels compute them.
int64_t shim_ring_offset(int64_t tiles, int64_t size, int64_t tile, int64_t columns) {
  return Ring{tiles, size}.slot(tile) * kTileRows * columns;
}
int64_t shim_route_offset(int64_t row, int64_t columns) { return row_route(row) * columns; }

// out: x, dy, routed, ids[2], weight, dweight, bytes.
void shim_layout(int64_t tokens, int64_t top_k, int64_t hidden, int64_t element, int64_t* out) {
  const Layout l = make_layout(tokens, top_k, hidden, element);
  const int64_t values[] = {l.x, l.dy, l.routed, l.ids[0], l.ids[1], l.weight, l.dweight, l.bytes};
  for (int i = 0; i < 8; ++i) out[i] = values[i];
}

int64_t shim_count(const Settings* s, int64_t backward, int64_t comm) {
  if (backward) return comm ? backward_of(*s).comm_count() : backward_of(*s).compute_count();
  return comm ? forward_of(*s).comm_count() : forward_of(*s).compute_count();
}
void shim_tasks(const Settings* s, int64_t backward, int64_t comm, Record* out) {
  const Slots slots = slots_of(*s);
  Wait waits[kMaxWaits];
  for (int64_t i = 0, count = shim_count(s, backward, comm); i < count; ++i) {
    if (!backward) {
      const ForwardOrder order = forward_of(*s);
      const Task task = comm ? order.comm(i) : order.compute(i);
      put(out + i, slots, task, waits, forward_waits(order, slots, task, waits));
      continue;
    }
    const BackwardOrder<int64_t> order = backward_of(*s);
    const Task task = comm ? order.comm(i) : order.compute(i);
    put(out + i, slots, task, waits, backward_waits(order, slots, task, waits));
    if (task.op == Op::kWgrad) {
      out[i].begin = order.wgrad_begin(task.index, task.macrobatch);
      out[i].end = order.wgrad_end(task.index, task.macrobatch);
      out[i].last = order.wgrad_last(task.index, task.macrobatch);
    }
  }
}

}  // extern "C"
