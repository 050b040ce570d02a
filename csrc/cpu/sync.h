// Waiting, between the threads of one rank (counters) and between ranks (epoch barrier). Every wait is bounded.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>

#include "../common/layout.h"

namespace mok::cpu {

// What a rank was doing when a wait expired; the names are in phase_name (ops.cpp).
enum class Phase : int32_t {
  kTokens = 1,
  kSchedule,
  kForwardBegin,
  kForwardEnd,
  kBackwardBegin,
  kBackwardEnd,
  kForwardTasks,
  kBackwardTasks,
  kRefused,
  kOutOfStep,
  kOther = 1000,  // and above: waits of another device, by its own numbers
};

// A wait expired here, or a peer said that one expired there.
struct Expired : std::exception {
  int64_t origin;  // rank whose wait expired
  int64_t waited;  // rank it waited for
  Phase phase;
  Expired(int64_t origin, int64_t waited, Phase phase) : origin(origin), waited(waited), phase(phase) {}
  const char* what() const noexcept override { return "a bounded wait expired"; }
};

// The control page of a rank, in memory that every rank of the group maps. Zeroed before first use.
struct Control {
  std::atomic<uint32_t> epoch;                // barriers this rank has entered
  std::atomic<uint64_t> arrived[kMaxRanks];   // arrived[r]: the phase and epoch that rank r reached, written by rank r
  std::atomic<int64_t> abort;                 // 0, or what expired first: origin, waited and phase, packed
  std::atomic<int64_t> tokens[2];             // tokens of this rank, banked by epoch
  std::atomic<int64_t> wants_dx[2];           // whether this rank's x has a gradient, banked by epoch
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "the control page is shared between processes");
constexpr int64_t kControlBytes = 4096;
static_assert(sizeof(Control) <= kControlBytes, "one page a rank");

// Spins briefly, then yields, then sleeps, longer each time: ranks and threads often outnumber cores. A sleep is at most
// a quarter of the wait so far, and at most a millisecond.
class Backoff {
 public:
  void pause() {
    if (count_ < 64) {
      ++count_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (count_ < 96) {
      ++count_;
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(sleep_));
      sleep_ = min_of<int64_t>(1000, sleep_ * 5 / 4);
    }
  }

 private:
  int count_ = 0;
  int64_t sleep_ = 50;
};

class Deadline {
 public:
  explicit Deadline(int64_t timeout_ns) : end_(std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns)) {}
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

// One rank's view of its group: who it is and where everyone's memory is mapped.
struct Group {
  int64_t rank = 0, ranks = 1;
  int64_t max_tokens = 0;   // Nmax
  int64_t timeout_ns = 0;
  Control* control[kMaxRanks] = {};
  char* data[kMaxRanks] = {};

  Control& own() const { return *control[rank]; }

  static int64_t pack(int64_t origin, int64_t waited, Phase phase) {
    return static_cast<int64_t>(phase) << 32 | (origin + 1) << 16 | (waited + 1);
  }
  void check() const {
    const int64_t word = own().abort.load(std::memory_order_acquire);
    if (word) throw Expired((word >> 16 & 0xffff) - 1, (word & 0xffff) - 1, static_cast<Phase>(word >> 32));
  }
  // Poisons the group: whatever each rank calls next, or is waiting in, raises.
  void abort(int64_t waited, Phase phase) const {
    for (int64_t r = 0; r < ranks; ++r) {
      int64_t none = 0;
      control[r]->abort.compare_exchange_strong(none, pack(rank, waited, phase), std::memory_order_acq_rel);
    }
  }
  [[noreturn]] void expire(int64_t waited, Phase phase) const {
    abort(waited, phase);
    check();
    throw Expired(rank, waited, phase);
  }

  // Epoch the next barrier will have: its parity picks the bank of what is published before it. A rank can be one
  // barrier ahead of a peer that still reads, never two.
  uint32_t next_epoch() const { return own().epoch.load(std::memory_order_relaxed) + 1; }

  void barrier(Phase phase) const {
    check();
    const uint32_t epoch = own().epoch.load(std::memory_order_relaxed) + 1;
    own().epoch.store(epoch, std::memory_order_relaxed);
    const uint64_t mine = static_cast<uint64_t>(phase) << 32 | epoch;
    for (int64_t r = 0; r < ranks; ++r) control[r]->arrived[rank].store(mine, std::memory_order_release);
    const Deadline deadline(timeout_ns);
    for (int64_t r = 0; r < ranks; ++r) {
      Backoff backoff;
      uint64_t theirs;
      while (static_cast<int32_t>(static_cast<uint32_t>(theirs = own().arrived[r].load(std::memory_order_acquire)) - epoch) < 0) {
        check();
        if (deadline.passed()) expire(r, phase);
        backoff.pause();
      }
      // A rank that failed in one layer and went on to the next meets the others at another barrier than theirs.
      if (static_cast<uint32_t>(theirs) == epoch && theirs != mine) expire(r, Phase::kOutOfStep);
    }
  }
};

}  // namespace mok::cpu
