// Checkpoints without scales: the state's own type, bit for bit, or each element rounded once to bf16.
//
//   active      [layers, slots, heads, ROWS, COLUMNS] STATE, rows contiguous
//   checkpoint  the same in KEPT, which is STATE or Bf16
//
// A block moves HELD vectors per thread of one head. A store also finds out whether the state reloads finite.
#include "element.cuh"
#include "transfer.cuh"

constexpr int ACROSS = COLUMNS / VECTOR;      // vectors of a row
constexpr int VECTORS = ROWS * ACROSS;        // of a head
static_assert(COLUMNS % VECTOR == 0, "a vector lies in one row");
static_assert(CHUNKS * THREADS * HELD >= VECTORS, "every vector has a thread");

template <class E, class F>
constexpr bool SAME = false;
template <class E>
constexpr bool SAME<E, E> = true;

template <class From, class To>
__device__ Vector<To, VECTOR> convert(const Vector<From, VECTOR>& from) {
    if constexpr (SAME<From, To>) {
        return from;
    } else {
        float values[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) values[j] = from[j];
        return Vector<To, VECTOR>::rounded(values);
    }
}

template <class E>
__device__ bool all_finite(const Vector<E, VECTOR>& vector) {
    bool finite = true;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) finite &= is_finite(vector[j]);
    return finite;
}

// Moves one block's share of a head, and hands what was written to `check`.
template <class From, class To, class Check>
__device__ void move_block(const Arguments& arguments, const Work& work, Check check) {
    const unsigned head = work.unit / CHUNKS, first = work.unit % CHUNKS * (THREADS * HELD) + threadIdx.x;
    const char* source = arguments.source.at(work.layer, work.source, head);
    char* target = arguments.target.at(work.layer, work.target, head);
    Vector<From, VECTOR> held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const unsigned vector = first + i * THREADS;
        if (vector >= VECTORS) continue;
        const long long row = vector / ACROSS * arguments.source.row_stride;
        held[i].words = Words<From::BYTES * VECTOR>::read(source + row + vector % ACROSS * (From::BYTES * VECTOR));
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const unsigned vector = first + i * THREADS;
        if (vector >= VECTORS) continue;
        const long long row = vector / ACROSS * arguments.target.row_stride;
        const Vector<To, VECTOR> moved = convert<From, To>(held[i]);
        moved.words.write(target + row + vector % ACROSS * (To::BYTES * VECTOR));
        check(moved);
    }
}

// (source slots, active) -> (destination slots, checkpoint)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
plain_store(const __grid_constant__ Arguments arguments) {
    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows<true>(arguments, work);
    bool finite = true;
    move_block<STATE, KEPT>(arguments, work, [&](const Vector<KEPT, VECTOR>& kept) {
        finite &= all_finite(convert<KEPT, STATE>(kept));
    });
    if (!finite) arguments.report(work.pair, NON_FINITE);
}

// (source slots, checkpoint) -> (destination slots, active)
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
plain_load(const __grid_constant__ Arguments arguments) {
    const Work work = work_of_block(arguments);
    if (!work.in_range) return skip(arguments, work);
    if (work.unit >= arguments.state_blocks) return copy_windows<false>(arguments, work);
    move_block<KEPT, STATE>(arguments, work, [](const Vector<STATE, VECTOR>&) {});
}
