// Notes every access of the block's threads to shared memory. Linked into a library whose kernel was compiled with
// -fsanitize=thread: the compiler announces each access, as wide as the source has it, to the functions below. The
// runtime that usually defines them is not linked.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda.h"

extern "C" unsigned char __start_shared_memory[] __attribute__((visibility("hidden")));
extern "C" unsigned char __stop_shared_memory[] __attribute__((visibility("hidden")));

namespace {

struct Access {
    uint64_t site;  // address of the instruction
    uint32_t thread, offset, size, block;
    uint64_t writes;
};

std::vector<Access> accesses, given;

void note(const void* address, size_t size, bool writes, const void* site) {
    const auto* at = static_cast<const unsigned char*>(address);
    if (at < __start_shared_memory || at >= __stop_shared_memory) return;
    const auto offset = static_cast<uint32_t>(at - __start_shared_memory);
    const auto bytes = static_cast<uint32_t>(size);
    accesses.push_back({reinterpret_cast<uintptr_t>(site), threadIdx.x, offset, bytes, blockIdx.x, writes});
}

}  // namespace

// Gives what was noted since the last time.
extern "C" const Access* noted(size_t* count) {
    given.swap(accesses);
    accesses.clear();
    *count = given.size();
    return given.data();
}

extern "C" void __tsan_init() {}

#define SITE __builtin_return_address(0)
#define ANNOUNCED(n)                                                         \
    extern "C" void __tsan_read##n(void* at) { note(at, n, false, SITE); }  \
    extern "C" void __tsan_write##n(void* at) { note(at, n, true, SITE); }

ANNOUNCED(1)
ANNOUNCED(2)
ANNOUNCED(4)
ANNOUNCED(8)
ANNOUNCED(16)

extern "C" void __tsan_read_range(void* at, size_t n) { note(at, n, false, SITE); }
extern "C" void __tsan_write_range(void* at, size_t n) { note(at, n, true, SITE); }
