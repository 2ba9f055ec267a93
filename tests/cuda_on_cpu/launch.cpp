// One specialisation of a kernel file as a shared library. Compiled with -DKERNEL_FILE=..., -DSTORE=... and
// -DLOAD=... for the file and its kernels, and with the macros of the specialisation.
#include "cuda.h"
#include KERNEL_FILE

extern "C" unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern "C" unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

static const char* launch(
    void (*kernel)(const void*), const void* arguments, unsigned x, unsigned y, unsigned threads, int order,
    unsigned seed) {
    const size_t shared = __stop_shared_memory - __start_shared_memory;
    return cpu::run({kernel, arguments, __start_shared_memory, shared}, x, y, threads, order, seed);
}

extern "C" const char* store(const void* a, unsigned x, unsigned y, unsigned threads, int order, unsigned seed) {
    return launch([](const void* a) { STORE(*static_cast<const Arguments*>(a)); }, a, x, y, threads, order, seed);
}

extern "C" const char* load(const void* a, unsigned x, unsigned y, unsigned threads, int order, unsigned seed) {
    return launch([](const void* a) { LOAD(*static_cast<const Arguments*>(a)); }, a, x, y, threads, order, seed);
}
