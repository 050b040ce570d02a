// What every CUDA operator needs around its launches: the workspace as ops see it, the stream, and the order of calls.
#pragma once

// References to CUDA's runtime are weak: runtime.cpp.
#pragma weak cudaDeviceGetAttribute
#pragma weak cudaEventCreateWithFlags
#pragma weak cudaEventDestroy
#pragma weak cudaEventRecord
#pragma weak cudaGetErrorString
#pragma weak cudaGetLastError
#pragma weak cudaMemcpyAsync
#pragma weak cudaMemsetAsync
#pragma weak cudaStreamCreateWithFlags
#pragma weak cudaStreamDestroy
#pragma weak cudaStreamGetCaptureInfo
#pragma weak cudaStreamIsCapturing
#pragma weak cudaStreamWaitEvent

#include <stdexcept>
#include <string>

#include "../cpu/stable.h"
#include "../common/layout.h"
#include "api.h"

#include <torch/csrc/stable/accelerator.h>

// Defined by a torch with CUDA, null in one for the CPU.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace mok::cuda {

using torch::stable::Tensor;

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cudaGetLastError();  // reported here; torch's next check is not to find it again
  STD_TORCH_CHECK(status == cudaSuccess, "mok: ", what, ": ", cudaGetErrorString(status));
}

inline int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// A rank's control segment: its barrier pad, epoch and abort word. Zeroed before first use, never replaced.
constexpr int64_t kAbortOffset = 1024, kEpochOffset = 2048;
static_assert(MOK_MAX_RANKS * 4 <= kAbortOffset);

// A rank's data segment, for up to Nmax tokens. One rank reads x and the weights where they lie.
struct DataLayout {
  int64_t tokens, ids, weight, d_weight, x, dout, routed, bytes;

  static DataLayout make(int64_t ranks, int64_t max_tokens, int64_t top_k, int64_t hidden) {
    DataLayout l{};
    int64_t end = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t begin = end;
      end += rounded(bytes);
      return begin;
    };
    const int64_t routes = max_tokens * top_k, shared = ranks > 1 ? 1 : 0;
    l.tokens = take(8);
    l.ids = take(routes * 4);
    l.weight = take(shared * routes * 4);
    l.d_weight = take(routes * 4);
    l.x = take(shared * max_tokens * hidden * 2);
    l.dout = take(shared * max_tokens * hidden * 2);
    l.routed = take(routes * hidden * 2);
    l.bytes = end;
    return l;
  }
};

// What a rank waits for between ranks; errors.py names them, and the waits of wait.cuh inside a kernel.
enum Barrier { kForwardBegin = 16, kForwardEnd = 17, kBackwardBegin = 18, kBackwardEnd = 19 };

// Calls on one workspace run one after the other, whatever streams they are given to: they share its buffers. Calls that are captured into a
// graph are ordered among themselves; a replay is ordered by whoever launches the graph.
class CallOrder {
 public:
  CallOrder() {
    for (Last* last : {&eager_, &captured_}) check(cudaEventCreateWithFlags(&last->event, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CallOrder() {
    for (Last* last : {&eager_, &captured_}) cudaEventDestroy(last->event);
  }
  struct Last {
    cudaEvent_t event = nullptr;
    bool used = false;
  };
  // Returns what leave() takes.
  Last* enter(cudaStream_t stream) {
    Last& last = last_of(stream);
    if (last.used) check(cudaStreamWaitEvent(stream, last.event, 0), "cudaStreamWaitEvent");
    return &last;
  }
  static void leave(Last* last, cudaStream_t stream) noexcept {
    last->used = cudaEventRecord(last->event, stream) == cudaSuccess;
    if (!last->used) cudaGetLastError();
  }

 private:
  Last& last_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check(cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, nullptr, nullptr, nullptr), "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusNone) return eager_;
    if (capture != capture_) capture_ = capture, captured_.used = false;  // events of another capture are not for this one
    return captured_;
  }
  Last eager_, captured_;
  unsigned long long capture_ = 0;
};

// What pinned host memory holds of a workspace's failures: the kernels' record, whether a peer set this rank's abort word (the device copies it
// here), and whether this process was told on the host.
struct Failure {
  MokTimeoutRecord record;
  uint32_t unused[2];
  uint32_t told;
  uint32_t told_on_host;
};

// The workspace (workspace.py): int64 [7 + 2R]: rank, ranks, Nmax, timeout in ns, every rank's control segment and data segment, then the
// Failure, the CallOrder, and the most SMs a call may take (0: all).
struct Workspace {
  int64_t rank, ranks, max_tokens, timeout_ns, sm_limit;
  char* control[MOK_MAX_RANKS];
  char* data[MOK_MAX_RANKS];
  Failure* failure;
  CallOrder* order;

  explicit Workspace(const Tensor& words) {
    const int64_t* word = static_cast<const int64_t*>(words.data_ptr());
    STD_TORCH_CHECK(words.is_cpu() && words.numel() >= 9, "not a workspace");
    rank = word[0], ranks = word[1], max_tokens = word[2], timeout_ns = word[3];
    STD_TORCH_CHECK(ranks >= 1 && ranks <= MOK_MAX_RANKS && rank >= 0 && rank < ranks && words.numel() == 7 + 2 * ranks, "not a CUDA workspace");
    STD_TORCH_CHECK(word[4] != 0, "this workspace was closed");
    for (int64_t r = 0; r < ranks; ++r) {
      control[r] = reinterpret_cast<char*>(word[4 + r]);
      data[r] = reinterpret_cast<char*>(word[4 + ranks + r]);
    }
    failure = reinterpret_cast<Failure*>(word[4 + 2 * ranks]);
    order = reinterpret_cast<CallOrder*>(word[5 + 2 * ranks]);
    sm_limit = word[6 + 2 * ranks];
  }

  // Raises once a wait on the device has expired, here or on a peer. Python turns the text into MoKTimeoutError.
  void raise_failure() const {
    const MokTimeoutRecord& record = failure->record;
    std::string text;
    if (__atomic_load_n(&record.set, __ATOMIC_ACQUIRE) != 0) {
      const bool barrier = record.phase >= kForwardBegin;  // only there the wait is for a rank
      text = "MoKTimeout origin=" + std::to_string(rank) + " waited=" + std::to_string(barrier ? record.waiting_for : rank) + " phase=#" +
             std::to_string(record.phase);
    } else if (__atomic_load_n(&failure->told, __ATOMIC_RELAXED) != 0 || __atomic_load_n(&failure->told_on_host, __ATOMIC_RELAXED) != 0) {
      text = "MoKTimeout origin=-1 waited=-1 phase=told by a peer";
    }
    if (!text.empty()) throw std::runtime_error(text);
  }

  uint32_t* abort_word(int64_t r) const { return reinterpret_cast<uint32_t*>(control[r] + kAbortOffset); }
  uint32_t* own_abort_word() const { return abort_word(rank); }
};

// One operator's launches: on the current stream of x's device, behind the workspace's earlier calls.
class Call {
 public:
  Call(const Tensor& words, const Tensor& x) : workspace(words), guard_(x.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
    void* current = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &current) == 0, "no current CUDA stream");
    stream = static_cast<cudaStream_t>(current);
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device_index()), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, x.get_device_index()), "cudaDeviceGetAttribute");
    STD_TORCH_CHECK(major == 9 && minor == 0, "this kernel is built for compute capability 9.0 (H100, H200); the tensors are on a device of ", major,
                    ".", minor);
    workspace.raise_failure();
    last_ = workspace.order->enter(stream);
  }
  Call(const Call&) = delete;
  ~Call() { CallOrder::leave(last_, stream); }

  // All ranks have come this far. Nothing to wait for with one.
  void barrier(int phase) const {
    const Workspace& w = workspace;
    if (w.ranks == 1) return;
    uint32_t *pads[MOK_MAX_RANKS], *aborts[MOK_MAX_RANKS];
    for (int64_t r = 0; r < w.ranks; ++r) pads[r] = reinterpret_cast<uint32_t*>(w.control[r]), aborts[r] = w.abort_word(r);
    check(mok_barrier(pads, aborts, static_cast<int>(w.rank), static_cast<int>(w.ranks), reinterpret_cast<uint32_t*>(w.control[w.rank] + kEpochOffset),
                      static_cast<uint64_t>(w.timeout_ns), &w.failure->record, phase, stream),
          "barrier");
  }
  // The host learns, without asking the device, whether a peer gave up.
  void report() const {
    const Workspace& w = workspace;
    if (w.ranks == 1) return;
    check(cudaMemcpyAsync(&w.failure->told, w.own_abort_word(), 4, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  }

  Workspace workspace;
  cudaStream_t stream = nullptr;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  CallOrder::Last* last_ = nullptr;
};

}  // namespace mok::cuda
