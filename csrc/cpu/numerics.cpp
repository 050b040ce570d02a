#include "numerics.h"

namespace mok::cpu {

namespace {

// exp, accurate to 1 unit in the last place over the range where neither it nor its reciprocal over- or underflows;
// clamped outside. NaN passes through: both comparisons are false.
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits of the mantissa
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float value = (p * r) * r + r + 1.0f;
  int32_t shift;
  std::memcpy(&shift, &shifted, sizeof shift);
  const uint32_t scale_bits = static_cast<uint32_t>(shift - 0x4b400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &scale_bits, sizeof scale);
  return value * scale;
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + exp_of(-x));
}

inline float clamp_gate(float v, float limit) {
  return v > limit ? limit : v;
}
inline float clamp_up(float v, float limit) {
  return v > limit ? limit : (v < -limit ? -limit : v);
}

constexpr int64_t kPartial = 64;  // columns of one router partial; every width is a multiple of it

}  // namespace

template <class T>
MOK_ROW_FUNCTION void Rows<T>::widen(float* __restrict out, const T* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(in[i]);
}

template <class T>
MOK_ROW_FUNCTION void Rows<T>::narrow(T* __restrict out, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = round_to<T>(in[i]);
}

template <class T>
MOK_ROW_FUNCTION void Rows<T>::add(T* __restrict sum, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = round_to<T>(to_float(sum[i]) + to_float(round_to<T>(in[i])));
}

template <class T>
MOK_ROW_FUNCTION void Rows<T>::add_to_fp32(float* __restrict sum, const float* __restrict in, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += to_float(round_to<T>(in[i]));
}

template <class T>
MOK_ROW_FUNCTION void Rows<T>::add_scaled(float* __restrict sum, const T* __restrict in, float weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += weight * to_float(in[i]);
}

template <class T>
MOK_ROW_FUNCTION void Rows<T>::swiglu(T* __restrict gate_kept, T* __restrict up_kept, T* __restrict h,
                                      const float* __restrict gate, const float* __restrict up, int64_t n,
                                      Clamp clamp) {
  for (int64_t i = 0; i < n; ++i) {
    gate_kept[i] = round_to<T>(gate[i]);
    up_kept[i] = round_to<T>(up[i]);
    const float g = clamp_gate(to_float(gate_kept[i]), clamp.limit);
    const float u = clamp_up(to_float(up_kept[i]), clamp.limit);
    h[i] = round_to<T>(g * sigmoid(g) * u);
  }
}

template <class T>
MOK_ROW_FUNCTION float Rows<T>::dswiglu(T* __restrict d_gate, T* __restrict d_up, T* __restrict weighted_h,
                                        const float* __restrict dh, const T* __restrict gate,
                                        const T* __restrict up, float weight, int64_t n, Clamp clamp) {
  float total = 0.0f;
  for (int64_t block = 0; block < n; block += kPartial) {
    float products[kPartial];
    for (int64_t j = 0; j < kPartial; ++j) {
      const int64_t i = block + j;
      const float g_in = to_float(gate[i]), u_in = to_float(up[i]);
      const float g = clamp_gate(g_in, clamp.limit), u = clamp_up(u_in, clamp.limit);
      const float s = sigmoid(g), silu = g * s;
      const float h = to_float(round_to<T>(silu * u));
      const float d = weight * dh[i];
      const float dg = d * u * (s + silu * (1.0f - s));
      const float du = d * silu;
      // Outside the clamp the derivative is zero; at the limit it passes, as torch.clamp's does.
      d_gate[i] = round_to<T>(g_in > clamp.limit ? 0.0f : dg);
      d_up[i] = round_to<T>(u_in > clamp.limit || u_in < -clamp.limit ? 0.0f : du);
      weighted_h[i] = round_to<T>(weight * h);
      products[j] = dh[i] * h;
    }
    for (int64_t width = kPartial / 2; width > 0; width /= 2) {
      for (int64_t j = 0; j < width; ++j) products[j] += products[j + width];
    }
    total += products[0];
  }
  return total;
}

template struct Rows<float>;
template struct Rows<bfloat16>;

}  // namespace mok::cpu
