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

}  // namespace mok::cuda
