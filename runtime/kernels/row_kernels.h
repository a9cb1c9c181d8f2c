// One row of weights against one vector: the two operations every kernel of this folder is made of.
//
// dot:  sum_i row[i] * x[i]          axpy:  y[i] += a * row[i]
//
// They exist once per weight type and instruction set. Rows of F32, BF16 and F16 are plain; rows of the block types are
// packed for wide loads, see packed_row_bytes. Nothing here knows what a row means.

#pragma once
#include <cstdint>

namespace pi {

enum class WeightType : int { F32, BF16, F16, Q8_0, Q4_0 };
constexpr int WEIGHT_TYPES = 5;
constexpr int64_t BLOCK = 32;   // values that share a scale
constexpr int64_t GROUP = 128;  // values of a block-type row are padded to this, so that 64 bytes hold whole blocks
constexpr int64_t LINE = 64;    // bytes of a cache line

// A vector in the forms that dot needs: `values` always, the rest for block types only. Blocks of 32 values share
// scales[b]; quants are round(values / scale) in -127..127; offsets[b] = -8 * (sum of the block's quants), the correction
// for nibbles that are stored with 8 added. `quants` is padded with zeros to GROUP.
struct Input {
    const float* values;
    const int8_t* quants;
    const float* scales;
    const float* offsets;
};

// `next` is a row that will be read soon: while `row` is worked on, it is fetched line by line. Rows that are picked at
// random run at the speed of sequential ones only this way.
using Dot = float (*)(const uint8_t* row, const Input& x, int64_t columns, const uint8_t* next);
using Axpy = void (*)(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t* next);
// Both for two rows at once, which reads the vector once for both; F32, BF16 and F16. Where dots[i] is that of rows[i], and
// y[i] += a[0] * rows[0][i] + a[1] * rows[1][i].
using DotTwo = void (*)(const uint8_t* const rows[2], const float* x, int64_t columns, const uint8_t* const next[2], float dots[2]);
using AxpyTwo = void (*)(float* y, const float a[2], const uint8_t* const rows[2], int64_t columns, const uint8_t* const next[2]);
using Store = void (*)(const float* x, int64_t columns, uint8_t* row);  // F32, BF16 and F16, rounded to nearest
using Quantise = void (*)(const float* x, int64_t columns, int8_t* quants, float* scales, float* offsets);

// GROUP values to what a packed row of blocks holds of them: quants, and the F16 scales of the first `blocks` blocks. The bytes
// are those of llama.cpp's reference quantiser. Returns false unless all values are finite.
using Encode = bool (*)(const float* x, int64_t blocks, uint8_t* scales, uint8_t* quants);

// values[0..count-1] = columns first..first+count-1 of a row of `columns`; for block types `first` is a multiple of GROUP.
using Unpack = void (*)(const uint8_t* row, int64_t columns, int64_t first, int64_t count, float* values);

// A small product of matrices in the caches: y[r][t] += sum over k < depth of w[r * row_stride + k * k_stride] * x[k][t] for
// r < rows and t < tokens, a multiple of TOKENS; x and y have rows of `stride` floats.
using Tile = void (*)(const float* w, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, const float* x,
                      float* y, int64_t tokens, int64_t stride);
constexpr int64_t TOKENS = 16;

struct RowKernels {
    const char* name;
    Dot dot[WEIGHT_TYPES];
    Axpy axpy[WEIGHT_TYPES];
    DotTwo dot_two[3];  // null where two rows are no faster than one after the other
    AxpyTwo axpy_two[3];
    Store store[3];
    Quantise quantise;
    Encode encode[2];  // Q8_0 and Q4_0
    Unpack unpack[WEIGHT_TYPES];
    Tile tile;
};

extern const RowKernels PORTABLE_ROW_KERNELS;
#if defined(__x86_64__)
extern const RowKernels AVX2_ROW_KERNELS;
extern const RowKernels AVX512_ROW_KERNELS;       // int8 products without VNNI
extern const RowKernels AVX512_VNNI_ROW_KERNELS;
#endif

// The fastest set this machine can run, or the one that environment variable PI_CPU_ISA names ("portable", "avx2",
// "avx512", "avx512_vnni"). Returns null for a name that is unknown or not supported here.
const RowKernels* choose_row_kernels();

// The same, but throws std::invalid_argument in place of null.
const RowKernels* require_row_kernels();

constexpr int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
constexpr bool is_block_type(WeightType type) { return type == WeightType::Q8_0 || type == WeightType::Q4_0; }

// Bytes of one row. Block types: F16 scales of all blocks, padded to a line; then the quants. Q8_0: one byte each. Q4_0:
// 64 bytes per GROUP, of which byte i holds value i in its low and value 64 + i in its high nibble, both with 8 added.
constexpr int64_t scales_bytes(int64_t columns) { return padded(padded(columns, GROUP) / BLOCK * 2, LINE); }
constexpr int64_t packed_row_bytes(WeightType type, int64_t columns) {
    switch (type) {
        case WeightType::F32: return columns * 4;
        case WeightType::BF16:
        case WeightType::F16: return columns * 2;
        case WeightType::Q8_0: return scales_bytes(columns) + padded(columns, GROUP);
        case WeightType::Q4_0: return scales_bytes(columns) + padded(columns, GROUP) / 2;
    }
    return 0;
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {  // zero or subnormal: mantissa * 2^-24
        const float magnitude = float(mantissa) * (1.0f / 16777216.0f);
        __builtin_memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t float_to_half(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);   // not a number
    if (magnitude >= 0x47800000) return uint16_t(sign | 0x7c00);  // 65536 and more
    if (magnitude < 0x38800000) {                                 // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        float shifted;
        __builtin_memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        __builtin_memcpy(&bits, &shifted, 4);
        return uint16_t(sign | (bits - 0x3f000000));
    }
    return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline uint16_t float_to_bfloat(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);  // not a number
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat_to_float(uint16_t bfloat) {
    const uint32_t bits = uint32_t(bfloat) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

}  // namespace pi
