// See pack_blocks_cpu.h. Rows are shared among the threads; each is read and written once.

#include "pack_blocks_cpu.h"

#include <algorithm>
#include <cstring>

namespace pi {
namespace {

constexpr int64_t ROWS = 64;  // per chunk

// Where the quants of block b are; beyond the row's end those of a block of zeros.
inline const uint8_t* quants_of(const uint8_t* row, int64_t b, int64_t blocks, int64_t block_bytes, const uint8_t* zeros) {
    return b < blocks ? row + b * block_bytes + 2 : zeros;
}

// Half of each byte of one block beside the same half of the block two further on.
void pack_group(const uint8_t* front, const uint8_t* back, uint8_t* packed) {
    for (int i = 0; i < 16; ++i) packed[i] = uint8_t((front[i] & 15) | back[i] << 4);
    for (int i = 0; i < 16; ++i) packed[16 + i] = uint8_t(front[i] >> 4 | (back[i] & 0xf0));
}

}  // namespace

void pack_blocks(ThreadPool& pool, WeightType type, const uint8_t* blocks, int64_t rows, int64_t columns, uint8_t* packed,
                 int64_t stride_bytes) {
    const int64_t count = columns / BLOCK, head = scales_bytes(columns), groups = padded(columns, GROUP) / GROUP;
    const int64_t block_bytes = type == WeightType::Q8_0 ? 34 : 18;
    uint8_t zeros[BLOCK];  // zero is stored as 8 in a nibble
    std::memset(zeros, type == WeightType::Q8_0 ? 0 : 0x88, sizeof zeros);
    pool.run((rows + ROWS - 1) / ROWS, [&](int64_t chunk) {
        for (int64_t r = chunk * ROWS; r < std::min(rows, (chunk + 1) * ROWS); ++r) {
            const uint8_t* row = blocks + r * count * block_bytes;
            uint8_t* out = packed + r * stride_bytes;
            std::memset(out, 0, head);
            for (int64_t b = 0; b < count; ++b) std::memcpy(out + 2 * b, row + b * block_bytes, 2);
            for (int64_t b = 0; b < 4 * groups; ++b) {
                const auto quants = [&](int64_t index) { return quants_of(row, index, count, block_bytes, zeros); };
                if (type == WeightType::Q8_0)
                    std::memcpy(out + head + BLOCK * b, quants(b), BLOCK);
                else if (b % 4 < 2)
                    pack_group(quants(b), quants(b + 2), out + head + b / 4 * LINE + b % 4 * BLOCK);
            }
        }
    });
}

}  // namespace pi
