// The CPU kernel as R virtual ranks, one thread each with the kernel's own threads below it, under a sanitizer.
//
// Every call is compared with the naive computation, and every setting bitwise with the first. The GEMM is plain loops:
// its reads and writes of the kernel's buffers are checked, its arithmetic is not.
//
//   sanitize SEED    exit status 0: all results right; 1: the first that is not is printed. A sanitizer's report ends
//                    the program with its own status.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include "problem.h"

namespace {
std::atomic<int64_t> products_until_error{-1};  // the GEMM throws when it reaches 0
}

namespace mok::cpu {

PROTOCOL_UNCHECKED static void multiply(float* out, const float* a, const float* b, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) out[i * n + j] += a[i * k + l] * b[l * n + j];
    }
  }
}

void gemm(float* out, int64_t out_stride, const Matrix& a, const Matrix& b, bool accumulate) {
  if (products_until_error.load() >= 0 && products_until_error.fetch_sub(1) == 0) throw std::runtime_error("product");
  const auto load = [](const Matrix& m) {
    std::vector<float> values(m.rows * m.cols);
    for (int64_t i = 0; i < m.rows; ++i) {
      for (int64_t j = 0; j < m.cols; ++j) values[i * m.cols + j] = m.data[i * m.row_stride + j * m.col_stride];
    }
    return values;
  };
  const std::vector<float> left = load(a), right = load(b);
  // Now and then a task stays in the middle of its work while the other threads go on.
  static std::atomic<uint32_t> products{0};
  if (products.fetch_add(1, std::memory_order_relaxed) % 16 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  std::vector<float> sum(a.rows * b.cols, 0.0f);
  if (accumulate) sum = load(row_major(out, a.rows, b.cols, out_stride));
  multiply(sum.data(), left.data(), right.data(), a.rows, a.cols, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) std::copy_n(&sum[i * b.cols], b.cols, out + i * out_stride);
}

void compute_with_one_thread() {}

}  // namespace mok::cpu

namespace protocol {
namespace {

using namespace mok::cpu;
using mok::kTileRows;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// R ranks in one process: each rank's control page and symmetric buffers, mapped by all.
class VirtualGroup {
 public:
  VirtualGroup(int64_t ranks, int64_t max_tokens, int64_t top_k, int64_t hidden, int64_t element, int64_t timeout_ms)
      : groups_(ranks), pages_(ranks), data_(ranks) {
    const int64_t bytes = mok::make_layout(max_tokens, top_k, hidden, element).bytes;
    for (int64_t r = 0; r < ranks; ++r) {
      pages_[r].reset(new Control{});
      data_[r].reset(new char[bytes]);
      std::memset(data_[r].get(), 0xff, bytes);  // NaN: nothing may be read that was not written
    }
    for (int64_t r = 0; r < ranks; ++r) {
      Group& group = groups_[r];
      group.rank = r, group.ranks = ranks, group.max_tokens = max_tokens, group.timeout_ns = timeout_ms * 1'000'000;
      for (int64_t p = 0; p < ranks; ++p) group.control[p] = pages_[p].get(), group.data[p] = data_[p].get();
    }
  }

  const Group& operator[](int64_t rank) const { return groups_[rank]; }

  // work(rank) on a thread each; what they threw.
  std::vector<std::exception_ptr> run(const std::function<void(int64_t)>& work) {
    std::vector<std::exception_ptr> errors(groups_.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < groups_.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          work(static_cast<int64_t>(r));
        } catch (...) {
          errors[r] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  void run_all(const std::function<void(int64_t)>& work) {
    for (const std::exception_ptr& error : run(work)) {
      if (error) std::rethrow_exception(error);
    }
  }

 private:
  std::vector<Group> groups_;
  std::vector<std::unique_ptr<Control>> pages_;
  std::vector<std::unique_ptr<char[]>> data_;
};

struct Wanted {
  bool dx = true, experts = true, shared = true;
};

// One rank's call: its schedule and what the forward saves.
template <class T>
class RankCall {
 public:
  RankCall(const Group& group, const Inputs<T>& in, float limit, const Settings& settings)
      : group_(group), in_(in), limit_(limit), settings_(settings) {
    const Shape& s = in.shape;
    const int64_t capacity = mok::most_tiles(group.ranks * group.max_tokens * s.top_k, s.experts) * kTileRows;
    table_.resize(capacity), plan_.resize(2 * s.experts + 1);
    build_schedule(group, in.ids.data(), s.tokens, s.top_k, s.hidden, sizeof(T), s.experts, table_.data(), capacity,
                   plan_.data());
    ring_x_ = poisoned(settings.ring * kTileRows * s.hidden);
    ring_gate_up_ = poisoned(settings.ring * kTileRows * 2 * s.intermediate);
    shared_gate_up_ = poisoned(s.tokens * 2 * s.shared);
  }

  std::vector<T> forward(bool save = true) {
    std::vector<T> out = poisoned(in_.x.size());
    std::vector<T> scratch = save ? std::vector<T>() : poisoned(ring_x_.size());
    ForwardCall<T> call = common<ForwardCall<T>>();
    call.out = out.data(), call.ring_x = save ? ring_x_.data() : scratch.data();
    call.ring_gate_up = save ? ring_gate_up_.data() : nullptr;
    call.shared_gate_up = save && in_.shape.shared ? shared_gate_up_.data() : nullptr;
    mok::cpu::forward<T>(group_, call);
    return out;
  }

  Results<T> backward(const Wanted& wanted) {
    Results<T> r;
    r.d_weights.assign(in_.weights.size(), NAN), r.d_scale.assign(in_.scale.size(), NAN);
    if (wanted.dx) r.dx = poisoned(in_.x.size());
    if (wanted.experts) r.d_gate_up = poisoned(in_.gate_up.size()), r.d_down = poisoned(in_.down.size());
    if (wanted.shared && in_.shape.shared) {
      r.d_shared_gate = r.d_shared_up = r.d_shared_down = poisoned(in_.shared_gate.size());
    }
    BackwardCall<T> call = common<BackwardCall<T>>();
    call.dout = in_.dout.data();
    call.ring_x = ring_x_.data(), call.ring_gate_up = ring_gate_up_.data();
    call.shared_gate_up = shared_gate_up_.data();
    call.wants_dx = wanted.dx;
    call.d_route_weights = r.d_weights.data(), call.d_shared_scale = in_.shape.shared ? r.d_scale.data() : nullptr;
    const auto pointer = [](std::vector<T>& v) { return v.empty() ? nullptr : v.data(); };
    call.dx = pointer(r.dx), call.d_gate_up.out = pointer(r.d_gate_up), call.d_down.out = pointer(r.d_down);
    call.d_shared_gate = pointer(r.d_shared_gate), call.d_shared_up = pointer(r.d_shared_up);
    call.d_shared_down = pointer(r.d_shared_down);
    mok::cpu::backward<T>(group_, call);
    return r;
  }

 private:
  const Group& group_;
  const Inputs<T>& in_;
  const float limit_;
  const Settings settings_;
  std::vector<int64_t> table_, plan_;
  std::vector<T> ring_x_, ring_gate_up_, shared_gate_up_;

  static std::vector<T> poisoned(int64_t count) { return std::vector<T>(count, round_to<T>(NAN)); }
  template <class Call>
  Call common() const {
    const int64_t experts = in_.shape.experts, *words = plan_.data();
    Call call{};
    call.shape = in_.shape, call.settings = settings_, call.clamp = {limit_};
    call.schedule = {table_.data(), words, words + experts + 1, words[experts]};
    call.weights = {in_.gate_up.data(), in_.down.data(), in_.shared_gate.data(), in_.shared_up.data(),
                    in_.shared_down.data()};
    call.x = in_.x.data(), call.ids = in_.ids.data(), call.route_weights = in_.weights.data();
    call.shared_scale = in_.shape.shared ? in_.scale.data() : nullptr;
    return call;
  }
};

inline float to_float(double v) { return static_cast<float>(v); }
using mok::cpu::to_float;

template <class V>
void compare(const char* name, const std::vector<V>& got, const std::vector<double>& want, double tolerance) {
  if (got.size() != want.size()) throw Failure(std::string(name) + " has another size than its reference");
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(to_float(got[i])) - want[i];
    error += difference * difference, norm += want[i] * want[i];
  }
  if (error == 0) return;
  const double relative = std::sqrt(error / norm);
  if (!(relative <= tolerance)) {
    throw Failure(std::string(name) + ": relative error " + std::to_string(relative) + ", limit " +
                  std::to_string(tolerance));
  }
}

template <class V>
void same_bits(const char* name, const std::vector<V>& got, const std::vector<V>& want) {
  if (got.size() != want.size() ||
      (!got.empty() && std::memcmp(got.data(), want.data(), got.size() * sizeof(V)) != 0)) {
    throw Failure(std::string(name) + ": other bits than with the first settings");
  }
}

template <class V, class Check>
void each(const Results<V>& r, const Check& check) {
  check("out", r.out, &Results<double>::out), check("dx", r.dx, &Results<double>::dx);
  check("d_gate_up", r.d_gate_up, &Results<double>::d_gate_up), check("d_down", r.d_down, &Results<double>::d_down);
  check("d_shared_gate", r.d_shared_gate, &Results<double>::d_shared_gate);
  check("d_shared_up", r.d_shared_up, &Results<double>::d_shared_up);
  check("d_shared_down", r.d_shared_down, &Results<double>::d_shared_down);
  check("d_weights", r.d_weights, &Results<double>::d_weights), check("d_scale", r.d_scale, &Results<double>::d_scale);
}

template <class T>
void same_results(const Results<T>& got, const Results<T>& want) {
  same_bits("out", got.out, want.out), same_bits("dx", got.dx, want.dx);
  same_bits("d_gate_up", got.d_gate_up, want.d_gate_up), same_bits("d_down", got.d_down, want.d_down);
  same_bits("d_shared_gate", got.d_shared_gate, want.d_shared_gate);
  same_bits("d_shared_up", got.d_shared_up, want.d_shared_up);
  same_bits("d_shared_down", got.d_shared_down, want.d_shared_down);
  same_bits("d_weights", got.d_weights, want.d_weights), same_bits("d_scale", got.d_scale, want.d_scale);
}

int64_t calls = 0;

// One problem with each of the settings: two calls in flight, backward in the opposite order and the last one twice.
template <class T>
void check(const Problem<T>& problem, int64_t max_tokens, const std::vector<Settings>& all, double tolerance) {
  const int64_t ranks = problem.ranks.size();
  const Shape& shape = problem.ranks[0].shape;
  const std::vector<Results<double>> reference = naive(problem);
  std::vector<Results<T>> first;
  for (const Settings& settings : all) {
    VirtualGroup group(ranks, max_tokens, shape.top_k, shape.hidden, sizeof(T), 120'000);
    std::vector<Results<T>> results(ranks), again(ranks), other(ranks), no_dx(ranks), frozen(ranks), neither(ranks);
    group.run_all([&](int64_t r) {
      RankCall<T> one(group[r], problem.ranks[r], problem.limit, settings);
      results[r].out = one.forward();
      RankCall<T> two(group[r], problem.ranks[r], problem.limit, settings);
      other[r].out = two.forward();
      const auto take = [](Results<T> backward, const std::vector<T>& out) {
        backward.out = out;
        return backward;
      };
      other[r] = take(two.backward({}), other[r].out);
      results[r] = take(one.backward({}), results[r].out);
      again[r] = take(one.backward({}), one.forward(false));
      no_dx[r] = two.backward({false, true, false}), frozen[r] = two.backward({true, false, true});
      neither[r] = two.backward({false, false, false});
    });
    calls += 9 * ranks;
    for (int64_t r = 0; r < ranks; ++r) {
      each(results[r], [&](const char* name, const auto& got, auto member) {
        compare(name, got, reference[r].*member, tolerance);
      });
      same_results(again[r], results[r]), same_results(other[r], results[r]);
      same_bits("d_gate_up without dx", no_dx[r].d_gate_up, results[r].d_gate_up);
      same_bits("d_down without dx", no_dx[r].d_down, results[r].d_down);
      same_bits("dx of frozen experts", frozen[r].dx, results[r].dx);
      same_bits("d_shared_up of frozen experts", frozen[r].d_shared_up, results[r].d_shared_up);
      same_bits("d_weights alone", neither[r].d_weights, results[r].d_weights);
      if (!first.empty()) same_results(results[r], first[r]);
    }
    if (first.empty()) first = results;
  }
}

// A rank that never comes: the others raise, naming it. One whose product throws: it raises that, and the others stop.
void check_failures() {
  Uniform random{7};
  const auto problem = make_problem<float>(random, {150, 40, 10}, 2, 64, 64, 64, 2, false, 1e30f);
  const Settings settings{2, 1, 2, 2};
  {
    VirtualGroup group(3, 150, 2, 64, sizeof(float), 3'000);
    std::vector<std::unique_ptr<RankCall<float>>> ranks(3);
    group.run_all([&](int64_t r) {
      ranks[r] = std::make_unique<RankCall<float>>(group[r], problem.ranks[r], problem.limit, settings);
    });
    const auto errors = group.run([&](int64_t r) {
      if (r != 2) ranks[r]->forward();
    });
    for (int64_t r = 0; r < 2; ++r) {
      try {
        if (errors[r]) std::rethrow_exception(errors[r]);
        throw Failure("a wait for a missing rank did not expire");
      } catch (const Expired& e) {
        if (e.waited != 2) throw Failure("the wait names rank " + std::to_string(e.waited) + ", missing is 2");
      }
    }
  }
  VirtualGroup group(3, 150, 2, 64, sizeof(float), 120'000);
  products_until_error = 5;
  std::atomic<int64_t> threw{0};
  const auto errors = group.run([&](int64_t r) {
    RankCall<float> call(group[r], problem.ranks[r], problem.limit, settings);
    try {
      call.forward();
    } catch (const std::runtime_error&) {
      ++threw;
      group[r].abort(r, Phase::kRefused);
      throw;
    }
  });
  if (threw != 1) throw Failure(std::to_string(threw.load()) + " ranks raised the product's error, not 1");
  for (const std::exception_ptr& error : errors) {
    if (!error) throw Failure("a rank finished a call that another had left");
  }
}

void run(uint64_t seed) {
  Uniform random{seed};
  constexpr float kNoLimit = std::numeric_limits<float>::infinity();
  // Ring, minibatch (row tiles), communication and compute threads; the last holds everything.
  const std::vector<Settings> settings = {{1, 1, 1, 1}, {2, 1, 2, 3}, {3, 2, 3, 2}, {5, 5, 1, 3}, {40, 7, 2, 2}};
  check(make_problem<float>(random, {300, 0, 131}, 3, 64, 64, 128, 3, false, kNoLimit), 300, settings, 2e-6);
  check(make_problem<float>(random, {260, 170}, 2, 64, 64, 0, 2, true, 0.5f), 300, settings, 2e-6);
  check(make_problem<bfloat16>(random, {300, 400}, 2, 128, 64, 64, 2, false, 0.7f), 512, settings, 1e-2);
  check(make_problem<bfloat16>(random, {700}, 1, 64, 64, 0, 1, false, kNoLimit), 700, settings, 1e-2);
  check_failures();
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: sanitize SEED\n"), 2;
  try {
    protocol::run(std::strtoull(argv[1], nullptr, 10));
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  std::printf("%lld calls\n", static_cast<long long>(protocol::calls));
  return 0;
}
