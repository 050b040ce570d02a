// Memory as the simulator sees it: cells that know whose data they hold and who is using them right now.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace protocol {

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One slot (or one column block of a slot). A stamp says which launch wrote it, for which tile.
struct Cell {
  int64_t stamp = -1;
  int32_t readers = 0;  // reads in flight
  int32_t writers = 0;  // writes in flight
  int32_t unread = 0;   // reads the current contents are still owed
};

inline int64_t stamp_of(int64_t launch, int64_t tile) {
  return launch << 32 | tile;
}

enum class Mode { kRead, kReadSaved, kWrite, kUpdate };  // kReadSaved: contents may be read any number of times

struct Access {
  Cell* cell;
  Mode mode;
  int64_t expected;  // stamp it must hold (reads, update)
  int64_t stamp;     // stamp it gets (write, update)
  int32_t owed;      // reads the new contents are owed (write, update)
  const char* buffer;
};

inline void fail(const Access& access, const char* what) {
  const auto name = [](int64_t stamp) {
    if (stamp < 0) return std::string("nothing");
    return "launch " + std::to_string(stamp >> 32) + " tile " + std::to_string(stamp & 0xffffffff);
  };
  throw Violation(std::string(access.buffer) + ": " + what + " (holds " + name(access.cell->stamp) + ", " +
                  (access.mode == Mode::kWrite ? "to get " + name(access.stamp) : "expected " + name(access.expected)) +
                  ", " + std::to_string(access.cell->readers) + " readers, " + std::to_string(access.cell->unread) +
                  " reads owed)");
}

inline void check_read(const Access& access) {
  if (access.cell->writers != 0 && access.mode != Mode::kUpdate) fail(access, "read while it is written");
  if (access.cell->stamp != access.expected) fail(access, "read of another tile's data");
}

inline void begin(const Access& access) {
  Cell& cell = *access.cell;
  if (access.mode == Mode::kRead || access.mode == Mode::kReadSaved) {
    check_read(access);
    ++cell.readers;
    return;
  }
  if (cell.readers != 0) fail(access, "overwritten under a reader");
  if (cell.writers != 0) fail(access, "written by two tasks at once");
  if (access.mode == Mode::kUpdate) {
    check_read(access);
  } else if (cell.unread != 0) {
    fail(access, "overwritten before its last reader ran");
  }
  ++cell.writers;
}

inline void verify(const Access& access) {
  if (access.mode != Mode::kWrite) check_read(access);
}

inline void finish(const Access& access) {
  Cell& cell = *access.cell;
  switch (access.mode) {
    case Mode::kRead:
      if (--cell.unread < 0) fail(access, "read more often than announced");
      [[fallthrough]];
    case Mode::kReadSaved: --cell.readers; break;
    case Mode::kWrite:
    case Mode::kUpdate: --cell.writers, cell.stamp = access.stamp, cell.unread = access.owed; break;
  }
}

}  // namespace protocol
