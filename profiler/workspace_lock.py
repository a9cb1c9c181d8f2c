"""One command at a time writes in a workspace."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic_write import parents
from .errors import WorkspaceError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold *folder*, which is made where it is missing and removed again if an exception leaves it empty.

    Raises ``WorkspaceError`` when another command holds it. The lock goes with the process, however that ends; where the
    file system knows no locks, or none of folders (NFS), there is none.
    """
    with parents(folder / "anything"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise WorkspaceError(
                    f"another pi-profile or pi-train-predictor is at work in {str(folder)!r}: wait for it, or end it"
                ) from None
            except OSError:
                pass
            yield
        finally:
            os.close(descriptor)
