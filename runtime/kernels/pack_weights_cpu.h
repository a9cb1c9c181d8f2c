// Weights as files hold them into the rows that the kernels read: copied, converted, quantised and turned on the way.

#pragma once
#include "row_kernels.h"
#include "thread_pool.h"

namespace pi {

// A matrix as it is stored. Rows of the block types are GGUF's: columns / 32 blocks, each its F16 scale and then 32 int8
// (Q8_0) or 16 bytes (Q4_0: value j in the low, value j + 16 in the high nibble of byte j).
struct StoredMatrix {
    WeightType type;
    const uint8_t* data;
    int64_t stride_bytes;  // from one stored row to the next
    bool turned;           // stored row k holds column k of what is wanted
    const int64_t* order;  // which stored row each wanted row is, or null where they are the same; not with turned ones

    const uint8_t* row(int64_t r) const { return data + (order ? order[r] : r) * stride_bytes; }
};

// Writes `rows` packed rows of `columns` values as `type`, stride_bytes apart, padding included. Floating point becomes
// blocks by the rule of llama.cpp's reference quantiser; blocks of another type, or turned ones, do so by way of float32.
// Returns false where a value that was to be quantised is not finite; the rows are garbage then.
bool pack_weights(ThreadPool& pool, const RowKernels& kernels, const StoredMatrix& stored, int64_t rows, int64_t columns,
                  WeightType type, uint8_t* packed, int64_t stride_bytes);

}  // namespace pi
