"""Which neurons are active, as a list on the GPU: a buffer of fixed size with a count beside it.

Neurons are cut into chunks that depend on their number alone, and each chunk has its own part of the list and its own count.
So no program waits for another, the order is that of the neurons on every run, and no length ever travels to the host, which
a CUDA graph could not contain.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["values_stride", "neurons", "chunk_length", "tokens"])
def list_active(
    values,  # float32 [tokens, neurons]: scores of the predictor, or activations
    values_stride,
    threshold,
    index,  # int32 [chunks · chunk_length], out: neurons of chunk c from c · chunk_length on, ascending
    counts,  # int32 [chunks], out
    listed,  # float32 [tokens, chunks · chunk_length], out: activations of the neurons in index; None for scores
    listed_stride,
    neurons,
    chunk_length,
    tokens,
    BY_SCORE: tl.constexpr,  # active where a score reaches the threshold, else where an activation is not zero
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The union over the tokens of each chunk's active neurons; one program per chunk."""
    base = tl.program_id(0) * chunk_length
    total = 0
    for first in range(0, chunk_length, LANES):
        place = first + tl.arange(0, LANES)
        neuron = base + place
        inside = (place < chunk_length) & (neuron < neurons)
        active = place < 0
        for token in tl.static_range(TOKENS):
            there = inside & (token < tokens)
            value = tl.load(values + token * values_stride + neuron, mask=there, other=0.0)
            reached = value >= threshold if BY_SCORE else value != 0.0
            active = active | (there & reached)
        ones = active.to(tl.int32)
        slot = base + total + tl.cumsum(ones, axis=0) - ones
        tl.store(index + slot, neuron, mask=active)
        if not BY_SCORE:
            for token in tl.static_range(TOKENS):
                there = active & (token < tokens)
                value = tl.load(values + token * values_stride + neuron, mask=there, other=0.0)
                tl.store(listed + token * listed_stride + slot, value, mask=there)
        total += tl.sum(ones, axis=0)
    tl.store(counts + tl.program_id(0), total)
