// What both megakernels do before their first task, and how they are launched.
#pragma once
#include <atomic>

#include "forward_params.cuh"

namespace mok::cuda::sm90 {

constexpr int kHeadTiles = 16;  // about one wave of gate+up: 66 clusters, 8 pairs of row tiles

__device__ __forceinline__ void prepare_barriers(uint32_t smem) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(smem + Shared::kFull + 8 * i, 1);
      ptx::mbarrier_init(smem + Shared::kEmpty + 8 * i, 2 * kConsumerWarps);
    }
    for (int i = 0; i < kTaskSlots; ++i) {
      ptx::mbarrier_init(smem + Shared::kTaskFull + 8 * i, 1);
      ptx::mbarrier_init(smem + Shared::kTaskEmpty + 8 * i, 8);
    }
    for (int i = 0; i < kCopySlots; ++i) ptx::mbarrier_init(smem + Shared::kCopyFull + 8 * i, 1);
    ptx::mbarrier_init(smem + Shared::kOutFull, kConsumerWarps);
    ptx::mbarrier_init(smem + Shared::kOutFree, 1);
    ptx::mbarrier_init(smem + Shared::kDrained, 2 * (kConsumerWarps + 1));
    ptx::mbarrier_init_fence();
    if constexpr (kStamped) ptx::store_shared_4(smem + Shared::kOutStage, ~0u);  // whoever takes a part that nobody handed over shall fault
  }
  ptx::cluster_sync();
}

// Copies that a role has started may still land in shared memory when others leave early; nothing of the next kernel may lie there by then.
__device__ __forceinline__ void leave_together(const Limits& limits) {
  if (ptx::ld_relaxed_sys(limits.abort_word) != 0) __nanosleep(1000000);
  __syncwarp();
  ptx::cluster_sync();  // no CTA leaves while the other may still signal its barriers
}

// The roles of a CTA, one callable each: operand loads (one lane), copies from peers (a warp), tasks (one lane of the cluster), pushes (a warp),
// and what the two consumer warpgroups do, which takes the warpgroup's number.
template <class Loads, class Copies, class Tasks, class Pushes, class Compute>
__device__ __forceinline__ void run_roles(uint32_t smem, const Limits& limits, Loads loads, Copies copies, Tasks tasks, Pushes pushes,
                                          Compute compute) {
  prepare_barriers(smem);
  const uint32_t warp = threadIdx.x / 32;
  if (warp < 4) {
    ptx::registers_shrink<40>();
    if (warp == 0) {
      if (threadIdx.x == 0) loads();
    } else if (warp == 1) {
      copies();
    } else if (warp == 2) {
      if (threadIdx.x == 64 && ptx::cta_rank_in_cluster() == 0) tasks();
    } else {
      pushes();
    }
    __syncwarp();
  } else {
    ptx::registers_grow<232>();
    compute(warp / 4 - 1);
  }
  leave_together(limits);
}

// A row travels in pieces of at most 7 KB.
template <class Params>
void choose_copies(int hidden, Params& p) {
  const int row_bytes = hidden * 2;
  p.copies_per_row = static_cast<int>(ceil_div(row_bytes, kCopyBytes / 2));
  p.copy_bytes = static_cast<int>(ceil_div(ceil_div(row_bytes, p.copies_per_row), 16) * 16);
  p.copy_slots = static_cast<int>(min_of<int64_t>(kCopySlots, kCopyBytes / p.copy_bytes));
}

// Clusters of two of this kernel that the device holds at once. Asked for once a device: the question takes longer than a launch.
template <class Kernel>
static cudaError_t device_clusters(Kernel kernel, int* clusters) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // of this kernel: each has parameters of a type of its own
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kDevices && (*clusters = known[device].load(std::memory_order_acquire)) > 0) return cudaSuccess;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shared::kBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads), config.gridDim = dim3(2), config.dynamicSmemBytes = Shared::kBytes;
  config.attrs = &attribute, config.numAttrs = 1;
  status = cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
  if (status == cudaSuccess && device < kDevices) known[device].store(*clusters, std::memory_order_release);
  return status;
}

// The same, at most sm_limit CTAs, the same number for each of the ranks; 0 with the reason in `status`.
template <class Kernel>
int resident_clusters(Kernel kernel, int ranks, int sm_limit, cudaError_t* status) {
  int clusters = 0;
  *status = device_clusters(kernel, &clusters);
  if (*status != cudaSuccess) return 0;
  if (sm_limit > 0 && sm_limit / 2 < clusters) clusters = sm_limit / 2;
  clusters = clusters / ranks * ranks;
  if (clusters < ranks) *status = cudaErrorCooperativeLaunchTooLarge;
  return *status == cudaSuccess ? clusters : 0;
}

// Clusters of a rank that compute from the start; 0 if the setting leaves none, or half of one.
inline int computing_clusters(int clusters, int comm_ctas) { return comm_ctas >= 0 && comm_ctas % 2 == 0 ? max_of(clusters - comm_ctas / 2, 0) : 0; }

template <class Kernel, class Launch>
cudaError_t launch_clusters(Kernel kernel, const Launch& params, int clusters, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {2, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads), config.gridDim = dim3(2 * clusters), config.dynamicSmemBytes = Shared::kBytes;
  config.stream = stream, config.attrs = attributes, config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace mok::cuda::sm90
