// See decode_step_cpu.h. Matrix products and attention heads are shared among the threads; the rest (norms, rotations,
// sums of `hidden` values) is too little to share and is done by the calling thread.

#include "decode_step_cpu.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace pi {

DecodeStep::DecodeStep(Model model, int threads)
    : model_(std::move(model)), kernels_(require_row_kernels()), pool_(threads) {
    const Shape& shape = model_.shape;
    const int64_t hidden = padded(shape.hidden, GROUP);
    for (std::vector<float>* buffer : {&residual_, &normed_, &ffn_normed_, &mapped_, &ffn_output_, &ffn_sum_}) buffer->resize(hidden);
    projected_.resize((shape.heads + 2 * shape.kv_heads) * shape.head_dim);
    attended_.resize(padded(shape.heads * shape.head_dim, GROUP));
    weights_.resize(shape.heads * shape.context);
}

void DecodeStep::run(int64_t token, int64_t position, int64_t slot, Mode mode, float* logits) {
    const int64_t hidden = model_.shape.hidden;
    read_embedding(token, position);
    for (const Layer& layer : model_.layers) {
        normalise(layer.attention_norm, residual_.data(), normed_.data());
        attend(layer, normed_.data(), position, slot);
        if (model_.shape.parallel_block) {
            const float* normed = normed_.data();
            if (layer.ffn_norm.weight) {
                normalise(layer.ffn_norm, residual_.data(), ffn_normed_.data());
                normed = ffn_normed_.data();
            }
            add_ffn(layer, normed, mode);  // reads the residual stream before the attention is added to it
            for (int64_t i = 0; i < hidden; ++i) residual_[i] += mapped_[i];
        } else {
            for (int64_t i = 0; i < hidden; ++i) residual_[i] += mapped_[i];
            normalise(layer.ffn_norm, residual_.data(), ffn_normed_.data());
            add_ffn(layer, ffn_normed_.data(), mode);
        }
    }
    if (!logits) return;
    normalise(model_.final_norm, residual_.data(), normed_.data());
    const Input input = prepared_.prepare(*kernels_, normed_.data(), hidden, model_.head.type);
    multiply(pool_, *kernels_, model_.head, input, nullptr, logits);
}

void DecodeStep::read_embedding(int64_t token, int64_t position) {
    std::fill(residual_.begin(), residual_.end(), 0.0f);
    const int64_t hidden = model_.shape.hidden;
    const Matrix &embedding = model_.embedding, &positions = model_.positions;
    const uint8_t* row = embedding.row(token);
    kernels_->axpy[int(embedding.type)](residual_.data(), 1.0f, row, hidden, row);
    if (!positions.rows) return;
    row = positions.row(position + model_.shape.position_offset);
    kernels_->axpy[int(positions.type)](residual_.data(), 1.0f, row, hidden, row);
}

void DecodeStep::normalise(const Norm& norm, const float* x, float* y) const {
    const int64_t hidden = model_.shape.hidden;
    double sum = 0, squares = 0;
    if (norm.bias)  // the RMS norm subtracts no mean
        for (int64_t i = 0; i < hidden; ++i) sum += x[i];
    const float mean = float(sum / double(hidden));
    for (int64_t i = 0; i < hidden; ++i) squares += double(x[i] - mean) * double(x[i] - mean);
    const float inverse = 1.0f / std::sqrt(float(squares / double(hidden)) + norm.epsilon);
    for (int64_t i = 0; i < hidden; ++i) {
        y[i] = (x[i] - mean) * inverse * norm.weight[i];
        if (norm.bias) y[i] += norm.bias[i];
    }
}

// Leaves the attention's output in mapped_.
void DecodeStep::attend(const Layer& layer, const float* normed, int64_t position, int64_t slot) {
    const Shape& shape = model_.shape;
    const int64_t dim = shape.head_dim, half = dim / 2, rotated = shape.heads + shape.kv_heads;
    Input input = prepared_.prepare(*kernels_, normed, shape.hidden, layer.query_key_value.type);
    multiply(pool_, *kernels_, layer.query_key_value, input, layer.query_key_value_bias, projected_.data());
    if (shape.cosines) {
        const float *cosine = shape.cosines + position * dim, *sine = shape.sines + position * dim;
        for (int64_t head = 0; head < rotated; ++head) {
            float *low = projected_.data() + head * dim, *high = low + half;
            for (int64_t i = 0; i < half; ++i) {
                const float a = low[i], b = high[i];
                low[i] = a * cosine[i] - b * sine[i];
                high[i] = b * cosine[half + i] + a * sine[half + i];
            }
        }
    }
    pool_.run(shape.kv_heads, [&](int64_t kv_head) { attend_group(layer, kv_head, position, slot); });
    input = prepared_.prepare(*kernels_, attended_.data(), shape.heads * dim, layer.output.type);
    multiply(pool_, *kernels_, layer.output, input, layer.output_bias, mapped_.data());
}

// The query heads that share one key/value head: stores its key and value, then attends over all positions so far.
void DecodeStep::attend_group(const Layer& layer, int64_t kv_head, int64_t position, int64_t slot) {
    const Shape& shape = model_.shape;
    const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    const int64_t row_bytes = packed_row_bytes(shape.cache_type, dim);
    const int64_t offset = (slot * shape.kv_heads + kv_head) * shape.context * row_bytes;
    uint8_t *keys = layer.keys + offset, *values = layer.values + offset;
    const Store store = kernels_->store[int(shape.cache_type)];
    const float* key = projected_.data() + (shape.heads + kv_head) * dim;
    store(key, dim, keys + position * row_bytes);
    store(key + shape.kv_heads * dim, dim, values + position * row_bytes);

    const Dot dot = kernels_->dot[int(shape.cache_type)];
    const Axpy axpy = kernels_->axpy[int(shape.cache_type)];
    const int64_t first = shape.sliding_window ? std::max<int64_t>(0, position + 1 - shape.sliding_window) : 0;
    const float scale = 1.0f / std::sqrt(float(dim));
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        float* weights = weights_.data() + head * shape.context;
        const Input query = {projected_.data() + head * dim, nullptr, nullptr, nullptr};
        float largest = -INFINITY, total = 0;
        for (int64_t t = first; t <= position; ++t) {
            weights[t] = scale * dot(keys + t * row_bytes, query, dim, keys + std::min(t + 4, position) * row_bytes);
            largest = std::max(largest, weights[t]);
        }
        for (int64_t t = first; t <= position; ++t) total += weights[t] = std::exp(weights[t] - largest);
        float* out = attended_.data() + head * dim;
        std::fill_n(out, dim, 0.0f);
        for (int64_t t = first; t <= position; ++t)
            axpy(out, weights[t] / total, values + t * row_bytes, dim, values + std::min(t + 4, position) * row_bytes);
    }
}

// Adds the FFN's output to the residual stream.
void DecodeStep::add_ffn(const Layer& layer, const float* normed, Mode mode) {
    const int64_t hidden = model_.shape.hidden;
    Candidates candidates;
    if (mode == Mode::predicted) {
        const Matrix &fc1 = layer.predictor.fc1, &fc2 = layer.predictor.fc2;
        const float* units = normed;
        if (fc1.rows) {
            units_.resize(padded(fc1.rows, GROUP));
            const Input input = prepared_.prepare(*kernels_, residual_.data(), hidden, fc1.type);
            multiply(pool_, *kernels_, fc1, input, nullptr, units_.data());
            for (float& unit : units_) unit = std::max(0.0f, unit);
            units = units_.data();
        }
        candidates.fc2 = fc2;
        candidates.units = units_input_.prepare(*kernels_, units, fc2.columns, fc2.type);
        candidates.bias = layer.predictor.bias;
        candidates.threshold = layer.predictor.threshold;
    }
    if (layer.down_bias)
        std::copy_n(layer.down_bias, hidden, ffn_sum_.data());
    else
        std::fill_n(ffn_sum_.data(), hidden, 0.0f);
    for (const Neurons& neurons : layer.tiers) {
        ffn_.run(pool_, *kernels_, neurons, mode, normed, candidates, ffn_output_.data());
        for (int64_t i = 0; i < hidden; ++i) ffn_sum_[i] += ffn_output_[i];
        candidates.fc2.data += neurons.count() * candidates.fc2.stride_bytes;
        if (candidates.bias) candidates.bias += neurons.count();
    }
    for (int64_t i = 0; i < hidden; ++i) residual_[i] += ffn_sum_[i];
}

}  // namespace pi
