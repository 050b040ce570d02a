#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "team.h"

namespace mok::cpu {

namespace {

// Everything the threads of one forward share. h and y are staged in rings of a few tiles of their own.
template <class T>
struct Forward {
  const Group& group;
  const ForwardCall<T>& call;
  const Shape& shape = call.shape;
  const Layout layout = make_layout(group.max_tokens, shape.top_k, shape.hidden, sizeof(T));
  const Slots slots{{{call.schedule.tiles(), call.settings.ring}, call.settings.minibatch},
                    min_of(kStagingTiles, call.settings.ring), min_of(kStagingTiles, call.settings.ring)};
  const Ring& ring = slots.minibatches.ring;
  Buffer<T> h = Buffer<T>(slots.h * kTileRows * shape.intermediate);
  Buffer<T> y = Buffer<T>(slots.y * kTileRows * shape.hidden);

  // With one rank x is read where it is; otherwise where its owner published it.
  const T* x_of(int64_t rank) const {
    return group.ranks == 1 ? call.x : reinterpret_cast<const T*>(group.data[rank] + layout.x);
  }
  T* routed_of(int64_t rank) const { return reinterpret_cast<T*>(group.data[rank] + layout.routed); }
};

template <class T>
class Worker {
 public:
  explicit Worker(Forward<T>& forward) : f_(forward) {}

  void perform(const Task& task) {
    switch (task.op) {
      case Op::kDispatch: return dispatch(task.index);
      case Op::kCombine: return combine(task.index);
      case Op::kShared: return shared(task.index);
      case Op::kGateUp: return gate_up(task.index);
      case Op::kDown: return down(task.index);
      default: return;
    }
  }

 private:
  void dispatch(int64_t tile) {
    const int64_t hidden = f_.shape.hidden;
    T* out = f_.call.ring_x + f_.ring.slot(tile) * kTileRows * hidden;
    const int64_t* rows = f_.call.schedule.table + tile * kTileRows;
    for (int64_t r = 0; r < kTileRows; ++r, out += hidden) {
      if (rows[r] == kPaddingRow) {
        std::memset(static_cast<void*>(out), 0, hidden * sizeof(T));
      } else {
        const int64_t token = row_route(rows[r]) / f_.shape.top_k;
        std::memcpy(static_cast<void*>(out), f_.x_of(row_rank(rows[r])) + token * hidden, hidden * sizeof(T));
      }
    }
  }

  void combine(int64_t tile) {
    const int64_t hidden = f_.shape.hidden;
    const T* y = f_.y.data() + tile % f_.slots.y * kTileRows * hidden;
    const int64_t* rows = f_.call.schedule.table + tile * kTileRows;
    for (int64_t r = 0; r < kTileRows && rows[r] != kPaddingRow; ++r, y += hidden) {
      std::memcpy(static_cast<void*>(f_.routed_of(row_rank(rows[r])) + row_route(rows[r]) * hidden), y,
                  hidden * sizeof(T));
    }
  }

  // Rows of a tile that carry a route, and its expert.
  int64_t valid(int64_t tile, int64_t* expert) const {
    const Schedule& s = f_.call.schedule;
    *expert = expert_of_tile(s.prefix, f_.shape.experts, tile);
    return rows_in_tile(tile, s.prefix[*expert], s.rows[*expert]);
  }

  void gate_up(int64_t tile) {
    const int64_t hidden = f_.shape.hidden, width = f_.shape.intermediate;
    int64_t expert;
    const int64_t rows = valid(tile, &expert);
    const float* weight =
        scratch_.widened(kGateUpWeight, f_.call.weights.gate_up + expert * 2 * width * hidden, 2 * width * hidden, true);
    float* product = scratch_.get(kProduct, kGemmRows * 2 * width);
    for (int64_t first = 0; first < rows; first += kGemmRows) {
      const int64_t slot = f_.ring.slot(tile) * kTileRows + first;
      const float* x = scratch_.widened(kInput, f_.call.ring_x + slot * hidden, kGemmRows * hidden);
      gemm(product, 2 * width, row_major(x, kGemmRows, hidden, hidden),
           row_major(weight, 2 * width, hidden, hidden).transposed(), false);
      T* kept = f_.call.ring_gate_up ? f_.call.ring_gate_up + slot * 2 * width : discarded(2 * width);
      T* h = f_.h.data() + (tile % f_.slots.h * kTileRows + first) * width;
      for (int64_t r = 0; r < kGemmRows; ++r) {
        Rows<T>::swiglu(kept, kept + width, h + r * width, product + r * 2 * width, product + r * 2 * width + width,
                        width, f_.call.clamp);
        if (f_.call.ring_gate_up) kept += 2 * width;
      }
    }
  }

  void down(int64_t tile) {
    const int64_t hidden = f_.shape.hidden, width = f_.shape.intermediate;
    int64_t expert;
    const int64_t rows = valid(tile, &expert);
    const float* weight =
        scratch_.widened(kDownWeight, f_.call.weights.down + expert * hidden * width, hidden * width, true);
    float* product = scratch_.get(kProduct, kGemmRows * hidden);
    for (int64_t first = 0; first < rows; first += kGemmRows) {
      const T* h = f_.h.data() + (tile % f_.slots.h * kTileRows + first) * width;
      gemm(product, hidden, row_major(scratch_.widened(kInput, h, kGemmRows * width), kGemmRows, width, width),
           row_major(weight, hidden, width, width).transposed(), false);
      Rows<T>::narrow(f_.y.data() + (tile % f_.slots.y * kTileRows + first) * hidden, product, kGemmRows * hidden);
    }
  }

  // The shared expert on one tile of this rank's own tokens; its output waits in `out` for the epilogue.
  void shared(int64_t tile) {
    const int64_t hidden = f_.shape.hidden, width = f_.shape.shared;
    const Weights<T>& w = f_.call.weights;
    const float* gate = scratch_.widened(kSharedGateWeight, w.shared_gate, width * hidden, true);
    const float* up = scratch_.widened(kSharedUpWeight, w.shared_up, width * hidden, true);
    const float* down = scratch_.widened(kSharedDownWeight, w.shared_down, hidden * width, true);
    float* product = scratch_.get(kProduct, kGemmRows * max_of(2 * width, hidden));
    std::vector<T>& h = h_;
    h.resize(kGemmRows * width);
    const int64_t end = min_of(f_.shape.tokens, (tile + 1) * kTileRows);
    for (int64_t first = tile * kTileRows; first < end; first += kGemmRows) {
      const int64_t rows = min_of(kGemmRows, end - first);
      float* x = scratch_.get(kPadded, kGemmRows * hidden);
      Rows<T>::widen(x, f_.call.x + first * hidden, rows * hidden);
      std::fill(x + rows * hidden, x + kGemmRows * hidden, 0.0f);
      const Matrix input = row_major(x, kGemmRows, hidden, hidden);
      gemm(product, 2 * width, input, row_major(gate, width, hidden, hidden).transposed(), false);
      gemm(product + width, 2 * width, input, row_major(up, width, hidden, hidden).transposed(), false);
      for (int64_t r = 0; r < kGemmRows; ++r) {
        T* kept = f_.call.shared_gate_up && r < rows ? f_.call.shared_gate_up + (first + r) * 2 * width
                                                     : discarded(2 * width);
        Rows<T>::swiglu(kept, kept + width, h.data() + r * width, product + r * 2 * width,
                        product + r * 2 * width + width, width, f_.call.clamp);
      }
      gemm(product, hidden, row_major(scratch_.widened(kInput, h.data(), kGemmRows * width), kGemmRows, width, width),
           row_major(down, hidden, width, width).transposed(), false);
      Rows<T>::narrow(f_.call.out + first * hidden, product, rows * hidden);
    }
  }

  T* discarded(int64_t count) {
    discarded_.resize(max_of<int64_t>(count, discarded_.size()));
    return discarded_.data();
  }

  enum { kInput, kPadded, kProduct, kGateUpWeight, kDownWeight, kSharedGateWeight, kSharedUpWeight, kSharedDownWeight };
  Forward<T>& f_;
  Scratch scratch_;
  std::vector<T> h_, discarded_;
};

// out = shared * scale + sum over slots of weight * ROUTED, in fp32 and in slot order.
template <class T>
void combine_token(const Forward<T>& f, int64_t token, std::vector<float>& sum) {
  const ForwardCall<T>& call = f.call;
  const int64_t hidden = f.shape.hidden, top_k = f.shape.top_k;
  const T* routed = f.routed_of(f.group.rank);
  for (int64_t k = 0; k < top_k; ++k) {
    const int64_t route = token * top_k + k;
    if (call.ids[route] >= 0) Rows<T>::add_scaled(sum.data(), routed + route * hidden, call.route_weights[route], hidden);
  }
  T* out = call.out + token * hidden;
  if (f.shape.shared) {
    Rows<T>::add_scaled(sum.data(), out, call.shared_scale ? call.shared_scale[token] : 1.0f, hidden);
  }
  Rows<T>::narrow(out, sum.data(), hidden);
}

}  // namespace

template <class T>
void forward(const Group& group, const ForwardCall<T>& call) {
  Forward<T> f{group, call};
  const int64_t hidden = f.shape.hidden, threads = call.settings.compute_threads;
  if (group.ranks > 1) {
    T* published = reinterpret_cast<T*>(group.data[group.rank] + f.layout.x);
    parallel_for(threads, f.shape.tokens, [&](int64_t token) {
      std::memcpy(static_cast<void*>(published + token * hidden), call.x + token * hidden, hidden * sizeof(T));
    });
  }
  group.barrier(Phase::kForwardBegin);
  ForwardOrder order{f.ring, 0, f.shape.shared ? ceil_div(f.shape.tokens, kTileRows) : 0, {}};
  order.lag = min_of(kLag, longest_lag(f.slots));
  Team<ForwardOrder>(group, Phase::kForwardTasks, order, f.slots, f.shape.experts)
      .run(call.settings.comm_threads, threads, [&] { return Worker<T>(f); });
  group.barrier(Phase::kForwardEnd);
  sum_tokens(threads, f.shape.tokens, hidden, [&](int64_t token, std::vector<float>& sum) {
    combine_token(f, token, sum);
  });
}

template void forward(const Group&, const ForwardCall<float>&);
template void forward(const Group&, const ForwardCall<bfloat16>&);

}  // namespace mok::cpu
