#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "gemm.h"
#include "stable.h"

// Of the runtimes torch brings along; null where its build has none.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}

namespace mok::cpu {

namespace {

torch::stable::Tensor view(const Matrix& m) {
  return torch::stable::from_blob(const_cast<float*>(m.data), {m.rows, m.cols}, {m.row_stride, m.col_stride},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  torch::headeronly::ScalarType::Float);
}

}  // namespace

void gemm(float* out, int64_t out_stride, const Matrix& a, const Matrix& b, bool accumulate) {
  const torch::stable::Tensor c = view({out, a.rows, b.cols, out_stride, 1});
  // The C shim and not the dispatcher, which can not take addmm's Scalar arguments.
  if (accumulate) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(c.get(), c.get(), view(a).get(), view(b).get(), 1.0, 1.0));
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(c.get(), view(a).get(), view(b).get()));
  }
}

void compute_with_one_thread() {
  // torch sets a thread's OpenMP and MKL thread counts the first time that thread asks for them: ask first, then set.
  torch::stable::get_num_threads();
  if (omp_set_num_threads) omp_set_num_threads(1);
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(1);
}

}  // namespace mok::cpu
