// Chooses, step by step, which worker or stream of the whole group moves next; seed and policy make the schedule.
#pragma once

#include "buffers.h"

namespace protocol {

enum class Policy {
  kRandom,
  kStarve,       // one worker moves only when nothing else can
  kExhaust,      // one worker runs until it blocks
  kReverse,      // everything that can start starts, then the latest ticket completes first
  kHold,         // tasks stop in the middle of their reads until nothing else can move
  kCommFirst,    // compute moves only when communication cannot
  kComputeFirst,
  kRankLast,     // one rank moves only when the others cannot
};
constexpr int64_t kPolicies = 8;

class Adversary {
 public:
  Adversary(const Scenario& scenario, const Rules& rules, Policy policy, uint64_t seed)
      : policy_(policy), random_{seed} {
    storage_.reserve(scenario.ranks);
    for (int64_t r = 0; r < scenario.ranks; ++r) {
      storage_.emplace_back(scenario, rules, r, ranks_);
      ranks_.push_back(&storage_.back());
    }
    for (Rank* rank : ranks_) {
      actors_.push_back({rank, nullptr, false});
      for (Worker& worker : rank->workers) actors_.push_back({rank, &worker, false});
    }
    victim_ = random_.below(actors_.size());
  }

  // Throws Violation; returns the number of steps.
  int64_t run() {
    int64_t steps = 0;
    while (!finished()) {
      if (!move()) throw Violation("deadlock");
      ++steps;
    }
    return steps;
  }

 private:
  struct Actor {
    Rank* rank;
    Worker* worker;  // null: the rank's stream
    bool held;
  };

  std::vector<Rank> storage_;
  std::vector<Rank*> ranks_;
  std::vector<Actor> actors_;
  Policy policy_;
  Random random_;
  int64_t victim_, current_ = 0;

  bool finished() const {
    for (const Rank* rank : ranks_) {
      if (!rank->done()) return false;
    }
    return true;
  }

  bool step(Actor& actor) {
    if (actor.worker == nullptr) return actor.rank->step_stream();
    const bool was_running = actor.worker->running();
    if (!actor.rank->step_worker(*actor.worker)) return false;
    actor.held = policy_ == Policy::kHold && !was_running && actor.worker->running() && random_.chance(30);
    return true;
  }

  // Actors put back move only when no other actor can.
  bool put_back(int64_t i) const {
    const Actor& actor = actors_[i];
    switch (policy_) {
      case Policy::kStarve: return i == victim_;
      case Policy::kReverse: return actor.worker != nullptr && actor.worker->running();
      case Policy::kHold: return actor.held;
      case Policy::kCommFirst: return actor.worker != nullptr && !actor.worker->comm;
      case Policy::kComputeFirst: return actor.worker != nullptr && actor.worker->comm;
      case Policy::kRankLast: return actor.rank == actors_[victim_].rank;
      default: return false;
    }
  }

  bool move_any(bool back) {
    const int64_t n = actors_.size(), start = random_.below(n);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t i = (start + k) % n;
      if (put_back(i) == back && step(actors_[i])) return current_ = i, true;
    }
    return false;
  }

  bool move_latest_ticket() {
    Actor* latest = nullptr;
    for (Actor& actor : actors_) {
      if (actor.worker == nullptr || !actor.worker->running()) continue;
      if (latest == nullptr || actor.worker->ticket > latest->worker->ticket) latest = &actor;
    }
    return latest != nullptr && step(*latest);
  }

  bool move() {
    if (policy_ == Policy::kExhaust && step(actors_[current_])) return true;
    if (random_.chance(5) && step(actors_[random_.below(actors_.size())])) return true;
    if (move_any(false)) return true;
    if (policy_ == Policy::kReverse) return move_latest_ticket();
    return move_any(true);
  }
};

}  // namespace protocol
