#!/bin/sh
# Compiles the CUDA kernels into one shared library without torch: benchmarks/build.sh [output folder]. Fails on ptxas warnings that
# say a kernel lost its registers or its asynchronous wgmma.
set -e
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build-cuda}
mkdir -p "$out"
log=$out/nvcc.log
: >"$log"
objects=
for source in "$root"/csrc/cuda/*.cu "$root"/csrc/cuda/sm90/*.cu; do
  object=$out/$(basename "$source" .cu).o
  nvcc -gencode arch=compute_90a,code=sm_90a -std=c++17 -O3 -Xptxas -v -Xcompiler -fPIC $MOK_NVCC_FLAGS -c "$source" -o "$object" >>"$log" 2>&1 || { cat "$log"; exit 1; }
  objects="$objects $object"
done
if grep -E 'C75(08|09|10|15)' "$log"; then echo "ptxas gave up setmaxnreg or asynchronous wgmma" >&2; exit 1; fi
nvcc -gencode arch=compute_90a,code=sm_90a -shared $objects -o "$out/libmok_cuda.so"
grep -E 'spill|registers|warning' "$log" || true
