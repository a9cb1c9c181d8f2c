// One decoding step of one sequence through a whole model whose weights are in this machine's memory.
//
// It is the twin of decoder.py for a single token: norms, attention over a cache, sparse FFN, output head, without a
// return to Python in between.

#pragma once
#include <vector>

#include "sparse_ffn_cpu.h"

namespace pi {

// Layer norm with a bias, RMS norm without one; weights are float32 [hidden].
struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;
    float epsilon = 0;
};

// score_j = fc2_j . relu(fc1 . residual), or, where fc1 has no rows, fc2_j . x + bias_j with x what the neurons read: fc2 is then
// a copy of their first rows. Rows of fc2 in the order of the tiers' neurons. Without rows there: no predictor.
struct Predictor {
    Matrix fc1, fc2;
    const float* bias = nullptr;
    float threshold = 0;
};

struct Layer {
    Norm attention_norm, ffn_norm;  // ffn_norm.weight null: attention and FFN share a norm
    Matrix query_key_value;         // rows of the three maps, one below the other
    const float* query_key_value_bias = nullptr;
    Matrix output;
    const float* output_bias = nullptr;
    std::vector<Neurons> tiers;
    const float* down_bias = nullptr;
    Predictor predictor;
    uint8_t* keys = nullptr;  // [slots, kv_heads, context, head_dim] of the cache's type; values alike
    uint8_t* values = nullptr;
};

struct Shape {
    int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, context = 0;
    int64_t sliding_window = 0;  // 0: none
    int64_t position_offset = 0;
    bool parallel_block = false;
    WeightType cache_type = WeightType::F32;
    const float* cosines = nullptr;  // [context, head_dim], both halves alike; null for learned positions
    const float* sines = nullptr;
};

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    Matrix embedding, positions, head;  // positions without rows for rotary models
    Norm final_norm;
};

class DecodeStep {
  public:
    DecodeStep(Model model, int threads);

    // logits [vocabulary] after `token` at `position` of the sequence in `slot`, whose cache holds what came before; with null
    // for logits the cache is all that changes.
    void run(int64_t token, int64_t position, int64_t slot, Mode mode, float* logits);

    const char* instruction_set() const { return kernels_->name; }
    int threads() const { return pool_.threads(); }

  private:
    void read_embedding(int64_t token, int64_t position);
    void normalise(const Norm& norm, const float* x, float* y) const;
    void attend(const Layer& layer, const float* normed, int64_t position, int64_t slot);
    void attend_group(const Layer& layer, int64_t kv_head, int64_t position, int64_t slot);
    void add_ffn(const Layer& layer, const float* normed, Mode mode);

    Model model_;
    const RowKernels* kernels_;
    ThreadPool pool_;
    SparseFfn ffn_;
    PreparedVector prepared_, units_input_;
    std::vector<float> residual_, normed_, ffn_normed_, projected_, attended_, mapped_, ffn_output_, ffn_sum_,
        weights_, units_;
};

}  // namespace pi
