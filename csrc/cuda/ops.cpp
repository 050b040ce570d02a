// The CUDA kernels as torch operators, in the stable ABI: the schemas of ../cpu/ops.cpp for tensors on a CUDA device.
//
// Everything runs on the current stream of x's device; nothing here waits for the device, so a call can be captured into a CUDA graph. Results
// and temporaries come from torch's allocator; what other ranks read and write lies in the workspace's segments.
#include <tuple>

#include "ops_args.h"

#if !defined(MOK_NAMESPACE)
#define MOK_NAMESPACE TORCH_EXTENSION_NAME
#endif

namespace mok::cuda {

namespace {

// Rows that a forward without a backward works in, at most: more than dispatch runs ahead by.
constexpr int64_t kRowsInFlight = 32768;

}  // namespace

// Bytes of a rank's data segment for up to max_tokens tokens.
int64_t segment_bytes(int64_t ranks, int64_t max_tokens, int64_t top_k, int64_t hidden) {
  return DataLayout::make(ranks, max_tokens, top_k, hidden).bytes;
}

int64_t open_order() {
  STD_TORCH_CHECK(cudaEventCreateWithFlags != nullptr, "CUDA's runtime library (libcudart.so.13) is not loaded in this process: the kernel takes it from a"
                  " torch that brings it");
  return reinterpret_cast<int64_t>(new CallOrder);
}
void close_order(int64_t order) {
  delete reinterpret_cast<CallOrder*>(order);
}

// Raises if a wait on the device has expired. Asks host memory only.
void check_device(Tensor words) {
  Workspace(words).raise_failure();
}

// Makes every rank that waits on its device for this group stop waiting; does not wait for the device itself.
void abort_device(Tensor words, Tensor on_device) {
  const Workspace w(words);
  torch::stable::accelerator::DeviceGuard guard(on_device.get_device_index());
  cudaStream_t stream = nullptr;  // of its own: the current one may be the one that waits
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (int64_t r = 0; r < w.ranks; ++r) check(cudaMemsetAsync(w.abort_word(r), 1, 4, stream), "cudaMemsetAsync");
  cudaStreamDestroy(stream);  // once its work is done
}

// -> out [N, D], ring x [ring, D], ring gate/up [ring, 2I], shared gate/up [N, 2S], schedule; all but the first are empty unless `save`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_op(Tensor words, Optional, Optional, Tensor x, Tensor ids, Tensor route_weights,
                                                              Tensor gate_up, Tensor down, Optional shared_gate, Optional shared_up,
                                                              Optional shared_down, Optional shared_scale, std::optional<double> limit,
                                                              int64_t ring_rows, int64_t minibatch_rows, int64_t comm, int64_t backward_comm,
                                                              int64_t max_tokens, int64_t schedule_bytes, bool save) {
  check_comm(comm), check_comm(backward_comm);
  const Layer layer{x, ids, route_weights, gate_up, down, shared_gate, shared_up, shared_down, shared_scale};
  Call call(words, x);
  const Workspace& w = call.workspace;
  layer.check_tensors(w, max_tokens, ring_rows);
  if (!save) ring_rows = min_of(ring_rows, kRowsInFlight);
  const int64_t n = layer.tokens(), d = layer.hidden(), i = layer.inter(), s = layer.shared(), k = layer.top_k();
  const DataLayout at = DataLayout::make(w.ranks, w.max_tokens, k, d);
  MokForwardArgs a = forward_args(w, layer, at, max_tokens, ring_rows, minibatch_rows, limit, save);
  a.comm_sms = static_cast<int>(comm);
  STD_TORCH_CHECK(schedule_bytes >= mok_schedule_bytes(&a), "the schedule has ", schedule_bytes, " bytes and needs ", mok_schedule_bytes(&a));

  Tensor out = rows_of(x, {n, d});
  Tensor ring_x = rows_of(x, {ring_rows, d}), ring_gate_up = rows_of(x, {save ? ring_rows : 0, 2 * i});
  Tensor shared_gate_up = rows_of(x, {save && s ? n : 0, 2 * s});
  Tensor schedule = empty_of(x, {schedule_bytes}, ScalarType::Byte);
  // What nobody needs afterwards, in one allocation: the hidden rows, the shared expert's hidden rows and output, the counters.
  const int64_t shared_h = rounded(2 * ring_rows * i), shared_y = shared_h + rounded(2 * n * s), scratch = shared_y + (s ? rounded(2 * n * d) : 0);
  Tensor temporary = empty_of(x, {scratch + mok_scratch_bytes(&a)}, ScalarType::Byte);
  char* memory = data_of<char>(temporary);
  a.ring_x = data_of(ring_x), a.ring_gate_up = save ? data_of(ring_gate_up) : nullptr, a.ring_h = memory;
  a.shared_gate_up = save && s ? data_of(shared_gate_up) : nullptr, a.shared_h = memory + shared_h, a.shared_y = memory + shared_y;
  a.schedule = data_of(schedule), a.scratch = memory + scratch;

  char* own = w.data[w.rank];
  int32_t* routes = reinterpret_cast<int32_t*>(own + at.ids);
  const float* weight = data_of<float>(route_weights);
  float* published_weight = w.ranks > 1 ? reinterpret_cast<float*>(own + at.weight) : const_cast<float*>(weight);
  check(mok_prologue(const_cast<void*>(a.peer_x[w.rank]), data_of(x), routes, data_of(ids), layer.long_ids(), published_weight, weight, 0,
                     reinterpret_cast<int32_t*>(own + at.tokens), a.tokens, a.topk, a.hidden, call.stream),
        "prologue");
  call.barrier(kForwardBegin);
  check(mok_schedule(&a, call.stream), "schedule");
  check(mok_forward(&a, 1, call.stream), "forward");
  call.barrier(kForwardEnd);
  check(mok_epilogue(data_of(out), own + at.routed, published_weight, routes, static_cast<int>(w.ranks * layer.experts()), s ? a.shared_y : nullptr,
                     data_of<float>(shared_scale), a.tokens, a.topk, a.hidden, w.own_abort_word(), call.stream),
        "epilogue");
  call.report();
  if (!save) ring_x = rows_of(x, {0, d}), schedule = empty_of(x, {0}, ScalarType::Byte);
  return std::make_tuple(out, ring_x, ring_gate_up, shared_gate_up, schedule);
}

// needs: one bit each for dx, d_route_weights, d_gate_up, d_down, d_shared_gate, d_shared_up, d_shared_down, d_shared_scale, in this order, which
// is also the order of the results; what is not needed comes back empty, and so does what is added to gate_up_buffer or down_buffer (bf16 or fp32)
// instead. What the forward saved is read. Where it is given again, as reused_x, reused_gate_up and reused_shared_gate_up, this backward may write
// over it.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_op(
    Tensor words, Tensor schedule, Optional, Tensor dout, Tensor x, Tensor ids, Tensor route_weights, Tensor gate_up, Tensor down,
    Optional shared_gate, Optional shared_up, Optional shared_down, Optional shared_scale, Tensor ring_x, Tensor ring_gate_up, Tensor shared_gate_up,
    std::optional<double> limit, int64_t minibatch_rows, int64_t comm, int64_t max_tokens, int64_t needs, Optional gate_up_buffer,
    Optional down_buffer, Optional reused_x, Optional reused_gate_up, Optional reused_shared_gate_up) {
  check_comm(comm);
  const Layer layer{x, ids, route_weights, gate_up, down, shared_gate, shared_up, shared_down, shared_scale};
  Call call(words, x);
  const Workspace& w = call.workspace;
  const int64_t n = layer.tokens(), d = layer.hidden(), i = layer.inter(), s = layer.shared(), k = layer.top_k(), l = layer.experts();
  const int64_t ring_rows = ring_x.size(0);
  layer.check_tensors(w, max_tokens, ring_rows);
  expect(dout, "dout", {n, d}, ScalarType::BFloat16, x);
  expect(ring_x, "ring_x", {ring_rows, d}, ScalarType::BFloat16, x);
  expect(ring_gate_up, "ring_gate_up", {ring_rows, 2 * i}, ScalarType::BFloat16, x);
  if (s) expect(shared_gate_up, "shared_gate_up", {n, 2 * s}, ScalarType::BFloat16, x);
  const auto is_again = [](const Optional& again, const Tensor& t) { return again && data_of(*again) == data_of(t); };
  const bool reuses = reused_x || reused_gate_up || reused_shared_gate_up;
  STD_TORCH_CHECK(!reuses || (is_again(reused_x, ring_x) && is_again(reused_gate_up, ring_gate_up) && is_again(reused_shared_gate_up, shared_gate_up)),
                  "reused tensors are ring_x, ring_gate_up and shared_gate_up again");
  const DataLayout at = DataLayout::make(w.ranks, w.max_tokens, k, d);
  MokBackwardArgs b{};
  b.forward = forward_args(w, layer, at, max_tokens, ring_rows, minibatch_rows, limit, true);
  MokForwardArgs& a = b.forward;
  expect(schedule, "schedule", {schedule.numel()}, ScalarType::Byte, x);
  STD_TORCH_CHECK(schedule.numel() >= mok_schedule_bytes(&a), "the schedule has ", schedule.numel(), " bytes and needs ", mok_schedule_bytes(&a));
  a.schedule = data_of(schedule), a.ring_x = data_of(ring_x), a.ring_gate_up = data_of(ring_gate_up);
  a.shared_gate_up = s ? data_of(shared_gate_up) : nullptr;

  const auto needed = [&](int bit) { return (needs >> bit & 1) != 0; };
  const auto grad = [&](int bit, std::initializer_list<int64_t> sizes, ScalarType type = ScalarType::BFloat16) {
    return needed(bit) ? empty_of(x, sizes, type) : rows_of(x, {0});
  };
  const auto wanted = [&](int bit, const Tensor& t) { return needed(bit) ? data_of(t) : nullptr; };
  Tensor dx = grad(0, {n, d}), d_route_weights = grad(1, {n, k}, ScalarType::Float);
  Tensor d_gate_up = gate_up_buffer ? rows_of(x, {0}) : grad(2, {l, 2 * i, d}), d_down = down_buffer ? rows_of(x, {0}) : grad(3, {l, d, i});
  Tensor d_shared_gate = grad(4, {s, d}), d_shared_up = grad(5, {s, d}), d_shared_down = grad(6, {d, s});
  Tensor d_shared_scale = grad(7, {n}, ScalarType::Float);
  b.wants_dx = needed(0), b.comm_sms = static_cast<int>(comm), b.x = data_of(x), b.dout = data_of(dout), b.shared_scale = data_of<float>(shared_scale);
  b.reuses_ring = reuses;
  b.shared_dx = needed(0) && s ? data_of(dx) : nullptr;  // the epilogue adds the routed part
  const auto weight_gradient = [&](int bit, const Tensor& t, const Optional& buffer, std::initializer_list<int64_t> sizes, int32_t& into) {
    if (!buffer) return wanted(bit, t);
    const bool fp32 = buffer->scalar_type() == ScalarType::Float;
    expect(*buffer, "a gradient's buffer", sizes, fp32 ? ScalarType::Float : ScalarType::BFloat16, x);
    into = fp32 ? kMokAddFp32 : kMokAddBf16;
    return wanted(bit, *buffer);
  };
  b.d_gate_up_proj = weight_gradient(2, d_gate_up, gate_up_buffer, {l, 2 * i, d}, b.d_gate_up_into);
  b.d_down_proj = weight_gradient(3, d_down, down_buffer, {l, d, i}, b.d_down_into);
  b.d_shared_gate = wanted(4, d_shared_gate), b.d_shared_up = wanted(5, d_shared_up), b.d_shared_down = wanted(6, d_shared_down);
  b.d_shared_scale = needed(7) ? data_of<float>(d_shared_scale) : nullptr;
  for (int64_t r = 0; r < w.ranks; ++r) {
    b.peer_dout[r] = w.data[r] + at.dout;
    b.peer_weight[r] = reinterpret_cast<const float*>(w.data[r] + at.weight);
    b.peer_dweight[r] = reinterpret_cast<float*>(w.data[r] + at.d_weight);
  }
  const float* weight = data_of<float>(route_weights);
  if (w.ranks == 1) b.peer_dout[0] = data_of(dout), b.peer_weight[0] = weight;
  Tensor workspace = empty_of(x, {mok_backward_workspace_bytes(&b)}, ScalarType::Byte);
  b.workspace = data_of(workspace);  // torch's allocations are 512-byte aligned

  char* own = w.data[w.rank];
  int32_t* tokens = reinterpret_cast<int32_t*>(own + at.tokens);
  const int32_t* routes = layer.long_ids() ? reinterpret_cast<int32_t*>(own + at.ids) : data_of<int32_t>(ids);
  if (layer.long_ids())  // the layers since have published theirs in this one's place
    check(mok_prologue(data_of(x), data_of(x), reinterpret_cast<int32_t*>(own + at.ids), data_of(ids), 1, const_cast<float*>(weight), weight, 0, tokens,
                       a.tokens, a.topk, a.hidden, call.stream),
          "prologue");
  check(mok_backward_prologue(const_cast<void*>(b.peer_dout[w.rank]), b.dout, const_cast<void*>(a.peer_x[w.rank]), b.x,
                              const_cast<float*>(b.peer_weight[w.rank]), weight, tokens + 1, b.wants_dx, a.tokens, a.topk, a.hidden, call.stream),
        "backward prologue");
  call.barrier(kBackwardBegin);
  check(mok_backward(&b, 1, call.stream), "backward");
  call.barrier(kBackwardEnd);
  check(mok_backward_epilogue(wanted(0, dx), own + at.routed, b.shared_dx, needed(1) ? data_of<float>(d_route_weights) : nullptr,
                              reinterpret_cast<const float*>(own + at.d_weight), routes, static_cast<int>(w.ranks * l), a.tokens, a.topk, a.hidden,
                              w.own_abort_word(), call.stream),
        "backward epilogue");
  call.report();
  return std::make_tuple(dx, d_route_weights, d_gate_up, d_down, d_shared_gate, d_shared_up, d_shared_down, d_shared_scale);
}

}  // namespace mok::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(MOK_NAMESPACE, m) {
  m.def("segment_bytes(int ranks, int max_tokens, int top_k, int hidden) -> int");
  m.def("open_order() -> int");
  m.def("close_order(int order) -> ()");
  m.def("check_device(Tensor workspace) -> ()");
  m.def("abort_device(Tensor workspace, Tensor on_device) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(MOK_NAMESPACE, CUDA, m) {
  m.impl("forward", TORCH_BOX(&mok::cuda::forward_op));
  m.impl("backward", TORCH_BOX(&mok::cuda::backward_op));
  m.impl("abort_device", TORCH_BOX(&mok::cuda::abort_device));
}

STABLE_TORCH_LIBRARY_IMPL(MOK_NAMESPACE, CPU, m) {
  m.impl("check_device", TORCH_BOX(&mok::cuda::check_device));
}

STABLE_TORCH_LIBRARY_IMPL(MOK_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("segment_bytes", TORCH_BOX(&mok::cuda::segment_bytes));
  m.impl("open_order", TORCH_BOX(&mok::cuda::open_order));
  m.impl("close_order", TORCH_BOX(&mok::cuda::close_order));
}
