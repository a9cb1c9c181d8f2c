// The cold part of a layer as a plain C function, so that a GPU's stream can call it between two copies, as a host function
// of the driver or as a node of a captured graph, without Python.

#pragma once
#include <stdexcept>

#include "sparse_ffn_cpu.h"

namespace pi {

// y [tokens, hidden] = the FFN of `neurons` for x [tokens, hidden]; `scores` [tokens, neurons] matter in mode predicted. The
// buffers are fixed when the task is made, their contents are those of the moment it runs.
class HostTask {
  public:
    // Throws std::invalid_argument for a mode that skips neurons of an activation that never falls silent: later there is
    // nobody to tell.
    HostTask(ThreadPool& pool, SparseFfn& ffn, const RowKernels& kernels, const Neurons& neurons, Mode mode, const float* x,
             const float* scores, float threshold, float* y, int64_t tokens)
        : pool_(pool), ffn_(ffn), kernels_(kernels), neurons_(neurons), mode_(mode), x_(x), scores_(scores),
          threshold_(threshold), y_(y), tokens_(tokens) {
        if (mode != Mode::dense && !falls_silent(neurons.activation))
            throw std::invalid_argument("no neuron of this activation can be skipped");
    }

    // What a driver is given: this function and the task's address.
    static void call(void* task) { static_cast<HostTask*>(task)->run(); }

    void run() {
        for (int64_t token = 0; token < tokens_; ++token) {
            Candidates candidates;
            candidates.scores = scores_ ? scores_ + token * neurons_.count() : nullptr;
            candidates.threshold = threshold_;
            const int64_t at = token * neurons_.hidden();
            ffn_.run(pool_, kernels_, neurons_, mode_, x_ + at, candidates, y_ + at);
        }
    }

  private:
    ThreadPool& pool_;
    SparseFfn& ffn_;
    const RowKernels& kernels_;
    Neurons neurons_;
    Mode mode_;
    const float* x_;
    const float* scores_;
    float threshold_;
    float* y_;
    int64_t tokens_;
};

}  // namespace pi
