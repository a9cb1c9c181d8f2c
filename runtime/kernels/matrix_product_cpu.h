// Products of weights with many tokens at once, for prompts: everything in float32, whatever the weights are stored in.
//
// Vectors of tokens lie side by side (x[k][t]), so that one weight meets 16 tokens in one instruction and rows of weights
// are unpacked as they are, without being transposed.

#pragma once
#include "sparse_ffn_cpu.h"

namespace pi {

// y[r][t] = sum over k of matrix[r][k] * x[k][t]. x [columns, tokens], y [rows, tokens]; tokens is a multiple of TOKENS.
void multiply_tokens(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const float* x, float* y,
                     int64_t tokens);

// y[c][t] = sum over r of matrix[r][c] * x[r][t]: the same with the matrix transposed. x [rows, tokens], y [columns, tokens].
void multiply_tokens_transposed(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const float* x, float* y,
                                int64_t tokens);

}  // namespace pi
