// The float arithmetic of the codec, one function per operation.
//
// In PTX, since nothing else fixes the rounding: CuPy compiles with -ftz=true, which flushes subnormals in C++
// operators and in the __f*_rn intrinsics alike, and the compiler may contract a product and a sum. An operation
// spelled in PTX is what it says under any option. No other file uses float operators or inline PTX.
//
// The second half is the same arithmetic in C++, for a host compiler without contraction (-ffp-contract=off). It
// lets the kernels run on a CPU, where they are tested.
#pragma once

#if defined(__CUDACC__)

__device__ inline float multiply(float a, float b) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ inline float add(float a, float b) {
    float y;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ inline float multiply_add(float a, float b, float c) {
    float y;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

__device__ inline float divide(float a, float b) {
    float y;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

__device__ inline float fp16_to_float(unsigned bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(static_cast<unsigned short>(bits)));
    return y;
}

__device__ inline unsigned round_to_fp16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else

__device__ inline float multiply(float a, float b) { return a * b; }
__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ inline float divide(float a, float b) { return a / b; }

__device__ inline float fp16_to_float(unsigned bits) {
    const unsigned sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    if (exponent == 0) {
        // A whole number of steps of 2^-24.
        const float magnitude = static_cast<float>(fraction) * __uint_as_float(0x33800000);
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    const unsigned rebiased = exponent == 0x1f ? 0xff : exponent + 112;
    return __uint_as_float(sign | rebiased << 23 | fraction << 13);
}

__device__ inline unsigned round_to_fp16(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000, bits = __float_as_uint(value) & 0x7fffffff;
    if (bits > 0x7f800000) return 0x7fff;
    if (bits < 0x38800000) {
        // Below 2^-14 a whole number of steps of 2^-24; adding 0.5 leaves exactly those in the fraction.
        return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000);
    }
    const unsigned rounded = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    return sign | (rounded < 0x7c00 ? rounded : 0x7c00);
}

#endif

// Two values at once, the first in the low half.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

__device__ inline unsigned round_pair_to_bf16(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ inline unsigned round_pair_to_fp16(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

#else

__device__ inline unsigned round_to_bf16(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ inline unsigned round_pair_to_bf16(float low, float high) {
    return round_to_bf16(low) | round_to_bf16(high) << 16;
}

__device__ inline unsigned round_pair_to_fp16(float low, float high) {
    return round_to_fp16(low) | round_to_fp16(high) << 16;
}

#endif
