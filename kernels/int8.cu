// int8 state codec: one scale per (layer, slot, head, k-channel), reduced over d_v.
//
//   state  [layers, slots, heads, ROWS, COLUMNS] STATE, rows contiguous; q the same in int8
//   scale  [layers, slots, heads, d_k] of STATE's scale type
//   CHANNELS  Columns: ROWS = d_v, COLUMNS = d_k; or Rows: ROWS = d_k, COLUMNS = d_v
//
//   scale = max(amax, 1e-8) / 127; q = clamp(round-half-even(x / scale)); x = q * scale; the README has every edge
//
// A block moves one chunk of a head: all of its channels' elements, ACROSS vectors wide, HELD vectors in the registers
// of each thread, so that the state is read once. Where a channel is too long for that, SWEEPS > 1 and the
// store reads it twice. Every element of a named slot is written, and nothing else.
#include "element.cuh"
#include "transfer.cuh"

constexpr int DOWN = THREADS / ACROSS;  // threads below each other
static_assert(COLUMNS % VECTOR == 0, "a vector lies in one row");

using State = Vector<STATE, VECTOR>;
using Codes = Words<VECTOR>;

// A thread and the chunk of its block.
struct Place {
    int chunk, across, down;

    static __device__ Place of_thread(int chunk) {
        return {chunk, static_cast<int>(threadIdx.x) % ACROSS, static_cast<int>(threadIdx.x) / ACROSS};
    }
};

constexpr int BANKS = 32;  // of shared memory, 4 bytes each

// Values that a thread reads from shared memory at once.
template <class T, int N>
struct __align__(N * sizeof(T)) Run {
    T at[N];
};

// Channels are columns. A block takes `ACROSS` vectors of each row, and sweeps down the rows. A thread has the channels
// of its vector; the maxima of a channel come from the threads below each other.
struct Columns {
    static constexpr int D_K = COLUMNS;
    static constexpr int ROWS_COVERED = SWEEPS * HELD * DOWN, COLUMNS_COVERED = CHUNKS * ACROSS * VECTOR;
    static __device__ int row(const Place& at, int sweep, int i) { return (sweep * HELD + i) * DOWN + at.down; }
    static __device__ int column(const Place& at, int) { return (at.chunk * ACROSS + at.across) * VECTOR; }

    static constexpr int OF_BLOCK = ACROSS * VECTOR, OF_THREAD = VECTOR;
    static constexpr bool SAME_IN_EVERY_ROW = true;

    // Largest magnitudes of a thread: a word of them for each word of a vector.
    static constexpr int WORDS = Words<State::BYTES>::COUNT;
    static __device__ int word(int, int w) { return w; }
    static __device__ unsigned largest(const unsigned (&words)[WORDS], int own) {
        return words[own / 2] >> 16 * (own % 2) & 0xffff;
    }

    // Partial maxima in shared memory: those of all threads for one channel of a vector, then the next.
    static constexpr int PITCH = THREADS + BANKS / VECTOR;
    static constexpr int PARTIALS = VECTOR * PITCH, CONTRIBUTORS = DOWN;
    static __device__ int partial(const Place&, int own) { return own * PITCH + threadIdx.x; }
    static __device__ int contribution(int channel, int i) {
        return channel % VECTOR * PITCH + channel / VECTOR + i * ACROSS;
    }

    // A value of each channel, in runs of 16 bytes: the first run of every thread along a row, then the next. So threads
    // beside each other read what is side by side, and the distance of the runs spares those that write by channel.
    template <class T>
    struct Values {
        static constexpr int WIDEST = 16 / sizeof(T), RUN = VECTOR < WIDEST ? VECTOR : WIDEST;
        static constexpr int LINE = BANKS * 4 / sizeof(T);
        static constexpr int APART = (ACROSS * RUN + LINE - 1) / LINE * LINE + LINE / VECTOR * RUN;
        __align__(16) T values[VECTOR / RUN * APART];

        static __device__ int place(int channel) {
            return channel % VECTOR / RUN * APART + channel / VECTOR * RUN + channel % RUN;
        }
        __device__ T& operator[](int channel) { return values[place(channel)]; }

        // Those of a thread's vectors.
        __device__ void read(T (&of_elements)[VECTOR], const Place& at, int) const {
#pragma unroll
            for (int j = 0; j < VECTOR; j += RUN) {
                const T* first = values + place(at.across * VECTOR + j);
                const Run<T, RUN> run = *reinterpret_cast<const Run<T, RUN>*>(first);
#pragma unroll
                for (int i = 0; i < RUN; ++i) of_elements[j + i] = run.at[i];
            }
        }
    };
};

// Channels are rows. A block takes `DOWN * HELD` of them, and sweeps along the columns. A thread has the channels of
// its rows; the maxima of a channel come from the threads beside each other.
struct Rows {
    static constexpr int D_K = ROWS;
    static constexpr int ROWS_COVERED = CHUNKS * HELD * DOWN, COLUMNS_COVERED = SWEEPS * ACROSS * VECTOR;
    static __device__ int row(const Place& at, int, int i) { return (at.chunk * HELD + i) * DOWN + at.down; }
    static __device__ int column(const Place& at, int sweep) { return (sweep * ACROSS + at.across) * VECTOR; }

    static constexpr int OF_BLOCK = DOWN * HELD, OF_THREAD = HELD;
    static __device__ int channel(const Place& at, int own) { return own * DOWN + at.down; }
    static constexpr bool SAME_IN_EVERY_ROW = false;

    // Largest magnitudes of a thread: a word for each row it holds.
    static constexpr int WORDS = HELD;
    static __device__ int word(int i, int) { return i; }
    static __device__ unsigned largest(const unsigned (&words)[WORDS], int own) {
        return max(words[own] >> 16, words[own] & 0xffff);
    }

    // Partial maxima in shared memory: those of all threads for one channel, then the next, without a gap, as the threads
    // lie that write them. Channels whose first ones share a bank are read from different ones on.
    static constexpr int PARTIALS = OF_BLOCK * ACROSS, CONTRIBUTORS = ACROSS;
    static constexpr int LOWEST_BIT = ACROSS & -ACROSS, SHARING = LOWEST_BIT < BANKS ? LOWEST_BIT : BANKS;
    static __device__ int partial(const Place& at, int own) { return channel(at, own) * ACROSS + at.across; }
    static __device__ int contribution(int channel, int i) {
        const int turned = i + channel / (BANKS / SHARING) % ACROSS;
        return channel * ACROSS + (turned < ACROSS ? turned : turned - ACROSS);
    }

    // A value of each channel. A row's threads read the same.
    template <class T>
    struct Values {
        T values[OF_BLOCK];

        __device__ T& operator[](int channel) { return values[channel]; }

        // Those of row `i` of a thread.
        __device__ void read(T (&of_elements)[VECTOR], const Place& at, int i) const {
            const T value = values[channel(at, i)];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) of_elements[j] = value;
        }
    };
};

// Whether a thread has a vector at a position; the last ones of a matrix may be missing.
template <class Channels>
__device__ bool has(const Place& at, int sweep, int i) {
    static_assert(Channels::ROWS_COVERED >= ROWS, "every row has a thread");
    static_assert(Channels::COLUMNS_COVERED >= COLUMNS, "every column has a thread");
    constexpr bool WHOLE =
        DOWN * ACROSS == THREADS && Channels::ROWS_COVERED == ROWS && Channels::COLUMNS_COVERED == COLUMNS;
    return WHOLE || (at.down < DOWN && Channels::row(at, sweep, i) < ROWS && Channels::column(at, sweep) < COLUMNS);
}

// The largest magnitudes that a thread has seen in each of its channels, packed as the elements are.
template <class Channels>
struct Largest {
    static constexpr int PER_WORD = STATE::BYTES == 4 || VECTOR == 1 ? 1 : 2;
    unsigned words[Channels::WORDS] = {};

    __device__ void take(const Words<State::BYTES> (&held)[HELD]) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
#pragma unroll
            for (int w = 0; w < Words<State::BYTES>::COUNT; ++w) {
                unsigned& largest = words[Channels::word(i, w)];
                largest = larger<STATE>(largest, magnitudes<STATE>(held[i].at[w]));
            }
        }
    }

    // Of the thread's channel `own`.
    __device__ unsigned operator[](int own) const {
        if constexpr (PER_WORD == 1) return words[own];
        return Channels::largest(words, own);
    }
};

// The same of all threads, laid out so that neither side has bank conflicts.
template <class Channels>
struct Partials {
    unsigned amax[Channels::PARTIALS];

    __device__ void put(const Place& at, const Largest<Channels>& largest) {
        if (at.down >= DOWN) return;
#pragma unroll
        for (int k = 0; k < Channels::OF_THREAD; ++k) amax[Channels::partial(at, k)] = largest[k];
    }

    // Of one channel, from all of its threads.
    __device__ float reduce(int channel) const {
        unsigned largest = 0;
#pragma unroll 8
        for (int i = 0; i < Channels::CONTRIBUTORS; ++i) {
            largest = max(largest, amax[Channels::contribution(channel, i)]);
        }
        return STATE::to_float(largest);
    }
};

// A head's matrix in memory, as vectors of BYTES bytes.
template <class Channels, int BYTES>
struct Matrix {
    char* start;
    long long row_stride;

    __device__ Matrix(const Strided& pool, unsigned layer, unsigned slot, unsigned head)
        : start(pool.at(layer, slot, head)), row_stride(pool.row_stride) {}

    // Address of a thread's first vector; the next ones are `stride()` bytes apart.
    __device__ char* first(const Place& at, int sweep) const {
        return start + Channels::row(at, sweep, 0) * row_stride + Channels::column(at, sweep) / VECTOR * BYTES;
    }
    __device__ long long stride() const { return DOWN * row_stride; }

    // Positions outside of the matrix read as zero.
    __device__ void read(Words<BYTES> (&held)[HELD], const Place& at, int sweep) const {
        const char* address = first(at, sweep);
#pragma unroll
        for (int i = 0; i < HELD; ++i, address += stride()) {
            held[i] = {};
            if (has<Channels>(at, sweep, i)) held[i] = Words<BYTES>::read(address);
        }
    }
};

// A value of each of the block's channels, in shared memory. Where a row has a multiple of 8 vectors neither side has bank
// conflicts.
template <class Channels, class T>
using Values = typename Channels::template Values<T>;

// What a thread has learned of its channels.
struct Findings {
    bool finite = true, exceeding = false;
};

// Writes the scales of the block's channels.
template <class Channels>
__device__ Findings write_scales(
    char* scales, Values<Channels, Divisor>& divisors, const Partials<Channels>& partials, const Place& at) {
    Findings found;
    const int first = at.chunk * Channels::OF_BLOCK;
#pragma unroll 1
    for (int c = threadIdx.x; c < Channels::OF_BLOCK; c += THREADS) {
        if (first + c >= Channels::D_K) break;
        const float amax = partials.reduce(c);
        const unsigned bits = scale_of<STATE>(amax);
        Words<STATE::Scale::BYTES>{bits}.write(scales + (first + c) * STATE::Scale::BYTES);
        const Divisor by = Divisor::of(STATE::Scale::to_float(bits));
        divisors[c] = by;
        found.finite &= by.is_finite();
        found.exceeding |= exceeds<STATE>(amax, by);
    }
    return found;
}

template <class Channels>
__device__ void read_scales(Values<Channels, float>& of_block, const Place& at, const char* scales) {
    const int first = at.chunk * Channels::OF_BLOCK;
#pragma unroll 1
    for (int c = threadIdx.x; c < Channels::OF_BLOCK; c += THREADS) {
        if (first + c >= Channels::D_K) break;
        const char* scale = scales + (first + c) * STATE::Scale::BYTES;
        of_block[c] = STATE::Scale::to_float(Words<STATE::Scale::BYTES>::read(scale).at[0]);
    }
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

template <bool CLAMP, class Channels>
__device__ void write_codes(
    const Matrix<Channels, VECTOR>& target, const Words<State::BYTES> (&held)[HELD],
    const Values<Channels, Divisor>& divisors, const Place& at, int sweep) {
    char* address = target.first(at, sweep);
    Divisor by[VECTOR];
#pragma unroll
    for (int i = 0; i < HELD; ++i, address += target.stride()) {
        if (!has<Channels>(at, sweep, i)) continue;
        if (i == 0 || !Channels::SAME_IN_EVERY_ROW) divisors.read(by, at, i);
        quantize<CLAMP>(State{held[i]}, by).write(address);
    }
}

template <class Channels>
__device__ void write_state(
    const Matrix<Channels, State::BYTES>& target, const Codes (&held)[HELD],
    const Values<Channels, float>& of_channels, const Place& at, int sweep) {
    char* address = target.first(at, sweep);
    float scales[VECTOR];
#pragma unroll
    for (int i = 0; i < HELD; ++i, address += target.stride()) {
        if (!has<Channels>(at, sweep, i)) continue;
        if (i == 0 || !Channels::SAME_IN_EVERY_ROW) of_channels.read(scales, at, i);
        dequantize(held[i], scales).words.write(address);
    }
}

using Channels = CHANNELS;

// (source slots, active) -> (destination slots, checkpoint)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
int8_store(const __grid_constant__ Arguments arguments) {
    __shared__ Partials<Channels> partials;
    __shared__ Values<Channels, Divisor> divisors;

    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows<true>(arguments, work);

    const unsigned head = work.unit / CHUNKS;
    const Place at = Place::of_thread(work.unit % CHUNKS);
    const Matrix<Channels, State::BYTES> source(arguments.source, work.layer, work.source, head);
    const Matrix<Channels, VECTOR> target(arguments.target, work.layer, work.target, head);

    Words<State::BYTES> held[HELD];
    Largest<Channels> largest;
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        source.read(held, at, sweep);
        largest.take(held);
    }
    partials.put(at, largest);
    __syncthreads();
    char* scales = arguments.scale.at(work.layer, work.target, head);
    const Findings found = write_scales(scales, divisors, partials, at);
    if (!found.finite) arguments.report(work.pair, NON_FINITE);
    const bool clamp = __syncthreads_or(found.exceeding);
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        if (SWEEPS > 1) source.read(held, at, sweep);
        if (STATE::Scale::BYTES == 2 && clamp) {
            write_codes<true>(target, held, divisors, at, sweep);
        } else {
            write_codes<false>(target, held, divisors, at, sweep);
        }
    }
}

// (source slots, checkpoint) -> (destination slots, active)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
int8_load(const __grid_constant__ Arguments arguments) {
    __shared__ Values<Channels, float> scales;

    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows<false>(arguments, work);

    const unsigned head = work.unit / CHUNKS;
    const Place at = Place::of_thread(work.unit % CHUNKS);
    const Matrix<Channels, VECTOR> source(arguments.source, work.layer, work.source, head);
    const Matrix<Channels, State::BYTES> target(arguments.target, work.layer, work.target, head);

    Codes held[HELD];
    source.read(held, at, 0);
    read_scales<Channels>(scales, at, arguments.scale.at(work.layer, work.source, head));
    __syncthreads();
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        if (sweep > 0) source.read(held, at, sweep);
        write_state(target, held, scales, at, sweep);
    }
}
