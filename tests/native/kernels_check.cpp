// The native kernels on their own, for the sanitizers: no Python, every buffer of exactly the size the kernels may touch.
// Prints what differs and returns 1, or returns 0.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

#include "decode_step_cpu.h"
#include "matrix_product_cpu.h"
#include "pack_weights_cpu.h"

using namespace pi;

namespace {

std::mt19937 generator(1);
int failures = 0;

void expect(bool holds, const char* what, const char* where) {
    if (holds) return;
    std::printf("%s: %s\n", where, what);
    ++failures;
}

std::vector<float> draw(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

// A random matrix in packed form; block types get random quants and scales.
struct Weights {
    std::unique_ptr<uint8_t[]> bytes;
    Matrix matrix;

    Weights(WeightType type, int64_t rows, int64_t columns) {
        const int64_t stride = packed_row_bytes(type, columns);
        bytes.reset(new uint8_t[rows * stride]());
        matrix = {type, bytes.get(), rows, columns, stride};
        for (int64_t r = 0; r < rows; ++r) {
            uint8_t* row = bytes.get() + r * stride;
            const std::vector<float> values = draw(columns);
            if (!is_block_type(type)) {
                PORTABLE_ROW_KERNELS.store[int(type)](values.data(), columns, row);
                continue;
            }
            for (int64_t b = 0; b < (columns + BLOCK - 1) / BLOCK; ++b) {
                const uint16_t scale = float_to_half(0.01f * float(1 + b % 7));
                std::memcpy(row + 2 * b, &scale, 2);
            }
            for (int64_t i = scales_bytes(columns); i < stride; ++i) row[i] = uint8_t(generator());
        }
    }
};

std::vector<const RowKernels*> kernels_here() {
    std::vector<const RowKernels*> found;
    for (const char* name : {"portable", "avx2", "avx512", "avx512_vnni"}) {
        setenv("PI_CPU_ISA", name, 1);
        if (const RowKernels* kernels = choose_row_kernels()) found.push_back(kernels);
    }
    unsetenv("PI_CPU_ISA");
    return found;
}

bool close(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (!(std::fabs(a[i] - b[i]) <= 1e-3f * (1.0f + std::fabs(b[i])))) return false;
    return a.size() == b.size();
}

void check_rows(const RowKernels& kernels, WeightType type, int64_t columns) {
    const Weights weights(type, 5, columns);
    const std::vector<float> x = draw(columns);
    PreparedVector mine, portable;
    const Input input = mine.prepare(kernels, x.data(), columns, type);
    const Input plain = portable.prepare(PORTABLE_ROW_KERNELS, x.data(), columns, type);
    const int64_t written = is_block_type(type) ? padded(columns, GROUP) : columns;
    for (int64_t r = 0; r < 5; ++r) {
        const uint8_t *row = weights.matrix.row(r), *next = weights.matrix.row(std::min<int64_t>(r + 1, 4));
        const float got = kernels.dot[int(type)](row, input, columns, next);
        const float want = PORTABLE_ROW_KERNELS.dot[int(type)](row, plain, columns, next);
        expect(close({got}, {want}), "dot", kernels.name);
        std::vector<float> y(written, 1.0f), z(written, 1.0f);
        kernels.axpy[int(type)](y.data(), 0.5f, row, columns, next);
        PORTABLE_ROW_KERNELS.axpy[int(type)](z.data(), 0.5f, row, columns, next);
        y.resize(columns);
        z.resize(columns);
        expect(close(y, z), "axpy", kernels.name);
    }
}

void check_ffn(const RowKernels& kernels, WeightType type, int64_t count, int64_t hidden, bool gated, Activation activation) {
    const Weights first(type, count, hidden), up(type, count, hidden), down(type, count, hidden);
    const std::vector<float> x = draw(hidden), bias = draw(count), scores = draw(count);
    const float activation_threshold = activation == Activation::fatrelu ? 0.25f : 0.0f;
    const Neurons neurons = {first.matrix, gated ? up.matrix : Matrix{}, down.matrix, gated ? nullptr : bias.data(), activation,
                             activation_threshold};
    Candidates candidates;
    candidates.scores = scores.data();
    candidates.threshold = 0.2f;
    for (Mode mode : {Mode::dense, Mode::exact, Mode::predicted}) {
        if (mode != Mode::dense && !falls_silent(activation)) continue;
        std::vector<float> one(hidden), many(hidden);
        ThreadPool alone(1), pool(5);
        SparseFfn ffn;
        ffn.run(alone, kernels, neurons, mode, x.data(), candidates, one.data());
        for (int repeat = 0; repeat < 5; ++repeat) {
            ffn.run(pool, kernels, neurons, mode, x.data(), candidates, many.data());
            expect(one == many, "ffn differs between thread counts", kernels.name);
        }
    }
}

void check_tokens(const RowKernels& kernels, WeightType type, int64_t rows, int64_t columns, int64_t tokens) {
    const Weights weights(type, rows, columns);
    ThreadPool pool(3);
    for (bool transposed : {false, true}) {
        const auto product = transposed ? multiply_tokens_transposed : multiply_tokens;
        const int64_t depth = transposed ? rows : columns, outputs = transposed ? columns : rows;
        const std::vector<float> x = draw(depth * tokens);
        std::vector<float> y(outputs * tokens), want(outputs * tokens);
        product(pool, kernels, weights.matrix, x.data(), y.data(), tokens);
        product(pool, PORTABLE_ROW_KERNELS, weights.matrix, x.data(), want.data(), tokens);
        expect(close(y, want), "product of many tokens", kernels.name);
    }
}

// Into rows of blocks and floats from rows and from columns of every type, in buffers of exactly the bytes there are.
void check_packing(const RowKernels& kernels, WeightType from, WeightType to, int64_t rows, int64_t columns, bool turned) {
    const int64_t stored_rows = turned ? columns : rows, stored_columns = turned ? rows : columns;
    const int64_t block = from == WeightType::Q8_0 ? 34 : 18;
    const int64_t stride = is_block_type(from) ? stored_columns / BLOCK * block : packed_row_bytes(from, stored_columns);
    std::vector<uint8_t> bytes(stored_rows * stride);
    for (int64_t r = 0; r < stored_rows; ++r) {
        uint8_t* row = bytes.data() + r * stride;
        if (!is_block_type(from)) {
            PORTABLE_ROW_KERNELS.store[int(from)](draw(stored_columns).data(), stored_columns, row);
            continue;
        }
        for (int64_t i = 0; i < stride; ++i) row[i] = uint8_t(generator());
        for (int64_t i = 0; i < stride; i += block) {
            const uint16_t scale = float_to_half(0.01f);
            std::memcpy(row + i, &scale, 2);
        }
    }
    std::vector<int64_t> backwards(rows);
    for (int64_t r = 0; r < rows; ++r) backwards[r] = rows - 1 - r;
    const StoredMatrix stored = {from, bytes.data(), stride, turned, turned ? nullptr : backwards.data()};
    const int64_t length = packed_row_bytes(to, columns);
    std::vector<uint8_t> one(rows * length, 1), many(rows * length, 2);
    ThreadPool alone(1), pool(3);
    expect(pack_weights(alone, PORTABLE_ROW_KERNELS, stored, rows, columns, to, one.data(), length), "not finite", "portable");
    expect(pack_weights(pool, kernels, stored, rows, columns, to, many.data(), length), "not finite", kernels.name);
    expect(one == many, "packed rows", kernels.name);
}

void check_thread_pool() {
    ThreadPool pool(4);
    for (int64_t job = 0; job < 3000; ++job) {
        const int64_t chunks = 1 + job % 37;
        std::vector<int> calls(chunks, 0);
        pool.run(chunks, [&](int64_t chunk) { ++calls[chunk]; });
        for (int64_t chunk = 0; chunk < chunks; ++chunk) expect(calls[chunk] == 1, "a chunk is lost or repeated", "thread pool");
        if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // lets the workers fall asleep
    }
}

void check_step(WeightType type, bool gated, bool parallel) {
    constexpr int64_t hidden = 96, heads = 4, kv_heads = 2, dim = 24, neurons = 70, vocabulary = 50, context = 6, units = 32;
    constexpr int layers = 2, slots = 2;
    std::vector<std::unique_ptr<Weights>> weights;
    const auto make_of = [&](WeightType which, int64_t rows, int64_t columns) {
        weights.push_back(std::make_unique<Weights>(which, rows, columns));
        return weights.back()->matrix;
    };
    const auto make = [&](int64_t rows, int64_t columns) { return make_of(type, rows, columns); };
    const std::vector<float> ones(hidden, 1.0f), bias = draw(neurons), angles = draw(context * dim);
    const WeightType cache = type == WeightType::F32 ? WeightType::F32 : WeightType::F16;
    const int64_t cache_bytes = slots * kv_heads * context * packed_row_bytes(cache, dim);
    std::vector<std::vector<uint8_t>> caches(2 * layers, std::vector<uint8_t>(cache_bytes));
    Model model;
    model.shape.hidden = hidden;
    model.shape.heads = heads;
    model.shape.kv_heads = kv_heads;
    model.shape.head_dim = dim;
    model.shape.context = context;
    model.shape.sliding_window = 4;
    model.shape.parallel_block = parallel;
    model.shape.cache_type = cache;
    model.shape.cosines = model.shape.sines = angles.data();
    for (int l = 0; l < layers; ++l) {
        Layer layer;
        layer.attention_norm = layer.ffn_norm = {ones.data(), nullptr, 1e-5f};
        layer.query_key_value = make((heads + 2 * kv_heads) * dim, hidden);
        layer.output = make(hidden, heads * dim);
        const auto tier = [&](int64_t count, const float* b) {
            return Neurons{make(count, hidden), gated ? make(count, hidden) : Matrix{}, make(count, hidden), gated ? nullptr : b};
        };
        layer.tiers = {tier(neurons - 1, bias.data()), tier(1, bias.data() + neurons - 1)};
        if (l == 0)
            layer.predictor = {make(units, hidden), make(neurons, units), nullptr, 0.1f};
        else
            layer.predictor = {Matrix{}, make_of(WeightType::Q4_0, neurons, hidden), bias.data(), -0.1f};
        layer.keys = caches[2 * l].data();
        layer.values = caches[2 * l + 1].data();
        model.layers.push_back(layer);
    }
    model.embedding = make(vocabulary, hidden);
    model.head = make(vocabulary, hidden);
    model.final_norm = {ones.data(), nullptr, 1e-5f};
    DecodeStep alone(model, 1);
    std::vector<float> logits(vocabulary), again(vocabulary);
    for (Mode mode : {Mode::dense, Mode::exact, Mode::predicted}) {
        DecodeStep step(model, 3);
        for (int64_t position = 0; position < context; ++position) {
            alone.run(7, position, 1, mode, logits.data());
            step.run(7, position, 1, mode, again.data());
            expect(logits == again, "step differs between thread counts", step.instruction_set());
        }
    }
}

}  // namespace

int main() {
    check_thread_pool();
    for (const RowKernels* kernels : kernels_here())
        for (int type = 0; type < WEIGHT_TYPES; ++type) {
            for (int64_t columns : {32, 64, 96, 128, 160, 544}) check_rows(*kernels, WeightType(type), columns);
            if (!is_block_type(WeightType(type)))
                for (int64_t columns : {1, 7, 17, 33, 100}) check_rows(*kernels, WeightType(type), columns);
            for (int64_t tokens : {16, 32, 48, 112}) check_tokens(*kernels, WeightType(type), 37, 160, tokens);
            check_tokens(*kernels, WeightType(type), 300, 32, 16);
            for (int to = 0; to < WEIGHT_TYPES; ++to)
                for (bool turned : {false, true}) check_packing(*kernels, WeightType(type), WeightType(to), 288, 288, turned);
            for (int64_t count : {1, 3, 77})
                for (bool gated : {true, false})
                    for (Activation activation :
                         {Activation::relu, Activation::fatrelu, Activation::drelu, Activation::silu, Activation::gelu})
                        if (gated || activation != Activation::drelu) check_ffn(*kernels, WeightType(type), count, 96, gated, activation);
        }
    for (int type = 0; type < WEIGHT_TYPES; ++type)
        for (bool gated : {true, false}) check_step(WeightType(type), gated, !gated);
    if (failures) std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
