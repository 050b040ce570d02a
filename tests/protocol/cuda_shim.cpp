// The task order of the CUDA forward (csrc/cuda/tasks.cuh is host code too), for ctypes (test_cuda_order.py). Units are
// given; where each of their tasks lands is what csrc/cuda/schedule.cu computes from the same functions.
#include "csrc/cuda/tasks.cuh"

using namespace mok::cuda;

extern "C" {

// out: tiles of a minibatch, lag in minibatches.
void cuda_lag(int minibatch, int ring, int* out) {
  const Lag lag = choose_lag(minibatch, ring);
  out[0] = lag.minibatch, out[1] = lag.lag;
}

int cuda_tasks_of(int pairs, int singles, int columns) { return tasks_of(pairs, singles, columns); }
int cuda_position(int pairs, int singles, int column, int pairs_before, int singles_before) {
  return task_position(pairs, singles, column, pairs_before, singles_before);
}

// First task of: gate+up of minibatch m (kind 0), its down (1), the shared expert's down (3). before[m]: tasks in
// minibatches 0 .. m-1.
int cuda_base(int kind, int m, int shared_gate_up, int shared_down, int lag, int minibatches, const int* gate_up_before,
              const int* down_before) {
  const TaskOrder order{shared_gate_up, shared_down, lag, minibatches};
  const auto gate_up = [&](int i) { return gate_up_before[i]; };
  const auto down = [&](int i) { return down_before[i]; };
  if (kind == kTaskGateUp) return order.gate_up_base(m, gate_up, down);
  return kind == kTaskDown ? order.down_base(m, gate_up, down) : order.shared_down_base(gate_up);
}

}  // extern "C"
