// See pack_weights_cpu.h. Rows are shared among the threads. What is only copied is read and written once; everything else
// passes through tiles of float32 in the caches, so that turned matrices are read by lines and written by rows.

#include "pack_weights_cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace pi {
namespace {

constexpr int64_t ROWS = 128, COLUMNS = 256;  // of a tile, 136 KB: the L2 cache
constexpr int64_t ACROSS = 16;                // stored rows turned at once
constexpr int64_t STRIDE = COLUMNS + 16;      // a power of two would put the rows of a tile into few sets of the L1 cache

constexpr int64_t block_bytes(WeightType type) { return type == WeightType::Q8_0 ? 34 : 18; }

constexpr int64_t value_bytes(WeightType type) { return type == WeightType::F32 ? 4 : 2; }

// Where the quants of block b are; beyond the row's end those of a block of zeros.
inline const uint8_t* quants_of(const uint8_t* row, int64_t b, int64_t blocks, int64_t bytes, const uint8_t* zeros) {
    return b < blocks ? row + b * bytes + 2 : zeros;
}

// Half of each byte of one block beside the same half of the block two further on.
void pack_group(const uint8_t* front, const uint8_t* back, uint8_t* packed) {
    for (int i = 0; i < 16; ++i) packed[i] = uint8_t((front[i] & 15) | back[i] << 4);
    for (int i = 0; i < 16; ++i) packed[16 + i] = uint8_t(front[i] >> 4 | (back[i] & 0xf0));
}

// One row of blocks as it is.
void pack_blocks(WeightType type, const uint8_t* row, int64_t columns, uint8_t* out) {
    const int64_t count = columns / BLOCK, head = scales_bytes(columns), groups = padded(columns, GROUP) / GROUP;
    const int64_t bytes = block_bytes(type);
    uint8_t zeros[BLOCK];  // zero is stored as 8 in a nibble
    std::memset(zeros, type == WeightType::Q8_0 ? 0 : 0x88, sizeof zeros);
    std::memset(out + 2 * count, 0, head - 2 * count);
    for (int64_t b = 0; b < count; ++b) std::memcpy(out + 2 * b, row + b * bytes, 2);
    for (int64_t b = 0; b < 4 * groups; ++b) {
        const auto quants = [&](int64_t index) { return quants_of(row, index, count, bytes, zeros); };
        if (type == WeightType::Q8_0)
            std::memcpy(out + head + BLOCK * b, quants(b), BLOCK);
        else if (b % 4 < 2)
            pack_group(quants(b), quants(b + 2), out + head + b / 4 * LINE + b % 4 * BLOCK);
    }
}

void dequantise(WeightType type, const uint8_t* block, int64_t count, float* values) {
    for (int64_t i = 0; i < count; i += BLOCK, block += block_bytes(type), values += BLOCK) {
        uint16_t bits;
        std::memcpy(&bits, block, 2);
        const float scale = half_to_float(bits);
        if (type == WeightType::Q8_0) {
            for (int j = 0; j < BLOCK; ++j) values[j] = scale * float(int8_t(block[2 + j]));
        } else {
            for (int j = 0; j < BLOCK / 2; ++j) values[j] = scale * float(int(block[2 + j] & 15) - 8);
            for (int j = 0; j < BLOCK / 2; ++j) values[BLOCK / 2 + j] = scale * float(int(block[2 + j] >> 4) - 8);
        }
    }
}

// Values first..first+count-1 of one stored row; for block types both are multiples of BLOCK.
void read_values(const RowKernels& kernels, const StoredMatrix& stored, int64_t row, int64_t first, int64_t count, float* values) {
    const uint8_t* data = stored.row(row);
    if (is_block_type(stored.type))
        dequantise(stored.type, data + first / BLOCK * block_bytes(stored.type), count, values);
    else
        kernels.unpack[int(stored.type)](data, 0, first, count, values);
}

// Columns first..first+count-1 of `rows` rows from row begin on.
void read_tile(const RowKernels& kernels, const StoredMatrix& stored, int64_t begin, int64_t rows, int64_t first, int64_t count,
               float* tile) {
    if (!stored.turned) {
        for (int64_t r = 0; r < rows; ++r) read_values(kernels, stored, begin + r, first, count, tile + r * STRIDE);
        return;
    }
    float across[ACROSS][ROWS];
    for (int64_t k = 0; k < count; k += ACROSS) {
        const int64_t some = std::min(ACROSS, count - k);
        for (int64_t i = 0; i < some; ++i) read_values(kernels, stored, first + k + i, begin, rows, across[i]);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < some; ++i) tile[r * STRIDE + k + i] = across[i][r];
    }
}

// `count` values of a row of `columns`, from column `first` on, which is a multiple of GROUP.
bool write_values(const RowKernels& kernels, WeightType type, float* values, int64_t first, int64_t count, int64_t columns,
                  uint8_t* row) {
    if (!is_block_type(type)) {
        kernels.store[int(type)](values, count, row + first * value_bytes(type));
        return true;
    }
    bool finite = true;
    std::fill(values + count, values + padded(count, GROUP), 0.0f);
    for (int64_t i = 0; i < count; i += GROUP) {
        uint8_t* quants = row + scales_bytes(columns) + (first + i) / (type == WeightType::Q8_0 ? 1 : 2);
        const int64_t blocks = std::min(GROUP, count - i) / BLOCK;
        finite &= kernels.encode[type == WeightType::Q4_0](values + i, blocks, row + (first + i) / BLOCK * 2, quants);
    }
    return finite;
}

}  // namespace

bool pack_weights(ThreadPool& pool, const RowKernels& kernels, const StoredMatrix& stored, int64_t rows, int64_t columns,
                  WeightType type, uint8_t* packed, int64_t stride_bytes) {
    std::atomic<bool> finite{true};
    const bool as_it_is = type == stored.type && !stored.turned;
    pool.run((rows + ROWS - 1) / ROWS, [&](int64_t chunk) {
        const int64_t begin = chunk * ROWS, count = std::min(ROWS, rows - begin);
        uint8_t* out = packed + begin * stride_bytes;
        if (as_it_is) {
            for (int64_t r = begin; r < begin + count; ++r, out += stride_bytes)
                if (is_block_type(type))
                    pack_blocks(type, stored.row(r), columns, out);
                else
                    std::memcpy(out, stored.row(r), columns * value_bytes(type));
            return;
        }
        thread_local std::vector<float> tile;
        tile.resize(ROWS * STRIDE);
        if (is_block_type(type))
            for (int64_t r = 0; r < count; ++r)
                std::memset(out + r * stride_bytes + columns / BLOCK * 2, 0, scales_bytes(columns) - columns / BLOCK * 2);
        for (int64_t first = 0; first < columns; first += COLUMNS) {
            const int64_t width = std::min(COLUMNS, columns - first);
            read_tile(kernels, stored, begin, count, first, width, tile.data());
            for (int64_t r = 0; r < count; ++r)
                if (!write_values(kernels, type, tile.data() + r * STRIDE, first, width, columns, out + r * stride_bytes))
                    finite.store(false, std::memory_order_relaxed);
        }
    });
    return finite.load(std::memory_order_relaxed);
}

}  // namespace pi
