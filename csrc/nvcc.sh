#!/bin/sh
# Compiles one CUDA source: nvcc.sh NVCC SOURCE OBJECT DEPENDENCIES FLAGS... Used by CMakeLists.txt.
#
# ptxas warnings C7508-C7510 and C7515 say that setmaxnreg was ignored or wgmma serialised: the kernel would still be right, at a fraction of its
# speed, so they fail the build. References to CUDA's runtime become weak: runtime.cpp says why.
set -e
nvcc=$1 source=$2 object=$3 dependencies=$4
shift 4
if ! "$nvcc" "$@" -Xptxas -v -MD -MF "$dependencies" -MT "$object" -c "$source" -o "$object" >"$object.log" 2>&1; then
  cat "$object.log" >&2
  exit 1
fi
if grep -E 'C75(08|09|10|15)' "$object.log" >&2; then
  echo "$source: ptxas gave up setmaxnreg or asynchronous wgmma" >&2
  rm -f "$object"
  exit 1
fi
grep -E 'warning|spill stores' "$object.log" | grep -v ' 0 bytes spill stores' >&2 || true
nm --undefined-only "$object" | awk '$2 ~ /^(cuda|__cuda)/ && $2 !~ /^__cuda(RegisterFatBinary|RegisterFatBinaryEnd|UnregisterFatBinary|RegisterFunction)$/ {print $2}' >"$object.weak"
objcopy --weaken-symbols="$object.weak" "$object"
