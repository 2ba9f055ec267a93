// Lets a host compiler take a .cu file as it is: what the kernels need of CUDA, in C++20. Kept small, since every
// specialisation compiles it; machine.cpp runs the threads.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))

struct Index {
    unsigned x, y, z;
};
extern Index threadIdx, blockIdx;

namespace cpu {

// A kernel, its arguments, and its shared memory.
struct Launch {
    void (*kernel)(const void*);
    const void* arguments;
    unsigned char* shared;
    size_t shared_size;
};

// Runs a grid of (columns, rows) blocks; returns what went wrong, or an empty text. `order`: see machine.cpp.
const char* run(Launch launch, unsigned columns, unsigned rows, unsigned threads, int order, unsigned seed);
// Waits until all threads of the block are here; says whether any of them gave true.
bool barrier(bool any);
// Ends the launch with a report.
[[noreturn]] void fail(const char* why);

template <class T>
const T* aligned(const T* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) fail("a vector access is misaligned");
    return address;
}

}  // namespace cpu

inline void __syncthreads() { cpu::barrier(false); }
inline int __syncthreads_or(int any) { return cpu::barrier(any); }

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class T>
T __ldcs(const T* address) {
    return *cpu::aligned(address);
}
template <class T>
void __stcs(T* address, T value) {
    *const_cast<T*>(cpu::aligned(address)) = value;
}

inline int atomicOr(int* address, int value) {
    const int old = *address;
    *address |= value;
    return old;
}

inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned which = selector >> 4 * i & 0xf;
        if (which > 7) cpu::fail("__byte_perm: sign replication is not implemented");
        result |= static_cast<unsigned>(bytes >> 8 * which & 0xff) << 8 * i;
    }
    return result;
}

inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned high = a >> 16 < b >> 16 ? b >> 16 : a >> 16, low = (a & 0xffff) < (b & 0xffff) ? b : a;
    return high << 16 | (low & 0xffff);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
