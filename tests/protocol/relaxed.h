// Included before everything else in two sanitizer builds: the kernel's orderings are weakened behind its back, and
// ThreadSanitizer has to report the races this makes. RELAXED_SIGNALS: what a finished task adds to its counter no
// longer publishes what it wrote. RELAXED_BARRIER: nor does a rank's arrival at a barrier.
#pragma once

// Every standard header that the sources use, so that only the kernel sees the macros.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(RELAXED_SIGNALS)
#define memory_order_acq_rel memory_order_relaxed
#elif defined(RELAXED_BARRIER)
#define memory_order_release memory_order_relaxed
#endif
