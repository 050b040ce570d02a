// What each task reads and writes, and what must hold at both ends of a launch.
#pragma once

#include "machine.h"

namespace protocol {

inline void Rank::prologue() {
  const auto publish = [](Cell& cell, int64_t stamp) {
    if (cell.readers != 0) throw Violation("published rows overwritten under a peer's dispatch");
    cell.stamp = stamp;
  };
  const mok::Parts& parts = s_.parts;
  if (backward()) {
    publish(dy_, launch_);
    if (s_.replays()) publish(x_, call());
    dw_rounded_.assign(s_.experts * parts.wgrad, 0), dw_next_ = dw_rounded_;
    for (int64_t i = 0; i < s_.experts * parts.wgrad; ++i) dw_next_[i] = schedule_.prefix[i / parts.wgrad];
  } else {
    publish(x_, call());
    saved_.resize(call() + 1);
    saved().x.resize(s_.ring), saved().gate_up.resize(s_.ring * parts.gate_up);
    saved().shared.resize(s_.shared_tiles * parts.shared), saved().launch = launch_;
  }
  for (std::vector<int64_t>& counter : counters_) counter.assign(counter.size(), 0);
  completed_ = tickets_[0] = tickets_[1] = 0;
  ++epoch_;
}

inline void Rank::end_megakernel() {
  for (const auto* buffer : {&h_, &y_, &dy_ring_, &x_replay_, &gate_up_replay_, &d_gate_up_, &weighted_h_, &carry_,
                             &shared_grad_, &saved().x}) {
    for (const Cell& cell : *buffer) {
      if (cell.unread + cell.readers + cell.writers != 0) throw Violation("a slot's last contents were not read");
    }
  }
  if (!backward() || !s_.wgrad) return;
  for (int64_t i = 0; i < s_.experts * s_.parts.wgrad; ++i) {
    const int64_t expert = i / s_.parts.wgrad, begin = schedule_.prefix[expert], end = schedule_.prefix[expert + 1];
    if (dw_next_[i] != end || dw_rounded_[i] > 1 || (dw_rounded_[i] == 0 && begin < end)) {
      throw Violation("an expert's weight gradient is incomplete");
    }
  }
}

inline void Rank::epilogue() const {
  for (size_t route = 0; route < routed_.size(); ++route) {
    const bool masked = ids_[route] < 0;
    const auto check = [&](const std::vector<int64_t>& rows) {
      if (!masked && rows[route] != launch_) throw Violation("a route's row was not written");
      if (masked && rows[route] != -1) throw Violation("a masked route's row was written");
    };
    if (!backward() || s_.dgrad) check(routed_);
    if (backward()) check(dweight_);
  }
}

inline void Rank::list_accesses(const mok::Task& task, std::vector<Access>& out) {
  const mok::Parts& parts = s_.parts;
  const int64_t tile = task.index, slot = tile % (backward() ? s_.window : s_.ring), now = launch_;
  const auto read = [&](const char* name, std::vector<Cell>& cells, int64_t slot, int64_t blocks, int64_t stamp,
                        Mode mode = Mode::kRead) {
    for (int64_t b = 0; b < blocks; ++b) out.push_back({&cells.at(slot * blocks + b), mode, stamp, 0, 0, name});
  };
  const auto write = [&](const char* name, std::vector<Cell>& cells, int64_t cell, int64_t owed) {
    out.push_back({&cells.at(cell), Mode::kWrite, 0, stamp_of(now, tile), static_cast<int32_t>(owed), name});
  };
  const auto pull = [&](Cell Rank::*published, const char* name, int64_t stamp) {
    for (size_t r = 0; r < peers_.size(); ++r) {
      if ((schedule_.sources[tile] >> r & 1) == 0) continue;
      out.push_back({&(peers_[r]->*published), Mode::kReadSaved, stamp, 0, 0, name});
    }
  };
  const int64_t staged = mok::max_of(parts.down, parts.dgrad_up);
  const auto read_staged = [&](int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      out.push_back({&y_.at(tile % s_.y * staged + b), Mode::kRead, stamp_of(now, tile), 0, 0, "y"});
    }
  };
  const int64_t wgrads = s_.wgrad ? parts.wgrad : 0;

  switch (task.op) {
    case Op::kDispatch:
      pull(&Rank::x_, "X", call());
      write("x", saved().x, slot, parts.gate_up);
      break;
    case Op::kGateUp:
      read("x", saved().x, slot, 1, stamp_of(now, tile));
      write("gate/up", saved().gate_up, slot * parts.gate_up + task.part, 0);
      write("h", h_, tile % s_.h * parts.gate_up + task.part, parts.down);
      break;
    case Op::kDown:
      read("h", h_, tile % s_.h, parts.gate_up, stamp_of(now, tile));
      write("y", y_, tile % s_.y * staged + task.part, 1);
      break;
    case Op::kCombine: read_staged(parts.down); break;
    case Op::kShared: write("shared gate/up", saved().shared, tile * parts.shared + task.part, 0); break;
    case Op::kPull:
      pull(&Rank::dy_, "DY", now);
      write("dOut", dy_ring_, slot, parts.dgrad_down + wgrads);
      if (tile < s_.ring) break;
      pull(&Rank::x_, "X", call());
      write("replayed x", x_replay_, slot, parts.gate_up + wgrads);
      break;
    case Op::kReplay:
      read("replayed x", x_replay_, slot, 1, stamp_of(now, tile));
      write("replayed gate/up", gate_up_replay_, slot * parts.gate_up + task.part, parts.dgrad_down);
      break;
    case Op::kDgradDown:
      read("dOut", dy_ring_, slot, 1, stamp_of(now, tile));
      if (tile < s_.ring) {
        read("gate/up", saved().gate_up, tile, parts.gate_up, stamp_of(saved().launch, tile), Mode::kReadSaved);
      } else {
        read("replayed gate/up", gate_up_replay_, slot, parts.gate_up, stamp_of(now, tile));
      }
      write("d_gate_up", d_gate_up_, slot * parts.dgrad_down + task.part, (s_.dgrad ? parts.dgrad_up : 0) + wgrads);
      write("w*h", weighted_h_, slot * parts.dgrad_down + task.part, wgrads);
      break;
    case Op::kDgradUp:
      read("d_gate_up", d_gate_up_, slot, parts.dgrad_down, stamp_of(now, tile));
      write("y", y_, tile % s_.y * staged + task.part, 1);
      break;
    case Op::kPush: read_staged(parts.dgrad_up); break;
    case Op::kWgrad: {
      const int64_t begin = backward_.wgrad_begin(task.index, task.macrobatch);
      const int64_t end = backward_.wgrad_end(task.index, task.macrobatch);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t at = t % s_.window;
        read("dOut", dy_ring_, at, 1, stamp_of(now, t));
        read("d_gate_up", d_gate_up_, at, parts.dgrad_down, stamp_of(now, t));
        read("w*h", weighted_h_, at, parts.dgrad_down, stamp_of(now, t));
        if (t < s_.ring) {
          read("x", saved().x, t, 1, stamp_of(saved().launch, t), Mode::kReadSaved);
        } else {
          read("replayed x", x_replay_, at, 1, stamp_of(now, t));
        }
      }
      // The carry's stamp is the tile that comes next, so it also names the expert.
      const bool first = backward_.wgrad_rounds(task.index, task.macrobatch) == 1;
      const bool last = backward_.wgrad_last(task.index, task.macrobatch);
      if (first && last) break;
      const Mode mode = last ? Mode::kRead : first ? Mode::kWrite : Mode::kUpdate;
      out.push_back({&carry_[task.part], mode, stamp_of(now, begin), stamp_of(now, end), 1, "carry"});
      break;
    }
    case Op::kSharedDgrad:
      read("shared gate/up", saved().shared, tile, parts.shared, stamp_of(saved().launch, tile), Mode::kReadSaved);
      write("shared gradient", shared_grad_, tile * parts.shared_dgrad + task.part,
            s_.shared_wgrad ? parts.shared_wgrad : 0);
      break;
    case Op::kSharedWgrad:
      for (int64_t t = 0; t < s_.shared_tiles; ++t) {
        read("shared gradient", shared_grad_, t, parts.shared_dgrad, stamp_of(now, t));
      }
      break;
  }
}

}  // namespace protocol
