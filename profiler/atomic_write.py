"""Files and directories that appear under their final name only when they are complete.

Everything is written under a hidden temporary name in the same parent folder, synced to the disk and then renamed. A
crash, a full disk or Ctrl-C leaves the old content or the new one; so does a kill, except that where the system cannot
exchange two names (other than Linux) a kill between the two renames of a directory leaves it under a temporary name.

A temporary name states which process on which machine made it. What a killed process left is removed by the next
command that writes beside it.
"""

import ctypes
import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import click

from .errors import WorkspaceError

TEMPORARY_PREFIX = ".tmp-"
STALE_SECONDS = 60.0  # a younger name may be that of a process whose number is not visible yet
_PUBLISHED = "pi_toolkit.published"  # key of a click context's meta: outputs of this command, with their identity
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
Kind = Literal["file", "directory"]


def _here() -> str:
    """Names the machine and its process numbers: a folder may be shared with others, where the same number is alive."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()}|{namespace}".encode()).hexdigest()[:8]


def _temporary_sibling(path: Path) -> Path:
    return path.parent / f"{TEMPORARY_PREFIX}{_here()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(
    path: Path, remedy: str = "choose another output with -o or mend the permissions", kind: Kind | None = None
) -> None:
    """Raise ``WorkspaceError``, ending in *remedy*, now if *path* could not be created later; leaves nothing behind.

    With *kind*, also if something else than that is there. Called before minutes of work, so that an unwritable output
    is reported at once; removes what killed commands left beside it.
    """
    if kind and os.path.lexists(path):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) if kind == "file" else path.is_dir()):
            what = "a directory" if stat.S_ISDIR(mode) else f"no regular {kind}"
            raise WorkspaceError(f"{str(path)!r} is {what}: move it away or choose another name")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    probe = _temporary_sibling(parent / path.name)
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise WorkspaceError(f"cannot write {str(path)!r} ({error.strerror}): {remedy}") from error
    remove_stale(parent)


def remove_stale(parent: Path) -> None:
    """Remove the temporary files and folders in *parent* whose process, of this machine, is no longer alive."""
    pattern = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}{_here()}-(\d+)-[0-9a-f]{{12}}")
    for entry in parent.iterdir():
        match = pattern.fullmatch(entry.name)
        with suppress(OSError):  # another command may remove it at the same time
            if match and not _is_alive(int(match[1])) and time.time() - entry.lstat().st_mtime > STALE_SECONDS:
                _remove(entry)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # there, asking with signal 0 is not a question
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number that can be asked about
        return True
    return True


def _remove(path: Path) -> None:
    """Remove a file, a link or a whole directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """A directory in *parent* for the time of the block."""
    temporary = _temporary_sibling(parent / "temporary")
    try:
        temporary.mkdir()
        yield temporary
    finally:
        _remove(temporary)


@contextmanager
def atomic_file(path: Path, is_output: bool = True) -> Iterator[Path]:
    """Yield a temporary path; on success it is synced and renamed to *path*, on any exception it is removed.

    A file that is no output (saved progress) is not named when the command is interrupted later, and its temporary name is
    always the same (``.new`` behind the other), so that whoever removes the file can remove what a kill left.
    """
    with parents(path):
        temporary = _temporary_sibling(path) if is_output else path.with_name(f"{path.name}.new")
        try:
            yield temporary
            _sync(temporary)
            if is_output:
                _will_publish(temporary, path)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; on success it takes the place of *path* as a whole, on any exception it is removed.

    Of two processes that write the same path, one has the last word, or one is refused with ``WorkspaceError``.
    """
    with parents(path), temporary_directory(path.parent) as temporary:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        _will_publish(temporary, path)
        try:
            if not (os.path.lexists(path) and _exchange(temporary, path)):
                _move(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            raise WorkspaceError(
                f"{str(path)!r} was written by another command at the same time: run this one again"
            ) from error


def _move(temporary: Path, path: Path) -> None:
    """Two renames: what was at *path* steps aside, and comes back if *temporary* cannot take its place."""
    previous = _temporary_sibling(path)
    try:
        if os.path.lexists(path):
            path.rename(previous)
        temporary.rename(path)
    except BaseException:
        if os.path.lexists(previous) and not os.path.lexists(path):
            previous.rename(path)
        raise
    finally:
        _remove(previous)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return renameat2 is not None and renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


@contextmanager
def parents(path: Path) -> Iterator[None]:
    """Make the folders above *path*; on any exception those made here are removed again unless something is in them."""
    made = []
    for folder in path.parents:
        if folder.exists():
            break
        made.append(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _will_publish(temporary: Path, path: Path) -> None:
    """Tell the running command that *temporary* is about to become its output *path*."""
    context = click.get_current_context(silent=True)
    if context and not any(part.startswith(TEMPORARY_PREFIX) for part in path.parent.parts):
        context.meta.setdefault(_PUBLISHED, []).append((path, _identity(temporary)))


def published(context: click.Context) -> list[Path]:
    """The outputs that the command of *context* has put in place so far."""
    found: list[tuple[Path, tuple[int, int] | None]] = context.meta.get(_PUBLISHED, [])
    return [path for path, identity in found if _identity(path) == identity]


def _identity(path: Path) -> tuple[int, int] | None:
    """What stays the same when a file or directory is renamed."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
