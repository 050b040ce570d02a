// Element-wise arithmetic of the layer. The library is compiled without contraction (-ffp-contract=off), so every clone
// of a row function, whatever its vector width, gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/macros.h"

// One clone per vector width, chosen at load time. The sanitizers' runtimes are not up yet when that choice is made.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define MOK_ROW_FUNCTION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MOK_ROW_FUNCTION
#endif

namespace mok::cpu {

struct bfloat16 {
  uint16_t bits;
};

inline float to_float(float v) {
  return v;
}
inline float to_float(bfloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <class T>
T round_to(float v);
template <>
inline float round_to<float>(float v) {
  return v;
}
template <>
inline bfloat16 round_to<bfloat16>(float v) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

// A clamped SwiGLU with no limit clamps at infinity: the same arithmetic serves both.
struct Clamp {
  float limit;
};

// Row functions over n columns. T is float or bfloat16; they are instantiated in numerics.cpp.
template <class T>
struct Rows {
  static void widen(float* __restrict out, const T* __restrict in, int64_t n);
  static void narrow(T* __restrict out, const float* __restrict in, int64_t n);
  // sum += in, rounded first; a sum of T is rounded again.
  static void add(T* __restrict sum, const float* __restrict in, int64_t n);
  static void add_to_fp32(float* __restrict sum, const float* __restrict in, int64_t n);
  // Rounds gate and up, keeps them (for the backward), and writes h = round(silu(gate) * up) of the rounded values.
  static void swiglu(T* __restrict gate_kept, T* __restrict up_kept, T* __restrict h, const float* __restrict gate,
                     const float* __restrict up, int64_t n, Clamp clamp);
  // From dh' (before the weight): <dh', h>, d_gate and d_up for dh = weight * dh', and weight * h.
  static float dswiglu(T* __restrict d_gate, T* __restrict d_up, T* __restrict weighted_h, const float* __restrict dh,
                       const T* __restrict gate, const T* __restrict up, float weight, int64_t n, Clamp clamp);
  // sum += weight * in
  static void add_scaled(float* __restrict sum, const T* __restrict in, float weight, int64_t n);
};

}  // namespace mok::cpu
