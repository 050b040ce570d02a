#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "team.h"

namespace mok::cpu {

namespace {

// Everything the threads of one backward share. x and gate/up of the tiles in the forward's ring are the forward's; those
// of the others are replayed. dOut, weight * h, d_gate_up and what is replayed live in a window of the ring, until their
// macrobatch's weight gradients: 16 tiles in place of all keep the step's peak memory below native expert parallelism's.
template <class T>
struct Backward {
  const Group& group;
  const BackwardCall<T>& call;
  const bool dgrad;  // some rank wants dX: every rank then computes and pushes it
  const Shape& shape = call.shape;
  const Layout layout = make_layout(group.max_tokens, shape.top_k, shape.hidden, sizeof(T));
  const int64_t window = backward_window(call.schedule.tiles(), call.settings.ring,
                                         max_of(kWindowTiles, 4 * call.settings.compute_threads));
  const Slots slots{{{call.schedule.tiles(), window}, min_of(call.settings.minibatch, window)},
                    1, min_of(kStagingTiles, window)};
  const Ring& ring = slots.minibatches.ring;
  const int64_t ring_rows = min_of(ring.size, ring.tiles) * kTileRows;
  const bool replays = ring.tiles > call.settings.ring;
  const bool shared = shape.shared > 0;
  Buffer<T> dy = Buffer<T>(ring_rows * shape.hidden);
  Buffer<T> weighted_h = Buffer<T>(ring_rows * shape.intermediate);
  Buffer<T> d_gate_up = Buffer<T>(ring_rows * 2 * shape.intermediate);
  Buffer<float> row_weight = Buffer<float>(ring_rows);
  Buffer<T> staged = Buffer<T>(dgrad ? slots.y * kTileRows * shape.hidden : 0);
  Buffer<T> replayed_x = Buffer<T>(replays ? ring_rows * shape.hidden : 0);
  Buffer<T> replayed_gate_up = Buffer<T>(replays ? ring_rows * 2 * shape.intermediate : 0);
  Buffer<T> shared_weighted_h = Buffer<T>(shared ? shape.tokens * shape.shared : 0);
  Buffer<T> shared_d_gate_up = Buffer<T>(shared ? shape.tokens * 2 * shape.shared : 0);
  // fp32 weight gradients of the expert that a macrobatch boundary splits, gate+up then down (an fp32 gradient that is
  // stored is its own carry). One is enough: waits.h orders its users.
  const bool carries =
      ring.tiles > ring.size && (sizeof(T) < sizeof(float) || call.d_gate_up.sum || call.d_down.sum);
  Buffer<float> carry_gate_up = Buffer<float>(carries ? 2 * shape.intermediate * shape.hidden : 0);
  Buffer<float> carry_down = Buffer<float>(carries ? shape.intermediate * shape.hidden : 0);

  template <class V>
  V* symmetric(int64_t rank, int64_t offset, const V* local) const {
    return group.ranks == 1 && local ? const_cast<V*>(local) : reinterpret_cast<V*>(group.data[rank] + offset);
  }
  const T* x_of(int64_t rank) const { return symmetric<T>(rank, layout.x, call.x); }
  const T* dout_of(int64_t rank) const { return symmetric<T>(rank, layout.dy, call.dout); }
  const float* weight_of(int64_t rank) const { return symmetric<float>(rank, layout.weight, call.route_weights); }
  T* routed_of(int64_t rank) const { return symmetric<T>(rank, layout.routed, nullptr); }
  float* dweight_of(int64_t rank) const { return symmetric<float>(rank, layout.dweight, nullptr); }

  bool survives(int64_t tile) const { return tile < call.settings.ring; }
  // A surviving tile's slot in the forward's ring is its own number.
  const T* x_row(int64_t tile) const {
    return survives(tile) ? call.ring_x + tile * kTileRows * shape.hidden
                          : replayed_x.data() + ring.slot(tile) * kTileRows * shape.hidden;
  }
  const T* gate_up_row(int64_t tile) const {
    const int64_t tile_size = kTileRows * 2 * shape.intermediate;
    return survives(tile) ? call.ring_gate_up + tile * tile_size
                          : replayed_gate_up.data() + ring.slot(tile) * tile_size;
  }
  int64_t valid(int64_t tile, int64_t expert) const {
    return rows_in_tile(tile, call.schedule.prefix[expert], call.schedule.rows[expert]);
  }
};

template <class T>
class Worker {
 public:
  Worker(Backward<T>& backward, const BackwardOrder<int64_t>& order) : b_(backward), order_(order) {}

  void perform(const Task& task) {
    switch (task.op) {
      case Op::kPull: return pull(task.index);
      case Op::kPush: return push(task.index);
      case Op::kSharedDgrad: return shared_dgrad(task.index);
      case Op::kSharedWgrad: return shared_wgrad(task.part);
      case Op::kReplay: return replay(task.index);
      case Op::kDgradDown: return dgrad_down(task.index);
      case Op::kDgradUp: return dgrad_up(task.index);
      case Op::kWgrad: return wgrad(task.index, task.part, task.macrobatch);
      default: return;
    }
  }

 private:
  // Reverse-combine: dOut of each route's token, unweighted, with the route's weight; x as well where it is replayed.
  void pull(int64_t tile) {
    const int64_t hidden = b_.shape.hidden, slot = b_.ring.slot(tile) * kTileRows;
    const int64_t* rows = b_.call.schedule.table + tile * kTileRows;
    const bool replay = !b_.survives(tile);
    for (int64_t r = 0; r < kTileRows; ++r) {
      T* dy = b_.dy.data() + (slot + r) * hidden;
      T* x = replay ? b_.replayed_x.data() + (slot + r) * hidden : nullptr;
      if (rows[r] == kPaddingRow) {
        b_.row_weight[slot + r] = 0.0f;
        std::memset(static_cast<void*>(dy), 0, hidden * sizeof(T));
        if (x) std::memset(static_cast<void*>(x), 0, hidden * sizeof(T));
        continue;
      }
      const int64_t rank = row_rank(rows[r]), route = row_route(rows[r]), token = route / b_.shape.top_k;
      b_.row_weight[slot + r] = b_.weight_of(rank)[route];
      std::memcpy(static_cast<void*>(dy), b_.dout_of(rank) + token * hidden, hidden * sizeof(T));
      if (x) std::memcpy(static_cast<void*>(x), b_.x_of(rank) + token * hidden, hidden * sizeof(T));
    }
  }

  void push(int64_t tile) {
    const int64_t hidden = b_.shape.hidden;
    const T* staged = b_.staged.data() + tile % b_.slots.y * kTileRows * hidden;
    const int64_t* rows = b_.call.schedule.table + tile * kTileRows;
    for (int64_t r = 0; r < kTileRows && rows[r] != kPaddingRow; ++r, staged += hidden) {
      std::memcpy(static_cast<void*>(b_.routed_of(row_rank(rows[r])) + row_route(rows[r]) * hidden), staged,
                  hidden * sizeof(T));
    }
  }

  int64_t expert_of(int64_t tile) const {
    return expert_of_tile(b_.call.schedule.prefix, b_.shape.experts, tile);
  }
  const float* gate_up_weight(int64_t expert) {
    const int64_t count = 2 * b_.shape.intermediate * b_.shape.hidden;
    return scratch_.widened(kGateUpWeight, b_.call.weights.gate_up + expert * count, count, true);
  }

  // Gate and up again: the products and the rounding of the forward.
  void replay(int64_t tile) {
    const int64_t hidden = b_.shape.hidden, width = 2 * b_.shape.intermediate, expert = expert_of(tile);
    const float* weight = gate_up_weight(expert);
    float* product = scratch_.get(kProduct, kGemmRows * width);
    T* out = b_.replayed_gate_up.data() + b_.ring.slot(tile) * kTileRows * width;
    for (int64_t first = 0; first < b_.valid(tile, expert); first += kGemmRows) {
      const float* x = scratch_.widened(kInput, b_.x_row(tile) + first * hidden, kGemmRows * hidden);
      gemm(product, width, row_major(x, kGemmRows, hidden, hidden),
           row_major(weight, width, hidden, hidden).transposed(), false);
      Rows<T>::narrow(out + first * width, product, kGemmRows * width);
    }
  }

  // dh' = dOut @ W_down in fp32; then the router gradient <dh', h> and dSwiGLU of dh = weight * dh'.
  void dgrad_down(int64_t tile) {
    const int64_t hidden = b_.shape.hidden, width = b_.shape.intermediate, expert = expert_of(tile);
    const int64_t slot = b_.ring.slot(tile) * kTileRows, rows = b_.valid(tile, expert);
    const float* weight =
        scratch_.widened(kDownWeight, b_.call.weights.down + expert * hidden * width, hidden * width, true);
    float* product = scratch_.get(kProduct, kGemmRows * width);
    const int64_t* sources = b_.call.schedule.table + tile * kTileRows;
    for (int64_t first = 0; first < rows; first += kGemmRows) {
      const float* dy = scratch_.widened(kInput, b_.dy.data() + (slot + first) * hidden, kGemmRows * hidden);
      gemm(product, width, row_major(dy, kGemmRows, hidden, hidden), row_major(weight, hidden, width, width), false);
      for (int64_t r = first; r < min_of(rows, first + kGemmRows); ++r) {
        const T* gate = b_.gate_up_row(tile) + r * 2 * width;
        T* d_gate = b_.d_gate_up.data() + (slot + r) * 2 * width;
        const float dot =
            Rows<T>::dswiglu(d_gate, d_gate + width, b_.weighted_h.data() + (slot + r) * width,
                             product + (r - first) * width, gate, gate + width, b_.row_weight[slot + r], width,
                             b_.call.clamp);
        b_.dweight_of(row_rank(sources[r]))[row_route(sources[r])] = dot;
      }
      // The rest of the block takes part in dgrad_up's product, and must be finite.
      for (int64_t r = max_of(first, rows); r < first + kGemmRows; ++r) {
        std::fill_n(b_.d_gate_up.data() + (slot + r) * 2 * width, 2 * width, round_to<T>(0.0f));
      }
    }
  }

  void dgrad_up(int64_t tile) {
    const int64_t hidden = b_.shape.hidden, width = 2 * b_.shape.intermediate, expert = expert_of(tile);
    const float* weight = gate_up_weight(expert);
    float* product = scratch_.get(kProduct, kGemmRows * hidden);
    for (int64_t first = 0; first < b_.valid(tile, expert); first += kGemmRows) {
      const T* d = b_.d_gate_up.data() + (b_.ring.slot(tile) * kTileRows + first) * width;
      gemm(product, hidden, row_major(scratch_.widened(kInput, d, kGemmRows * width), kGemmRows, width, width),
           row_major(weight, width, hidden, hidden), false);
      Rows<T>::narrow(b_.staged.data() + (tile % b_.slots.y * kTileRows + first) * hidden, product, kGemmRows * hidden);
    }
  }

  // sum over tiles of left^T right, 128 rows at a time in ascending order, so that its bits do not depend on where the
  // macrobatches end. `sum` holds what earlier macrobatches left unless `fresh`.
  template <class Left, class Right>
  void accumulate(float* sum, int64_t begin, int64_t end, int64_t expert, int64_t left_width, int64_t right_width,
                  bool fresh, const Left& left, const Right& right) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t rows = b_.valid(tile, expert);
      const float* a = scratch_.widened(kInput, left(tile), rows * left_width);
      const float* c = scratch_.widened(kSecondInput, right(tile), rows * right_width);
      gemm(sum, right_width, row_major(a, rows, left_width, left_width).transposed(),
           row_major(c, rows, right_width, right_width), !fresh);
      fresh = false;
    }
  }

  // part 0: gate and up, part 1: down.
  void wgrad(int64_t expert, int64_t part, int64_t macrobatch) {
    const int64_t hidden = b_.shape.hidden, width = b_.shape.intermediate;
    const WeightGradient<T>& to = part == 0 ? b_.call.d_gate_up : b_.call.d_down;
    const int64_t begin = order_.wgrad_begin(expert, macrobatch), end = order_.wgrad_end(expert, macrobatch);
    if (!to.wanted() || begin >= end) return;
    const int64_t count = (part == 0 ? 2 : 1) * width * hidden, first = expert * count;
    const bool fresh = order_.wgrad_rounds(expert, macrobatch) == 1, last = order_.wgrad_last(expert, macrobatch);
    float* carry = fresh && last ? nullptr : (part == 0 ? b_.carry_gate_up.data() : b_.carry_down.data());
    float* sum = to.out ? sum_of(to.out + first, count, carry) : sum_apart(count, carry);
    const auto dy = [&](int64_t tile) { return b_.dy.data() + b_.ring.slot(tile) * kTileRows * hidden; };
    if (part == 0) {
      accumulate(sum, begin, end, expert, 2 * width, hidden, fresh,
                 [&](int64_t tile) { return b_.d_gate_up.data() + b_.ring.slot(tile) * kTileRows * 2 * width; },
                 [&](int64_t tile) { return b_.x_row(tile); });
    } else {
      accumulate(sum, begin, end, expert, hidden, width, fresh, dy,
                 [&](int64_t tile) { return b_.weighted_h.data() + b_.ring.slot(tile) * kTileRows * width; });
    }
    if (!last) return;
    if (to.out) store(to.out + first, sum, count);
    if (to.sum) Rows<T>::add(to.sum + first, sum, count);
    if (to.sum_fp32) Rows<T>::add_to_fp32(to.sum_fp32 + first, sum, count);
  }

  // fp32 gradients are summed where they are stored; others in scratch, or in a carry when more macrobatches follow.
  float* sum_of(float* out, int64_t, float*) { return out; }
  float* sum_of(bfloat16*, int64_t count, float* carry) { return sum_apart(count, carry); }
  float* sum_apart(int64_t count, float* carry) { return carry ? carry : scratch_.get(kSum, count); }
  void store(float*, const float*, int64_t) {}
  void store(bfloat16* out, const float* sum, int64_t count) { Rows<bfloat16>::narrow(out, sum, count); }

  void shared_dgrad(int64_t tile) {
    const int64_t hidden = b_.shape.hidden, width = b_.shape.shared;
    const Weights<T>& w = b_.call.weights;
    const float* down = scratch_.widened(kSharedDownWeight, w.shared_down, hidden * width, true);
    float* product = scratch_.get(kProduct, kGemmRows * max_of(width, hidden));
    const int64_t end = min_of(b_.shape.tokens, (tile + 1) * kTileRows);
    for (int64_t first = tile * kTileRows; first < end; first += kGemmRows) {
      const int64_t rows = min_of(kGemmRows, end - first);
      gemm(product, width, padded(b_.call.dout + first * hidden, rows, hidden), row_major(down, hidden, width, width),
           false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = first + r;
        const T* gate = b_.call.shared_gate_up + token * 2 * width;
        T* d_gate = b_.shared_d_gate_up.data() + token * 2 * width;
        const float dot = Rows<T>::dswiglu(d_gate, d_gate + width, b_.shared_weighted_h.data() + token * width,
                                           product + r * width, gate, gate + width,
                                           b_.call.shared_scale ? b_.call.shared_scale[token] : 1.0f, width,
                                           b_.call.clamp);
        if (b_.call.d_shared_scale) b_.call.d_shared_scale[token] = dot;
      }
      if (!b_.call.dx) continue;
      const float* gate = scratch_.widened(kSharedGateWeight, w.shared_gate, width * hidden, true);
      const float* up = scratch_.widened(kSharedUpWeight, w.shared_up, width * hidden, true);
      Matrix d = padded(b_.shared_d_gate_up.data() + first * 2 * width, rows, 2 * width);
      d.cols = width;
      gemm(product, hidden, d, row_major(gate, width, hidden, hidden), false);
      d.data += width;
      gemm(product, hidden, d, row_major(up, width, hidden, hidden), true);
      Rows<T>::narrow(b_.call.dx + first * hidden, product, rows * hidden);
    }
  }
  Matrix padded(const T* data, int64_t rows, int64_t width) {
    float* out = scratch_.get(kInput, kGemmRows * width);
    Rows<T>::widen(out, data, rows * width);
    std::fill(out + rows * width, out + kGemmRows * width, 0.0f);
    return row_major(out, kGemmRows, width, width);
  }

  // part 0: gate, 1: up, 2: down.
  void shared_wgrad(int64_t part) {
    const int64_t hidden = b_.shape.hidden, width = b_.shape.shared, tokens = b_.shape.tokens;
    T* const outs[] = {b_.call.d_shared_gate, b_.call.d_shared_up, b_.call.d_shared_down};
    T* out = outs[part];
    if (!out) return;
    float* sum = sum_of(out, width * hidden, nullptr);
    for (int64_t first = 0; first < tokens; first += kTileRows) {
      const int64_t rows = min_of(kTileRows, tokens - first);
      if (part < 2) {
        const float* d = scratch_.widened(kInput, b_.shared_d_gate_up.data() + first * 2 * width, rows * 2 * width);
        const float* x = scratch_.widened(kSecondInput, b_.call.x + first * hidden, rows * hidden);
        gemm(sum, hidden, row_major(d + part * width, rows, width, 2 * width).transposed(),
             row_major(x, rows, hidden, hidden), first > 0);
      } else {
        const float* dy = scratch_.widened(kInput, b_.call.dout + first * hidden, rows * hidden);
        const float* h = scratch_.widened(kSecondInput, b_.shared_weighted_h.data() + first * width, rows * width);
        gemm(sum, width, row_major(dy, rows, hidden, hidden).transposed(), row_major(h, rows, width, width), first > 0);
      }
    }
    store(out, sum, width * hidden);
  }

  enum {
    kInput, kSecondInput, kProduct, kSum,
    kGateUpWeight, kDownWeight, kSharedGateWeight, kSharedUpWeight, kSharedDownWeight
  };
  Backward<T>& b_;
  const BackwardOrder<int64_t>& order_;
  Scratch scratch_;
};

// Gradients of experts (or of a shared expert) that no row reaches are zero, never whatever memory held; where gradients
// are added, nothing is.
template <class T>
void zero_unused(const Backward<T>& b) {
  const int64_t count = b.shape.intermediate * b.shape.hidden;
  for (int64_t e = 0; e < b.shape.experts; ++e) {
    if (b.call.schedule.rows[e]) continue;
    if (T* d = b.call.d_gate_up.out) std::fill_n(d + e * 2 * count, 2 * count, round_to<T>(0.0f));
    if (T* d = b.call.d_down.out) std::fill_n(d + e * count, count, round_to<T>(0.0f));
  }
  if (!b.shared || b.shape.tokens) return;
  for (T* d : {b.call.d_shared_gate, b.call.d_shared_up, b.call.d_shared_down}) {
    if (d) std::fill_n(d, b.shape.shared * b.shape.hidden, round_to<T>(0.0f));
  }
}

// dX = the sum over slots of ROUTED (unweighted: the weight is in it) + the shared expert's part; DWEIGHT of a masked
// route is zero.
template <class T>
void finish_token(const Backward<T>& b, int64_t token, std::vector<float>& sum) {
  const BackwardCall<T>& call = b.call;
  const int64_t hidden = b.shape.hidden;
  for (int64_t k = 0; k < b.shape.top_k; ++k) {
    const int64_t route = token * b.shape.top_k + k;
    const bool masked = call.ids[route] < 0;
    if (call.d_route_weights) {
      call.d_route_weights[route] = masked ? 0.0f : b.dweight_of(b.group.rank)[route];
    }
    if (call.dx && !masked) {
      Rows<T>::add_scaled(sum.data(), b.routed_of(b.group.rank) + route * hidden, 1.0f, hidden);
    }
  }
  if (!call.dx) return;
  T* dx = call.dx + token * hidden;
  if (b.shared) Rows<T>::add_scaled(sum.data(), dx, 1.0f, hidden);
  Rows<T>::narrow(dx, sum.data(), hidden);
}

}  // namespace

template <class T>
void backward(const Group& group, const BackwardCall<T>& call) {
  const Shape& shape = call.shape;
  const Layout layout = make_layout(group.max_tokens, shape.top_k, shape.hidden, sizeof(T));
  const int64_t hidden = shape.hidden, top_k = shape.top_k, threads = call.settings.compute_threads;
  if (group.ranks > 1) {
    char* data = group.data[group.rank];
    parallel_for(threads, shape.tokens, [&](int64_t token) {
      const int64_t row = token * hidden;
      std::memcpy(data + layout.dy + row * sizeof(T), call.dout + row, hidden * sizeof(T));
      // X is shared by all layers, and a rank with a smaller ring than this one may replay.
      std::memcpy(data + layout.x + row * sizeof(T), call.x + row, hidden * sizeof(T));
      std::memcpy(data + layout.weight + token * top_k * sizeof(float), call.route_weights + token * top_k,
                  top_k * sizeof(float));
    });
  }
  const uint32_t bank = group.next_epoch() & 1;
  group.own().wants_dx[bank].store(call.wants_dx, std::memory_order_relaxed);
  group.barrier(Phase::kBackwardBegin);
  bool dgrad = false;
  for (int64_t r = 0; r < group.ranks; ++r) {
    dgrad = dgrad || group.control[r]->wants_dx[bank].load(std::memory_order_relaxed);
  }
  Backward<T> b{group, call, dgrad};
  zero_unused(b);
  Parts parts;
  parts.wgrad = 2;
  parts.shared_wgrad = 3;
  const BackwardOrder<int64_t> order{b.ring,
                                     call.settings.ring,
                                     kLag,
                                     b.shared ? ceil_div(b.shape.tokens, kTileRows) : 0,
                                     parts,
                                     dgrad,
                                     call.d_gate_up.wanted() || call.d_down.wanted(),
                                     call.d_shared_gate || call.d_shared_up || call.d_shared_down,
                                     call.schedule.prefix,
                                     b.shape.experts};
  Team<BackwardOrder<int64_t>>(group, Phase::kBackwardTasks, order, b.slots, b.shape.experts)
      .run(call.settings.comm_threads, threads, [&] { return Worker<T>(b, order); });
  group.barrier(Phase::kBackwardEnd);
  sum_tokens(threads, shape.tokens, hidden, [&](int64_t token, std::vector<float>& sum) {
    finish_token(b, token, sum);
  });
}

template void backward(const Group&, const BackwardCall<float>&);
template void backward(const Group&, const BackwardCall<bfloat16>&);

}  // namespace mok::cpu
