// Tensors and numbers -> the C interface's arguments. What would corrupt memory is refused here, before any launch; shapes that a person can get
// wrong are refused earlier, in Python, with the way forward.
#pragma once

#include <initializer_list>
#include <limits>
#include <optional>

#include "ops_call.h"

namespace mok::cuda {

using torch::headeronly::ScalarType;
using Optional = std::optional<Tensor>;

constexpr int64_t kRows = 128;           // of a row tile
constexpr int64_t kWidthStep = 64;       // of D, I and S
constexpr int64_t kMostExperts = 3071;   // L: the schedule's shared memory holds four counts of each in 48 KB
constexpr int64_t kMostWidth = 1 << 20;  // column tiles have 13 bits in a task

// What a tensor argument must be. The copy engine takes 16-byte aligned addresses.
inline void expect(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes, ScalarType type, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), name, " is not on the device of x");
  STD_TORCH_CHECK(t.scalar_type() == type, name, " has another dtype than the CUDA kernel takes");
  STD_TORCH_CHECK(t.is_contiguous(), name, " is not contiguous");
  STD_TORCH_CHECK(t.dim() == static_cast<int64_t>(sizes.size()), name, " has ", t.dim(), " dimensions, not ", sizes.size());
  int64_t i = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(t.size(i) == size, name, " has size ", t.size(i), " in dimension ", i, ", not ", size);
    ++i;
  }
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, name, " is not 16-byte aligned: pass a copy of it");
}

// SMs that pull before they compute. Whether they leave some that compute is known once the kernel is: the launch refuses then.
inline void check_comm(int64_t comm) {
  STD_TORCH_CHECK(comm >= 0 && comm % 2 == 0 && comm <= std::numeric_limits<int32_t>::max(), comm, " SMs for communication: they come in pairs");
}

inline Tensor empty_of(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, type);
}
inline Tensor rows_of(const Tensor& like, std::initializer_list<int64_t> sizes) { return empty_of(like, sizes, ScalarType::BFloat16); }
template <class T = void>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}
template <class T = void>
T* data_of(const Optional& t) {
  return t ? data_of<T>(*t) : nullptr;
}

// The tensors that forward and backward have in common.
struct Layer {
  const Tensor &x, &ids, &route_weights, &gate_up, &down;
  const Optional &shared_gate, &shared_up, &shared_down, &shared_scale;

  int64_t tokens() const { return x.size(0); }
  int64_t hidden() const { return x.size(1); }
  int64_t top_k() const { return ids.size(1); }
  int64_t experts() const { return gate_up.size(0); }
  int64_t inter() const { return gate_up.size(1) / 2; }
  int64_t shared() const { return shared_gate ? shared_gate->size(0) : 0; }
  bool long_ids() const { return ids.scalar_type() == ScalarType::Long; }

  void check_tensors(const Workspace& w, int64_t max_tokens, int64_t ring_rows) const {
    STD_TORCH_CHECK(x.dim() == 2 && ids.dim() == 2 && gate_up.dim() == 3, "x and ids have two dimensions, gate_up_proj three");
    const int64_t n = tokens(), d = hidden(), k = top_k(), l = experts(), i = inter(), s = shared();
    for (const int64_t width : {d, i, shared_gate ? s : kWidthStep})
      STD_TORCH_CHECK(width >= kWidthStep && width % kWidthStep == 0 && width <= kMostWidth, "a width is ", width, "; D, I and S are multiples of ",
                      kWidthStep, " up to ", kMostWidth);
    STD_TORCH_CHECK(k >= 1 && k <= MOK_MAX_TOPK, "K is ", k, "; a token has 1 to ", MOK_MAX_TOPK, " routes");
    STD_TORCH_CHECK(l >= 1 && l <= kMostExperts, "this rank has ", l, " experts; the schedule holds 1 to ", kMostExperts, ": use more ranks");
    STD_TORCH_CHECK(n <= max_tokens && max_tokens <= max_of<int64_t>(w.max_tokens, 1), "x has ", n, " tokens, the call is for ", max_tokens,
                    " and the workspace for ", w.max_tokens);
    STD_TORCH_CHECK(w.ranks * max_tokens * k < std::numeric_limits<int32_t>::max(), "all ranks together have ", w.ranks * max_tokens * k,
                    " routes; the limit is 2^31 - 1: use smaller batches");
    STD_TORCH_CHECK(ring_rows >= 2 * kRows && ring_rows % kRows == 0 && ring_rows < std::numeric_limits<int32_t>::max(), "the ring has ", ring_rows,
                    " rows; it takes a multiple of ", kRows, ", at least ", 2 * kRows);
    const ScalarType bf16 = ScalarType::BFloat16;
    expect(x, "x", {n, d}, bf16, x);
    expect(ids, "ids", {n, k}, long_ids() ? ScalarType::Long : ScalarType::Int, x);
    expect(route_weights, "route_weights", {n, k}, ScalarType::Float, x);
    expect(gate_up, "gate_up_proj", {l, 2 * i, d}, bf16, x);
    expect(down, "down_proj", {l, d, i}, bf16, x);
    if (shared_gate) {
      STD_TORCH_CHECK(shared_up && shared_down, "a shared expert has gate, up and down");
      expect(*shared_gate, "shared gate", {s, d}, bf16, x);
      expect(*shared_up, "shared up", {s, d}, bf16, x);
      expect(*shared_down, "shared down", {d, s}, bf16, x);
    }
    if (shared_scale) expect(*shared_scale, "shared_scale", {n}, ScalarType::Float, x);
  }
};

// Arguments of the forward but for its ring, schedule and scratch. `x` is where this rank's rows are read from.
inline MokForwardArgs forward_args(const Workspace& w, const Layer& layer, const DataLayout& at, int64_t max_tokens, int64_t ring_rows,
                                   int64_t minibatch_rows, std::optional<double> limit, bool save) {
  MokForwardArgs a{};
  a.rank = static_cast<int>(w.rank), a.ranks = static_cast<int>(w.ranks);
  a.tokens = static_cast<int>(layer.tokens()), a.max_tokens = static_cast<int>(max_tokens);
  a.topk = static_cast<int>(layer.top_k()), a.hidden = static_cast<int>(layer.hidden());
  a.inter = static_cast<int>(layer.inter()), a.shared_inter = static_cast<int>(layer.shared());
  a.local_experts = static_cast<int>(layer.experts()), a.first_expert = static_cast<int>(w.rank * layer.experts());
  a.ring_tiles = static_cast<int>(ring_rows / kRows), a.minibatch_tiles = static_cast<int>(minibatch_rows / kRows);
  a.ladder = kMokWhole, a.store_gate_up = save;
  a.swiglu_limit = limit ? static_cast<float>(*limit) : 0.0f;
  a.sm_limit = static_cast<int>(w.sm_limit);
  a.timeout_ns = static_cast<uint64_t>(w.timeout_ns);
  for (int64_t r = 0; r < w.ranks; ++r) {
    a.peer_x[r] = w.data[r] + at.x;
    a.peer_ids[r] = reinterpret_cast<const int32_t*>(w.data[r] + at.ids);
    a.peer_tokens[r] = reinterpret_cast<const int32_t*>(w.data[r] + at.tokens);
    a.peer_routed[r] = w.data[r] + at.routed;
  }
  if (w.ranks == 1) a.peer_x[0] = data_of(layer.x);
  a.gate_up_proj = data_of(layer.gate_up), a.down_proj = data_of(layer.down);
  a.shared_gate = data_of(layer.shared_gate), a.shared_up = data_of(layer.shared_up), a.shared_down = data_of(layer.shared_down);
  a.abort_word = w.own_abort_word(), a.record = &w.failure->record;
  return a;
}

}  // namespace mok::cuda
