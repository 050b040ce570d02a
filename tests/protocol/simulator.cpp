// Protocol simulator: R ranks x workers run the task orders, counters and ring arithmetic of csrc/common in adversarial
// interleavings, forward and backward, over several launches.
//
//   simulator INTERLEAVINGS SEED [BUG [OP COUNTER SHORTFALL]]
//
// Prints one JSON object. Exit status 0: every interleaving kept every invariant; 1: one did not (`violation` says
// what, `seed` replays it alone); 2: wrong arguments.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "adversary.h"

namespace protocol {
namespace {

constexpr int64_t kSchedules = kPolicies;  // interleavings of each scenario, one for each policy

// How many interleavings had each property: a test asserts that none is rare.
void cover(const Scenario& s, std::map<std::string, int64_t>& coverage) {
  bool empty_expert = false, one_expert = false, no_tiles = false, no_tokens = false, masked = false, partial = false;
  bool uneven = false, carry = false, chained = false, replays = false, lag = false;
  for (int64_t r = 0; r < s.ranks; ++r) {
    const Schedule& schedule = s.schedules[r];
    const int64_t tiles = schedule.tiles();
    int64_t splits = 0;
    for (int64_t e = 0; e < s.experts; ++e) {
      const int64_t begin = schedule.prefix[e], end = schedule.prefix[e + 1];
      empty_expert |= begin == end && tiles > 0;
      one_expert |= end - begin == tiles && tiles > 1 && s.experts > 1;
      if (begin < end && begin / s.window != (end - 1) / s.window) ++splits;
    }
    carry |= splits > 0, chained |= splits > 1;
    no_tiles |= tiles == 0, no_tokens |= s.ids[r].empty();
    for (const int32_t id : s.ids[r]) masked |= id < 0;
    replays |= tiles > s.ring;
    partial |= tiles > s.ring && tiles % s.ring != 0;
    uneven |= tiles > s.ring && s.ring % s.minibatch != 0;
    const mok::Slots slots{{{tiles, s.ring}, s.minibatch}, s.h, s.y};
    lag |= tiles > s.ring && mok::longest_lag(slots) > 0 && s.lag >= mok::longest_lag(slots);
  }
  const auto count = [&](const char* name, bool holds) { coverage[name] += holds ? kSchedules : 0; };
  count("several ranks", s.ranks > 1);
  count("an expert without rows", empty_expert);
  count("one expert takes everything", one_expert);
  count("a rank without tiles", no_tiles);
  count("a rank without tokens", no_tokens);
  count("masked routes", masked);
  count("replay", replays);
  count("partial last macrobatch", partial);
  count("minibatch does not divide the ring", uneven);
  count("the backward's window is smaller than the ring", s.window < s.ring);
  count("so is it, with replay", s.window < s.ring && replays);
  count("ring of one tile", s.ring == 1 && replays);
  count("ring holds everything", !replays);
  count("an expert split between macrobatches", carry);
  count("two split experts", chained);
  count("lag 0", s.lag == 0);
  count("longest lag with slots reused", lag);
  count("h of one tile", s.h == 1);
  count("y of one tile", s.y == 1);
  count("several parts", s.parts.gate_up > 1 && s.parts.dgrad_down > 1);
  count("no dgrad", !s.dgrad);
  count("no wgrad", !s.wgrad);
  count("neither dgrad nor wgrad", !s.dgrad && !s.wgrad);
  count("shared expert", s.shared_tiles > 0);
  count("one worker of each role", s.comm_workers == 1 && s.compute_workers == 1);
  count("several workers of each role", s.comm_workers > 1 && s.compute_workers > 1);
  count("several calls in flight", s.launches.size() == 4);
  count("second backward", s.launches.size() == 3);
}

int run(int64_t interleavings, uint64_t seed, const Rules& rules) {
  std::map<std::string, int64_t> coverage;
  int64_t ran = 0, steps = 0;
  while (ran < interleavings) {
    const uint64_t scenario_seed = seed + ran / kSchedules;
    Random random{scenario_seed * 0x2545f4914f6cdd1du};
    const Scenario scenario = make_scenario(random);
    cover(scenario, coverage);
    for (int64_t policy = 0; policy < kSchedules; ++policy, ++ran) {
      try {
        steps += Adversary(scenario, rules, static_cast<Policy>(policy), random.next()).run();
      } catch (const Violation& violation) {
        std::printf("{\"interleavings\": %lld, \"violation\": \"%s\", \"seed\": %llu, \"policy\": %lld}\n",
                    static_cast<long long>(ran), violation.what(), static_cast<unsigned long long>(scenario_seed),
                    static_cast<long long>(policy));
        return 1;
      }
    }
  }
  std::printf("{\"interleavings\": %lld, \"steps\": %lld, \"violation\": null, \"coverage\": {",
              static_cast<long long>(ran), static_cast<long long>(steps));
  const char* separator = "";
  for (const auto& [name, count] : coverage) {
    std::printf("%s\"%s\": %lld", separator, name.c_str(), static_cast<long long>(count));
    separator = ", ";
  }
  std::printf("}}\n");
  return 0;
}

}  // namespace
}  // namespace protocol

int main(int argc, char** argv) {
  protocol::Rules rules;
  if (argc < 3 || (argc > 3 && !protocol::Rules::parse(argv[3], &rules.bug))) {
    std::fprintf(stderr, "usage: simulator INTERLEAVINGS SEED [BUG [OP COUNTER SHORTFALL]]\n");
    return 2;
  }
  if (rules.bug == protocol::Bug::kMutatedWait) {
    if (argc != 7) return 2;
    rules.mutated_op = static_cast<mok::Op>(std::atoi(argv[4]));
    rules.mutated_counter = static_cast<mok::Counter>(std::atoi(argv[5]));
    rules.shortfall = std::atoll(argv[6]);
  }
  return protocol::run(std::atoll(argv[1]), std::strtoull(argv[2], nullptr, 10), rules);
}
