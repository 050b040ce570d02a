// The counters and tickets of one call, and the loop in which each thread takes its tasks.
#pragma once

#include <memory>
#include <vector>

#include "../common/waits.h"
#include "pool.h"
#include "sync.h"

namespace mok::cpu {

// Order is ForwardOrder or BackwardOrder.
template <class Order>
class Team {
 public:
  Team(const Group& group, Phase phase, const Order& order, const Slots& slots, int64_t experts)
      : group_(group), phase_(phase), order_(order), slots_(slots) {
    for (int64_t c = 0; c < kCounters; ++c) {
      const int64_t length =
          counter_length(static_cast<Counter>(c), slots.minibatches, experts, order.shared_tiles);
      counters_[c].reset(new std::atomic<int32_t>[max_of<int64_t>(length, 1)]());
    }
  }

  // Runs every task: make_worker() is called on each thread and returns what does one task. Whatever a thread throws
  // stops the others and is rethrown here.
  template <class MakeWorker>
  void run(int64_t comm_threads, int64_t compute_threads, const MakeWorker& make_worker) {
    const int64_t comm = order_.comm_count(), compute = order_.compute_count();
    comm_threads = min_of(comm_threads, comm);
    compute_threads = min_of(compute_threads, compute);
    Pool::run(static_cast<int>(comm_threads + compute_threads), [&](int thread) {
      try {
        auto worker = make_worker();
        if (thread < comm_threads) {
          for (int64_t i; (i = comm_ticket_.fetch_add(1)) < comm;) perform(worker, order_.comm(i));
        } else {
          for (int64_t i; (i = compute_ticket_.fetch_add(1)) < compute;) perform(worker, order_.compute(i));
        }
      } catch (const Stopped&) {  // another thread's exception is the one to report
      } catch (...) {
        failed_.store(true, std::memory_order_release);
        throw;
      }
    });
  }

 private:
  struct Stopped {};

  template <class Worker>
  void perform(Worker& worker, const Task& task) {
    Wait waits[kMaxWaits];
    const int64_t count = waits_of(order_, task, waits);
    for (int64_t w = 0; w < count; ++w) {
      for (int64_t i = waits[w].begin; i < waits[w].end; ++i) wait(waits[w].counter, i, waits[w].target);
    }
    worker.perform(task);
    const Signal signal = signal_of(slots_.minibatches, task);
    if (signal.counter != Counter::kNone) counter(signal.counter, signal.index).fetch_add(1, std::memory_order_acq_rel);
  }
  int64_t waits_of(const ForwardOrder& order, const Task& task, Wait* waits) const {
    return forward_waits(order, slots_, task, waits);
  }
  template <class Index>
  int64_t waits_of(const BackwardOrder<Index>& order, const Task& task, Wait* waits) const {
    return backward_waits(order, slots_, task, waits);
  }

  std::atomic<int32_t>& counter(Counter which, int64_t index) const {
    return counters_[static_cast<int64_t>(which)][index];
  }
  void wait(Counter which, int64_t index, int64_t target) const {
    const std::atomic<int32_t>& count = counter(which, index);
    if (count.load(std::memory_order_acquire) >= target) return;
    const Deadline deadline(group_.timeout_ns);
    Backoff backoff;
    while (count.load(std::memory_order_acquire) < target) {
      if (failed_.load(std::memory_order_acquire)) throw Stopped{};
      group_.check();
      if (deadline.passed()) group_.expire(group_.rank, phase_);
      backoff.pause();
    }
  }

  const Group& group_;
  const Phase phase_;
  const Order order_;
  const Slots slots_;
  std::unique_ptr<std::atomic<int32_t>[]> counters_[kCounters];
  std::atomic<int64_t> comm_ticket_{0}, compute_ticket_{0};
  std::atomic<bool> failed_{false};
};

// work(i) for every i in [0, count), in chunks over the compute threads.
template <class Work>
void parallel_for(int64_t threads, int64_t count, const Work& work) {
  constexpr int64_t kChunk = 64;
  const int64_t chunks = ceil_div(count, kChunk);
  std::atomic<int64_t> ticket{0};
  Pool::run(static_cast<int>(min_of(threads, chunks)), [&](int) {
    for (int64_t c; (c = ticket.fetch_add(1)) < chunks;) {
      for (int64_t i = c * kChunk; i < min_of(count, (c + 1) * kChunk); ++i) work(i);
    }
  });
}

// work(token, sum) for every token; sum has `width` values and belongs to the thread.
template <class Work>
void sum_tokens(int64_t threads, int64_t tokens, int64_t width, const Work& work) {
  parallel_for(threads, tokens, [&](int64_t token) {
    thread_local std::vector<float> sum;
    sum.assign(width, 0.0f);
    work(token, sum);
  });
}

}  // namespace mok::cpu
