// Which row kernels this machine can run.

#include "row_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace pi {
namespace {

struct Supported {
    const RowKernels* kernels;
    bool here;
};

#if defined(__x86_64__)
// clang 14's __builtin_cpu_supports does not know "f16c".
bool converts_halves() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

}  // namespace

const RowKernels* choose_row_kernels() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halves();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const Supported fastest_first[] = {{&AVX512_VNNI_ROW_KERNELS, avx512 && __builtin_cpu_supports("avx512vnni")},
                                       {&AVX512_ROW_KERNELS, avx512},
                                       {&AVX2_ROW_KERNELS, avx2},
                                       {&PORTABLE_ROW_KERNELS, true}};
#else
    const Supported fastest_first[] = {{&PORTABLE_ROW_KERNELS, true}};
#endif
    const char* wanted = std::getenv("PI_CPU_ISA");
    for (const Supported& candidate : fastest_first)
        if (candidate.here && (!wanted || !std::strcmp(wanted, candidate.kernels->name))) return candidate.kernels;
    return nullptr;
}

const RowKernels* require_row_kernels() {
    const RowKernels* kernels = choose_row_kernels();
    if (!kernels) throw std::invalid_argument("PI_CPU_ISA names no instruction set of this machine");
    return kernels;
}

}  // namespace pi
