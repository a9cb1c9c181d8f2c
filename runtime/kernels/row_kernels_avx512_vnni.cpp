// AVX-512 with VNNI (Ice Lake, Zen 4 and later): byte products in one instruction.

#if defined(__x86_64__)
#define PI_KERNELS AVX512_VNNI_ROW_KERNELS
#define PI_KERNELS_NAME "avx512_vnni"
#define PI_DOT_INT8(sums, unsigned_bytes, signed_bytes) sums = _mm512_dpbusd_epi32(sums, unsigned_bytes, signed_bytes)
#include "row_kernels_avx512.h"
#endif
