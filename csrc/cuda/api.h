// C interface of the CUDA kernels: plain pointers and sizes, no torch, so Python's ctypes or a torch op can drive it.
//
// One forward of one rank, in stream order (every call is asynchronous and safe in CUDA graph capture):
//   mok_prologue   x, ids, weights and the token count into this rank's symmetric buffers
//   mok_barrier    all ranks have published
//   mok_schedule   every rank's ids -> row table, expert prefix, task table; clears the counters
//   mok_forward    the megakernel: shared expert, dispatch, gate+up, SwiGLU, down, combine
//   mok_barrier    all ranks have pushed
//   mok_epilogue   out = shared * scale + sum_k weight_k * ROUTED[k]
// Its backward, likewise:
//   mok_backward_prologue   dOut, x, weights and whether dX is wanted into this rank's symmetric buffers
//   mok_barrier
//   mok_backward            replay, dgrads, weight gradients, reverse-dispatch, router gradient
//   mok_barrier
//   mok_backward_epilogue   dX = shared + sum_k ROUTED[k]; the router gradients that the experts' ranks stored
// At one rank the prologue copy and both barriers can be left out: point peer_x[0], peer_ids[0], peer_tokens[0] at the inputs.
//
// Build (benchmarks/build.sh; no torch, no CUDA driver library needed at link time):
//   nvcc -gencode arch=compute_90a,code=sm_90a -std=c++17 -O3 -Xcompiler -fPIC -shared csrc/cuda/*.cu csrc/cuda/sm90/*.cu -o libmok_cuda.so
// ptxas warnings C7508-C7510 (setmaxnreg ignored, wgmma serialised) are build errors: add -Xptxas -v and look.
#pragma once
#include <cuda_runtime_api.h>
#include <stdint.h>

#define MOK_MAX_RANKS 72
#define MOK_MAX_TOPK 16

#ifdef __cplusplus
extern "C" {
#endif

// Which part of the megakernel runs: the whole layer, or one rung of the ladder that the benchmarks time alone.
enum MokLadder {
  kMokWhole = 0,
  kMokGateUpOnly = 1,  // grouped GEMM ring_x -> ring_gate_up, no SwiGLU; ring_x filled by the caller
  kMokDownOnly = 2,    // grouped GEMM ring_h -> ROUTED rows; ring_h filled by the caller
  kMokNoDispatch = 3,  // everything but dispatch; ring_x filled by the caller
};

typedef struct MokForwardArgs {
  int32_t rank, ranks;
  int32_t tokens;       // N of this rank
  int32_t max_tokens;   // most tokens on any rank: sizes the schedule's grid
  int32_t topk, hidden, inter, shared_inter;  // K, D, I, S (0: no shared expert)
  int32_t local_experts, first_expert;        // L, and the global id of local expert 0
  int32_t ring_tiles;       // macrobatch: 128-row tiles the ring holds (>= 2). From (routes of all ranks / 64 + L) / 2 on it holds whatever
                            // comes: an expert's last tile takes 64 rows there if it has no more
  int32_t minibatch_tiles;  // 128-row tiles that gate+up leads down by (0: as many as make two waves of gate+up tasks)
  int32_t lead_tiles;       // 128-row tiles that dispatch may run ahead of gate+up (0: 48, at least three minibatches)
  int32_t ladder;           // MokLadder
  int32_t store_gate_up;    // 1: keep gate and up (bf16) for the backward
  float swiglu_limit;       // clamp of gate (above) and up (both sides); <= 0: none
  int32_t sm_limit;         // CTAs at most (0: all the device holds at once)
  int32_t comm_sms;         // forward: CTAs that pull before they compute, an even number that leaves two (0: all pull beside their products)
  uint64_t timeout_ns;      // bound of every wait in a kernel

  const void* peer_x[MOK_MAX_RANKS];         // bf16 [tokens of that rank, D]
  const int32_t* peer_ids[MOK_MAX_RANKS];    // int32 [tokens of that rank, K], -1 or out of range: masked
  const int32_t* peer_tokens[MOK_MAX_RANKS]; // int32 [2]: tokens; in the backward whether that rank wants dX
  void* peer_routed[MOK_MAX_RANKS];          // bf16 [max_tokens * K, D]

  const void* gate_up_proj;  // bf16 [L, 2I, D], gate rows first
  const void* down_proj;     // bf16 [L, D, I]
  const void* shared_gate;   // bf16 [S, D]
  const void* shared_up;     // bf16 [S, D]
  const void* shared_down;   // bf16 [D, S]

  void* ring_x;          // bf16 [ring rows, D]
  void* ring_gate_up;    // bf16 [ring rows, 2I], may be null without store_gate_up
  void* ring_h;          // bf16 [ring rows, I]
  void* shared_gate_up;  // bf16 [tokens, 2S], may be null without store_gate_up
  void* shared_h;        // bf16 [tokens, S]
  void* shared_y;        // bf16 [tokens, D]

  void* schedule;        // mok_schedule_bytes(): header, row table, tasks; kept for this forward's backward
  void* scratch;         // mok_scratch_bytes(): counters and partial counts, reused by every call
  uint32_t* abort_word;  // device; nonzero: some rank gave up
  struct MokTimeoutRecord* record;  // pinned host memory mapped to the device, may be null
} MokForwardArgs;

// Written by the first wait of a rank that runs out of time.
typedef struct MokTimeoutRecord {
  uint32_t set, rank, phase, waiting_for, expected, seen;
} MokTimeoutRecord;

// What becomes of an expert weight's gradient, rounded to bf16.
enum MokInto {
  kMokStore = 0,
  kMokAddBf16 = 1,  // added to what is there, and rounded again
  kMokAddFp32 = 2,  // added to fp32 values
};

typedef struct MokBackwardArgs {
  // As the forward had them. Its schedule is read; so are ring_x, ring_gate_up and shared_gate_up, and written only where reuses_ring says
  // so. peer_x is pulled again for row tiles beyond the ring (replay); peer_routed takes dX rows. ring_h, shared_h, shared_y and scratch are
  // not used.
  MokForwardArgs forward;
  int32_t window_tiles;  // 128-row tiles that the backward's own buffers hold (0: as many as the ring); divides ring_tiles, unless the ring
                         // holds whatever comes
  int32_t chunk_units;   // pairs of row tiles by which one dgrad trails the other (0: as many as make one wave)
  int32_t wants_dx;      // of any rank; with more than one rank read from peer_tokens instead
  int32_t d_gate_up_into, d_down_into;  // MokInto
  int32_t comm_sms;      // as the forward's, which counts for nothing here
  int32_t reuses_ring;   // 1: this is the last backward of its forward. d_gate_up takes the place of gate and up in ring_gate_up and
                         // shared_gate_up, and what is replayed goes to the ring too. 0: they have room in the workspace
  const void* x;         // bf16 [tokens, D], this rank's
  const void* dout;      // bf16 [tokens, D], this rank's
  const float* shared_scale;  // fp32 [tokens], may be null
  const void* peer_dout[MOK_MAX_RANKS];     // bf16 [tokens of that rank, D]
  const float* peer_weight[MOK_MAX_RANKS];  // fp32 [tokens of that rank, K]
  float* peer_dweight[MOK_MAX_RANKS];       // fp32 [max_tokens * K]
  void* workspace;       // mok_backward_workspace_bytes(), 256-byte aligned, reused by every call
  void* shared_dx;       // bf16 [tokens, D], may be null without a shared expert
  // Results; null: not wanted.
  void* d_gate_up_proj;  // bf16 [L, 2I, D], or fp32 (MokInto)
  void* d_down_proj;     // bf16 [L, D, I], or fp32
  void* d_shared_gate;   // bf16 [S, D]
  void* d_shared_up;     // bf16 [S, D]
  void* d_shared_down;   // bf16 [D, S]
  float* d_shared_scale; // fp32 [tokens]
} MokBackwardArgs;

int64_t mok_schedule_bytes(const MokForwardArgs* args);
int64_t mok_scratch_bytes(const MokForwardArgs* args);
cudaError_t mok_schedule(const MokForwardArgs* args, cudaStream_t stream);
// One launch for `count` ranks that share this GPU (block ranges are ranks); count is 1 outside tests.
cudaError_t mok_forward(const MokForwardArgs* args, int count, cudaStream_t stream);
cudaError_t mok_prologue(void* x_dst, const void* x, int32_t* ids_dst, const void* ids, int ids_are_int64, float* weight_dst,
                         const void* weight, int weight_is_bf16, int32_t* tokens_dst, int tokens, int topk, int hidden, cudaStream_t stream);
// out [tokens, D] bf16; shared_y, shared_scale (fp32 [tokens]) may be null; ids are the published ones.
cudaError_t mok_epilogue(void* out, const void* routed, const float* weight, const int32_t* ids, int experts, const void* shared_y,
                         const float* shared_scale, int tokens, int topk, int hidden, const uint32_t* abort_word, cudaStream_t stream);
// pads[r]: uint32 [ranks] of rank r (slot s is written by rank s); epoch: uint32 [1] on this device, starts at 0 like the pads.
cudaError_t mok_barrier(uint32_t* const* pads, uint32_t* const* abort_words, int rank, int ranks, uint32_t* epoch, uint64_t timeout_ns,
                        MokTimeoutRecord* record, int phase, cudaStream_t stream);
int64_t mok_backward_workspace_bytes(const MokBackwardArgs* args);
// wants_dx_dst is peer_tokens[rank] + 1. A destination may be its source: nothing is copied then.
cudaError_t mok_backward_prologue(void* dout_dst, const void* dout, void* x_dst, const void* x, float* weight_dst, const float* weight,
                                  int32_t* wants_dx_dst, int wants_dx, int tokens, int topk, int hidden, cudaStream_t stream);
cudaError_t mok_backward(const MokBackwardArgs* args, int count, cudaStream_t stream);
// dx [tokens, D] bf16 and d_weight [tokens, K] fp32 may be null; dx may be shared_dx. ids: as the forward had them; routes without an expert get
// a gradient of zero.
cudaError_t mok_backward_epilogue(void* dx, const void* routed, const void* shared_dx, float* d_weight, const float* dweight, const int32_t* ids,
                                  int experts, int tokens, int topk, int hidden, const uint32_t* abort_word, cudaStream_t stream);
#ifdef __cplusplus
}
#endif
