#include "pool.h"

#include "gemm.h"

namespace mok::cpu {

// Never destroyed: idle workers wait on it until the process ends. A forked child has none of the parent's threads, so
// it starts with a pool of its own.
Pool& Pool::instance() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {
    pool = new Pool;
    owner = getpid();
  }
  return *pool;
}

Pool::Worker* Pool::take() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      Worker* worker = idle_.back();
      idle_.pop_back();
      return worker;
    }
  }
  auto* worker = new Worker;
  std::thread([worker] {
    compute_with_one_thread();
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(worker->mutex);
        worker->changed.wait(lock, [worker] { return static_cast<bool>(worker->job); });
        job.swap(worker->job);
      }
      job();
    }
  }).detach();
  return worker;
}

void Pool::give(Worker* worker) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(worker);
}

void Pool::run(int count, const std::function<void(int)>& work) {
  Pool& pool = instance();
  std::mutex mutex;
  Condition finished;
  int left = count;
  std::vector<std::exception_ptr> errors(count);
  for (int i = 0; i < count; ++i) {
    Worker* worker = pool.take();
    const std::lock_guard<std::mutex> lock(worker->mutex);
    worker->job = [&, i, worker] {
      try {
        work(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
      pool.give(worker);
      // Notified under the lock: `finished` lives on the caller's stack, which may go as soon as the lock is free.
      const std::lock_guard<std::mutex> guard(mutex);
      if (--left == 0) finished.notify_one();
    };
    worker->changed.notify_one();
  }
  std::unique_lock<std::mutex> lock(mutex);
  finished.wait(lock, [&] { return left == 0; });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace mok::cpu
