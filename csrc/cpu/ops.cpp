// The kernel as torch operators, in the stable ABI. Shapes and arguments are checked in Python (functional.py), where the
// error can say what to do; here only what would corrupt memory is.
#include <Python.h>

#include <limits>
#include <sstream>
#include <string>
#include <tuple>

#include "kernel.h"
#include "stable.h"

// kernel-builder names the extension with a macro of its own.
#if !defined(MOK_NAMESPACE)
#define MOK_NAMESPACE TORCH_EXTENSION_NAME
#endif
#define MOK_QUOTED(name) #name
#define MOK_TEXT(name) MOK_QUOTED(name)

namespace mok::cpu {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

std::string phase_name(Phase phase) {
  if (phase >= Phase::kOther) return "#" + std::to_string(static_cast<int32_t>(phase) - static_cast<int32_t>(Phase::kOther));
  switch (phase) {
    case Phase::kTokens: return "exchange of token counts";
    case Phase::kSchedule: return "schedule, exchange of expert ids";
    case Phase::kForwardBegin: return "forward, before dispatch";
    case Phase::kForwardEnd: return "forward, after combine";
    case Phase::kBackwardBegin: return "backward, before reverse-combine";
    case Phase::kBackwardEnd: return "backward, after reverse-dispatch";
    case Phase::kForwardTasks: return "forward, tasks of this rank";
    case Phase::kBackwardTasks: return "backward, tasks of this rank";
    case Phase::kRefused: return "refused its input";
    case Phase::kOutOfStep: return "out of step";
    case Phase::kOther: break;
  }
  return "unknown";
}

// Python turns this text into MoKTimeoutError: functional.py parses the numbers.
template <class Call>
auto bounded(const Call& call) {
  try {
    return call();
  } catch (const Expired& e) {
    std::ostringstream text;
    text << "MoKTimeout origin=" << e.origin << " waited=" << e.waited << " phase=" << phase_name(e.phase);
    throw std::runtime_error(text.str());
  }
}

// workspace: int64 [4 + 2R]: rank, ranks, Nmax, timeout in ns, then the address of every rank's control page and of its
// symmetric buffers (workspace.py).
Group group_of(const Tensor& workspace) {
  const int64_t* word = static_cast<const int64_t*>(workspace.data_ptr());
  Group group;
  group.rank = word[0];
  group.ranks = word[1];
  group.max_tokens = word[2];
  group.timeout_ns = word[3];
  STD_TORCH_CHECK(group.ranks >= 1 && group.ranks <= kMaxRanks && workspace.numel() == 4 + 2 * group.ranks,
                  "not a workspace");
  STD_TORCH_CHECK(word[4] != 0, "this workspace was closed");
  for (int64_t r = 0; r < group.ranks; ++r) {
    group.control[r] = reinterpret_cast<Control*>(word[4 + r]);
    group.data[r] = reinterpret_cast<char*>(word[4 + group.ranks + r]);
  }
  return group;
}

template <class V>
V* data_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "every tensor of the kernel is contiguous");
  return static_cast<V*>(tensor.data_ptr());
}
template <class V>
V* data_of(const Optional& tensor) {
  return tensor ? data_of<V>(*tensor) : nullptr;
}

Tensor empty_like_type(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()});
}
Tensor empty_of(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, type);
}

Shape shape_of(const Tensor& x, const Tensor& ids, const Tensor& gate_up, const Optional& shared_gate) {
  return {x.size(0), ids.size(1), x.size(1), gate_up.size(1) / 2, shared_gate ? shared_gate->size(0) : 0,
          gate_up.size(0)};
}
Schedule schedule_of(const Tensor& table, const Tensor& plan, int64_t experts) {
  const int64_t* words = data_of<int64_t>(plan);
  return {data_of<int64_t>(table), words, words + experts + 1, words[experts]};
}
Settings settings_of(int64_t ring_rows, int64_t minibatch_rows, int64_t comm_threads) {
  const int64_t ring = ring_rows / kTileRows;
  return {ring, min_of(ring, minibatch_rows / kTileRows), comm_threads, torch::stable::get_num_threads()};
}
Clamp clamp_of(std::optional<double> limit) {
  return {limit ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity()};
}
template <class T>
Weights<T> weights_of(const Tensor& gate_up, const Tensor& down, const Optional& shared_gate, const Optional& shared_up,
                      const Optional& shared_down) {
  return {data_of<T>(gate_up), data_of<T>(down), data_of<T>(shared_gate), data_of<T>(shared_up),
          data_of<T>(shared_down)};
}

// Where a wanted gradient goes: into `buffer`, of T or fp32 and of the weight's shape, if there is one.
template <class T>
WeightGradient<T> weight_gradient(bool needed, const Tensor& grad, const Optional& buffer, const Tensor& weight) {
  if (!needed) return {};
  if (!buffer) return {data_of<T>(grad), nullptr, nullptr};
  const bool same = buffer->scalar_type() == weight.scalar_type();
  STD_TORCH_CHECK(buffer->numel() == weight.numel() && (same || buffer->scalar_type() == ScalarType::Float),
                  "a gradient's buffer has its weight's shape, and its dtype or fp32");
  if (same) return {nullptr, data_of<T>(*buffer), nullptr};
  return {nullptr, nullptr, data_of<float>(*buffer)};
}

template <class Run>
auto by_type(const Tensor& x, const Run& run) {
  if (x.scalar_type() == ScalarType::Float) return run(float{});
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "the CPU kernel serves float32 and bfloat16");
  return run(bfloat16{});
}

}  // namespace

// Tokens of the rank that has most.
int64_t agree_tokens(Tensor workspace, int64_t tokens) {
  return bounded([&] {
    const Group group = group_of(workspace);
    const uint32_t bank = group.next_epoch() & 1;
    group.own().tokens[bank].store(tokens, std::memory_order_relaxed);
    group.barrier(Phase::kTokens);
    int64_t most = 0;
    for (int64_t r = 0; r < group.ranks; ++r) {
      most = max_of(most, group.control[r]->tokens[bank].load(std::memory_order_relaxed));
    }
    return most;
  });
}

// Tells every rank of the group that this one leaves: whatever they wait for, they raise.
void abort_group(Tensor workspace) {
  const Group group = group_of(workspace);
  group.abort(group.rank, Phase::kRefused);
}

// Tells every rank that a wait of this one expired on another device: for which rank, and in which phase (numbers of
// errors.py).
void expire_group(Tensor workspace, int64_t waited, int64_t phase) {
  group_of(workspace).abort(waited, static_cast<Phase>(static_cast<int32_t>(Phase::kOther) + phase));
}

// Raises if the group is poisoned.
void check_group(Tensor workspace) {
  bounded([&] { group_of(workspace).check(); });
}

// Rows that the schedule table needs at most, for the tokens the workspace has room for.
int64_t table_rows(int64_t ranks, int64_t max_tokens, int64_t top_k, int64_t experts) {
  return most_tiles(ranks * max_tokens * top_k, experts) * kTileRows;
}

int64_t workspace_bytes(int64_t max_tokens, int64_t top_k, int64_t hidden, int64_t element) {
  return make_layout(max_tokens, top_k, hidden, element).bytes;
}

// ids int32 [N, K], -1 for a masked route -> table int64 [capacity], plan int64 [2L + 1].
std::tuple<Tensor, Tensor> schedule(Tensor workspace, Tensor ids, int64_t experts, int64_t hidden, int64_t element,
                                    int64_t capacity) {
  return bounded([&] {
    const Group group = group_of(workspace);
    const int64_t top_k = ids.size(1);
    STD_TORCH_CHECK(ids.size(0) <= group.max_tokens && ids.scalar_type() == ScalarType::Int, "ids do not fit");
    Tensor table = empty_of(ids, {capacity}, ScalarType::Long);
    Tensor plan = empty_of(ids, {2 * experts + 1}, ScalarType::Long);
    build_schedule(group, data_of<int32_t>(ids), ids.size(0), top_k, hidden, element, experts,
                   data_of<int64_t>(table), capacity, data_of<int64_t>(plan));
    return std::make_tuple(table, plan);
  });
}

// -> out [N, D], ring x [ring, D], ring gate/up [ring, 2I], shared gate/up [N, 2S], and an empty one in place of the
// schedule, which other devices build in here. The middle three are empty unless `save` (the last of them without a
// shared expert too).
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_op(
    Tensor workspace, Optional table, Optional plan, Tensor x, Tensor ids, Tensor route_weights, Tensor gate_up,
    Tensor down, Optional shared_gate, Optional shared_up, Optional shared_down, Optional shared_scale,
    std::optional<double> limit, int64_t ring_rows, int64_t minibatch_rows, int64_t comm_threads,
    int64_t /* of the backward */, int64_t /* max_tokens */, int64_t /* schedule_bytes */, bool save) {
  return bounded([&] {
    STD_TORCH_CHECK(table && plan, "on CPU the schedule comes from `schedule`");
    const Group group = group_of(workspace);
    const Shape shape = shape_of(x, ids, gate_up, shared_gate);
    STD_TORCH_CHECK(shape.tokens <= group.max_tokens, "x does not fit");
    Settings settings = settings_of(ring_rows, minibatch_rows, comm_threads);
    if (!save) {  // a few tiles in flight are enough when nothing is kept
      settings.ring = min_of(settings.ring, max_of<int64_t>(2 * kStagingTiles, settings.minibatch + kLag));
    }
    Tensor out = empty_like_type(x, {shape.tokens, shape.hidden});
    Tensor ring_x = empty_like_type(x, {settings.ring * kTileRows, shape.hidden});
    Tensor ring_gate_up = empty_like_type(x, {save ? settings.ring * kTileRows : 0, 2 * shape.intermediate});
    Tensor shared_gate_up = empty_like_type(x, {save && shape.shared ? shape.tokens : 0, 2 * shape.shared});
    by_type(x, [&](auto type) {
      using T = decltype(type);
      forward<T>(group, {shape, schedule_of(*table, *plan, shape.experts), settings,
                         weights_of<T>(gate_up, down, shared_gate, shared_up, shared_down), clamp_of(limit),
                         data_of<T>(x), data_of<int32_t>(ids), data_of<float>(route_weights),
                         data_of<float>(shared_scale), data_of<T>(out), data_of<T>(ring_x),
                         save ? data_of<T>(ring_gate_up) : nullptr,
                         save && shape.shared ? data_of<T>(shared_gate_up) : nullptr});
    });
    if (!save) ring_x = empty_like_type(x, {0, shape.hidden});
    return std::make_tuple(out, ring_x, ring_gate_up, shared_gate_up, empty_of(x, {0}, ScalarType::Byte));
  });
}

// needs: one bit each for dx, d_route_weights, d_gate_up, d_down, d_shared_gate, d_shared_up, d_shared_down,
// d_shared_scale, in this order, which is also the order of the results; what is not needed comes back empty, and so
// does what is added to gate_up_buffer or down_buffer instead. What may be written over is not: the window is small.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_op(
    Tensor workspace, Tensor table, Optional plan, Tensor dout, Tensor x, Tensor ids, Tensor route_weights,
    Tensor gate_up, Tensor down, Optional shared_gate, Optional shared_up, Optional shared_down, Optional shared_scale,
    Tensor ring_x, Tensor ring_gate_up, Tensor shared_gate_up, std::optional<double> limit, int64_t minibatch_rows,
    int64_t comm_threads, int64_t /* max_tokens */, int64_t needs, Optional gate_up_buffer, Optional down_buffer,
    Optional /* reused_x */, Optional /* reused_gate_up */, Optional /* reused_shared_gate_up */) {
  return bounded([&] {
    STD_TORCH_CHECK(plan.has_value(), "on CPU the schedule comes from `schedule`");
    const Group group = group_of(workspace);
    const Shape shape = shape_of(x, ids, gate_up, shared_gate);
    STD_TORCH_CHECK(shape.tokens <= group.max_tokens, "x does not fit");
    const auto needed = [&](int bit) { return (needs >> bit & 1) != 0; };
    const auto grad = [&](int bit, std::initializer_list<int64_t> sizes, bool buffered = false) {
      return needed(bit) && !buffered ? empty_like_type(x, sizes) : empty_like_type(x, {0});
    };
    Tensor dx = grad(0, {shape.tokens, shape.hidden});
    Tensor d_route_weights = needed(1) ? empty_of(x, {shape.tokens, shape.top_k}, ScalarType::Float) : grad(1, {});
    Tensor d_gate_up = grad(2, {shape.experts, 2 * shape.intermediate, shape.hidden}, gate_up_buffer.has_value());
    Tensor d_down = grad(3, {shape.experts, shape.hidden, shape.intermediate}, down_buffer.has_value());
    Tensor d_shared_gate = grad(4, {shape.shared, shape.hidden});
    Tensor d_shared_up = grad(5, {shape.shared, shape.hidden});
    Tensor d_shared_down = grad(6, {shape.hidden, shape.shared});
    Tensor d_shared_scale = needed(7) ? empty_of(x, {shape.tokens}, ScalarType::Float) : grad(7, {});
    by_type(x, [&](auto type) {
      using T = decltype(type);
      const auto wanted = [&](int bit, const Tensor& t) { return needed(bit) ? data_of<T>(t) : nullptr; };
      backward<T>(group, {shape, schedule_of(table, *plan, shape.experts),
                          settings_of(ring_x.size(0), minibatch_rows, comm_threads),
                          weights_of<T>(gate_up, down, shared_gate, shared_up, shared_down), clamp_of(limit),
                          data_of<T>(dout), data_of<T>(x), data_of<int32_t>(ids), data_of<float>(route_weights),
                          data_of<float>(shared_scale), data_of<T>(ring_x), data_of<T>(ring_gate_up),
                          data_of<T>(shared_gate_up), needed(0), wanted(0, dx),
                          needed(1) ? data_of<float>(d_route_weights) : nullptr,
                          weight_gradient<T>(needed(2), d_gate_up, gate_up_buffer, gate_up),
                          weight_gradient<T>(needed(3), d_down, down_buffer, down), wanted(4, d_shared_gate),
                          wanted(5, d_shared_up), wanted(6, d_shared_down),
                          needed(7) ? data_of<float>(d_shared_scale) : nullptr});
    });
    return std::make_tuple(dx, d_route_weights, d_gate_up, d_down, d_shared_gate, d_shared_up, d_shared_down,
                           d_shared_scale);
  });
}

}  // namespace mok::cpu

STABLE_TORCH_LIBRARY(MOK_NAMESPACE, m) {
  m.def("agree_tokens(Tensor workspace, int tokens) -> int");
  m.def("abort_group(Tensor workspace) -> ()");
  m.def("expire_group(Tensor workspace, int waited, int phase) -> ()");
  m.def("check_group(Tensor workspace) -> ()");
  m.def("table_rows(int ranks, int max_tokens, int top_k, int experts) -> int");
  m.def("workspace_bytes(int max_tokens, int top_k, int hidden, int element) -> int");
  m.def(
      "schedule(Tensor workspace, Tensor ids, int experts, int hidden, int element, int capacity)"
      " -> (Tensor, Tensor)");
  m.def(
      "forward(Tensor workspace, Tensor? table, Tensor? plan, Tensor x, Tensor ids, Tensor route_weights,"
      " Tensor gate_up, Tensor down, Tensor? shared_gate, Tensor? shared_up, Tensor? shared_down,"
      " Tensor? shared_scale, float? limit, int ring_rows, int minibatch_rows, int comm, int backward_comm,"
      " int max_tokens, int schedule_bytes, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor workspace, Tensor table, Tensor? plan, Tensor dout, Tensor x, Tensor ids, Tensor route_weights,"
      " Tensor gate_up, Tensor down, Tensor? shared_gate, Tensor? shared_up, Tensor? shared_down, Tensor? shared_scale,"
      " Tensor ring_x, Tensor ring_gate_up, Tensor shared_gate_up, float? limit, int minibatch_rows, int comm,"
      " int max_tokens, int needs, Tensor(a!)? gate_up_buffer=None, Tensor(b!)? down_buffer=None,"
      " Tensor(c!)? reused_x=None, Tensor(d!)? reused_gate_up=None, Tensor(e!)? reused_shared_gate_up=None)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(MOK_NAMESPACE, CPU, m) {
  m.impl("agree_tokens", TORCH_BOX(&mok::cpu::agree_tokens));
  m.impl("abort_group", TORCH_BOX(&mok::cpu::abort_group));
  m.impl("expire_group", TORCH_BOX(&mok::cpu::expire_group));
  m.impl("check_group", TORCH_BOX(&mok::cpu::check_group));
  m.impl("schedule", TORCH_BOX(&mok::cpu::schedule));
  m.impl("forward", TORCH_BOX(&mok::cpu::forward_op));
  m.impl("backward", TORCH_BOX(&mok::cpu::backward_op));
}

STABLE_TORCH_LIBRARY_IMPL(MOK_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("table_rows", TORCH_BOX(&mok::cpu::table_rows));
  m.impl("workspace_bytes", TORCH_BOX(&mok::cpu::workspace_bytes));
}

// Importing the module registers the operators.
#define MOK_CONCAT(a, b) a##b
#define MOK_INIT(name) MOK_CONCAT(PyInit_, name)
PyMODINIT_FUNC MOK_INIT(MOK_NAMESPACE)(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, MOK_TEXT(MOK_NAMESPACE), nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
