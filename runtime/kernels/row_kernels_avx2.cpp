// Row kernels for AVX2 with FMA and F16C (Haswell, Zen 1 and later).

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>

#include "row_kernels_scalar.h"

namespace pi {
namespace {

inline void fetch(const uint8_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0); }

template <WeightType type>
inline __m256 load8(const uint8_t* row, int64_t i) {
    if constexpr (type == WeightType::F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(row + 4 * i));
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
    if constexpr (type == WeightType::F16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline float sum_lanes(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

template <WeightType type>
float dot_float(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
        for (int64_t line = 0; line < bytes / 2; ++line) fetch(next + bytes * i + LINE * line);
        for (int k = 0; k < 4; ++k)
            sums[k] = _mm256_fmadd_ps(load8<type>(row, i + 8 * k), _mm256_loadu_ps(x.values + i + 8 * k), sums[k]);
    }
    for (; i + 8 <= columns; i += 8) sums[0] = _mm256_fmadd_ps(load8<type>(row, i), _mm256_loadu_ps(x.values + i), sums[0]);
    float sum = sum_lanes(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    for (; i < columns; ++i) sum += load_scalar<type>(row, i) * x.values[i];
    return sum;
}

template <WeightType type>
void axpy_float(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    const __m256 factor = _mm256_set1_ps(a);
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
        for (int64_t line = 0; line < bytes / 2; ++line) fetch(next + bytes * i + LINE * line);
        for (int k = 0; k < 4; ++k) {
            float* at = y + i + 8 * k;
            _mm256_storeu_ps(at, _mm256_fmadd_ps(factor, load8<type>(row, i + 8 * k), _mm256_loadu_ps(at)));
        }
    }
    for (; i < columns; ++i) y[i] += a * load_scalar<type>(row, i);
}

inline __m256i load32(const void* address) { return _mm256_loadu_si256(static_cast<const __m256i*>(address)); }

// Sums of four neighbouring byte products each, of 32 unsigned and 32 signed bytes.
inline __m256i dot_int8(__m256i unsigned_bytes, __m256i signed_bytes) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_bytes, signed_bytes), _mm256_set1_epi16(1));
}

float dot_q8(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next) {
    const int64_t head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    __m256 sum = _mm256_setzero_ps();
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t b = 0; b < padded(columns, GROUP) / BLOCK; ++b) {
        fetch(next + head + BLOCK * b);
        const __m256i w = load32(quants + BLOCK * b), v = load32(x.quants + BLOCK * b);
        const __m256i products = dot_int8(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(load_scale(row, b) * x.scales[b]), sum);
    }
    return sum_lanes(sum);
}

float dot_q4(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next) {
    const int64_t head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    const __m256i low = _mm256_set1_epi8(15);
    __m256 sum = _mm256_setzero_ps();
    float correction = 0;
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t group = 0; group < padded(columns, GROUP) / GROUP; ++group) {
        fetch(next + head + LINE * group);
        for (int half = 0; half < 2; ++half) {  // 32 bytes: one block in the low nibbles, one in the high ones
            const __m256i packed = load32(quants + LINE * group + BLOCK * half);
            const __m256i nibbles[2] = {
                _mm256_and_si256(packed, low), _mm256_and_si256(_mm256_srli_epi16(packed, 4), low)};
            for (int which = 0; which < 2; ++which) {
                const int64_t b = 4 * group + 2 * which + half;
                const float scale = load_scale(row, b) * x.scales[b];
                const __m256i products = dot_int8(nibbles[which], load32(x.quants + BLOCK * b));
                sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scale), sum);
                correction += scale * x.offsets[b];
            }
        }
    }
    return sum_lanes(sum) + correction;
}

inline void add_bytes(float* y, __m256 factor, __m128i signed_bytes) {
    const __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(signed_bytes));
    _mm256_storeu_ps(y, _mm256_fmadd_ps(factor, values, _mm256_loadu_ps(y)));
}

inline __m128i load8_bytes(const uint8_t* address) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(address)); }

void axpy_q8(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    const int64_t head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t b = 0; b < padded(columns, GROUP) / BLOCK; ++b) {
        fetch(next + head + BLOCK * b);
        const __m256 factor = _mm256_set1_ps(a * load_scale(row, b));
        for (int64_t i = BLOCK * b; i < BLOCK * (b + 1); i += 8) add_bytes(y + i, factor, load8_bytes(quants + i));
    }
}

void axpy_q4(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    const int64_t head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    const __m128i low = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t group = 0; group < padded(columns, GROUP) / GROUP; ++group) {
        fetch(next + head + LINE * group);
        __m256 factors[4];
        for (int b = 0; b < 4; ++b) factors[b] = _mm256_set1_ps(a * load_scale(row, 4 * group + b));
        for (int eighth = 0; eighth < 8; ++eighth) {
            const __m128i packed = load8_bytes(quants + LINE * group + 8 * eighth);
            float* at = y + GROUP * group + 8 * eighth;
            add_bytes(at, factors[eighth / 4], _mm_sub_epi8(_mm_and_si128(packed, low), eight));
            const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
            add_bytes(at + LINE, factors[2 + eighth / 4], _mm_sub_epi8(high, eight));
        }
    }
}

void store_half(const float* x, int64_t columns, uint8_t* row) {
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
    store_row<WeightType::F16>(x + i, columns - i, row + 2 * i);
}

void unpack_half(const uint8_t* row, int64_t, int64_t first, int64_t count, float* values) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(values + i, load8<WeightType::F16>(row, first + i));
    for (; i < count; ++i) values[i] = load_scalar<WeightType::F16>(row, first + i);
}

using Vector = __m256;
constexpr int64_t WIDTH = 8, TILE_ROWS = 4;
inline Vector load(const float* values) { return _mm256_loadu_ps(values); }
inline void store(float* values, Vector v) { _mm256_storeu_ps(values, v); }
inline Vector set(float value) { return _mm256_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace pi

#include "row_kernels_tile.h"

namespace pi {

const RowKernels AVX2_ROW_KERNELS = {
    "avx2",
    {dot_float<WeightType::F32>, dot_float<WeightType::BF16>, dot_float<WeightType::F16>, dot_q8, dot_q4},
    {axpy_float<WeightType::F32>, axpy_float<WeightType::BF16>, axpy_float<WeightType::F16>, axpy_q8, axpy_q4},
    {},
    {},
    {store_row<WeightType::F32>, store_row<WeightType::BF16>, store_half},
    quantise_blocks,
    {encode_group<WeightType::Q8_0>, encode_group<WeightType::Q4_0>},
    {unpack_row<WeightType::F32>, unpack_row<WeightType::BF16>, unpack_half, unpack_row<WeightType::Q8_0>,
     unpack_row<WeightType::Q4_0>},
    tile,
};

}  // namespace pi
#endif
