// The CPU kernel of one layer, on raw pointers and free of torch: ops.cpp binds it.
//
// The same algorithm as on the GPUs. Ranks are processes (or threads, in a virtual group) that map each other's
// symmetric buffers: dispatch and reverse-combine pull rows from the owner's memory, combine and reverse-dispatch push
// rows into it. Inside a rank, communication and compute threads take tasks in the orders of common/tasks.h and meet at
// counters. T is the type of activations and weights; products and sums are fp32.
#pragma once

#include <memory>
#include <vector>

#include "../common/tasks.h"
#include "gemm.h"
#include "numerics.h"
#include "sync.h"

namespace mok::cpu {

// Sizes of one call. N tokens on this rank, K routes a token, D hidden, I expert and S shared intermediate width,
// L local experts.
struct Shape {
  int64_t tokens, top_k, hidden, intermediate, shared, experts;
};

// The schedule of one call (Algorithm 1): see common/schedule.h.
struct Schedule {
  const int64_t* table;           // packed source of each row, or kPaddingRow
  const int64_t* prefix;          // [L + 1] first row tile of each local expert
  const int64_t* rows;            // [L] rows of each local expert
  int64_t tiles() const { return prefix_end; }
  int64_t prefix_end;             // prefix[L]
};

// How a call is run; none of it changes a bit of the result.
struct Settings {
  int64_t ring;          // row tiles
  int64_t minibatch;     // row tiles
  int64_t comm_threads;
  int64_t compute_threads;
};

template <class T>
struct Weights {
  const T* gate_up;      // [L, 2I, D], gate rows first
  const T* down;         // [L, D, I]
  const T* shared_gate;  // [S, D]
  const T* shared_up;    // [S, D]
  const T* shared_down;  // [D, S]
};

template <class T>
struct ForwardCall {
  Shape shape;
  Schedule schedule;
  Settings settings;
  Weights<T> weights;
  Clamp clamp;
  const T* x;                 // [N, D]
  const int32_t* ids;         // [N, K], -1 for a masked route
  const float* route_weights; // [N, K]
  const float* shared_scale;  // [N] or null
  T* out;                     // [N, D]
  T* ring_x;                  // [ring, D]
  T* ring_gate_up;            // [ring, 2I], or null: nothing is kept for a backward
  T* shared_gate_up;          // [N, 2S], or null
};

// Where the gradient of an expert weight goes; all null: not wanted.
template <class T>
struct WeightGradient {
  T* out;            // stored here,
  T* sum;            // or, rounded to T, added to what is here,
  float* sum_fp32;   // or to what is here
  bool wanted() const { return out || sum || sum_fp32; }
};

template <class T>
struct BackwardCall {
  Shape shape;
  Schedule schedule;
  Settings settings;
  Weights<T> weights;
  Clamp clamp;
  const T* dout;              // [N, D]
  const T* x;
  const int32_t* ids;
  const float* route_weights;
  const float* shared_scale;
  const T* ring_x;            // as the forward left them; never written here
  const T* ring_gate_up;
  const T* shared_gate_up;
  bool wants_dx;              // dx itself may be null, when this rank has no tokens
  // Null where no gradient is wanted.
  T* dx;                      // [N, D]
  float* d_route_weights;     // [N, K]
  WeightGradient<T> d_gate_up;
  WeightGradient<T> d_down;
  T* d_shared_gate;
  T* d_shared_up;
  T* d_shared_down;
  float* d_shared_scale;      // [N]
};

// Builds the schedule from every rank's ids. table has room for capacity rows; plan is prefix and rows, one after the
// other: [2L + 1].
void build_schedule(const Group& group, const int32_t* ids, int64_t tokens, int64_t top_k, int64_t hidden,
                    int64_t element, int64_t experts, int64_t* table, int64_t capacity, int64_t* plan);

template <class T>
void forward(const Group& group, const ForwardCall<T>& call);

template <class T>
void backward(const Group& group, const BackwardCall<T>& call);

// Row tiles by which the second operation on a tile trails the first, and how many tiles the buffers between them hold.
constexpr int64_t kLag = 2;
constexpr int64_t kStagingTiles = 8;
// Row tiles of the backward's window, at least; more where many threads share the weight gradients of one.
constexpr int64_t kWindowTiles = 16;

// Memory of one call, not cleared: every value is written before it is read.
template <class V>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(new V[count > 0 ? count : 1]) {}
  V* data() const { return data_.get(); }
  V& operator[](int64_t i) const { return data_[i]; }

 private:
  std::unique_ptr<V[]> data_;
};

// Memory of one thread: operands widened to fp32, and products.
class Scratch {
 public:
  float* get(int slot, int64_t count) {
    if (static_cast<int>(buffers_.size()) <= slot) buffers_.resize(slot + 1);
    if (static_cast<int64_t>(buffers_[slot].size()) < count) buffers_[slot].resize(count);
    return buffers_[slot].data();
  }
  // `count` values as fp32: themselves when they are, else a copy. A slot remembers what it holds, so that an expert's
  // weights are widened once for consecutive tiles.
  const float* widened(int slot, const float* data, int64_t count, bool constant = false) {
    (void)slot, (void)count, (void)constant;
    return data;
  }
  const float* widened(int slot, const bfloat16* data, int64_t count, bool constant = false) {
    if (static_cast<int>(held_.size()) <= slot) held_.resize(slot + 1);
    float* out = get(slot, count);
    if (!constant || held_[slot] != data) Rows<bfloat16>::widen(out, data, count);
    held_[slot] = constant ? data : nullptr;
    return out;
  }

 private:
  std::vector<std::vector<float>> buffers_;
  std::vector<const void*> held_;
};

}  // namespace mok::cpu
