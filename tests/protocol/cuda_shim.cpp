// The task orders of the CUDA forward and backward (csrc/cuda/tasks.cuh and backward_tasks.cuh are host code too), for
// ctypes (test_cuda_order.py, test_cuda_backward_order.py). Units of the forward are given; where each of their tasks
// lands is what csrc/cuda/schedule.cu computes from the same functions.
#include <initializer_list>

#include "csrc/cuda/backward_tasks.cuh"

using namespace mok::cuda;

extern "C" {

// out: tiles of a minibatch, lag in minibatches.
void cuda_lag(int minibatch, int ring, int* out) {
  const Lag lag = choose_lag(minibatch, ring);
  out[0] = lag.minibatch, out[1] = lag.lag;
}

int cuda_lead(int wanted, int minibatch, int ring) { return dispatch_lead(wanted, minibatch, ring); }

int cuda_tasks_of(int pairs, int singles, int columns) { return tasks_of(pairs, singles, columns); }
int cuda_position(int pairs, int singles, int columns, int by_unit, int two, int column, int pairs_before, int singles_before) {
  return task_position(pairs, singles, columns, by_unit != 0, two != 0, column, pairs_before, singles_before);
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

// The backward's tasks in the order of their tickets, eleven numbers each: kind, two, short, first, last, replayed, expert,
// tile, column, row, count. sizes: tiles, experts, window, saved, chunk, shared chunk, tokens, then column
// tiles of replay, down, up, shared down, shared up, then whether by unit, then row pairs and columns of the five weight gradients. Returns how
// many there are, or -1 if `most` are not enough.
int cuda_backward_order(const int32_t* tile_prefix, const int32_t* unit_prefix, const int32_t* rows, const int* sizes,
                        int32_t* out, int most) {
  BackwardPlan p{};
  p.tile_prefix = tile_prefix, p.unit_prefix = unit_prefix, p.expert_rows = rows;
  int* const fields[] = {&p.tiles, &p.experts, &p.window, &p.saved, &p.chunk, &p.shared_chunk, &p.tokens,
                         &p.replay_columns, &p.down_columns, &p.up_columns, &p.shared_down_columns,
                         &p.shared_up_columns};
  for (int* field : fields) *field = *sizes++;
  p.by_unit = *sizes != 0, p.shared_by_unit = *sizes++ != 0;
  for (WgradGrid* grid : {&p.gate_up, &p.down, &p.shared_gate, &p.shared_up, &p.shared_down}) {
    grid->row_pairs = *sizes++, grid->columns = *sizes++;
  }
  BackwardWalk walk(p);
  BackwardTask task;
  int count = 0;
  for (int ticket = 0;; ++ticket) {
    if (!walk.take(ticket, &task)) continue;
    if (task.is_end()) return count;
    if (count == most) return -1;
    for (int value : {static_cast<int>(task.kind()), static_cast<int>(task.two()), static_cast<int>(task.is_short()),
                      static_cast<int>(task.first()), static_cast<int>(task.last()),
                      static_cast<int>(task.replayed()), task.expert(), task.tile(), task.column(), task.row(),
                      task.count}) {
      *out++ = value;
    }
    ++count;
  }
}

int cuda_run_of(const int32_t* tile_prefix, int window, int expert, int tile) {
  BackwardPlan p{};
  p.tile_prefix = tile_prefix, p.window = window;
  return p.run_of(expert, tile);
}

int cuda_carry_before(const int32_t* tile_prefix, int experts, int window, int macrobatch) {
  BackwardPlan p{};
  p.tile_prefix = tile_prefix, p.experts = experts, p.window = window;
  return p.carry_before(macrobatch);
}

}  // extern "C"
