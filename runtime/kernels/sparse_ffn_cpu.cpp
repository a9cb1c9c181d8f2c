// See sparse_ffn_cpu.h. Neurons are cut into chunks that depend on their number alone; every chunk adds up its own output
// and the sums are added in the order of the chunks, so the result has the same bits for any number of threads.

#include "sparse_ffn_cpu.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace pi {
namespace {

constexpr int64_t FFN_CHUNKS = 16;          // of 2048 floats each: 128 KB of partial sums, which stay in the L2 cache
constexpr int64_t AHEAD = 8192;             // bytes fetched ahead of the row that is worked on
// Of weights per chunk of a product: every chunk is a stream that the processor has to notice first (two cores that read 82 GB/s
// reach 65 with chunks of 64 KB, 77 with 1 MB), and every thread should have several.
constexpr int64_t LEAST_MULTIPLY_BYTES = 1 << 16, MOST_MULTIPLY_BYTES = 1 << 20, MULTIPLY_CHUNKS_PER_THREAD = 8;

// One chunk's neurons begin..end and the buffers it may use.
struct Chunk {
    int64_t begin, end;
    float* sums;         // [hidden], padded to GROUP
    float* activations;  // [end - begin]: what decides on firing, then h or its first factor
    float* scores;       // [end - begin]
    int32_t* active;     // [end - begin] ids, relative to begin
};

inline float product(const RowKernels& kernels, const Matrix& matrix, const Input& x, int64_t j, const uint8_t* next) {
    return kernels.dot[int(matrix.type)](matrix.row(j), x, matrix.columns, next);
}

inline float fires_on(const RowKernels& kernels, const Neurons& neurons, const Input& x, int64_t j, const uint8_t* next) {
    const float z = product(kernels, neurons.first, x, j, next);
    return neurons.up_bias ? z + neurons.up_bias[j] : z;
}

inline float activate(const Neurons& neurons, float z) {
    switch (neurons.activation) {
        case Activation::silu: return z / (1.0f + std::exp(-z));
        case Activation::gelu: return 0.5f * z * (1.0f + std::erf(z * 0.70710678f));
        default: return z > neurons.activation_threshold ? z : 0.0f;
    }
}

void dense_chunk(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk) {
    const Axpy axpy = kernels.axpy[int(neurons.down.type)];
    for (int64_t j = chunk.begin; j < chunk.end; ++j)
        chunk.activations[j - chunk.begin] =
            activate(neurons, fires_on(kernels, neurons, x, j, neurons.first.row(std::min(j + 1, chunk.end - 1))));
    for (int64_t j = chunk.begin; j < chunk.end; ++j) {
        const int64_t following = std::min(j + 1, chunk.end - 1);
        float h = chunk.activations[j - chunk.begin];
        if (neurons.up.rows) {
            const float up = product(kernels, neurons.up, x, j, neurons.up.row(following));
            h *= neurons.activation == Activation::drelu ? std::max(0.0f, up) : up;
        }
        axpy(chunk.sums, h, neurons.down.row(j), neurons.hidden(), neurons.down.row(following));
    }
}

// How many rows ahead to fetch, so that AHEAD bytes are under way.
inline int64_t rows_ahead(int64_t bytes) { return std::max<int64_t>(1, AHEAD / bytes); }

inline void fetch_row(const uint8_t* row, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(row + line);
}

// Of neurons whose gate fires, listed with its product, those whose up product is above zero too, with the two multiplied.
int64_t keep_firing_ups(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk, int64_t count) {
    const int64_t bytes = packed_row_bytes(neurons.up.type, neurons.hidden()), ahead = rows_ahead(bytes);
    int64_t firing = 0;
    for (int64_t k = 0; k < std::min(ahead, count); ++k) fetch_row(neurons.up.row(chunk.begin + chunk.active[k]), bytes);
    for (int64_t k = 0; k < count; ++k) {
        const int32_t neuron = chunk.active[k], following = chunk.active[std::min(k + ahead, count - 1)];
        const float up = product(kernels, neurons.up, x, chunk.begin + neuron, neurons.up.row(chunk.begin + following));
        if (!(up > 0)) continue;
        chunk.activations[firing] = chunk.activations[k] * up;  // firing <= k, as in find_firing
        chunk.active[firing++] = neuron;
    }
    return firing;
}

// Up and down rows of gated neurons that fire, two neurons at a time; returns how many of them are done.
int64_t add_firing_in_pairs(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk, int64_t firing) {
    const DotTwo dot = kernels.dot_two[int(neurons.up.type)];
    const AxpyTwo axpy = kernels.axpy_two[int(neurons.down.type)];
    int64_t k = 0;
    for (; k + 2 <= firing; k += 2) {
        const uint8_t *ups[2], *downs[2], *following[2];
        for (int r = 0; r < 2; ++r) {
            const int64_t j = chunk.begin + chunk.active[k + r];
            ups[r] = neurons.up.row(j);
            downs[r] = neurons.down.row(j);
            following[r] = neurons.up.row(chunk.begin + chunk.active[std::min(k + 2 + r, firing - 1)]);
        }
        float h[2];
        dot(ups, x.values, neurons.hidden(), downs, h);
        for (int r = 0; r < 2; ++r) h[r] *= chunk.activations[k + r];
        axpy(chunk.sums, h, downs, neurons.hidden(), following);
    }
    return k;
}

// Up and down rows of the neurons that fire, which are listed in chunk.active with their z in chunk.activations. Which dReLU
// neurons fire is known only after their up products: those are computed first, so that no other's down row is fetched.
void add_firing(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk, int64_t firing) {
    const Axpy axpy = kernels.axpy[int(neurons.down.type)];
    const bool both = neurons.activation == Activation::drelu, gated = neurons.up.rows > 0 && !both;
    if (both) firing = keep_firing_ups(kernels, neurons, x, chunk, firing);
    const int64_t bytes = packed_row_bytes(neurons.down.type, neurons.hidden()), ahead = rows_ahead((gated ? 2 : 1) * bytes);
    for (int64_t k = 0; k < std::min(ahead, firing); ++k) {
        const int64_t j = chunk.begin + chunk.active[k];
        if (gated) fetch_row(neurons.up.row(j), bytes);
        fetch_row(neurons.down.row(j), bytes);
    }
    const bool pairs = gated && !is_block_type(neurons.up.type) && kernels.dot_two[int(neurons.up.type)];
    for (int64_t k = pairs ? add_firing_in_pairs(kernels, neurons, x, chunk, firing) : 0; k < firing; ++k) {
        const int64_t j = chunk.begin + chunk.active[k], following = chunk.begin + chunk.active[std::min(k + ahead, firing - 1)];
        float h = chunk.activations[k];
        if (gated) h *= product(kernels, neurons.up, x, j, neurons.up.row(following));
        axpy(chunk.sums, h, neurons.down.row(j), neurons.hidden(), neurons.down.row(following));
    }
}

// What decides on firing, for the neurons that `id` lists; those that fire end up in chunk.active and chunk.activations.
template <typename Id>
int64_t find_firing(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk, int64_t count,
                    const Id& id) {
    const int64_t bytes = packed_row_bytes(neurons.first.type, neurons.hidden()), ahead = rows_ahead(bytes);
    int64_t firing = 0;
    for (int64_t k = 0; k < std::min(ahead, count); ++k) fetch_row(neurons.first.row(chunk.begin + id(k)), bytes);
    for (int64_t k = 0; k < count; ++k) {
        const int32_t neuron = id(k), following = id(std::min(k + ahead, count - 1));
        const float z = fires_on(kernels, neurons, x, chunk.begin + neuron, neurons.first.row(chunk.begin + following));
        if (!(z > neurons.activation_threshold)) continue;
        chunk.activations[firing] = z;
        chunk.active[firing++] = neuron;  // firing <= k: what is still to be read lies behind
    }
    return firing;
}

void exact_chunk(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk) {
    const int64_t firing = find_firing(kernels, neurons, x, chunk, chunk.end - chunk.begin, [](int64_t k) { return int32_t(k); });
    add_firing(kernels, neurons, x, chunk, firing);
}

void predicted_chunk(const RowKernels& kernels, const Neurons& neurons, const Input& x, const Chunk& chunk,
                     const float* scores, float threshold) {
    int64_t candidates = 0;
    for (int64_t k = 0; k < chunk.end - chunk.begin; ++k)
        if (scores[k] >= threshold) chunk.active[candidates++] = int32_t(k);
    const int64_t firing =
        find_firing(kernels, neurons, x, chunk, candidates, [&](int64_t k) { return chunk.active[k]; });
    add_firing(kernels, neurons, x, chunk, firing);
}

}  // namespace

Input PreparedVector::prepare(const RowKernels& kernels, const float* values, int64_t columns, WeightType type) {
    if (!is_block_type(type)) return {values, nullptr, nullptr, nullptr};
    const int64_t padded_columns = padded(columns, GROUP);
    if (int64_t(quants_.size()) < padded_columns) {
        quants_.resize(padded_columns);
        scales_.resize(padded_columns / BLOCK);
        offsets_.resize(padded_columns / BLOCK);
    }
    kernels.quantise(values, columns, quants_.data(), scales_.data(), offsets_.data());
    return {values, quants_.data(), scales_.data(), offsets_.data()};
}

void multiply(ThreadPool& pool, const RowKernels& kernels, const Matrix& matrix, const Input& x, const float* bias, float* y) {
    const Dot dot = kernels.dot[int(matrix.type)];
    const int64_t stride = std::max<int64_t>(1, matrix.stride_bytes);
    const int64_t share = matrix.rows * stride / (MULTIPLY_CHUNKS_PER_THREAD * pool.threads());
    const int64_t rows = std::max<int64_t>(1, std::clamp(share, LEAST_MULTIPLY_BYTES, MOST_MULTIPLY_BYTES) / stride);
    pool.run((matrix.rows + rows - 1) / rows, [&](int64_t chunk) {
        const int64_t end = std::min(matrix.rows, (chunk + 1) * rows);
        for (int64_t r = chunk * rows; r < end; ++r) {
            const float product = dot(matrix.row(r), x, matrix.columns, matrix.row(std::min(r + 1, end - 1)));
            y[r] = bias ? product + bias[r] : product;
        }
    });
}

void SparseFfn::run(ThreadPool& pool, const RowKernels& kernels, const Neurons& neurons, Mode mode, const float* x,
                    const Candidates& candidates, float* y) {
    if (mode != Mode::dense && !falls_silent(neurons.activation))
        throw std::invalid_argument("no neuron of this activation can be skipped");
    const int64_t count = neurons.count(), hidden = neurons.hidden(), stride = padded(hidden, GROUP);
    const int64_t chunks = std::min(FFN_CHUNKS, count);
    partial_sums_.resize(chunks * stride);
    activations_.resize(count);
    scores_.resize(count);
    active_.resize(count);
    const Input input = x_.prepare(kernels, x, hidden, neurons.first.type);
    pool.run(chunks, [&](int64_t c) {
        const int64_t begin = count * c / chunks, end = count * (c + 1) / chunks;
        const Chunk chunk = {begin, end, partial_sums_.data() + c * stride, activations_.data() + begin,
                             scores_.data() + begin, active_.data() + begin};
        std::fill_n(chunk.sums, stride, 0.0f);
        if (mode == Mode::dense) return dense_chunk(kernels, neurons, input, chunk);
        if (mode == Mode::exact) return exact_chunk(kernels, neurons, input, chunk);
        const Matrix& fc2 = candidates.fc2;
        const float* scores = candidates.scores ? candidates.scores + begin : chunk.scores;
        if (!candidates.scores)
            for (int64_t j = begin; j < end; ++j) {
                const float product = kernels.dot[int(fc2.type)](fc2.row(j), candidates.units, fc2.columns,
                                                                 fc2.row(std::min(j + 1, end - 1)));
                chunk.scores[j - begin] = candidates.bias ? product + candidates.bias[j] : product;
            }
        predicted_chunk(kernels, neurons, input, chunk, scores, candidates.threshold);
    });
    std::copy_n(partial_sums_.data(), hidden, y);
    for (int64_t c = 1; c < chunks; ++c)
        for (int64_t i = 0; i < hidden; ++i) y[i] += partial_sums_[c * stride + i];
}

}  // namespace pi
