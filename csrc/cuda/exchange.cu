// The small kernels around the megakernel: publish inputs, wait for the other ranks, sum what they pushed.
#include <cuda_bf16.h>

#include "wait.cuh"

namespace mok::cuda {
namespace {

// grid-stride over 16-byte pieces of x, then over routes. Ids beyond int32 become -1 (masked), never another expert.
__global__ void __launch_bounds__(256) prologue_kernel(uint4* x_dst, const uint4* x, int64_t pieces, int32_t* ids_dst, const void* ids,
                                                       bool int64_ids, float* weight_dst, const void* weight, bool bf16_weight,
                                                       int32_t* tokens_dst, int tokens, int topk) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (thread == 0) *tokens_dst = tokens;
  const int64_t routes = static_cast<int64_t>(tokens) * topk;
  for (int64_t i = thread; i < routes; i += threads) {
    if (int64_ids) {
      const int64_t id = static_cast<const int64_t*>(ids)[i];
      ids_dst[i] = id >= 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : -1;
    } else {
      ids_dst[i] = static_cast<const int32_t*>(ids)[i];
    }
    if (weight_dst != weight)
      weight_dst[i] = bf16_weight ? __bfloat162float(static_cast<const __nv_bfloat16*>(weight)[i]) : static_cast<const float*>(weight)[i];
  }
  if (x_dst == x) return;
  for (int64_t i = thread; i < pieces; i += threads) x_dst[i] = x[i];
}

// Cross-rank barrier, one CTA; thread r talks to rank r. The epoch lives in device memory and is advanced here, so a replayed graph
// never meets an old flag as a new one. pads[r][s] is written by rank s alone.
struct BarrierArgs {
  uint32_t* pads[MOK_MAX_RANKS];
  uint32_t* abort_words[MOK_MAX_RANKS];
};

__global__ void barrier_kernel(const __grid_constant__ BarrierArgs b, int rank, int ranks, uint32_t* epoch, uint64_t timeout_ns,
                               MokTimeoutRecord* record, uint32_t phase) {
  const int peer = threadIdx.x;
  const uint32_t next = *epoch + 1;
  __syncthreads();
  if (peer == 0) *epoch = next;
  const Limits limits{b.abort_words[rank], record, timeout_ns, static_cast<uint32_t>(rank)};
  // A rank whose kernel gave up before it came here says so before it says that it came: a peer that goes on knows.
  Watch watch = watch_of(limits);
  if (peer < ranks) {
    if (watch.dead) ptx::st_release_sys(b.abort_words[peer], 1);
    __threadfence_system();  // everything earlier kernels of this stream wrote, on any rank's memory
    ptx::st_release_sys(b.pads[peer] + rank, next);
    const uint32_t* slot = b.pads[rank] + peer;
    wait_for(watch, phase, peer, next, [&](uint32_t& seen) {
      seen = ptx::ld_acquire_sys(slot);
      return static_cast<int32_t>(seen - next) >= 0;
    });
  }
  if (__syncthreads_or(watch.dead) && peer < ranks) ptx::st_release_sys(b.abort_words[peer], 1);
}

constexpr int kSumThreads = 128;

// out[n] = shared[n] * scale[n] + sum_k weight[n, k] * ROUTED[n * K + k], in fp32, k ascending, masked routes left out.
// A CTA takes one token's 8 * kSumThreads columns; grid (tokens, column blocks).
template <int kUnroll>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(__nv_bfloat16* out, const __nv_bfloat16* routed, const float* weight, const int32_t* ids,
                                                          int experts, const __nv_bfloat16* shared, const float* scale, int topk, int hidden,
                                                          const uint32_t* abort_word) {
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * kSumThreads + threadIdx.x) * 8;
  if (column >= hidden) return;
  uint4* to = reinterpret_cast<uint4*>(out + token * hidden + column);
  if (ptx::ld_relaxed_sys(abort_word) != 0) {
    *to = uint4{0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff};  // NaN: a failed call has no result
    return;
  }
  float sum[8] = {};
  if (shared != nullptr) {
    const uint4 v = *reinterpret_cast<const uint4*>(shared + token * hidden + column);
    const float f = scale != nullptr ? scale[token] : 1.0f;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[2 * i] = __fmul_rn(ptx::bf16_low(words[i]), f), sum[2 * i + 1] = __fmul_rn(ptx::bf16_high(words[i]), f);
  }
  const int64_t route0 = token * topk;
  for (int k0 = 0; k0 < topk; k0 += kUnroll) {
    uint4 v[kUnroll];
    float w[kUnroll];
    bool use[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {  // all loads before the first use
      const int k = k0 + j;
      const int id = k < topk ? ids[route0 + k] : -1;
      use[j] = id >= 0 && id < experts;
      w[j] = use[j] ? weight[route0 + k] : 0.0f;
      v[j] = use[j] ? __ldcs(reinterpret_cast<const uint4*>(routed + (route0 + k) * hidden + column)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (!use[j]) continue;
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(w[j], ptx::bf16_low(words[i]), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(w[j], ptx::bf16_high(words[i]), sum[2 * i + 1]);
      }
    }
  }
  *to = uint4{ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]), ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
}

}  // namespace
}  // namespace mok::cuda

extern "C" {

cudaError_t mok_prologue(void* x_dst, const void* x, int32_t* ids_dst, const void* ids, int ids_are_int64, float* weight_dst,
                         const void* weight, int weight_is_bf16, int32_t* tokens_dst, int tokens, int topk, int hidden, cudaStream_t stream) {
  const int64_t pieces = static_cast<int64_t>(tokens) * hidden / 8;
  const int64_t work = x_dst == x ? static_cast<int64_t>(tokens) * topk : pieces;
  const int64_t blocks = work / 1024 + 1;  // four pieces a thread
  mok::cuda::prologue_kernel<<<static_cast<int>(blocks < 8192 ? blocks : 8192), 256, 0, stream>>>(
      static_cast<uint4*>(x_dst), static_cast<const uint4*>(x), pieces, ids_dst, ids, ids_are_int64 != 0, weight_dst, weight,
      weight_is_bf16 != 0, tokens_dst, tokens, topk);
  return cudaGetLastError();
}

cudaError_t mok_epilogue(void* out, const void* routed, const float* weight, const int32_t* ids, int experts, const void* shared_y,
                         const float* shared_scale, int tokens, int topk, int hidden, const uint32_t* abort_word, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const dim3 grid(tokens, (hidden + 8 * mok::cuda::kSumThreads - 1) / (8 * mok::cuda::kSumThreads));
  const auto kernel = topk > 4 ? mok::cuda::sum_kernel<8> : mok::cuda::sum_kernel<4>;
  kernel<<<grid, mok::cuda::kSumThreads, 0, stream>>>(static_cast<__nv_bfloat16*>(out), static_cast<const __nv_bfloat16*>(routed), weight, ids,
                                                      experts, static_cast<const __nv_bfloat16*>(shared_y), shared_scale, topk, hidden, abort_word);
  return cudaGetLastError();
}

cudaError_t mok_barrier(uint32_t* const* pads, uint32_t* const* abort_words, int rank, int ranks, uint32_t* epoch, uint64_t timeout_ns,
                        MokTimeoutRecord* record, int phase, cudaStream_t stream) {
  if (ranks < 1 || ranks > MOK_MAX_RANKS) return cudaErrorInvalidValue;
  mok::cuda::BarrierArgs b{};
  for (int r = 0; r < ranks; ++r) b.pads[r] = pads[r], b.abort_words[r] = abort_words[r];
  mok::cuda::barrier_kernel<<<1, 96, 0, stream>>>(b, rank, ranks, epoch, timeout_ns, record, static_cast<uint32_t>(phase));
  return cudaGetLastError();
}

}  // extern "C"
