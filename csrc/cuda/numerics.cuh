// The arithmetic that forward, replay and backward must do alike, bit for bit: explicit roundings, so the compiler cannot contract.
#pragma once

namespace mok::cuda {

__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// 1 / (1 + exp(-x)); two special-function instructions, relative error about 2^-22.
__device__ __forceinline__ float sigmoid(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950408889634f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.0f, e)));
  return r;
}

// silu(gate) * up of the bf16-rounded gate and up; limit > 0 clamps gate from above and up on both sides. NaN stays NaN.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  if (limit > 0.0f) {
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
  }
  return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
}

// The backward of one element, from the unrounded gradient dh of h (before the route's weight) and the bf16 gate and up that were kept.
struct SwigluGradient {
  float d_gate, d_up, h;  // h: unrounded, the forward's
};
template <bool kClamped>
__device__ __forceinline__ SwigluGradient dswiglu(float dh, float weight, float gate_in, float up_in, float limit) {
  float gate = gate_in, up = up_in;
  if (kClamped) {
    gate = min_nan(gate, limit);
    up = max_nan(min_nan(up, limit), -limit);
  }
  const float s = sigmoid(gate), silu = __fmul_rn(gate, s), d = __fmul_rn(weight, dh);
  SwigluGradient g;
  g.h = __fmul_rn(silu, up);
  g.d_gate = __fmul_rn(__fmul_rn(d, up), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
  g.d_up = __fmul_rn(d, silu);
  // Outside the clamp the derivative is zero; at the limit it passes, as torch.clamp's does.
  if (kClamped && gate_in > limit) g.d_gate = 0.0f;
  if (kClamped && (up_in > limit || up_in < -limit)) g.d_up = 0.0f;
  return g;
}

}  // namespace mok::cuda
