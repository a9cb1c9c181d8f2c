"""Activations of neurons on a GPU: gathered rows of gate and up times x, and the activation function, in one kernel.

A program reads one neuron's rows at a time, from their first column to their last in pieces, and every token's x against each
piece. The sum of a row is the same for any number of tokens and programs.
"""

import triton
import triton.language as tl

from .triton_dequantise import load_piece, piece_product, tile_columns

# What a product becomes. An argument and no constant of the kernel: it concerns one number per row, and every constant
# multiplies the kernels that have to be compiled.
NONE = tl.constexpr(0)
THRESHOLD = tl.constexpr(1)  # z where z > activation_threshold: ReLU and FATReLU
DOUBLE_RELU = tl.constexpr(2)
SILU = tl.constexpr(3)
GELU = tl.constexpr(4)


@triton.jit(do_not_specialize=["scores_stride", "activation", "neurons", "chunk_length", "tokens"])
def gather_gemv(
    first,  # weights that decide on firing, see packed_matrix.py; the rows' scales as float16, and distances between rows
    first_scales,
    first_stride,
    first_scales_stride,
    up,
    up_scales,
    up_stride,
    up_scales_stride,
    bias,  # float32 [neurons], or None
    x,  # float32 [tokens, COLUMNS]
    index,  # what list_active made; both None: all neurons
    counts,
    scores,  # float32 [tokens, neurons]: a token's own candidates among those of all tokens
    scores_stride,
    score_threshold,
    h,  # float32 [tokens, chunks · chunk_length], out: in the order of index
    h_stride,
    activation,
    activation_threshold,
    neurons,
    chunk_length,
    tokens,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    KIND: tl.constexpr,
    READS: tl.constexpr,  # "first": h = act(first · x + bias); "both": that times up · x; "up": h · up · x
    GATHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,  # a power of two, at least tokens
    BLOCKS: tl.constexpr,
):
    """Program (p, c) computes every P-th active neuron of chunk c, from the p-th on."""
    base = tl.program_id(1) * chunk_length
    count = tl.load(counts + tl.program_id(1)) if GATHER else tl.minimum(chunk_length, neurons - base)
    token = tl.arange(0, TOKENS)
    for position in range(tl.program_id(0), count, tl.num_programs(0)):
        slot = base + position
        neuron = tl.load(index + slot) if GATHER else slot
        row = neuron.to(tl.int64)
        z = tl.zeros([TOKENS], tl.float32)
        factor = tl.zeros([TOKENS], tl.float32)
        for start in range(0, COLUMNS, 64 * BLOCKS):
            low_columns, high_columns = tile_columns(start, KIND, BLOCKS)
            if READS != "up":
                first_low, first_high, first_low_scale, first_high_scale = load_piece(
                    first + row * first_stride, first_scales + row * first_scales_stride, start, True,
                    PADDED, HEAD, KIND, BLOCKS,
                )  # fmt: skip
            if READS != "first":
                up_low, up_high, up_low_scale, up_high_scale = load_piece(
                    up + row * up_stride, up_scales + row * up_scales_stride, start, True, PADDED, HEAD, KIND, BLOCKS
                )
            for t in range(tokens if TOKENS > 1 else 1):
                x_low = tl.load(x + t * COLUMNS + low_columns, mask=low_columns < COLUMNS, other=0.0)
                x_high = tl.load(x + t * COLUMNS + high_columns, mask=high_columns < COLUMNS, other=0.0)
                if READS != "up":
                    product = piece_product(
                        first_low, first_high, first_low_scale, first_high_scale, x_low, x_high, KIND
                    )
                    z += tl.where(token == t, product, 0.0)
                if READS != "first":
                    product = piece_product(up_low, up_high, up_low_scale, up_high_scale, x_low, x_high, KIND)
                    factor += tl.where(token == t, product, 0.0)
        there = token < tokens
        if READS == "up":
            z = tl.load(h + token * h_stride + slot, mask=there, other=0.0)
        else:
            if HAS_BIAS:
                z += tl.load(bias + neuron)
            z = _activate(z, activation, activation_threshold)
        if READS != "first":
            z *= tl.where((activation == DOUBLE_RELU) & (factor <= 0.0), 0.0, factor)
        if GATHER and READS != "up" and TOKENS > 1:
            own = tl.load(scores + token * scores_stride + neuron, mask=there, other=0.0) >= score_threshold
            z = tl.where(own, z, 0.0)
        tl.store(h + token * h_stride + slot, z, mask=there)


@triton.jit
def _activate(z, activation, threshold):
    if activation == SILU:
        z = z / (1.0 + tl.exp(-z))
    elif activation == GELU:
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif activation != NONE:
        z = tl.where(z <= threshold, 0.0, z)
    return z
