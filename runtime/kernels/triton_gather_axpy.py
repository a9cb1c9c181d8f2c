"""What active neurons add to the output on a GPU: gathered rows of down times their activations, summed in a fixed order.

A program owns one chunk of neurons and some columns, and adds row after row; the chunks' sums are added in the order of the
chunks by a second kernel. There are no atomic additions, so every run gives the same bits, and because a row that is not a
token's own is added as zero, so does every batch that a token is in.
"""

import triton
import triton.language as tl

from .triton_dequantise import load_piece, tile_columns


@triton.jit(do_not_specialize=["neurons", "chunk_length", "tokens"])
def gather_axpy(
    down,
    down_scales,
    down_stride,
    down_scales_stride,
    index,  # what list_active made; both None: all neurons
    counts,
    h,  # float32 [tokens, chunks · chunk_length]
    h_stride,
    sums,  # float32 [chunks, tokens, COLUMNS], out
    neurons,
    chunk_length,
    tokens,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD: tl.constexpr,
    KIND: tl.constexpr,
    GATHER: tl.constexpr,
    TOKENS: tl.constexpr,  # 1, 2, or 4 for 3 and 4 tokens
    BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,  # rows whose reads may be under way together
):
    """Program (p, c) adds the rows of chunk c in columns [64·BLOCKS·p, 64·BLOCKS·(p + 1))."""
    chunk = tl.program_id(1)
    base, start = chunk * chunk_length, tl.program_id(0) * 64 * BLOCKS
    count = tl.load(counts + chunk) if GATHER else tl.minimum(chunk_length, neurons - base)
    # One pair of tiles per token: a tile [TOKENS, BLOCKS, 32] would send every row through shared memory to spread it.
    low_0 = tl.zeros([BLOCKS, 32], tl.float32)
    low_1, low_2, low_3 = low_0, low_0, low_0
    high_0, high_1, high_2, high_3 = low_0, low_0, low_0, low_0
    for begin in range(0, count, UNROLL):
        for ahead in tl.static_range(UNROLL):
            slot, inside = base + begin + ahead, begin + ahead < count
            h_0 = tl.load(h + slot, mask=inside, other=0.0)
            adding = (h_0 != 0.0).to(tl.int32)
            if TOKENS > 1:
                h_1 = tl.load(h + h_stride + slot, mask=inside, other=0.0)
                adding += (h_1 != 0.0).to(tl.int32)
            if TOKENS > 2:
                h_2 = tl.load(h + 2 * h_stride + slot, mask=inside, other=0.0)
                h_3 = tl.load(h + 3 * h_stride + slot, mask=inside & (tokens > 3), other=0.0)
                adding += (h_2 != 0.0).to(tl.int32) + (h_3 != 0.0).to(tl.int32)
            if GATHER:  # a candidate that stays silent costs no row
                neuron, wanted = tl.load(index + slot, mask=inside, other=0), adding > 0
            else:
                neuron, wanted = slot, inside
            row = neuron.to(tl.int64)
            row_low, row_high, low_scale, high_scale = load_piece(
                down + row * down_stride, down_scales + row * down_scales_stride, start, wanted,
                PADDED, HEAD, KIND, BLOCKS,
            )  # fmt: skip
            low_0 = _add_row(low_0, h_0, row_low, low_scale, KIND)
            high_0 = _add_row(high_0, h_0, row_high, high_scale, KIND)
            if TOKENS > 1:
                low_1 = _add_row(low_1, h_1, row_low, low_scale, KIND)
                high_1 = _add_row(high_1, h_1, row_high, high_scale, KIND)
            if TOKENS > 2:
                low_2 = _add_row(low_2, h_2, row_low, low_scale, KIND)
                high_2 = _add_row(high_2, h_2, row_high, high_scale, KIND)
                low_3 = _add_row(low_3, h_3, row_low, low_scale, KIND)
                high_3 = _add_row(high_3, h_3, row_high, high_scale, KIND)
    low_columns, high_columns = tile_columns(start, KIND, BLOCKS)
    target = sums + chunk * tokens * COLUMNS
    _store(target, low_0, high_0, low_columns, high_columns, True, COLUMNS)
    if TOKENS > 1:
        _store(target + COLUMNS, low_1, high_1, low_columns, high_columns, True, COLUMNS)
    if TOKENS > 2:
        _store(target + 2 * COLUMNS, low_2, high_2, low_columns, high_columns, True, COLUMNS)
        _store(target + 3 * COLUMNS, low_3, high_3, low_columns, high_columns, tokens > 3, COLUMNS)


@triton.jit
def _add_row(total, activation, row, scale, KIND: tl.constexpr):
    if KIND == "plain":
        return total + activation * row
    return total + (activation * scale)[:, None] * row


@triton.jit
def _store(target, low, high, low_columns, high_columns, there, COLUMNS: tl.constexpr):
    tl.store(target + low_columns, low, mask=there & (low_columns < COLUMNS))
    tl.store(target + high_columns, high, mask=there & (high_columns < COLUMNS))


@triton.jit(do_not_specialize=["chunks", "tokens"])
def add_chunks(sums, y, chunks, tokens, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, UNROLL: tl.constexpr):
    """y [tokens, COLUMNS] = Σ sums [chunks, tokens, COLUMNS], chunk after chunk; program (p, t) has token t's p-th WIDTH."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1)
    total = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, chunks, UNROLL):
        for ahead in tl.static_range(UNROLL):
            chunk = begin + ahead
            source = sums + (chunk * tokens + token) * COLUMNS + column
            total += tl.load(source, mask=(chunk < chunks) & (column < COLUMNS), other=0.0)
    tl.store(y + token * COLUMNS + column, total, mask=column < COLUMNS)
