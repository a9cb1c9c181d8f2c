"""Model files into the page cache while other things are done: loading waits for a disk only as long as reading it takes."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

PIECE_BYTES = 2**22
SENT_BYTES = 2**30


def read_ahead(files: Sequence[Path]) -> threading.Thread | None:
    """Start to read *files* from beginning to end, on a thread of its own that nobody has to wait for.

    None where one cannot be read, which whoever wants it says, and where the memory has no room for them beside the
    weights that are made of them: what is read would leave the cache before it is wanted.
    """
    try:
        num_bytes = sum(file.stat().st_size for file in files)
    except OSError:
        return None
    available = _available_bytes()
    if available is None or 2 * num_bytes > available:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(files: Sequence[Path]) -> None:
    try:
        for path in files:
            with path.open("rb", buffering=0) as file:
                if not _send_nowhere(file.fileno()):
                    piece = bytearray(PIECE_BYTES)
                    while file.readinto(piece):
                        pass
    except OSError:
        return


def _send_nowhere(file: int) -> bool:
    """Read *file* without a copy and, in pieces of a gigabyte, without Python's lock; False where the system cannot."""
    if sys.platform != "linux":
        return False
    with Path(os.devnull).open("wb", buffering=0) as nowhere:
        while os.sendfile(nowhere.fileno(), file, None, SENT_BYTES):
            pass
    return True


def _available_bytes() -> int | None:
    """What programs can have without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
