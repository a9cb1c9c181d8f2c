// See matrix_product_cpu.h. Each chunk of outputs unpacks its weights once into a buffer that fits the L2 cache and passes
// over the tokens in panels that do, DEPTH products at a time.

#include "matrix_product_cpu.h"

#include <algorithm>

namespace pi {
namespace {

constexpr int64_t DEPTH = 256, PANEL = 48;  // 48 KB of x: the L1 cache
constexpr int64_t ROWS = 32;                // rows unpacked at once: 256 KB at 2048 columns

void add_block(const RowKernels& kernels, const float* w, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth,
               const float* x, float* y, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += PANEL)
        kernels.tile(w, row_stride, k_stride, rows, depth, x + t, y + t, std::min(PANEL, tokens - t), tokens);
}

}  // namespace

void multiply_tokens(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const float* x, float* y,
                     int64_t tokens) {
    const Unpack unpack = kernels.unpack[int(matrix.type)];
    const int64_t columns = matrix.columns;
    pool.run((matrix.rows + ROWS - 1) / ROWS, [&](int64_t chunk) {
        const int64_t begin = chunk * ROWS, rows = std::min(ROWS, matrix.rows - begin);
        thread_local std::vector<float> weights;
        weights.resize(ROWS * columns);
        for (int64_t r = 0; r < rows; ++r) unpack(matrix.row(begin + r), columns, 0, columns, weights.data() + r * columns);
        float* out = y + begin * tokens;
        std::fill_n(out, rows * tokens, 0.0f);
        for (int64_t k = 0; k < columns; k += DEPTH)
            add_block(kernels, weights.data() + k, columns, 1, rows, std::min(DEPTH, columns - k), x + k * tokens, out, tokens);
    });
}

void multiply_tokens_transposed(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const float* x, float* y,
                                int64_t tokens) {
    const Unpack unpack = kernels.unpack[int(matrix.type)];
    pool.run((matrix.columns + GROUP - 1) / GROUP, [&](int64_t chunk) {
        const int64_t begin = chunk * GROUP, columns = std::min(GROUP, matrix.columns - begin);
        thread_local std::vector<float> weights;
        weights.resize(DEPTH * GROUP);
        float* out = y + begin * tokens;
        std::fill_n(out, columns * tokens, 0.0f);
        for (int64_t r = 0; r < matrix.rows; r += DEPTH) {
            const int64_t depth = std::min(DEPTH, matrix.rows - r);
            for (int64_t k = 0; k < depth; ++k)
                unpack(matrix.row(r + k), matrix.columns, begin, columns, weights.data() + k * GROUP);
            add_block(kernels, weights.data(), 1, GROUP, columns, depth, x + r * tokens, out, tokens);
        }
    });
}

}  // namespace pi
