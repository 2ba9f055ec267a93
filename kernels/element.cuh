// Element types as bit patterns, and the arithmetic of one channel. Knows no memory and no threads.
#pragma once

#include "ptx.cuh"

constexpr unsigned INFINITE = 0x7f800000;  // magnitudes from here on are Inf and NaN
constexpr unsigned SMALLEST_AMAX = 0x322bcc77;  // 1e-8f: no scale is zero
constexpr float LEVELS = 127.0f;

__device__ inline bool is_finite(float value) { return (__float_as_uint(value) & 0x7fffffff) < INFINITE; }

struct Fp32 {
    using Scale = Fp32;
    static constexpr int BYTES = 4;
    static constexpr unsigned NOT_A_NUMBER = 0x7fc00000;
    static __device__ float to_float(unsigned bits) { return __uint_as_float(bits); }
    static __device__ unsigned round(float value) { return __float_as_uint(value); }
};

struct Bf16 {
    using Scale = Bf16;
    static constexpr int BYTES = 2;
    static constexpr unsigned NOT_A_NUMBER = 0x7fc0;
    static __device__ float to_float(unsigned bits) { return __uint_as_float(bits << 16); }
    static __device__ unsigned round_pair(float low, float high) { return round_pair_to_bf16(low, high); }
    static __device__ unsigned round(float value) { return round_pair(value, 0.0f) & 0xffff; }
};

struct Fp16 {
    using Scale = Fp32;  // an fp16 scale would be zero for small channels
    static constexpr int BYTES = 2;
    static __device__ float to_float(unsigned bits) { return fp16_to_float(bits); }
    static __device__ unsigned round_pair(float low, float high) { return round_pair_to_fp16(low, high); }
    static __device__ unsigned round(float value) { return round_to_fp16(value); }
};

// The absolute values of a word's elements, as integers that order them, with NaN above Inf above finite. Made of the
// elements' own bits and not of their floats, which the compiler would keep alive from here to the quantizing.
template <class E>
__device__ unsigned magnitudes(unsigned word) {
    return word & (E::BYTES == 4 ? 0x7fffffff : 0x7fff7fff);
}

// The larger magnitudes, element by element.
template <class E>
__device__ unsigned larger(unsigned a, unsigned b) {
    return E::BYTES == 4 ? max(a, b) : __vmaxu2(a, b);
}

// Bits of the scale of a channel whose largest magnitude is `amax`.
template <class E>
__device__ unsigned scale_of(float amax) {
    if (!is_finite(amax)) return E::Scale::NOT_A_NUMBER;
    const unsigned bits = E::Scale::round(divide(__uint_as_float(max(__float_as_uint(amax), SMALLEST_AMAX)), LEVELS));
    const float reloaded = E::to_float(E::round(multiply(LEVELS, E::Scale::to_float(bits))));
    return is_finite(reloaded) ? bits : bits - 1;
}

// A scale in the form that quantizing takes; all zero for a channel that is not finite.
struct Divisor {
    float minus_scale, reciprocal;

    __device__ bool is_finite() const { return __float_as_uint(reciprocal) != 0; }

    static __device__ Divisor of(float scale) {
        if (!::is_finite(scale)) return {0.0f, 0.0f};
        return {__uint_as_float(__float_as_uint(scale) ^ 0x80000000), divide(1.0f, scale)};
    }
};

// The nearest integer of x / scale, ties to even, plus ZERO: the integer itself is in the low byte.
constexpr int ZERO = 0x4b400000;
__device__ inline int nearest(float x, Divisor by) {
    // One step of refinement of x * (1 / scale) gives the correctly rounded quotient.
    const float estimate = multiply(x, by.reciprocal);
    const float quotient = multiply_add(multiply_add(estimate, by.minus_scale, x), by.reciprocal, estimate);
    // 1.5 * 2^23 has a unit of one in its last place, and the bits of ZERO.
    return __float_as_int(add(quotient, 12582912.0f));
}

// Whether the largest element of a channel is more than 127 steps. It takes a scale that was made one step smaller and
// has the coarse steps of bf16; others are within 2^-22 of amax / 127.
template <class E>
__device__ bool exceeds(float amax, Divisor by) {
    return E::Scale::BYTES == 2 && by.is_finite() && nearest(amax, by) > ZERO + 127;
}

// Byte `j` of a word whose bytes have their sign bit flipped, as the signed number it was.
__device__ inline float signed_byte(unsigned flipped, int j) {
    // The byte becomes the last bits of 2^23.
    return add(__uint_as_float(__byte_perm(flipped, 0x4b000000, 0x7440 | j)), -8388736.0f);
}
