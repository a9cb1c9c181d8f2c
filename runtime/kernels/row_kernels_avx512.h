// Row kernels for AVX-512 (F, BW, DQ, VL). The file that includes this defines PI_DOT_INT8(sums, unsigned, signed), which
// adds the products of 64 byte pairs to 16 int32 sums, four neighbours each, and PI_KERNELS and PI_KERNELS_NAME.

#include <immintrin.h>

#include <algorithm>

#include "row_kernels_scalar.h"

namespace pi {
namespace {

inline void fetch(const uint8_t* address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0); }

template <WeightType type>
inline __m512 load16(const uint8_t* row, int64_t i) {
    if constexpr (type == WeightType::F32) return _mm512_loadu_ps(row + 4 * i);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * i));
    if constexpr (type == WeightType::F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <WeightType type>
float dot_float(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t i = 0;
    for (; i + 64 <= columns; i += 64) {
        for (int64_t line = 0; line < bytes; ++line) fetch(next + bytes * i + LINE * line);
        for (int k = 0; k < 4; ++k)
            sums[k] = _mm512_fmadd_ps(load16<type>(row, i + 16 * k), _mm512_loadu_ps(x.values + i + 16 * k), sums[k]);
    }
    for (; i + 16 <= columns; i += 16)
        sums[0] = _mm512_fmadd_ps(load16<type>(row, i), _mm512_loadu_ps(x.values + i), sums[0]);
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
    for (; i < columns; ++i) sum += load_scalar<type>(row, i) * x.values[i];
    return sum;
}

template <WeightType type>
void axpy_float(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    const __m512 factor = _mm512_set1_ps(a);
    int64_t i = 0;
    for (; i + 64 <= columns; i += 64) {
        for (int64_t line = 0; line < bytes; ++line) fetch(next + bytes * i + LINE * line);
        for (int k = 0; k < 4; ++k) {
            float* at = y + i + 16 * k;
            _mm512_storeu_ps(at, _mm512_fmadd_ps(factor, load16<type>(row, i + 16 * k), _mm512_loadu_ps(at)));
        }
    }
    for (; i < columns; ++i) y[i] += a * load_scalar<type>(row, i);
}

template <WeightType type>
void dot_two(const uint8_t* const rows[2], const float* x, int64_t columns, const uint8_t* const next[2], float dots[2]) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    __m512 sums[2][2] = {{_mm512_setzero_ps(), _mm512_setzero_ps()}, {_mm512_setzero_ps(), _mm512_setzero_ps()}};
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
        for (int r = 0; r < 2; ++r)
            for (int64_t line = 0; line < bytes / 2; ++line) fetch(next[r] + bytes * i + LINE * line);
        for (int k = 0; k < 2; ++k) {
            const __m512 values = _mm512_loadu_ps(x + i + 16 * k);
            for (int r = 0; r < 2; ++r) sums[r][k] = _mm512_fmadd_ps(load16<type>(rows[r], i + 16 * k), values, sums[r][k]);
        }
    }
    for (int r = 0; r < 2; ++r) dots[r] = _mm512_reduce_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]));
    for (; i < columns; ++i)
        for (int r = 0; r < 2; ++r) dots[r] += load_scalar<type>(rows[r], i) * x[i];
}

template <WeightType type>
void axpy_two(float* y, const float a[2], const uint8_t* const rows[2], int64_t columns, const uint8_t* const next[2]) {
    constexpr int64_t bytes = type == WeightType::F32 ? 4 : 2;
    const __m512 factors[2] = {_mm512_set1_ps(a[0]), _mm512_set1_ps(a[1])};
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
        for (int r = 0; r < 2; ++r)
            for (int64_t line = 0; line < bytes / 2; ++line) fetch(next[r] + bytes * i + LINE * line);
        for (int k = 0; k < 2; ++k) {
            float* at = y + i + 16 * k;
            __m512 sum = _mm512_loadu_ps(at);
            for (int r = 0; r < 2; ++r) sum = _mm512_fmadd_ps(factors[r], load16<type>(rows[r], i + 16 * k), sum);
            _mm512_storeu_ps(at, sum);
        }
    }
    for (; i < columns; ++i) y[i] += a[0] * load_scalar<type>(rows[0], i) + a[1] * load_scalar<type>(rows[1], i);
}

// Lanes 0-7 get lane `first` of v, lanes 8-15 the one after it.
inline __m512 spread_two(__m512 v, int first) {
    const __m512i pattern = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(_mm512_add_epi32(pattern, _mm512_set1_epi32(first)), v);
}

// Scales of up to 16 blocks from `block` on, zero where `lanes` is not set.
inline __m512 load_scales(const uint8_t* row, int64_t block, __mmask16 lanes) {
    return _mm512_maskz_cvtph_ps(lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 2 * block)));
}

template <WeightType type>
float dot_blocks(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next) {
    constexpr bool nibbles = type == WeightType::Q4_0;
    const int64_t groups = padded(columns, GROUP) / GROUP, head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    const __m512i low = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps(), correction = _mm512_setzero_ps();
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t first = 0; first < groups; first += 4) {
        const int count = int(std::min<int64_t>(4, groups - first));
        const __mmask16 lanes = __mmask16((1u << (4 * count)) - 1);
        const __m512 scales =
            _mm512_mul_ps(load_scales(row, 4 * first, lanes), _mm512_maskz_loadu_ps(lanes, x.scales + 4 * first));
        if constexpr (nibbles)
            correction = _mm512_fmadd_ps(scales, _mm512_maskz_loadu_ps(lanes, x.offsets + 4 * first), correction);
        for (int k = 0; k < count; ++k) {
            const int64_t group = first + k;
            const __m512i x0 = _mm512_loadu_si512(x.quants + GROUP * group);
            const __m512i x1 = _mm512_loadu_si512(x.quants + GROUP * group + LINE);
            __m512i p0 = zero, p1 = zero;
            if constexpr (nibbles) {
                fetch(next + head + LINE * group);
                const __m512i packed = _mm512_loadu_si512(quants + LINE * group);
                PI_DOT_INT8(p0, _mm512_and_si512(packed, low), x0);
                PI_DOT_INT8(p1, _mm512_and_si512(_mm512_srli_epi16(packed, 4), low), x1);
            } else {  // one factor has to be unsigned: move the weight's sign to x
                fetch(next + head + GROUP * group);
                fetch(next + head + GROUP * group + LINE);
                const __m512i w0 = _mm512_loadu_si512(quants + GROUP * group);
                const __m512i w1 = _mm512_loadu_si512(quants + GROUP * group + LINE);
                PI_DOT_INT8(p0, _mm512_abs_epi8(w0), _mm512_mask_sub_epi8(x0, _mm512_movepi8_mask(w0), zero, x0));
                PI_DOT_INT8(p1, _mm512_abs_epi8(w1), _mm512_mask_sub_epi8(x1, _mm512_movepi8_mask(w1), zero, x1));
            }
            sum0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(p0), spread_two(scales, 4 * k), sum0);
            sum1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(p1), spread_two(scales, 4 * k + 2), sum1);
        }
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum0, sum1), correction));
}

inline __m512i load_16_bytes(const uint8_t* address) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(address)));
}

inline void add_to(float* y, __m512 v) { _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), v)); }

// All lanes get lane `index` of v.
inline __m512 spread_one(__m512 v, int64_t index) { return _mm512_permutexvar_ps(_mm512_set1_epi32(int(index)), v); }

// Scales of the 16 blocks from `block` on, times a; garbage where the row has fewer.
inline __m512 scaled(float a, const uint8_t* row, int64_t block) {
    return _mm512_mul_ps(_mm512_set1_ps(a), load_scales(row, block, 0xffff));
}

// A nibble is looked up in the table of its block's 16 possible products, which saves a conversion and a multiplication.
void axpy_q4(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    const int64_t groups = padded(columns, GROUP) / GROUP, head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    const __m512 steps = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512 scales = _mm512_setzero_ps();
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t group = 0; group < groups; ++group) {
        if (group % 4 == 0) scales = scaled(a, row, 4 * group);
        fetch(next + head + LINE * group);
        __m512 products[4];
        for (int b = 0; b < 4; ++b) products[b] = _mm512_mul_ps(steps, spread_one(scales, 4 * (group % 4) + b));
        for (int quarter = 0; quarter < 4; ++quarter) {
            const __m512i bytes = load_16_bytes(quants + LINE * group + 16 * quarter);
            float* at = y + GROUP * group + 16 * quarter;
            add_to(at, _mm512_permutexvar_ps(bytes, products[quarter / 2]));  // uses the low four bits
            add_to(at + LINE, _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), products[2 + quarter / 2]));
        }
    }
}

void axpy_q8(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next) {
    const int64_t head = scales_bytes(columns);
    const uint8_t* quants = row + head;
    __m512 scales = _mm512_setzero_ps();
    for (int64_t line = 0; line < head; line += LINE) fetch(next + line);
    for (int64_t b = 0; b < padded(columns, GROUP) / BLOCK; ++b) {
        if (b % 16 == 0) scales = scaled(a, row, b);
        fetch(next + head + BLOCK * b);
        const __m512 factor = spread_one(scales, b % 16);
        for (int half = 0; half < 2; ++half) {
            const int64_t i = BLOCK * b + 16 * half;
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants + i));
            const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
            _mm512_storeu_ps(y + i, _mm512_fmadd_ps(factor, values, _mm512_loadu_ps(y + i)));
        }
    }
}

void store_half(const float* x, int64_t columns, uint8_t* row) {
    int64_t i = 0;
    for (; i + 16 <= columns; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 2 * i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), 0));
    store_row<WeightType::F16>(x + i, columns - i, row + 2 * i);
}

void unpack_half(const uint8_t* row, int64_t, int64_t first, int64_t count, float* values) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) _mm512_storeu_ps(values + i, load16<WeightType::F16>(row, first + i));
    for (; i < count; ++i) values[i] = load_scalar<WeightType::F16>(row, first + i);
}

using Vector = __m512;
constexpr int64_t WIDTH = 16, TILE_ROWS = 8;
inline Vector load(const float* values) { return _mm512_loadu_ps(values); }
inline void store(float* values, Vector v) { _mm512_storeu_ps(values, v); }
inline Vector set(float value) { return _mm512_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace pi

#include "row_kernels_tile.h"

namespace pi {

const RowKernels PI_KERNELS = {
    PI_KERNELS_NAME,
    {dot_float<WeightType::F32>, dot_float<WeightType::BF16>, dot_float<WeightType::F16>, dot_blocks<WeightType::Q8_0>,
     dot_blocks<WeightType::Q4_0>},
    {axpy_float<WeightType::F32>, axpy_float<WeightType::BF16>, axpy_float<WeightType::F16>, axpy_q8, axpy_q4},
    {dot_two<WeightType::F32>, dot_two<WeightType::BF16>, dot_two<WeightType::F16>},
    {axpy_two<WeightType::F32>, axpy_two<WeightType::BF16>, axpy_two<WeightType::F16>},
    {store_row<WeightType::F32>, store_row<WeightType::BF16>, store_half},
    quantise_blocks,
    {encode_group<WeightType::Q8_0>, encode_group<WeightType::Q4_0>},
    {unpack_row<WeightType::F32>, unpack_row<WeightType::BF16>, unpack_half, unpack_row<WeightType::Q8_0>,
     unpack_row<WeightType::Q4_0>},
    tile,
};

}  // namespace pi
