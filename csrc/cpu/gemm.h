// The one matrix product that the CPU kernel uses. The extension implements it with torch's matmul (gemm_torch.cpp), the
// sanitizer builds with plain loops.
#pragma once

#include <cstdint>

namespace mok::cpu {

struct Matrix {
  const float* data;
  int64_t rows, cols, row_stride, col_stride;

  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
};

inline Matrix row_major(const float* data, int64_t rows, int64_t cols, int64_t row_stride) {
  return {data, rows, cols, row_stride, 1};
}

// out[a.rows, b.cols], with rows `out_stride` apart, becomes a @ b, plus itself if `accumulate`.
void gemm(float* out, int64_t out_stride, const Matrix& a, const Matrix& b, bool accumulate);

// Called once on each pool thread.
void compute_with_one_thread();

// Rows of every forward and dgrad product. torch's mm gives a row the same bits whatever the other rows hold as long as
// this number stays fixed (it does not at 1 or 2 rows against 64). 64 reaches 92 % of the rate of large products on
// AVX-512 and pads an expert's last rows by 32 on average.
constexpr int64_t kGemmRows = 64;

}  // namespace mok::cpu
