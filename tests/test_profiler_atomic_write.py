"""Outputs appear complete or not at all, and no temporary name survives whatever interrupts the writing."""

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import click
import pytest

from pi_toolkit.profiler import atomic_write
from pi_toolkit.profiler.atomic_write import (
    atomic_directory,
    atomic_file,
    check_writable,
    published,
    remove_stale,
    temporary_directory,
)
from pi_toolkit.profiler.errors import WorkspaceError
from pi_toolkit.profiler.json_file import write_json

INTERRUPTIONS = [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(3), OSError(28, "No space left on device")]


def fill(kind: str, temporary: Path, content: str) -> None:
    if kind == "file":
        temporary.write_text(content)
    else:
        (temporary / "inside").write_text(content)


def content_of(kind: str, path: Path) -> str:
    return (path if kind == "file" else path / "inside").read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def writer(kind: str, path: Path) -> AbstractContextManager[Path]:
    return atomic_file(path) if kind == "file" else atomic_directory(path)


def write(kind: str, path: Path, content: str) -> None:
    with writer(kind, path) as temporary:
        fill(kind, temporary, content)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_content_appears_under_its_final_name_only_when_complete(tmp_path: Path, kind: str) -> None:
    """Prevents a reader that runs at the same time from seeing half of the output."""
    path = tmp_path / "new" / "output"
    with writer(kind, path) as temporary:
        fill(kind, temporary, "content")
        assert not path.exists()
        assert temporary.parent == path.parent and temporary.name.startswith(".tmp-")
    assert content_of(kind, path) == "content"
    assert names(path.parent) == ["output"]


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda error: type(error).__name__)
def test_interruption_leaves_what_was_there(
    tmp_path: Path, kind: str, existing: bool, interruption: BaseException
) -> None:
    """Prevents Ctrl-C, a full disk or a mistake from destroying the last good output or leaving debris."""
    path = tmp_path / "output"
    if existing:
        write(kind, path, "old")
    with pytest.raises(type(interruption)), writer(kind, path) as temporary:
        fill(kind, temporary, "half")
        raise interruption
    assert names(tmp_path) == (["output"] if existing else [])
    if existing:
        assert content_of(kind, path) == "old"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_failed_first_output_takes_its_new_folders_along(tmp_path: Path, kind: str) -> None:
    """Prevents an empty workspace from a run that failed, which the next command then calls incomplete."""
    (tmp_path / "old").mkdir()
    with pytest.raises(OSError), writer(kind, tmp_path / "old" / "new" / "newer" / "output"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == ["old"] and names(tmp_path / "old") == []


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda error: type(error).__name__)
def test_interruption_of_each_step_of_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, interruption: BaseException
) -> None:
    """Prevents the old output from being gone when the new one could not take its place."""
    path, real_rename = tmp_path / "output", Path.rename
    write(kind, path, "old")
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    for step in ("_sync", "rename", "second rename"):
        calls: list[int] = []

        def fail(*_: object, calls: list[int] = calls, step: str = step) -> None:
            calls.append(1)
            raise interruption

        def fail_second(self: Path, target: Path, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise interruption
            real_rename(self, target)

        with monkeypatch.context() as patch:
            if step == "_sync":
                patch.setattr("pi_toolkit.profiler.atomic_write._sync", fail)
            elif kind == "file":
                patch.setattr(Path, "replace", fail)
            else:
                patch.setattr(Path, "rename", fail_second if step == "second rename" else fail)
            with pytest.raises(type(interruption)):
                write(kind, path, "new")
        assert calls
        assert content_of(kind, path) == "old", step
        assert names(tmp_path) == ["output"], step


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_existing_output_is_replaced(tmp_path: Path, kind: str) -> None:
    """Prevents old and new content from being mixed."""
    path = tmp_path / "output"
    write(kind, path, "old")
    if kind == "directory":
        (path / "left over").write_text("old")
    write(kind, path, "new")
    assert content_of(kind, path) == "new"
    assert names(tmp_path) == ["output"]
    if kind == "directory":
        assert names(path) == ["inside"]


def test_file_and_link_in_place_of_a_directory_leave_no_debris(tmp_path: Path) -> None:
    """Prevents hidden files beside the output when what it replaces is no ordinary directory."""
    elsewhere = tmp_path / "elsewhere"
    write("directory", elsewhere, "theirs")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(elsewhere)
    for name in ("file", "link"):
        write("directory", tmp_path / name, "new")
        assert content_of("directory", tmp_path / name) == "new"
    assert content_of("directory", elsewhere) == "theirs"
    assert names(tmp_path) == ["elsewhere", "file", "link"]


def test_existing_directory_is_exchanged_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a kill between two renames from leaving no directory at all, where the system can do better."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux exchanges two names")
    write("directory", tmp_path / "output", "old")
    monkeypatch.setattr(atomic_write, "_move", lambda *_: pytest.fail("moved in two steps"))
    write("directory", tmp_path / "output", "new")
    assert content_of("directory", tmp_path / "output") == "new"
    assert names(tmp_path) == ["output"]


def test_directory_is_replaced_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents systems and file systems without that step from being unable to write a second time."""
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    for content in ("old", "new"):
        write("directory", tmp_path / "output", content)
        assert content_of("directory", tmp_path / "output") == content
        assert names(tmp_path) == ["output"]


@pytest.mark.parametrize("exchange", [True, False])
def test_two_writers_of_a_directory_end_in_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Prevents a traceback, a mixture or debris when two runs finish at the same time, in the middle of the other."""
    path, real_move = tmp_path / "output", atomic_write._move

    def overtaken(temporary: Path, target: Path) -> None:
        monkeypatch.setattr(atomic_write, "_move", real_move)
        write("directory", target, "first")
        temporary.rename(target)

    if not exchange:
        monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    monkeypatch.setattr(atomic_write, "_move", overtaken)
    with pytest.raises(WorkspaceError, match="was written by another command at the same time: run this one again"):
        write("directory", path, "second")
    assert content_of("directory", path) == "first"
    assert names(tmp_path) == ["output"]


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def test_what_killed_commands_left_is_removed(tmp_path: Path) -> None:
    """Prevents gigabytes of samples from staying in a workspace for ever after ``kill -9``, and the removal of anything
    else: what is being written now, by another machine or by hand."""
    ours, dead = f".tmp-{atomic_write._here()}", dead_process()
    left = {f"{ours}-{dead}-{'0' * 12}": True, f"{ours}-{dead}-{'1' * 12}": False}
    kept = [f"{ours}-{os.getpid()}-{'2' * 12}", f".tmp-{'f' * 8}-{dead}-{'3' * 12}", ".tmp-mine", ".tmp-0123456789ab"]
    kept += [f"{ours}-{dead}-{'4' * 12}.bak", f"{ours}-{'9' * 50}-{'5' * 12}"]
    young = f"{ours}-{dead}-{'6' * 12}"
    for name in (*left, *kept, young):
        fill("directory" if left.get(name) else "file", _made(tmp_path / name, left.get(name, False)), "samples")
        if name != young:
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    check_writable(tmp_path / "output")
    assert names(tmp_path) == sorted([*kept, young])


def _made(path: Path, directory: bool) -> Path:
    if directory:
        path.mkdir()
    return path


def test_stale_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    """Prevents the removal of something elsewhere through a link with a stale name."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    link = tmp_path / f".tmp-{atomic_write._here()}-{dead_process()}-{'0' * 12}"
    link.symlink_to(tmp_path / "elsewhere")
    os.utime(link, (0, 0), follow_symlinks=False)
    remove_stale(tmp_path)
    assert names(tmp_path) == ["elsewhere"] and names(tmp_path / "elsewhere") == ["file"]


def test_temporary_directory_goes_with_its_block(tmp_path: Path) -> None:
    """Prevents samples from surviving the command that drew them."""
    with pytest.raises(KeyboardInterrupt), temporary_directory(tmp_path) as directory:
        (directory / "sample").touch()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_only_outputs_in_place_are_reported(tmp_path: Path, kind: str, existing: bool) -> None:
    """Prevents "no output was changed" after one was, and the opposite for one that only was about to be."""
    path = tmp_path / "output"
    if existing:
        write(kind, path, "old")
    with click.Context(click.Command("test")) as context:
        with pytest.raises(KeyboardInterrupt), writer(kind, path) as temporary:
            fill(kind, temporary, "half")
            write_json((temporary if kind == "directory" else tmp_path) / "inner.json", {})
            raise KeyboardInterrupt
        assert published(context) == ([] if kind == "directory" else [tmp_path / "inner.json"])
        write(kind, path, "new")
        assert path in published(context)


@pytest.mark.parametrize(
    ("kind", "there"), [("file", "folder"), ("file", "link"), ("file", "pipe"), ("directory", "file")]
)
def test_output_of_another_kind_is_refused_at_once(tmp_path: Path, kind: atomic_write.Kind, there: str) -> None:
    """Prevents replacing a device, a pipe or a link by a file, and a user's file by a directory."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WorkspaceError, match=r"is (a directory|no regular .*): move it away or choose another name"):
        check_writable(tmp_path / there, kind=kind)
    check_writable(tmp_path / ("file" if kind == "file" else "folder"), kind=kind)


def test_two_writers_do_not_share_a_temporary(tmp_path: Path) -> None:
    """Prevents two runs into one workspace from publishing a mixture."""
    path = tmp_path / "output"
    with atomic_file(path) as first, atomic_file(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["output"]


@pytest.mark.parametrize("path", ["new", "a/b/c/new", "."])
def test_check_leaves_nothing(tmp_path: Path, path: str) -> None:
    """Prevents empty folders from a run that is refused later."""
    check_writable(tmp_path / path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("path", ["file/new", "file/a/b"])
def test_place_below_a_file_is_refused_at_once(tmp_path: Path, path: str) -> None:
    """Prevents minutes of profiling before it turns out that nothing can be written."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(WorkspaceError) as caught:
        check_writable(tmp_path / path)
    assert repr(str(tmp_path / path)) in caught.value.message
    assert caught.value.message.endswith(": choose another output with -o or mend the permissions")
    assert names(tmp_path) == ["file"]


def test_read_only_file_system_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the same for permissions, which do not stop root and so are simulated."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(WorkspaceError, match=r"cannot write .* \(Permission denied\): choose another output"):
        check_writable(tmp_path / "new")


def test_number_that_json_cannot_hold_keeps_the_old_file(tmp_path: Path) -> None:
    """Prevents NaN in a description, which strict readers refuse, from replacing a good one."""
    write_json(tmp_path / "about.json", {"share": 0.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "about.json", {"share": float("nan")})
    assert (tmp_path / "about.json").read_text() == '{\n "share": 0.5\n}\n'
    assert names(tmp_path) == ["about.json"]
