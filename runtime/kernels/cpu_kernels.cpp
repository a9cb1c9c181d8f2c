// Python's view of the CPU kernels: addresses and sizes in, nothing kept alive here, the GIL released while they run.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "decode_step_cpu.h"
#include "host_task_cpu.h"
#include "matrix_product_cpu.h"
#include "pack_weights_cpu.h"

namespace nb = nanobind;
using namespace nb::literals;
using pi::Matrix;

namespace {

// Addresses travel as integers: what they point to is a tensor that Python owns.
template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Matrix make_matrix(int type, uintptr_t data, int64_t rows, int64_t columns, int64_t stride_bytes) {
    return {pi::WeightType(type), pointer<const uint8_t>(data), rows, columns, stride_bytes};
}

// The kernels that are called one by one, for layers of which only a part is on the CPU.
class Kernels {
  public:
    explicit Kernels(int threads) : kernels_(pi::require_row_kernels()), pool_(threads) {}

    void multiply(const Matrix& matrix, uintptr_t x, uintptr_t bias, uintptr_t y) {
        const pi::Input input = prepared_.prepare(*kernels_, pointer<const float>(x), matrix.columns, matrix.type);
        pi::multiply(pool_, *kernels_, matrix, input, pointer<const float>(bias), pointer<float>(y));
    }

    void multiply_tokens(const Matrix& matrix, uintptr_t x, uintptr_t y, int64_t tokens, bool transposed) {
        const auto product = transposed ? pi::multiply_tokens_transposed : pi::multiply_tokens;
        product(pool_, *kernels_, matrix, pointer<const float>(x), pointer<float>(y), tokens);
    }

    void sparse_ffn(const pi::Neurons& neurons, int mode, uintptr_t x, uintptr_t scores, float threshold, uintptr_t y) {
        pi::Candidates candidates;
        candidates.scores = pointer<const float>(scores);
        candidates.threshold = threshold;
        ffn_.run(pool_, *kernels_, neurons, pi::Mode(mode), pointer<const float>(x), candidates, pointer<float>(y));
    }

    bool pack_weights(int stored_type, uintptr_t data, int64_t stored_stride_bytes, bool turned, uintptr_t order, int64_t rows,
                      int64_t columns, int type, uintptr_t packed, int64_t stride_bytes) {
        const pi::StoredMatrix stored = {pi::WeightType(stored_type), pointer<const uint8_t>(data), stored_stride_bytes, turned,
                                         pointer<const int64_t>(order)};
        return pi::pack_weights(pool_, *kernels_, stored, rows, columns, pi::WeightType(type), pointer<uint8_t>(packed),
                                stride_bytes);
    }

    pi::HostTask host_task(const pi::Neurons& neurons, int mode, uintptr_t x, uintptr_t scores, float threshold, uintptr_t y,
                           int64_t tokens) {
        return {pool_, ffn_, *kernels_, neurons, pi::Mode(mode), pointer<const float>(x), pointer<const float>(scores),
                threshold, pointer<float>(y), tokens};
    }

    void add_row(const Matrix& matrix, int64_t row, float factor, uintptr_t y) {
        const uint8_t* data = matrix.row(row);
        kernels_->axpy[int(matrix.type)](pointer<float>(y), factor, data, matrix.columns, data);
    }

    std::string instruction_set() const { return kernels_->name; }
    int threads() const { return pool_.threads(); }

  private:
    const pi::RowKernels* kernels_;
    pi::ThreadPool pool_;
    pi::SparseFfn ffn_;
    pi::PreparedVector prepared_;
};

}  // namespace

NB_MODULE(cpu_kernels, m) {
    m.doc() = "Sparse FFN and decoding step on the CPU; see runtime/kernels/*.h.";
    m.def("row_bytes", [](int type, int64_t columns) { return pi::packed_row_bytes(pi::WeightType(type), columns); });
    m.def("scales_bytes", &pi::scales_bytes);

    nb::class_<Matrix>(m, "Matrix").def(nb::init<>()).def("__init__", [](Matrix* self, int type, uintptr_t data, int64_t rows,
                                                                        int64_t columns, int64_t stride_bytes) {
        new (self) Matrix(make_matrix(type, data, rows, columns, stride_bytes));
    });
    nb::class_<pi::Neurons>(m, "Neurons")
        .def("__init__", [](pi::Neurons* self, const Matrix& first, const Matrix& up, const Matrix& down, uintptr_t up_bias,
                            int activation, float activation_threshold) {
            new (self) pi::Neurons{first, up, down, pointer<const float>(up_bias), pi::Activation(activation), activation_threshold};
        });
    nb::class_<pi::Predictor>(m, "Predictor")
        .def(nb::init<>())
        .def("__init__", [](pi::Predictor* self, const Matrix& fc1, const Matrix& fc2, uintptr_t bias, float threshold) {
            new (self) pi::Predictor{fc1, fc2, pointer<const float>(bias), threshold};
        });
    nb::class_<pi::Norm>(m, "Norm")
        .def(nb::init<>())
        .def("__init__", [](pi::Norm* self, uintptr_t weight, uintptr_t bias, float epsilon) {
            new (self) pi::Norm{pointer<const float>(weight), pointer<const float>(bias), epsilon};
        });
    nb::class_<pi::Layer>(m, "Layer")
        .def("__init__",
             [](pi::Layer* self, const pi::Norm& attention_norm, const Matrix& query_key_value, uintptr_t query_key_value_bias,
                const Matrix& output, uintptr_t output_bias, const pi::Norm& ffn_norm, std::vector<pi::Neurons> tiers,
                uintptr_t down_bias, const pi::Predictor& predictor, uintptr_t keys, uintptr_t values) {
                 new (self) pi::Layer{attention_norm, ffn_norm, query_key_value, pointer<const float>(query_key_value_bias),
                                      output, pointer<const float>(output_bias), std::move(tiers), pointer<const float>(down_bias),
                                      predictor, pointer<uint8_t>(keys), pointer<uint8_t>(values)};
             },
             nb::kw_only(), "attention_norm"_a, "query_key_value"_a, "query_key_value_bias"_a, "output"_a, "output_bias"_a,
             "ffn_norm"_a, "tiers"_a, "down_bias"_a, "predictor"_a, "keys"_a, "values"_a);
    nb::class_<pi::Shape>(m, "Shape")
        .def("__init__",
             [](pi::Shape* self, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t context,
                int64_t sliding_window, int64_t position_offset, bool parallel_block, int cache_type, uintptr_t cosines,
                uintptr_t sines) {
                 new (self) pi::Shape{hidden, heads, kv_heads, head_dim, context, sliding_window, position_offset,
                                      parallel_block, pi::WeightType(cache_type), pointer<const float>(cosines),
                                      pointer<const float>(sines)};
             },
             nb::kw_only(), "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "context"_a, "sliding_window"_a,
             "position_offset"_a, "parallel_block"_a, "cache_type"_a, "cosines"_a, "sines"_a);
    nb::class_<pi::DecodeStep>(m, "DecodeStep")
        .def("__init__",
             [](pi::DecodeStep* self, const pi::Shape& shape, std::vector<pi::Layer> layers, const Matrix& embedding,
                const Matrix& positions, const Matrix& head, const pi::Norm& final_norm, int threads) {
                 new (self) pi::DecodeStep({shape, std::move(layers), embedding, positions, head, final_norm}, threads);
             },
             nb::kw_only(), "shape"_a, "layers"_a, "embedding"_a, "positions"_a, "head"_a, "final_norm"_a, "threads"_a)
        .def(
            "run",
            [](pi::DecodeStep& self, int64_t token, int64_t position, int64_t slot, int mode, uintptr_t logits) {
                self.run(token, position, slot, pi::Mode(mode), pointer<float>(logits));
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("instruction_set", [](const pi::DecodeStep& self) { return std::string(self.instruction_set()); })
        .def_prop_ro("threads", &pi::DecodeStep::threads);
    nb::class_<pi::HostTask>(m, "HostTask")
        .def_prop_ro("function", [](const pi::HostTask&) { return reinterpret_cast<uintptr_t>(&pi::HostTask::call); })
        .def_prop_ro("data", [](const pi::HostTask& self) { return reinterpret_cast<uintptr_t>(&self); })
        .def("run", &pi::HostTask::run, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Kernels>(m, "Kernels")
        .def(nb::init<int>(), "threads"_a)
        .def("multiply", &Kernels::multiply, nb::call_guard<nb::gil_scoped_release>())
        .def("multiply_tokens", &Kernels::multiply_tokens, nb::call_guard<nb::gil_scoped_release>())
        .def("sparse_ffn", &Kernels::sparse_ffn, nb::call_guard<nb::gil_scoped_release>())
        .def("host_task", &Kernels::host_task, nb::keep_alive<0, 1>())
        .def("pack_weights", &Kernels::pack_weights, nb::call_guard<nb::gil_scoped_release>())
        .def("add_row", &Kernels::add_row)
        .def_prop_ro("instruction_set", &Kernels::instruction_set)
        .def_prop_ro("threads", &Kernels::threads);
}
