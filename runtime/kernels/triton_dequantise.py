"""How a Triton program reads weights: a piece of one packed row as float32, whichever kind it is stored in.

A piece is 64·BLOCKS columns in two tiles [BLOCKS, 32]. Row t of a tile is one block of 32 values, so blocks of q8_0 and
q4_0 meet their scale once each, after the sum over the block. Of q4_0 both tiles come from the same bytes: low nibbles
hold 32 columns, high nibbles those 64 further on (see :mod:`.packed_matrix`); of all other kinds the second tile follows
the first. The layout on the GPU is that of the CPU: rows begin on 64 bytes, scales and quants lie apart, and so neighbouring
threads read neighbouring words of up to 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def tile_columns(start, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Column numbers [BLOCKS, 32] of the piece's two tiles, the piece beginning at column *start*."""
    block = tl.arange(0, BLOCKS)[:, None]
    within = tl.arange(0, 32)[None, :]
    if KIND == "q4_0":
        low = start + block // 2 * 128 + block % 2 * 32 + within
        return low, low + 64
    low = start + block * 32 + within
    return low, low + BLOCKS * 32


@triton.jit
def load_piece(
    values, scales, start, wanted, PADDED: tl.constexpr, HEAD: tl.constexpr, KIND: tl.constexpr, BLOCKS: tl.constexpr
):
    """The tiles of a piece as float32 without their scales, and the scales [BLOCKS] (of plain kinds ones, never to be used).

    *values* and *scales* point to the beginning of the row, the latter as float16; quants begin HEAD bytes behind it. A row
    holds PADDED values. Unless *wanted* nothing is read, and zeros are returned.
    """
    block = tl.arange(0, BLOCKS)
    offset = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    if KIND == "q4_0":
        # Half a group of 128 values is 32 bytes.
        byte = start // 2 + offset
        both = tl.load(values + HEAD + byte, mask=wanted & (byte < PADDED // 2), other=0x88).to(tl.int32)
        low, high = _as_float(both & 15) - 8.0, _as_float(both >> 4) - 8.0
        low_block = start // 32 + block // 2 * 4 + block % 2
        high_block = low_block + 2
    elif KIND == "q8_0":
        first, second = start + offset, start + BLOCKS * 32 + offset
        low_bytes = tl.load(values + HEAD + first, mask=wanted & (first < PADDED), other=0).to(tl.int32)
        high_bytes = tl.load(values + HEAD + second, mask=wanted & (second < PADDED), other=0).to(tl.int32)
        # Bytes are two's complement: turning the top bit adds 128 to each.
        low, high = _as_float(low_bytes ^ 128) - 128.0, _as_float(high_bytes ^ 128) - 128.0
        low_block = start // 32 + block
        high_block = low_block + BLOCKS
    else:
        first, second = start + offset, start + BLOCKS * 32 + offset
        low = tl.load(values + first, mask=wanted & (first < PADDED), other=0.0).to(tl.float32)
        high = tl.load(values + second, mask=wanted & (second < PADDED), other=0.0).to(tl.float32)
    if KIND == "plain":
        low_scale = tl.full([BLOCKS], 1.0, tl.float32)
        high_scale = low_scale
    else:
        low_scale = tl.load(scales + low_block, mask=wanted & (low_block < PADDED // 32), other=0.0).to(tl.float32)
        high_scale = tl.load(scales + high_block, mask=wanted & (high_block < PADDED // 32), other=0.0).to(tl.float32)
    return low, high, low_scale, high_scale


@triton.jit
def piece_product(low, high, low_scale, high_scale, x_low, x_high, KIND: tl.constexpr):
    """Σ weight · x over a piece; the order of the sum depends on the tiles' shape alone."""
    low_sums, high_sums = tl.sum(low * x_low, axis=1), tl.sum(high * x_high, axis=1)
    if KIND != "plain":
        low_sums, high_sums = low_sums * low_scale, high_sums * high_scale
    return tl.sum(low_sums + high_sums, axis=0)


@triton.jit
def _as_float(number):
    """int32 in [0, 2²³) as float32, exactly: 2²³ + number has that number in its lowest bits.

    An "or" and a subtraction run at full rate on every GPU; NVIDIA's instruction for the conversion does not.
    """
    return (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
