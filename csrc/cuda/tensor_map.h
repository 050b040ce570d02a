// Tensor maps for the copy engine. The driver's encoder is looked up at run time, so nothing links against libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mok::cuda {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess) f = nullptr;
    return reinterpret_cast<EncodeTiled>(f);
  }();
  return function;
}

inline bool encode_bf16(CUtensorMap& map, const void* base, int rank, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode_tiled() != nullptr &&
         encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// bf16 [count, width]; a box is box_rows rows of box_width columns. Rows beyond `count` read as zero.
inline bool make_row_map(CUtensorMap& map, const void* base, int64_t width, int64_t count, int box_width, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(width) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(box_rows)};
  return encode_bf16(map, base, 2, sizes, strides, box);
}

// bf16 [depth, count, width]; a box stays inside one of the `depth` matrices: rows beyond `count` read as zero, not as the next matrix.
inline bool make_weight_map(CUtensorMap& map, const void* base, int64_t width, int64_t count, int64_t depth, int box_width, int box_rows) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(count), static_cast<cuuint64_t>(depth)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(width) * 2, static_cast<cuuint64_t>(width) * count * 2};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(box_rows), 1};
  return encode_bf16(map, base, 3, sizes, strides, box);
}

// bf16 [depth, count, width], read in chunks of 64 columns: a box is `chunks` of them one behind the other, each of 64 rows. Rows and chunks
// beyond the matrix read as zero.
inline bool make_chunk_map(CUtensorMap& map, const void* base, int64_t width, int64_t count, int64_t depth, int chunks) {
  const cuuint64_t sizes[4] = {64, static_cast<cuuint64_t>(count), static_cast<cuuint64_t>(width) / 64, static_cast<cuuint64_t>(depth)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(width) * 2, 128, static_cast<cuuint64_t>(width) * count * 2};
  const cuuint32_t box[4] = {64, 64, static_cast<cuuint32_t>(chunks), 1};
  return encode_bf16(map, base, 4, sizes, strides, box);
}

}  // namespace mok::cuda
