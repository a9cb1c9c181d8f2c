// GGUF's rows of blocks into the rows that the kernels read; see packed_row_bytes for what those hold.

#pragma once
#include "row_kernels.h"
#include "thread_pool.h"

namespace pi {

// `blocks`: rows of columns / 32 blocks, each its F16 scale and then 32 int8 (Q8_0) or 16 bytes (Q4_0: value j in the low,
// value j + 16 in the high nibble of byte j). `packed`: rows stride_bytes apart, every byte of which is written.
void pack_blocks(ThreadPool& pool, WeightType type, const uint8_t* blocks, int64_t rows, int64_t columns, uint8_t* packed,
                 int64_t stride_bytes);

}  // namespace pi
