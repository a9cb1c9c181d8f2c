// The sparse FFN of one token on the CPU: the twin of sparse_ffn_reference.py.
//
// y = sum over neurons j of h_j * down_j, with h_j = act(gate_j . x) * (up_j . x) for gated neurons, dReLU ones applying it to
// both factors, and act(up_j . x + bias_j) for the others. Weights are rows of one neuron each, and what decides on firing lies apart from
// what is only read when a neuron fires, so that `exact` streams through the first and `predicted` picks from both.

#pragma once
#include <vector>

#include "row_kernels.h"
#include "thread_pool.h"

namespace pi {

// Rows of equal length; row r begins at data + r * stride_bytes.
struct Matrix {
    WeightType type = WeightType::F32;
    const uint8_t* data = nullptr;
    int64_t rows = 0, columns = 0, stride_bytes = 0;

    const uint8_t* row(int64_t r) const { return data + r * stride_bytes; }
};

// In the order of profiler/model_families/shape.py. fatrelu: relu with a threshold in place of zero. drelu: relu on both factors
// of gated neurons. gelu: the exact one.
enum class Activation : int { relu, fatrelu, drelu, silu, gelu };

// Whether a neuron that does not fire adds exactly nothing, which modes exact and predicted take for granted.
inline bool falls_silent(Activation activation) { return activation != Activation::silu && activation != Activation::gelu; }

struct Neurons {
    Matrix first;                    // gate rows, or up rows of ungated neurons
    Matrix up;                       // gated neurons only, else no rows
    Matrix down;                     // [neurons, hidden]
    const float* up_bias = nullptr;  // [neurons], or null
    Activation activation = Activation::relu;
    float activation_threshold = 0;  // what has to be exceeded to fire; other than zero for fatrelu alone
    int64_t count() const { return first.rows; }
    int64_t hidden() const { return first.columns; }
};

enum class Mode : int { dense, exact, predicted };

// What names candidates in mode predicted: neurons whose score is at least the threshold. Scores are given, or are the
// products of the rows of `fc2` [neurons, r] with `units` [r], plus `bias` [neurons] where there is one, of which each chunk of
// neurons computes its own.
struct Candidates {
    const float* scores = nullptr;
    Matrix fc2;
    Input units = {nullptr, nullptr, nullptr, nullptr};
    const float* bias = nullptr;
    float threshold = 0;
};

// A vector with everything dot needs of it; grows to the longest vector it has held.
class PreparedVector {
  public:
    // Copies nothing: `values` must outlive the result. Quantises when `type` is a block type.
    Input prepare(const RowKernels& kernels, const float* values, int64_t columns, WeightType type);

  private:
    std::vector<int8_t> quants_;
    std::vector<float> scales_, offsets_;
};

// y[r] = matrix.row(r) . x + bias[r]
void multiply(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const Input& x, const float* bias, float* y);

class SparseFfn {
  public:
    // y [hidden] = the FFN of these neurons for x [hidden], without an output bias. `candidates` matter in mode predicted.
    // Throws std::invalid_argument for a mode that skips neurons of an activation that never falls silent.
    void run(ThreadPool& pool, const RowKernels& kernels, const Neurons& neurons, Mode mode, const float* x,
             const Candidates& candidates, float* y);

  private:
    PreparedVector x_;
    std::vector<float> scores_, partial_sums_, activations_;
    std::vector<int32_t> active_;
};

}  // namespace pi
