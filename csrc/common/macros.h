// Shared by the CPU kernel, the CUDA kernels and the protocol simulator.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ __forceinline__
#else
#define MOK_HD inline
#endif

namespace mok {

// Rows of one row tile. Every expert's region starts on a tile boundary, so a tile belongs to one expert.
constexpr int64_t kTileRows = 128;
// Most routes a token may have (K).
constexpr int64_t kMaxTopK = 16;
// Every width (D, I, S) is a multiple of this.
constexpr int64_t kWidthStep = 64;

template <class T>
MOK_HD T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
MOK_HD T max_of(T a, T b) {
  return a > b ? a : b;
}
MOK_HD int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace mok
