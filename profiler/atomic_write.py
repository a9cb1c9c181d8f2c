"""Files and directories that appear under their final name only when they are complete.

Everything is written under a hidden temporary name in the same parent folder, synced to the disk and then renamed, so
that a crash, a full disk or Ctrl-C leaves either the old content or the new one.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import WorkspaceError

TEMPORARY_PREFIX = ".tmp-"


def _temporary_sibling(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:12]}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(path: Path, remedy: str = "choose another output with -o or mend the permissions") -> None:
    """Raise ``WorkspaceError``, ending in *remedy*, now if *path* could not be created later; leaves nothing behind.

    Called before minutes of work, so that an unwritable output is reported at once.
    """
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    probe = parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:12]}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise WorkspaceError(f"cannot write {str(path)!r} ({error.strerror}): {remedy}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it is synced and renamed to *path*, on any exception it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_sibling(path)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; on success it takes the place of *path* as a whole, on any exception it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, previous = _temporary_sibling(path), _temporary_sibling(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if path.exists():
            path.rename(previous)
        temporary.rename(path)
    except BaseException:
        if previous.exists() and not path.exists():
            previous.rename(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if previous.is_symlink() or previous.is_file():
            previous.unlink()
        shutil.rmtree(previous, ignore_errors=True)
