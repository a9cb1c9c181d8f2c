"""How work is cut for the Triton kernels: a fixed table by shape and kind, as nothing may be tried out inside a CUDA graph.

The reasoning behind the sizes is in docs/gpu.md; none of them has been measured on a GPU yet.
"""

from dataclasses import dataclass

from .packed_matrix import Kind


@dataclass(frozen=True)
class Tiling:
    """``chunks``: parts that neurons are cut into, at most; they fix the order of sums. ``rows_at_once``: programs per chunk
    that read rows of gate and up. ``gemv_blocks`` and ``axpy_blocks``: 64 columns each of a piece. ``axpy_unroll``: rows of
    down whose reads are under way together."""

    chunks: int
    rows_at_once: int
    gemv_blocks: int
    axpy_blocks: int
    axpy_unroll: int

    def chunk_length(self, neurons: int) -> int:
        """Neurons of one chunk, a multiple of 16 so that chunks begin on 64 bytes of every buffer."""
        return -(-neurons // (16 * self.chunks)) * 16


def tiling(kind: Kind, columns: int, tokens: int) -> Tiling:
    """For rows of so many *columns*, met by so many *tokens* at once."""
    narrow = _power_of_two(-(-columns // 64))
    widest = 4 if kind == "float32" else 8
    return Tiling(
        chunks=64,
        rows_at_once=32,
        gemv_blocks=max(2, min(16, narrow)),
        axpy_blocks=max(2, min(widest, narrow)),
        axpy_unroll=8 if tokens <= 2 else 4,
    )


def _power_of_two(number: int) -> int:
    """The next power of two from *number* on."""
    return 1 << (number - 1).bit_length()
