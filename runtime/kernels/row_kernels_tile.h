// The small product of matrices that is RowKernels::tile, in whatever vectors the file that includes this has: it defines
// Vector, WIDTH (floats in one), TILE_ROWS (rows whose sums fit the registers with 3 vectors each) and the operations load,
// store, set (one value to all) and multiply_add (a * b + c).

#pragma once

namespace pi {
namespace {

// Some rows and up to 3 vectors of tokens, whose sums stay in registers.
template <int rows, int vectors>
inline void tile_block(const float* w, int64_t row_stride, int64_t k_stride, int64_t depth, const float* x, float* y,
                       int64_t stride) {
    Vector sums[rows][vectors];
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) sums[r][v] = load(y + r * stride + WIDTH * v);
    for (int64_t k = 0; k < depth; ++k) {
        Vector tokens[vectors];
        for (int v = 0; v < vectors; ++v) tokens[v] = load(x + k * stride + WIDTH * v);
        for (int r = 0; r < rows; ++r) {
            const Vector weight = set(w[r * row_stride + k * k_stride]);
            for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add(weight, tokens[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) store(y + r * stride + WIDTH * v, sums[r][v]);
}

template <int vectors>
void tile_columns(const float* w, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, const float* x, float* y,
                  int64_t stride) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        tile_block<TILE_ROWS, vectors>(w + r * row_stride, row_stride, k_stride, depth, x, y + r * stride, stride);
    for (; r < rows; ++r)
        tile_block<1, vectors>(w + r * row_stride, row_stride, k_stride, depth, x, y + r * stride, stride);
}

void tile(const float* w, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t depth, const float* x, float* y,
          int64_t tokens, int64_t stride) {
    int64_t t = 0;
    for (; t + 3 * WIDTH <= tokens; t += 3 * WIDTH) tile_columns<3>(w, row_stride, k_stride, rows, depth, x + t, y + t, stride);
    if (t + 2 * WIDTH <= tokens) {
        tile_columns<2>(w, row_stride, k_stride, rows, depth, x + t, y + t, stride);
        t += 2 * WIDTH;
    }
    if (t < tokens) tile_columns<1>(w, row_stride, k_stride, rows, depth, x + t, y + t, stride);
}

}  // namespace
}  // namespace pi
