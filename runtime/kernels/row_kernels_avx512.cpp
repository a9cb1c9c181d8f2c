// AVX-512 without VNNI (Skylake-X): byte products by way of int16.

#if defined(__x86_64__)
#define PI_KERNELS AVX512_ROW_KERNELS
#define PI_KERNELS_NAME "avx512"
#define PI_DOT_INT8(sums, unsigned_bytes, signed_bytes) \
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(unsigned_bytes, signed_bytes), _mm512_set1_epi16(1)))
#include "row_kernels_avx512.h"
#endif
