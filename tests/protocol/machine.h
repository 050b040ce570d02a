// One rank of the simulated machine: its stream of launches (prologue, barrier, megakernel, barrier, epilogue), the
// workers of the megakernel, and every buffer they share.
#pragma once

#include <vector>

#include "cells.h"
#include "rules.h"
#include "scenario.h"

namespace protocol {

using mok::Op;

// A worker takes tickets in order. Waiting, the start of its reads, the end of its reads and the completion of its
// writes are separate steps, so anything may happen on other workers between them.
struct Worker {
  enum State { kIdle, kWaiting, kReading, kWriting } state = kIdle;
  bool comm = false;
  int64_t ticket = -1;
  mok::Task task{};
  mok::Wait waits[mok::kMaxWaits];
  int64_t wait_count = 0;
  std::vector<Access> accesses;

  bool running() const { return state == kReading || state == kWriting; }
};

class Rank {
 public:
  std::vector<Worker> workers;

  Rank(const Scenario& scenario, const Rules& rules, int64_t rank, std::vector<Rank*>& peers)
      : s_(scenario), rules_(rules), peers_(peers), schedule_(scenario.schedules[rank]) {
    const mok::Ring ring{schedule_.tiles(), s_.ring};
    const mok::Ring window{schedule_.tiles(), s_.window};
    forward_slots_ = {{ring, s_.minibatch}, s_.h, s_.y};
    backward_slots_ = {{window, mok::min_of(s_.minibatch, s_.window)}, s_.h, s_.y};
    const int64_t lag = rules.forward_lag(s_.lag, forward_slots_);
    forward_ = {ring, lag, s_.shared_tiles, s_.parts};
    backward_ = {window,  s_.ring, s_.lag,          s_.shared_tiles,          s_.parts, s_.dgrad,
                 s_.wgrad, s_.shared_wgrad, schedule_.prefix.data(), s_.experts};
    for (int64_t i = 0; i < s_.comm_workers + s_.compute_workers; ++i) {
      workers.emplace_back();
      workers.back().comm = i < s_.comm_workers;
    }
    routed_.assign(s_.ids[rank].size(), -1), dweight_ = routed_;
    ids_ = s_.ids[rank].data();
    h_.resize(s_.h * s_.parts.gate_up);
    y_.resize(s_.y * mok::max_of(s_.parts.down, s_.parts.dgrad_up));
    dy_ring_.resize(s_.window), x_replay_.resize(s_.window), gate_up_replay_.resize(s_.window * s_.parts.gate_up);
    d_gate_up_.resize(s_.window * s_.parts.dgrad_down), weighted_h_ = d_gate_up_;
    carry_.resize(s_.parts.wgrad);
    shared_grad_.resize(s_.shared_tiles * s_.parts.shared_dgrad);
    for (int64_t e = 0; e < mok::kCounters; ++e) {
      const auto length = [&](const mok::Slots& slots) {
        return mok::counter_length(static_cast<mok::Counter>(e), slots.minibatches, s_.experts, s_.shared_tiles);
      };
      counters_[e].assign(mok::max_of(length(forward_slots_), length(backward_slots_)), 0);
    }
  }

  bool done() const { return launch_ == static_cast<int64_t>(s_.launches.size()); }
  bool in_megakernel() const { return stage_ == kMegakernel; }

  // Each step returns false if it has to wait.
  bool step_stream() {
    if (done()) return false;
    switch (stage_) {
      case kPrologue: prologue(); break;
      case kBefore:
      case kAfter:
        if (stage_ == kAfter && rules_.bug == Bug::kNoBarrier) break;
        for (const Rank* peer : peers_) {
          if (peer->epoch_ < epoch_) return false;
        }
        break;
      case kMegakernel:
        if (completed_ < forward_or_backward_count(true) + forward_or_backward_count(false)) return false;
        end_megakernel();
        ++epoch_;
        break;
      case kEpilogue: epilogue(); break;
    }
    stage_ = static_cast<Stage>((stage_ + 1) % 5);
    if (stage_ == kPrologue) ++launch_;
    return true;
  }

  bool step_worker(Worker& worker) {
    if (stage_ != kMegakernel) return false;
    switch (worker.state) {
      case Worker::kIdle: return take_ticket(worker);
      case Worker::kWaiting:
        for (int64_t i = 0; i < worker.wait_count; ++i) {
          if (!holds(worker.waits[i])) return false;
        }
        worker.accesses.clear();
        list_accesses(worker.task, worker.accesses);
        for (const Access& access : worker.accesses) begin(access);
        worker.state = Worker::kReading;
        return true;
      case Worker::kReading:
        for (const Access& access : worker.accesses) verify(access);
        worker.state = Worker::kWriting;
        return true;
      case Worker::kWriting: complete(worker); return true;
    }
    return false;
  }

 private:
  enum Stage { kPrologue, kBefore, kMegakernel, kAfter, kEpilogue };
  struct Saved {  // what a forward keeps for its backward
    std::vector<Cell> x, gate_up, shared;
    int64_t launch;
  };

  const Scenario& s_;
  const Rules& rules_;
  std::vector<Rank*>& peers_;
  const Schedule& schedule_;
  mok::Slots forward_slots_, backward_slots_;
  mok::ForwardOrder forward_;
  mok::BackwardOrder<int64_t> backward_;

  int64_t launch_ = 0, epoch_ = 0, completed_ = 0, tickets_[2] = {0, 0};
  Stage stage_ = kPrologue;
  std::vector<int64_t> counters_[mok::kCounters];

  Cell x_, dy_;                           // published to peers
  const int32_t* ids_;
  std::vector<int64_t> routed_, dweight_;  // launch that wrote the row of each route; peers write them
  std::vector<Saved> saved_;              // [call]
  std::vector<Cell> h_, y_, dy_ring_, x_replay_, gate_up_replay_, d_gate_up_, weighted_h_, carry_, shared_grad_;
  std::vector<int64_t> dw_next_, dw_rounded_;  // [expert, part] tile that comes next, roundings

  bool backward() const { return s_.launches[launch_].backward; }
  const mok::Slots& slots() const { return backward() ? backward_slots_ : forward_slots_; }
  int64_t call() const { return s_.launches[launch_].call; }
  Saved& saved() { return saved_[call()]; }

  int64_t forward_or_backward_count(bool comm) const {
    if (backward()) return comm ? backward_.comm_count() : backward_.compute_count();
    return comm ? forward_.comm_count() : forward_.compute_count();
  }

  bool holds(const mok::Wait& wait) const {
    const std::vector<int64_t>& counter = counters_[static_cast<int64_t>(wait.counter)];
    for (int64_t i = wait.begin; i < wait.end; ++i) {
      if (counter.at(i) < wait.target) return false;
    }
    return true;
  }

  bool take_ticket(Worker& worker) {
    int64_t& next = tickets_[worker.comm];
    if (next >= forward_or_backward_count(worker.comm)) return false;
    worker.ticket = next++;
    if (backward()) {
      worker.task = worker.comm ? backward_.comm(worker.ticket) : backward_.compute(worker.ticket);
      worker.wait_count = mok::backward_waits(backward_, backward_slots_, worker.task, worker.waits);
    } else {
      worker.task = worker.comm ? rules_.forward_comm(forward_, worker.ticket) : forward_.compute(worker.ticket);
      worker.wait_count = mok::forward_waits(forward_, forward_slots_, worker.task, worker.waits);
    }
    worker.wait_count = rules_.distort(slots(), worker.task, worker.waits, worker.wait_count);
    worker.state = Worker::kWaiting;
    return true;
  }

  void complete(Worker& worker) {
    const mok::Task& task = worker.task;
    for (const Access& access : worker.accesses) finish(access);
    if (task.op == Op::kCombine || task.op == Op::kPush) write_rows(task.index, &Rank::routed_);
    if (task.op == Op::kWgrad) accumulate(task);
    const mok::Signal signal = rules_.signal(slots(), task);
    if (signal.counter != mok::Counter::kNone) {
      const int64_t count = ++counters_[static_cast<int64_t>(signal.counter)].at(signal.index);
      // The last part of the tile sums the router partials and stores them with their owners.
      if (task.op == Op::kDgradDown && count == s_.parts.dgrad_down) write_rows(task.index, &Rank::dweight_);
    }
    ++completed_;
    worker.state = Worker::kIdle, worker.ticket = -1;
  }

  void write_rows(int64_t tile, std::vector<int64_t> Rank::*rows) {
    for (int64_t i = tile * kTileRows; i < (tile + 1) * kTileRows; ++i) {
      const int64_t row = schedule_.rows[i];
      if (row == mok::kPaddingRow) continue;
      int64_t& cell = (peers_[mok::row_rank(row)]->*rows)[mok::row_route(row)];
      if (cell == launch_) throw Violation("a route's row is written twice");
      cell = launch_;
    }
  }

  void accumulate(const mok::Task& task) {
    const int64_t i = task.index * s_.parts.wgrad + task.part;
    if (dw_rounded_[i] != 0) throw Violation("wgrad after it was rounded");
    for (int64_t t = backward_.wgrad_begin(task.index, task.macrobatch);
         t < backward_.wgrad_end(task.index, task.macrobatch); ++t) {
      if (dw_next_[i]++ != t) throw Violation("wgrad sees its tiles out of order");
    }
    if (!backward_.wgrad_last(task.index, task.macrobatch)) return;
    if (dw_next_[i] != schedule_.prefix[task.index + 1]) throw Violation("wgrad rounded before its last tile");
    ++dw_rounded_[i];
  }

  void prologue();
  void end_megakernel();
  void epilogue() const;
  void list_accesses(const mok::Task& task, std::vector<Access>& out);
};

}  // namespace protocol
