// Single values of every weight type, and the quantiser: what the vector loops use for their remainders.
// Included by every row_kernels_*.cpp, so that each compiles it for its own instruction set.

#pragma once
#include <cmath>
#include <cstring>

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

inline float load_scale(const uint8_t* row, int64_t block) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * block, 2);
    return half_to_float(bits);
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

}  // namespace
}  // namespace pi
