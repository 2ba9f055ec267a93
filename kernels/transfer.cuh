// What every kernel shares: the arguments, which block does what, vector access, and the copy of conv windows.
//
// A launch has grid (pairs * units, layers). The units of a pair and layer are its state's blocks, then the blocks of
// its windows. Offsets are 64 bits wide.
#pragma once

#if WINDOWS > 0
constexpr int WINDOW_SLOTS = WINDOWS;
#else
constexpr int WINDOW_SLOTS = 1;  // an array has at least one element
#endif

constexpr int WINDOW_HELD = 8;  // vectors of a window in the registers of a thread

constexpr int NON_FINITE = 1;    // status: the state does not reload finite
constexpr int OUT_OF_RANGE = 2;  // status: a slot is the padding sink or past the end; nothing moved

// Memory with one entry per layer and slot. Strides are bytes.
struct Strided {
    const unsigned long long* table;  // the address of each layer; or null, then base + layer * layer_stride
    unsigned long long base;
    long long layer_stride, slot_stride, head_stride, row_stride;

    __device__ char* at(unsigned layer, unsigned slot, unsigned head = 0) const {
        const unsigned long long start = table ? table[layer] : base + layer * layer_stride;
        return reinterpret_cast<char*>(start + slot * slot_stride + head * head_stride);
    }
};

struct Window {
    Strided source, target;
    long long vectors;  // WINDOW_VECTOR bytes each
    long long blocks;
    unsigned width;     // bytes of an element
    unsigned exponent;  // those of an element's last 16 bits that are all set in an Inf or a NaN, and in no other
};

struct Arguments {
    int* pairs;  // source slots, then destination slots, then status words
    unsigned pair_count;
    unsigned source_slots, target_slots;  // the padding sinks included
    unsigned state_blocks, units;         // per pair and layer: without and with the windows' blocks
    Strided source, target, scale;
    Window windows[WINDOW_SLOTS];

    __device__ void report(unsigned pair, int flag) const { atomicOr(pairs + 2 * pair_count + pair, flag); }
};

static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "the host packs the same struct");

// What one block works on.
struct Work {
    unsigned layer, pair, unit, source, target;
    bool in_range;
};

__device__ inline Work work_of_block(const Arguments& arguments) {
    Work work;
    work.layer = blockIdx.y;
    work.pair = blockIdx.x / arguments.units;
    work.unit = blockIdx.x % arguments.units;
    work.source = arguments.pairs[work.pair];
    work.target = arguments.pairs[arguments.pair_count + work.pair];
    // Slot 0 wraps around to the largest number.
    work.in_range = work.source - 1 < arguments.source_slots - 1 && work.target - 1 < arguments.target_slots - 1;
    return work;
}

// What the blocks of a pair that is out of range do instead: one thread of them says so. A captured batch is padded with
// such pairs.
__device__ inline void skip(const Arguments& arguments, const Work& work) {
    if (work.layer == 0 && work.unit == 0 && threadIdx.x == 0) arguments.report(work.pair, OUT_OF_RANGE);
}

// A vector of BYTES bytes in registers; shorter ones lie in the low bits.
template <int BYTES>
struct Words {
    static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "a power of two");
    static constexpr int COUNT = BYTES > 4 ? BYTES / 4 : 1;
    unsigned at[COUNT];

    // Streaming: what is moved is not used again soon.
    static __device__ Words read(const char* address) {
        if constexpr (BYTES == 16) {
            const uint4 v = __ldcs(reinterpret_cast<const uint4*>(address));
            return {v.x, v.y, v.z, v.w};
        } else if constexpr (BYTES == 8) {
            const uint2 v = __ldcs(reinterpret_cast<const uint2*>(address));
            return {v.x, v.y};
        } else if constexpr (BYTES == 4) {
            return {__ldcs(reinterpret_cast<const unsigned*>(address))};
        } else if constexpr (BYTES == 2) {
            return {__ldcs(reinterpret_cast<const unsigned short*>(address))};
        } else {
            return {__ldcs(reinterpret_cast<const unsigned char*>(address))};
        }
    }

    __device__ void write(char* address) const {
        if constexpr (BYTES == 16) {
            __stcs(reinterpret_cast<uint4*>(address), make_uint4(at[0], at[1], at[2], at[3]));
        } else if constexpr (BYTES == 8) {
            __stcs(reinterpret_cast<uint2*>(address), make_uint2(at[0], at[1]));
        } else if constexpr (BYTES == 4) {
            __stcs(reinterpret_cast<unsigned*>(address), at[0]);
        } else if constexpr (BYTES == 2) {
            __stcs(reinterpret_cast<unsigned short*>(address), static_cast<unsigned short>(at[0]));
        } else {
            __stcs(reinterpret_cast<unsigned char*>(address), static_cast<unsigned char>(at[0]));
        }
    }
};

// N elements of type E.
template <class E, int N>
struct Vector {
    static constexpr int BYTES = N * E::BYTES;
    Words<BYTES> words;

    __device__ unsigned bits(int j) const {
        if constexpr (E::BYTES == 4) return words.at[j];
        return words.at[j / 2] >> 16 * (j % 2) & 0xffff;
    }

    __device__ float operator[](int j) const { return E::to_float(bits(j)); }

    static __device__ Vector rounded(const float (&values)[N]) {
        Vector vector;
#pragma unroll
        for (int w = 0; w < Words<BYTES>::COUNT; ++w) {
            if constexpr (E::BYTES == 4) {
                vector.words.at[w] = E::round(values[w]);
            } else {
                vector.words.at[w] = E::round_pair(values[2 * w], 2 * w + 1 < N ? values[2 * w + 1] : 0.0f);
            }
        }
        return vector;
    }
};

// Whether a vector of a window has an Inf or a NaN. The exponent of every type lies in its last 16 bits.
__device__ inline bool has_special(const Words<WINDOW_VECTOR>& vector, const Window& window) {
    bool found = false;
#pragma unroll
    for (int w = 0; w < Words<WINDOW_VECTOR>::COUNT; ++w) {
        const unsigned word = vector.at[w], high = window.exponent << 16;
        found |= (word & high) == high;
        found |= window.width == 2 && (word & window.exponent) == window.exponent;
    }
    return found;
}

// The same where vectors are shorter than elements may be: looks at the source again, where an element ends.
__device__ inline bool has_special(const char* source, long long vector, const Window& window) {
    const long long end = (vector + 1) * WINDOW_VECTOR;
    if (end % window.width) return false;
    const unsigned low = Words<1>::read(source + end - 2).at[0], high = Words<1>::read(source + end - 1).at[0];
    return ((high << 8 | low) & window.exponent) == window.exponent;
}

// Copies one block's share of a window. A store, which CHECKs, reports a window that is not finite.
template <bool CHECK>
__device__ void copy_windows(const Arguments& arguments, const Work& work) {
    bool finite = true;
    long long unit = work.unit - arguments.state_blocks;
#pragma unroll
    for (int w = 0; w < WINDOWS; ++w) {
        const Window& window = arguments.windows[w];
        if (unit >= 0 && unit < window.blocks) {
            const char* source = window.source.at(work.layer, work.source);
            char* target = window.target.at(work.layer, work.target);
            const long long first = unit * (WINDOW_HELD * THREADS) + threadIdx.x;
            Words<WINDOW_VECTOR> held[WINDOW_HELD];
#pragma unroll
            for (int i = 0; i < WINDOW_HELD; ++i) {
                const long long vector = first + i * THREADS;
                if (vector < window.vectors) held[i] = Words<WINDOW_VECTOR>::read(source + vector * WINDOW_VECTOR);
            }
#pragma unroll
            for (int i = 0; i < WINDOW_HELD; ++i) {
                const long long vector = first + i * THREADS;
                if (vector >= window.vectors) continue;
                held[i].write(target + vector * WINDOW_VECTOR);
                if constexpr (CHECK && WINDOW_VECTOR >= 4) finite &= !has_special(held[i], window);
                if constexpr (CHECK && WINDOW_VECTOR < 4) finite &= !has_special(source, vector, window);
            }
        }
        unit -= window.blocks;
    }
    if (!finite) arguments.report(work.pair, NON_FINITE);
}
