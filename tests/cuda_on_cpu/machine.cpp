// Runs the blocks of a launch one after the other, and the threads of a block as fibers of one thread, which switch at
// __syncthreads. Both in an order of choice, so that code which needs a barrier that it lacks gives a wrong result.
// Shared memory is poisoned before each block. A barrier that some threads of a block do not reach is reported.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if !defined(__x86_64__) || defined(__SANITIZE_ADDRESS__)
#define USE_UCONTEXT 1
#include <ucontext.h>
#endif

#include "cuda.h"

Index threadIdx, blockIdx;

namespace cpu {

enum class Order : int { Forward, Backward, Shuffled };

#if USE_UCONTEXT

struct Context {
    ucontext_t state;
};

inline void switch_to(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void start_at(Context& context, char* stack, size_t size, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = size;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

#else

struct Context {
    void* stack_pointer;
};

// Saves what the calling convention preserves; swapcontext would also make a system call each time.
__attribute__((naked, noinline)) inline void switch_stack(void**, void*) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
        "ret");
}

inline void switch_to(Context& from, Context& to) { switch_stack(&from.stack_pointer, to.stack_pointer); }

inline void start_at(Context& context, char* stack, size_t size, void (*entry)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15});
    *--top = nullptr;  // where a call would have left its return address
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}

#endif

// One multiprocessor, which runs one block at a time.
class Machine {
   public:
    Machine(Launch launch) : launch_(launch) {}

    // Runs every block of the grid; returns what went wrong, or an empty text.
    std::string run(unsigned columns, unsigned rows, unsigned threads, Order order, unsigned seed) {
        fibers_ = std::vector<Fiber>(threads);
        stacks_ = std::make_unique_for_overwrite<char[]>(threads * STACK);
        std::mt19937 random(seed);
        for (unsigned block : turns(columns * rows, order, random)) {
            blockIdx = {block % columns, block / columns, 0};
            run_block(order, random);
            if (!fault_.empty()) break;
        }
        return fault_;
    }

    bool barrier(bool any) {
        if (waiting_++ == 0) any_ = false;
        any_ |= any;
        leave(State::AtBarrier);
        --waiting_;
        return any_;
    }

    [[noreturn]] void fail(const char* why) {
        fault_ = why;
        leave(State::Done);
        __builtin_unreachable();
    }

    void run_thread() {
        launch_.kernel(launch_.arguments);
        leave(State::Done);
    }

   private:
    static constexpr size_t STACK = 64 << 10;
    enum class State { Running, AtBarrier, Done };
    struct Fiber {
        Context context;
        State state;
    };

    static std::vector<unsigned> turns(size_t n, Order order, std::mt19937& random) {
        std::vector<unsigned> turns(n);
        std::iota(turns.begin(), turns.end(), 0u);
        if (order == Order::Backward) std::reverse(turns.begin(), turns.end());
        if (order == Order::Shuffled) std::shuffle(turns.begin(), turns.end(), random);
        return turns;
    }

    void run_block(Order order, std::mt19937& random) {
#if !defined(__SANITIZE_ADDRESS__)
        memset(launch_.shared, 0x7f, launch_.shared_size);
#endif
        for (size_t t = 0; t < fibers_.size(); ++t) start_at(fibers_[t].context, &stacks_[t * STACK], STACK, enter);
        size_t done = 0;
        while (done == 0) {
            for (unsigned t : turns(fibers_.size(), order, random)) {
                resume(t);
                if (!fault_.empty()) return;
                done += fibers_[t].state == State::Done;
            }
        }
        if (done != fibers_.size()) fault_ = "a barrier was not reached by all threads of its block";
    }

    void resume(unsigned thread) {
        threadIdx = {thread, 0, 0};
        current_ = &fibers_[thread];
        current_->state = State::Running;
        switch_to(scheduler_, current_->context);
    }

    void leave(State state) {
        current_->state = state;
        switch_to(current_->context, scheduler_);
    }

    static void enter();

    const Launch launch_;
    std::string fault_;
    std::vector<Fiber> fibers_;
    std::unique_ptr<char[]> stacks_;
    Context scheduler_;
    Fiber* current_ = nullptr;
    size_t waiting_ = 0;
    bool any_ = false;
};

Machine* machine;

void Machine::enter() { machine->run_thread(); }

bool barrier(bool any) { return machine->barrier(any); }
void fail(const char* why) { machine->fail(why); }

const char* run(Launch launch, unsigned columns, unsigned rows, unsigned threads, int order, unsigned seed) {
    static std::string fault;
    Machine running(launch);
    machine = &running;
    fault = running.run(columns, rows, threads, static_cast<Order>(order), seed);
    return fault.c_str();
}

}  // namespace cpu
