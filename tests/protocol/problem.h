// One layer call of a whole group: random inputs, and what a naive computation in double makes of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "csrc/cpu/kernel.h"

// The oracle's loops touch nothing that another thread writes; checking them would only cost time.
#define PROTOCOL_UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined")))

namespace protocol {

using mok::cpu::Shape;
using mok::cpu::bfloat16;
using mok::cpu::round_to;
using mok::cpu::to_float;

struct Uniform {
  uint64_t state;
  uint64_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  float symmetric(float scale) { return scale * (static_cast<float>(next()) / 1073741824.0f - 1.0f); }
};

template <class T>
std::vector<T> random_values(Uniform& random, int64_t count, float scale) {
  std::vector<T> out(count);
  for (T& value : out) value = round_to<T>(random.symmetric(scale));
  return out;
}

// Everything one rank holds.
template <class T>
struct Inputs {
  Shape shape;
  std::vector<T> x, dout, gate_up, down, shared_gate, shared_up, shared_down;
  std::vector<int32_t> ids;
  std::vector<float> weights, scale;
};

template <class V>
struct Results {
  std::vector<V> out, dx, d_gate_up, d_down, d_shared_gate, d_shared_up, d_shared_down;
  std::vector<std::conditional_t<std::is_same_v<V, double>, double, float>> d_weights, d_scale;
};

template <class T>
struct Problem {
  std::vector<Inputs<T>> ranks;
  float limit;
};

// ids: everything on expert 0 of rank 0 with `one_expert`; else anywhere, and a tenth of the routes masked.
template <class T>
Problem<T> make_problem(Uniform& random, const std::vector<int64_t>& tokens, int64_t top_k, int64_t hidden,
                        int64_t intermediate, int64_t shared, int64_t experts, bool one_expert, float limit) {
  Problem<T> problem{{}, limit};
  const int64_t all = experts * static_cast<int64_t>(tokens.size());
  const auto shared_gate = random_values<T>(random, shared * hidden, 0.2f);
  const auto shared_up = random_values<T>(random, shared * hidden, 0.2f);
  const auto shared_down = random_values<T>(random, shared * hidden, 0.2f);
  for (const int64_t n : tokens) {
    Inputs<T> in{{n, top_k, hidden, intermediate, shared, experts}, {}, {}, {}, {}, shared_gate, shared_up, shared_down,
                 {}, {}, {}};
    in.x = random_values<T>(random, n * hidden, 1.0f);
    in.dout = random_values<T>(random, n * hidden, 1.0f);
    in.gate_up = random_values<T>(random, experts * 2 * intermediate * hidden, 0.2f);
    in.down = random_values<T>(random, experts * hidden * intermediate, 0.2f);
    in.weights = random_values<float>(random, n * top_k, 1.0f);
    if (shared) in.scale = random_values<float>(random, n, 1.0f);
    for (int64_t i = 0; i < n * top_k; ++i) {
      const bool masked = random.below(10) == 0;
      in.ids.push_back(masked ? -1 : static_cast<int32_t>(one_expert ? 0 : random.below(all)));
    }
    problem.ranks.push_back(std::move(in));
  }
  return problem;
}

// y += scale * down(swiglu(gate x, up x)) and its gradients, for one token and one expert.
template <class T>
PROTOCOL_UNCHECKED inline void naive_expert(const T* x, const T* dout, const T* gate, const T* up, const T* down,
                                            double scale, float limit, int64_t hidden, int64_t width, double* y,
                                            double* dx, double* d_gate, double* d_up, double* d_down, double* d_scale) {
  double total = 0;
  for (int64_t i = 0; i < width; ++i) {
    double g_in = 0, u_in = 0, dh = 0;
    for (int64_t d = 0; d < hidden; ++d) {
      g_in += static_cast<double>(to_float(gate[i * hidden + d])) * to_float(x[d]);
      u_in += static_cast<double>(to_float(up[i * hidden + d])) * to_float(x[d]);
      dh += static_cast<double>(to_float(down[d * width + i])) * to_float(dout[d]);
    }
    // Kept in the type of activations: at the clamp one rounding decides whether a derivative is zero.
    g_in = to_float(round_to<T>(static_cast<float>(g_in))), u_in = to_float(round_to<T>(static_cast<float>(u_in)));
    const double g = g_in > limit ? limit : g_in;
    const double u = u_in > limit ? limit : u_in < -limit ? -limit : u_in;
    const double s = 1 / (1 + std::exp(-g)), h = g * s * u;
    total += dh * h;
    const double dg = g_in > limit ? 0 : scale * dh * u * (s + g * s * (1 - s));
    const double du = std::fabs(u_in) > limit ? 0 : scale * dh * g * s;
    for (int64_t d = 0; d < hidden; ++d) {
      y[d] += scale * to_float(down[d * width + i]) * h;
      dx[d] += dg * to_float(gate[i * hidden + d]) + du * to_float(up[i * hidden + d]);
      d_gate[i * hidden + d] += dg * to_float(x[d]);
      d_up[i * hidden + d] += du * to_float(x[d]);
      d_down[d * width + i] += scale * h * to_float(dout[d]);
    }
  }
  *d_scale = total;
}

template <class T>
std::vector<Results<double>> naive(const Problem<T>& problem) {
  std::vector<Results<double>> results;
  for (const Inputs<T>& in : problem.ranks) {
    Results<double> r;
    r.out.resize(in.x.size()), r.dx.resize(in.x.size()), r.d_weights.resize(in.weights.size());
    r.d_gate_up.resize(in.gate_up.size()), r.d_down.resize(in.down.size()), r.d_scale.resize(in.scale.size());
    r.d_shared_gate.resize(in.shared_gate.size()), r.d_shared_up = r.d_shared_down = r.d_shared_gate;
    results.push_back(std::move(r));
  }
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const Inputs<T>& in = problem.ranks[rank];
    const Shape& s = in.shape;
    Results<double>& r = results[rank];
    for (int64_t n = 0; n < s.tokens; ++n) {
      const int64_t row = n * s.hidden, weights = s.intermediate * s.hidden;
      for (int64_t route = n * s.top_k; route < (n + 1) * s.top_k; ++route) {
        if (in.ids[route] < 0) continue;
        const int64_t owner = in.ids[route] / s.experts, e = in.ids[route] % s.experts;
        const Inputs<T>& w = problem.ranks[owner];
        double* d_gate = &results[owner].d_gate_up[e * 2 * weights];
        naive_expert(&in.x[row], &in.dout[row], &w.gate_up[e * 2 * weights], &w.gate_up[(e * 2 + 1) * weights],
                     &w.down[e * weights], in.weights[route], problem.limit, s.hidden, s.intermediate, &r.out[row],
                     &r.dx[row], d_gate, d_gate + weights, &results[owner].d_down[e * weights], &r.d_weights[route]);
      }
      if (s.shared) {
        naive_expert(&in.x[row], &in.dout[row], in.shared_gate.data(), in.shared_up.data(), in.shared_down.data(),
                     in.scale[n], problem.limit, s.hidden, s.shared, &r.out[row], &r.dx[row], r.d_shared_gate.data(),
                     r.d_shared_up.data(), r.d_shared_down.data(), &r.d_scale[n]);
      }
    }
  }
  return results;
}

}  // namespace protocol
