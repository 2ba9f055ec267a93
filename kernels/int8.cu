// int8 state codec: one scale per (layer, slot, head, k-channel), reduced over d_v.
//
//   state  [layers, slots, heads, ROWS, COLUMNS] STATE, rows contiguous; q the same in int8
//   scale  [layers, slots, heads, d_k] of STATE's scale type
//   K_LAST   a channel is a column, ROWS = d_v, COLUMNS = d_k; otherwise a row, ROWS = d_k, COLUMNS = d_v
//
//   scale = max(amax, 1e-8) / 127; q = clamp(round-half-even(x / scale)); x = q * scale; the README has every edge
//
// A block moves one chunk of a head: all of its channels' elements, ACROSS vectors wide, HELD vectors in the registers
// of each thread, so that the state is read once. Where a channel is too long for that, SWEEPS > 1 and the
// store reads it twice. Every element of a named slot is written, and nothing else.
#include "element.cuh"
#include "transfer.cuh"

constexpr int DOWN = THREADS / ACROSS;  // threads below each other
constexpr bool WHOLE = DOWN * ACROSS == THREADS && ROWS == (K_LAST ? SWEEPS : CHUNKS) * HELD * DOWN &&
                       COLUMNS == (K_LAST ? CHUNKS : SWEEPS) * ACROSS * VECTOR;
static_assert(COLUMNS % VECTOR == 0, "a vector lies in one row");
static_assert((K_LAST ? SWEEPS : CHUNKS) * HELD * DOWN >= ROWS, "every row has a thread");
static_assert((K_LAST ? CHUNKS : SWEEPS) * ACROSS * VECTOR >= COLUMNS, "every column has a thread");

using State = Vector<STATE, VECTOR>;
using Codes = Words<VECTOR>;

// Where a thread's vectors lie, and which channels they belong to.
struct Tile {
    int chunk, across, down;

    static __device__ Tile of_thread(int chunk) {
        return {chunk, static_cast<int>(threadIdx.x) % ACROSS, static_cast<int>(threadIdx.x) / ACROSS};
    }

    __device__ int row(int sweep, int i) const { return ((K_LAST ? sweep : chunk) * HELD + i) * DOWN + down; }
    __device__ int column(int sweep) const { return ((K_LAST ? chunk : sweep) * ACROSS + across) * VECTOR; }
    __device__ bool has(int sweep, int i) const {
        return WHOLE || (down < DOWN && row(sweep, i) < ROWS && column(sweep) < COLUMNS);
    }

    // Channels of a block, of which the last chunk may have fewer, and of one thread.
    static constexpr int CHANNELS = K_LAST ? ACROSS * VECTOR : DOWN * HELD;
    static constexpr int OWN = K_LAST ? VECTOR : HELD;
    __device__ int first_channel() const { return chunk * CHANNELS; }
    static __device__ int own(int i, int j) { return K_LAST ? j : i; }
    __device__ int channel(int own) const { return K_LAST ? across * VECTOR + own : own * DOWN + down; }
};

constexpr int D_K = K_LAST ? COLUMNS : ROWS;

// The largest magnitudes that a thread has seen in each of its channels, packed as the elements are.
struct Largest {
    static constexpr int PER_WORD = STATE::BYTES == 4 || VECTOR == 1 ? 1 : 2;
    unsigned words[K_LAST ? Words<State::BYTES>::COUNT : HELD] = {};

    __device__ void take(const Words<State::BYTES> (&held)[HELD]) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int w = 0; w < Words<State::BYTES>::COUNT; ++w) {
                unsigned& largest = words[K_LAST ? w : i];
                largest = larger<STATE>(largest, magnitudes<STATE>(held[i].at[w]));
            }
        }
    }

    // Of the thread's channel `own`.
    __device__ unsigned operator[](int own) const {
        if constexpr (PER_WORD == 1) return words[own];
        if constexpr (K_LAST) return words[own / 2] >> 16 * (own % 2) & 0xffff;
        return max(words[own] >> 16, words[own] & 0xffff);
    }
};

// The same of all threads, laid out so that neither side has bank conflicts.
struct Partials {
    static constexpr int PITCH = K_LAST ? THREADS + 32 / VECTOR : ACROSS | 1;
    static constexpr int CONTRIBUTORS = K_LAST ? DOWN : ACROSS;
    unsigned amax[(K_LAST ? VECTOR : Tile::CHANNELS) * PITCH];

    __device__ void put(const Tile& tile, const Largest& largest) {
        if (tile.down >= DOWN) return;
#pragma unroll
        for (int k = 0; k < Tile::OWN; ++k) {
            amax[K_LAST ? k * PITCH + threadIdx.x : tile.channel(k) * PITCH + tile.across] = largest[k];
        }
    }

    // Of one channel, from all of its threads.
    __device__ float reduce(int channel) const {
        const unsigned* first = amax + (K_LAST ? channel % VECTOR * PITCH + channel / VECTOR : channel * PITCH);
        unsigned largest = 0;
#pragma unroll 8
        for (int i = 0; i < CONTRIBUTORS; ++i) largest = max(largest, first[i * (K_LAST ? ACROSS : 1)]);
        return STATE::to_float(largest);
    }
};

// A head's matrix in memory, as vectors of BYTES bytes.
template <int BYTES>
struct Matrix {
    char* start;
    long long row_stride;

    __device__ Matrix(const Pool& pool, unsigned layer, unsigned slot, unsigned head)
        : start(pool.at(layer, slot, head)), row_stride(pool.row_stride) {}

    // Address of a thread's first vector; the next ones are `step()` bytes apart.
    __device__ char* first(const Tile& tile, int sweep) const {
        return start + tile.row(sweep, 0) * row_stride + tile.column(sweep) / VECTOR * BYTES;
    }
    __device__ long long step() const { return DOWN * row_stride; }

    // Positions outside of the matrix read as zero.
    __device__ void read(Words<BYTES> (&held)[HELD], const Tile& tile, int sweep) const {
        const char* address = first(tile, sweep);
#pragma unroll
        for (int i = 0; i < HELD; ++i, address += step()) {
            held[i] = {};
            if (tile.has(sweep, i)) held[i] = Words<BYTES>::read(address);
        }
    }
};

// What a thread has learned of its channels.
struct Findings {
    bool finite = true, exceeding = false;
};

// Writes the scales of the block's channels.
__device__ inline Findings write_scales(char* scales, Divisor* divisors, const Partials& partials, const Tile& tile) {
    Findings found;
#pragma unroll 1
    for (int c = threadIdx.x; c < Tile::CHANNELS; c += THREADS) {
        if (tile.first_channel() + c >= D_K) break;
        const float amax = partials.reduce(c);
        const unsigned bits = scale_of<STATE>(amax);
        Words<STATE::Scale::BYTES>{bits}.write(scales + (tile.first_channel() + c) * STATE::Scale::BYTES);
        divisors[c] = Divisor::of(STATE::Scale::to_float(bits));
        found.finite &= divisors[c].is_finite();
        found.exceeding |= exceeds<STATE>(amax, divisors[c]);
    }
    return found;
}

__device__ inline void read_scales(float* of_block, const Tile& tile, const char* scales) {
#pragma unroll 1
    for (int c = threadIdx.x; c < Tile::CHANNELS; c += THREADS) {
        if (tile.first_channel() + c >= D_K) break;
        const char* scale = scales + (tile.first_channel() + c) * STATE::Scale::BYTES;
        of_block[c] = STATE::Scale::to_float(Words<STATE::Scale::BYTES>::read(scale).at[0]);
    }
}

// What the elements of row `i` of a thread need from the block's channels.
template <class T>
__device__ void fetch(T (&of_elements)[VECTOR], const T* of_channels, const Tile& tile, int i) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) of_elements[j] = of_channels[tile.channel(Tile::own(i, j))];
}

template <bool CLAMP>
__device__ Codes quantize(const State& state, const Divisor (&by)[VECTOR]) {
    Codes codes;
#pragma unroll
    for (int w = 0; w < Codes::COUNT; ++w) {
        unsigned byte[4] = {}, finite = 0;
#pragma unroll
        for (int j = 4 * w; j < 4 * w + 4 && j < VECTOR; ++j) {
            const int code = nearest(state[j], by[j]);
            byte[j % 4] = CLAMP ? min(max(code, ZERO - 127), ZERO + 127) : code;
            if (by[j].is_finite()) finite |= 0xffu << 8 * (j % 4);
        }
        const unsigned low = __byte_perm(byte[0], byte[1], 0x0040), high = __byte_perm(byte[2], byte[3], 0x0040);
        codes.at[w] = __byte_perm(low, high, 0x5410) & finite;
    }
    return codes;
}

__device__ inline State dequantize(const Codes& codes, const float (&scales)[VECTOR]) {
    float values[VECTOR];
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        values[j] = multiply(signed_byte(codes.at[j / 4] ^ 0x80808080, j % 4), scales[j]);
    }
    return State::rounded(values);
}

template <bool CLAMP>
__device__ void write_codes(
    const Matrix<VECTOR>& target, const Words<State::BYTES> (&held)[HELD], const Divisor* divisors, const Tile& tile,
    int sweep) {
    char* address = target.first(tile, sweep);
    Divisor by[VECTOR];
#pragma unroll
    for (int i = 0; i < HELD; ++i, address += target.step()) {
        if (!tile.has(sweep, i)) continue;
        if (i == 0 || !K_LAST) fetch(by, divisors, tile, i);
        quantize<CLAMP>(State{held[i]}, by).write(address);
    }
}

__device__ inline void write_state(
    const Matrix<State::BYTES>& target, const Codes (&held)[HELD], const float* of_channels, const Tile& tile,
    int sweep) {
    char* address = target.first(tile, sweep);
    float scales[VECTOR];
#pragma unroll
    for (int i = 0; i < HELD; ++i, address += target.step()) {
        if (!tile.has(sweep, i)) continue;
        if (i == 0 || !K_LAST) fetch(scales, of_channels, tile, i);
        dequantize(held[i], scales).words.write(address);
    }
}

// (source slots, active) -> (destination slots, checkpoint)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
int8_store(const __grid_constant__ Arguments arguments) {
    __shared__ Partials partials;
    __shared__ __align__(16) Divisor divisors[Tile::CHANNELS];

    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows(arguments, work);

    const unsigned head = work.unit / CHUNKS;
    const Tile tile = Tile::of_thread(work.unit % CHUNKS);
    const Matrix<State::BYTES> source(arguments.source, work.layer, work.source, head);
    const Matrix<VECTOR> target(arguments.target, work.layer, work.target, head);

    Words<State::BYTES> held[HELD];
    Largest largest;
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        source.read(held, tile, sweep);
        largest.take(held);
    }
    partials.put(tile, largest);
    __syncthreads();
    char* scales = arguments.scale.at(work.layer, work.target, head);
    const Findings found = write_scales(scales, divisors, partials, tile);
    if (!found.finite) arguments.report(work.pair, NON_FINITE);
    const bool clamp = __syncthreads_or(found.exceeding);
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        if (SWEEPS > 1) source.read(held, tile, sweep);
        if (STATE::Scale::BYTES == 2 && clamp) {
            write_codes<true>(target, held, divisors, tile, sweep);
        } else {
            write_codes<false>(target, held, divisors, tile, sweep);
        }
    }
}

// (source slots, checkpoint) -> (destination slots, active)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
int8_load(const __grid_constant__ Arguments arguments) {
    __shared__ float scales[Tile::CHANNELS];

    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows(arguments, work);

    const unsigned head = work.unit / CHUNKS;
    const Tile tile = Tile::of_thread(work.unit % CHUNKS);
    const Matrix<VECTOR> source(arguments.source, work.layer, work.source, head);
    const Matrix<State::BYTES> target(arguments.target, work.layer, work.target, head);

    Codes held[HELD];
    source.read(held, tile, 0);
    read_scales(scales, tile, arguments.scale.at(work.layer, work.source, head));
    __syncthreads();
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        if (sweep > 0) source.read(held, tile, sweep);
        write_state(target, held, scales, tile, sweep);
    }
}
