// The plainest form of every row kernel, for machines without AVX2; the others must equal it up to rounding.

#include <algorithm>

#include "row_kernels_scalar.h"

namespace pi {
namespace {

template <WeightType type>
float dot_float(const uint8_t* row, const Input& x, int64_t columns, const uint8_t*) {
    float sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= columns; i += 8)
        for (int k = 0; k < 8; ++k) sums[k] += load_scalar<type>(row, i + k) * x.values[i + k];
    for (; i < columns; ++i) sums[0] += load_scalar<type>(row, i) * x.values[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <WeightType type>
void axpy_float(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t*) {
    for (int64_t i = 0; i < columns; ++i) y[i] += a * load_scalar<type>(row, i);
}

float dot_q8(const uint8_t* row, const Input& x, int64_t columns, const uint8_t*) {
    const int8_t* quants = reinterpret_cast<const int8_t*>(row + scales_bytes(columns));
    float sum = 0;
    for (int64_t b = 0; b < padded(columns, GROUP) / BLOCK; ++b) {
        int32_t products = 0;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; ++i) products += int32_t(quants[i]) * x.quants[i];
        sum += load_scale(row, b) * x.scales[b] * float(products);
    }
    return sum;
}

void axpy_q8(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t*) {
    const int8_t* quants = reinterpret_cast<const int8_t*>(row + scales_bytes(columns));
    for (int64_t i = 0; i < columns; ++i) y[i] += a * load_scale(row, i / BLOCK) * float(quants[i]);
}

// Value i of a Q4_0 row, without its scale and with 8 added.
inline int32_t nibble(const uint8_t* quants, int64_t i) {
    const int64_t within = i % GROUP;
    const uint8_t byte = quants[i / GROUP * LINE + within % LINE];
    return within < LINE ? byte & 15 : byte >> 4;
}

float dot_q4(const uint8_t* row, const Input& x, int64_t columns, const uint8_t*) {
    const uint8_t* quants = row + scales_bytes(columns);
    float sum = 0;
    for (int64_t b = 0; b < padded(columns, GROUP) / BLOCK; ++b) {
        int32_t products = 0;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; ++i) products += nibble(quants, i) * x.quants[i];
        sum += load_scale(row, b) * x.scales[b] * (float(products) + x.offsets[b]);
    }
    return sum;
}

void axpy_q4(float* y, float a, const uint8_t* row, int64_t columns, const uint8_t*) {
    const uint8_t* quants = row + scales_bytes(columns);
    for (int64_t i = 0; i < columns; ++i) y[i] += a * load_scale(row, i / BLOCK) * float(nibble(quants, i) - 8);
}

void tile(const float* w, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, const float* x, float* y,
          int64_t tokens, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t t = 0; t < tokens; ++t) y[r * stride + t] += w[r * row_stride + k * k_stride] * x[k * stride + t];
}

}  // namespace

const RowKernels PORTABLE_ROW_KERNELS = {
    "portable",
    {dot_float<WeightType::F32>, dot_float<WeightType::BF16>, dot_float<WeightType::F16>, dot_q8, dot_q4},
    {axpy_float<WeightType::F32>, axpy_float<WeightType::BF16>, axpy_float<WeightType::F16>, axpy_q8, axpy_q4},
    {},
    {},
    {store_row<WeightType::F32>, store_row<WeightType::BF16>, store_row<WeightType::F16>},
    quantise_blocks,
    {encode_group<WeightType::Q8_0>, encode_group<WeightType::Q4_0>},
    {unpack_row<WeightType::F32>, unpack_row<WeightType::BF16>, unpack_row<WeightType::F16>, unpack_row<WeightType::Q8_0>,
     unpack_row<WeightType::Q4_0>},
    tile,
};

}  // namespace pi
