// Threads that outlive a call. Each computes with one thread (its GEMMs are not split further), so the bits of a result
// do not depend on torch.set_num_threads, and communication threads run whether or not compute is busy.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace mok::cpu {

// std::condition_variable's wait became a newer symbol in GCC 12's library; POSIX's is in every glibc.
class Condition {
 public:
  void notify_one() { pthread_cond_signal(&condition_); }
  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& lock, const Predicate& predicate) {
    while (!predicate()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

class Pool {
 public:
  // Runs work(0) .. work(count - 1), each on its own thread, and returns when all have: concurrency is guaranteed, so
  // they may wait for each other. Rethrows the first exception, in the order of the index.
  static void run(int count, const std::function<void(int)>& work);

 private:
  struct Worker {
    std::mutex mutex;
    Condition changed;
    std::function<void()> job;
  };
  static Pool& instance();
  Worker* take();
  void give(Worker* worker);

  std::mutex mutex_;
  std::vector<Worker*> idle_;
};

}  // namespace mok::cpu
