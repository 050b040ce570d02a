// One binary for a torch with CUDA and one without.
//
// The extension does not ask the loader for libcudart: a torch with CUDA has it in the process already, a torch for the CPU has not. So all
// references to it are weak (nvcc.sh and ops_call.h see to that) and are null in the second case. What nvcc's own start-up code calls before any
// operator runs must not be null: the linker's --wrap sends those four here.
struct uint3;
struct dim3;

extern "C" {

__attribute__((weak)) void** __real___cudaRegisterFatBinary(void* fat_binary);
__attribute__((weak)) void __real___cudaRegisterFatBinaryEnd(void** handle);
__attribute__((weak)) void __real___cudaUnregisterFatBinary(void** handle);
__attribute__((weak)) void __real___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int threads, uint3* thread,
                                                         uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size);

void** __wrap___cudaRegisterFatBinary(void* fat_binary) {
  return __real___cudaRegisterFatBinary ? __real___cudaRegisterFatBinary(fat_binary) : nullptr;
}
void __wrap___cudaRegisterFatBinaryEnd(void** handle) {
  if (__real___cudaRegisterFatBinaryEnd) __real___cudaRegisterFatBinaryEnd(handle);
}
void __wrap___cudaUnregisterFatBinary(void** handle) {
  if (__real___cudaUnregisterFatBinary) __real___cudaUnregisterFatBinary(handle);
}
void __wrap___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int threads, uint3* thread, uint3* block,
                                   dim3* block_dim, dim3* grid_dim, int* warp_size) {
  if (__real___cudaRegisterFunction)
    __real___cudaRegisterFunction(handle, host, device, name, threads, thread, block, block_dim, grid_dim, warp_size);
}

}  // extern "C"
