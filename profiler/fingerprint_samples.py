"""Which bytes of a model a fingerprint looks at: 4 KiB from the start, middle and end of every tensor."""

import ctypes
import mmap
from collections.abc import Iterable

SAMPLE_BYTES = 4096


def samples(num_bytes: int) -> list[slice]:
    """Where the samples of a tensor of *num_bytes* lie in it."""
    length = min(SAMPLE_BYTES, num_bytes)
    return [slice(start, start + length) for start in (0, (num_bytes - length) // 2, num_bytes - length)]


def ask_for_samples(tensors: Iterable[tuple[int, int]]) -> None:
    """Let the system begin to read the samples of all *tensors* (address and bytes of each), which lie in mapped files.

    One by one, each would wait for the disk, and behind all that another thread reads ahead. Where the system takes no such
    hint nothing happens.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_WILLNEED") else None
    if advise is None:
        return
    for address, num_bytes in tensors:
        for sample in samples(num_bytes):
            first = (address + sample.start) // mmap.PAGESIZE * mmap.PAGESIZE
            advise(ctypes.c_void_p(first), ctypes.c_size_t(address + sample.stop - first), mmap.MADV_WILLNEED)
