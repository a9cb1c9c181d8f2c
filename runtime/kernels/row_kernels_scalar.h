// Single values of every weight type, and the quantiser: what the vector loops use for their remainders.
// Included by every row_kernels_*.cpp, so that each compiles it for its own instruction set.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "row_kernels.h"

namespace pi {
namespace {

template <WeightType type>
inline float load_scalar(const uint8_t* row, int64_t i) {
    if constexpr (type == WeightType::F32) {
        float value;
        std::memcpy(&value, row + 4 * i, 4);
        return value;
    } else {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * i, 2);
        return type == WeightType::F16 ? half_to_float(bits) : bfloat_to_float(bits);
    }
}

// In files compiled for F16C one instruction.
inline float load_scale(const uint8_t* row, int64_t block) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * block, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    return half_to_float(bits);
#endif
}

template <WeightType type>
void store_row(const float* x, int64_t columns, uint8_t* row) {
    if constexpr (type == WeightType::F32) {
        std::memcpy(row, x, 4 * columns);
    } else {
        for (int64_t i = 0; i < columns; ++i) {
            const uint16_t bits = type == WeightType::F16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
            std::memcpy(row + 2 * i, &bits, 2);
        }
    }
}

template <WeightType type>
void unpack_row(const uint8_t* row, int64_t columns, int64_t first, int64_t count, float* values) {
    if constexpr (!is_block_type(type)) {
        for (int64_t i = 0; i < count; ++i) values[i] = load_scalar<type>(row, first + i);
    } else {
        const uint8_t* quants = row + scales_bytes(columns);
        for (int64_t begin = 0; begin < count; begin += BLOCK) {
            const int64_t at = first + begin, within = at % GROUP, length = std::min(BLOCK, count - begin);
            const float scale = load_scale(row, at / BLOCK);
            const uint8_t* bytes = quants + (type == WeightType::Q8_0 ? at : at / GROUP * LINE + within % LINE);
            const int shift = within < LINE ? 0 : 4;
            for (int64_t i = 0; i < length; ++i) {
                const int quant = type == WeightType::Q8_0 ? int(int8_t(bytes[i])) : (bytes[i] >> shift & 15) - 8;
                values[begin + i] = scale * float(quant);
            }
        }
    }
}

void quantise_blocks(const float* x, int64_t columns, int8_t* quants, float* scales, float* offsets) {
    const int64_t blocks = padded(columns, GROUP) / BLOCK;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = b * BLOCK, count = std::max<int64_t>(0, std::min(BLOCK, columns - begin));
        float largest = 0;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[begin + i]));
        const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        int32_t sum = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int32_t quant = int32_t(std::nearbyint(x[begin + i] * inverse));
            quants[begin + i] = int8_t(quant);
            sum += quant;
        }
        for (int64_t i = count; i < BLOCK; ++i) quants[begin + i] = 0;
        scales[b] = largest / 127.0f;
        offsets[b] = -8.0f * float(sum);
    }
}

template <WeightType type>
bool encode_group(const float* x, int64_t blocks, uint8_t* scales, uint8_t* quants) {
    constexpr bool nibbles = type == WeightType::Q4_0;
    constexpr uint32_t magnitude = 0x7fffffff, infinity = 0x7f800000;
    float scaled[GROUP];
    uint32_t largest_of_all = 0;
    for (int64_t b = 0; b < GROUP / BLOCK; ++b) {
        const float* block = x + b * BLOCK;
        uint32_t bits[BLOCK], largest = 0, first = BLOCK;
        std::memcpy(bits, block, sizeof bits);
        for (uint32_t i = 0; i < BLOCK; ++i) largest = std::max(largest, bits[i] & magnitude);
        for (uint32_t i = 0; i < BLOCK; ++i) first = std::min(first, (bits[i] & magnitude) == largest ? i : uint32_t(BLOCK));
        largest_of_all = std::max(largest_of_all, largest);
        const float scale = nibbles ? block[first] / -8.0f : std::fabs(block[first]) / 127.0f;
        const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
        // Of numbers below 2^-128, whose scale has no inverse, the reference makes quants of zero.
        const bool usable = std::fabs(inverse) <= 3.402823466e38f;
        if (b < blocks) {
            const uint16_t half = float_to_half(scale);
            std::memcpy(scales + 2 * b, &half, 2);
        }
        for (int64_t i = 0; i < BLOCK; ++i) scaled[b * BLOCK + i] = usable ? block[i] * inverse : (nibbles ? -8.5f : 0.0f);
    }
    // The reference rounds each product before it adds to it, and a compiler that sees both fuses them.
    __asm__ volatile("" : : "r"(scaled) : "memory");
    if (largest_of_all >= infinity) return false;
    if constexpr (nibbles) {
        uint8_t values[GROUP];
        for (int64_t i = 0; i < GROUP; ++i) values[i] = uint8_t(std::min(15, int(scaled[i] + 8.5f)));
        for (int64_t i = 0; i < LINE; ++i) quants[i] = uint8_t(values[i] | values[LINE + i] << 4);
    } else {
        for (int64_t i = 0; i < GROUP; ++i) {
            const float size = std::fabs(scaled[i]);
            const int whole = int(size), rounded = whole + (size - float(whole) >= 0.5f);
            quants[i] = uint8_t(scaled[i] < 0 ? -rounded : rounded);
        }
    }
    return true;
}

}  // namespace
}  // namespace pi
