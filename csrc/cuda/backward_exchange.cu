// The small kernels around the backward megakernel: publish inputs, finish gradients, sum what the other ranks pushed.
#include <cuda_bf16.h>

#include "backward_layout.cuh"
#include "wait.cuh"

namespace mok::cuda {

namespace sm90 {
cudaError_t launch_backward(const MokBackwardArgs* args, int count, cudaStream_t stream);
}

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void copy(uint4* to, const uint4* from, int64_t pieces) {
  if (to == from) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pieces; i += step) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads) backward_prologue_kernel(uint4* dout_dst, const uint4* dout, uint4* x_dst, const uint4* x, int64_t pieces,
                                                                     float* weight_dst, const float* weight, int64_t routes, int32_t* wants_dx_dst,
                                                                     int wants_dx) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *wants_dx_dst = wants_dx;
  copy(dout_dst, dout, pieces);
  copy(x_dst, x, pieces);
  if (weight_dst == weight) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < routes; i += step) weight_dst[i] = weight[i];
}

__device__ __forceinline__ float sum_of(const float* values, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum = __fadd_rn(sum, values[i]);
  return sum;
}

struct FinishArgs {
  MokBackwardArgs b;
  ScheduleLayout s;
  BackwardLayout l;
};

__device__ __forceinline__ void fill(void* to, int64_t values, uint32_t word) {
  if (to == nullptr) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint4* pieces = static_cast<uint4*>(to);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < values / 8; i += step) pieces[i] = uint4{word, word, word, word};
}

// Router gradients: the partial sums of each row in ascending order, to the rank that owns the token. Weight gradients that no row reaches are
// zero, never what memory held (where gradients are added, nothing is); those of a call that failed are NaN.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishArgs f) {
  const MokForwardArgs& a = f.b.forward;
  const bool failed = ptx::ld_relaxed_sys(a.abort_word) != 0;
  const uint32_t word = failed ? 0x7fff7fffu : 0u;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t rows = static_cast<int64_t>(at<const ScheduleHeader>(a.schedule, 0)->tiles) * kRowsPerTile;
  const int parts = a.inter / kDotColumns, shared_parts = a.shared_inter / kDotColumns;
  const int64_t* table = at<const int64_t>(a.schedule, f.s.rows);
  for (int64_t row = thread; row < rows && !failed; row += threads) {  // a call that failed may have no schedule
    const int64_t entry = table[row];
    if (entry >= 0) f.b.peer_dweight[row_rank(entry)][row_route(entry)] = sum_of(at<const float>(f.b.workspace, f.l.dots) + row * parts, parts);
  }
  if (f.b.d_shared_scale != nullptr)
    for (int64_t token = thread; token < a.tokens; token += threads)
      f.b.d_shared_scale[token] =
          failed ? __uint_as_float(0x7fffffffu) : sum_of(at<const float>(f.b.workspace, f.l.shared_dots) + token * shared_parts, shared_parts);

  const int64_t expert = static_cast<int64_t>(a.inter) * a.hidden, shared = static_cast<int64_t>(a.shared_inter) * a.hidden;
  const int32_t* counts = at<const int32_t>(a.schedule, f.s.expert_rows);
  for (int e = 0; e < a.local_experts; ++e) {
    if (counts[e] > 0 && !failed) continue;
    const auto fill_gradient = [&](void* to, int into, int64_t values) {
      if (to == nullptr || (into != kMokStore && !failed)) return;
      if (into == kMokAddFp32) values *= 2;  // `word` is a NaN of either width
      fill(static_cast<__nv_bfloat16*>(to) + values * e, values, word);
    };
    fill_gradient(f.b.d_gate_up_proj, f.b.d_gate_up_into, 2 * expert);
    fill_gradient(f.b.d_down_proj, f.b.d_down_into, expert);
  }
  if (a.tokens == 0 || failed)
    for (void* to : {f.b.d_shared_gate, f.b.d_shared_up, f.b.d_shared_down}) fill(to, shared, word);
}

// dx[n] = shared_dx[n] + sum_k ROUTED[n * K + k] in fp32, k ascending; and the router gradients. Grid (tokens, column blocks), 8 columns a thread.
constexpr int kSumThreads = 128;
__global__ void __launch_bounds__(kSumThreads) backward_sum_kernel(__nv_bfloat16* dx, const __nv_bfloat16* routed, const __nv_bfloat16* shared_dx,
                                                                   float* d_weight, const float* dweight, const int32_t* ids, int experts, int topk,
                                                                   int hidden, const uint32_t* abort_word) {
  const int64_t token = blockIdx.x, route0 = token * topk;
  const bool failed = ptx::ld_relaxed_sys(abort_word) != 0;
  const auto used = [&](int k) {
    const int id = ids[route0 + k];
    return id >= 0 && id < experts;
  };
  if (d_weight != nullptr && blockIdx.y == 0 && threadIdx.x < topk)
    d_weight[route0 + threadIdx.x] = failed ? __uint_as_float(0x7fffffffu) : (used(threadIdx.x) ? dweight[route0 + threadIdx.x] : 0.0f);
  const int column = (blockIdx.y * kSumThreads + threadIdx.x) * 8;
  if (dx == nullptr || column >= hidden) return;
  uint4* to = reinterpret_cast<uint4*>(dx + token * hidden + column);
  if (failed) {
    *to = uint4{0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};
    return;
  }
  float sum[8] = {};
  const auto add = [&](const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[2 * i] = __fadd_rn(sum[2 * i], ptx::bf16_low(words[i])), sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], ptx::bf16_high(words[i]));
  };
  if (shared_dx != nullptr) add(*reinterpret_cast<const uint4*>(shared_dx + token * hidden + column));
  constexpr int kUnroll = 8;
  for (int k0 = 0; k0 < topk; k0 += kUnroll) {
    uint4 v[kUnroll];
    bool use[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {  // all loads before the first use
      use[j] = k0 + j < topk && used(k0 + j);
      v[j] = use[j] ? __ldcs(reinterpret_cast<const uint4*>(routed + (route0 + k0 + j) * hidden + column)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j)
      if (use[j]) add(v[j]);
  }
  *to = uint4{ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
}

}  // namespace
}  // namespace mok::cuda

extern "C" {

int64_t mok_backward_workspace_bytes(const MokBackwardArgs* args) { return mok::cuda::BackwardLayout::make(*args).bytes; }

cudaError_t mok_backward_prologue(void* dout_dst, const void* dout, void* x_dst, const void* x, float* weight_dst, const float* weight,
                                  int32_t* wants_dx_dst, int wants_dx, int tokens, int topk, int hidden, cudaStream_t stream) {
  const int64_t pieces = static_cast<int64_t>(tokens) * hidden / 8;
  const int64_t blocks = pieces / 1024 + 1;
  mok::cuda::backward_prologue_kernel<<<static_cast<int>(blocks < 8192 ? blocks : 8192), mok::cuda::kThreads, 0, stream>>>(
      static_cast<uint4*>(dout_dst), static_cast<const uint4*>(dout), static_cast<uint4*>(x_dst), static_cast<const uint4*>(x), pieces, weight_dst,
      weight, static_cast<int64_t>(tokens) * topk, wants_dx_dst, wants_dx);
  return cudaGetLastError();
}

cudaError_t mok_backward(const MokBackwardArgs* args, int count, cudaStream_t stream) {
  using namespace mok::cuda;
  cudaError_t status = sm90::launch_backward(args, count, stream);
  for (int r = 0; r < count && status == cudaSuccess; ++r) {
    const FinishArgs f{args[r], ScheduleLayout::make(args[r].forward), BackwardLayout::make(args[r])};
    finish_kernel<<<264, mok::cuda::kThreads, 0, stream>>>(f);
    status = cudaGetLastError();
  }
  return status;
}

cudaError_t mok_backward_epilogue(void* dx, const void* routed, const void* shared_dx, float* d_weight, const float* dweight, const int32_t* ids,
                                  int experts, int tokens, int topk, int hidden, const uint32_t* abort_word, cudaStream_t stream) {
  if (tokens == 0 || (dx == nullptr && d_weight == nullptr)) return cudaSuccess;
  const int columns = dx != nullptr ? (hidden + 8 * mok::cuda::kSumThreads - 1) / (8 * mok::cuda::kSumThreads) : 1;
  mok::cuda::backward_sum_kernel<<<dim3(tokens, columns), mok::cuda::kSumThreads, 0, stream>>>(
      static_cast<__nv_bfloat16*>(dx), static_cast<const __nv_bfloat16*>(routed), static_cast<const __nv_bfloat16*>(shared_dx), d_weight, dweight, ids,
      experts, topk, hidden, abort_word);
  return cudaGetLastError();
}

}  // extern "C"
