"""Saved progress comes back exactly, for the same job only, and a damaged file is one sentence."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from pi_toolkit.profiler.command_line import ToolkitCommand
from pi_toolkit.profiler.progress_file import ProgressError, ProgressFile

JOB = {"fingerprint": "ab" * 32, "window": 512, "dtype": "float32"}


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    """Prevents counts or weights from being rounded, or a position from being lost, on the way through a file."""
    file = ProgressFile(tmp_path / "new" / "progress", JOB)
    assert file.read() is None
    tensors = {"counts": torch.tensor([[2**62, 0], [1, 3]]), "weights": torch.randn(3, 2).to(torch.bfloat16).T}
    for position in ({"windows": 1}, {"windows": 2, "parts": [1, "two", None]}):
        file.save(tensors, position)
    found = ProgressFile(tmp_path / "new" / "progress", dict(reversed(JOB.items()))).read()
    assert found is not None and found.position == {"windows": 2, "parts": [1, "two", None]}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert found.tensors["weights"].dtype == torch.bfloat16
    file.remove()
    assert file.read() is None and list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("changes", [{"window": 256}, {"fingerprint": "cd" * 32}, {"dtype": None}, {"more": 1}])
def test_other_jobs_progress_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Prevents counts of two models or of two kinds of windows from being added up."""
    ProgressFile(tmp_path / "progress", JOB).save({}, {})
    (key,) = changes
    with pytest.raises(
        ProgressError, match=rf"was saved with {key} .*: give the same options, or run .* without --resume"
    ):
        ProgressFile(tmp_path / "progress", JOB | changes).read()


def test_damaged_progress_is_one_sentence(tmp_path: Path) -> None:
    """Prevents a traceback, or wrong counts, from a file that was cut off or is something else."""
    path = tmp_path / "progress"
    file = ProgressFile(path, JOB)
    file.save({"counts": torch.arange(9)}, {"windows": 1})
    whole = path.read_bytes()
    changed = whole.replace(b'\\"version\\": 1', b'\\"version\\": 9')
    assert changed != whole
    for content in (
        b"",
        whole[:-1],
        whole[:50],
        b"\0" * 100,
        b"{" * 4000,
        whole.replace(b"position", b"positiom"),
        changed,
    ):
        path.write_bytes(content)
        with pytest.raises(ProgressError, match=r"run the command again without --resume$"):
            file.read()


def test_saving_is_due_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a save after every batch, and a first save that never comes."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert ProgressFile(tmp_path / "progress", JOB, 0.0).due()
    file = ProgressFile(tmp_path / "progress", JOB, 5.0)
    now += 4.9
    assert not file.due()
    now += 0.2
    assert file.due()
    file.save({}, {})
    assert not file.due()
    now += 5.1
    assert file.due()


def test_interruption_says_that_progress_is_kept(tmp_path: Path) -> None:
    """Prevents "no output was changed, run the command again" from costing hours."""

    @click.command(cls=ToolkitCommand)
    @click.argument("finished", type=bool)
    def command(finished: bool) -> None:
        file = ProgressFile(tmp_path / "progress", JOB)
        file.save({}, {})
        if finished:
            file.remove()
        raise KeyboardInterrupt

    kept, gone = (CliRunner().invoke(command, [finished]).stderr for finished in ("false", "true"))
    assert kept.endswith(
        f"and the work done so far is in {str(tmp_path / 'progress')!r}, run the command again with --resume\n"
    )
    assert gone == "Error: interrupted before the end: no output was changed, run the command again\n"


def test_a_killed_save_leaves_the_one_before(tmp_path: Path) -> None:
    """Prevents a kill in the middle of saving from costing everything."""
    code = (
        "import sys, torch\nfrom pathlib import Path\nfrom pi_toolkit.profiler.progress_file import ProgressFile\n"
        "file, n = ProgressFile(Path(sys.argv[1]), {}), 0\n"
        "while True:\n    n += 1\n    file.save({'counts': torch.full((1 << 20,), n)}, {'n': n})\n    print(n, flush=True)"
    )
    path = tmp_path / "progress"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    found = ProgressFile(path, {}).read()
    assert found is not None and found.position["n"] >= 3
    assert (found.tensors["counts"] == found.position["n"]).all()


def test_another_command_in_the_same_workspace_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents advice about permissions and full disks where two commands share one workspace."""
    monkeypatch.setattr("pi_toolkit.profiler.atomic_write._sync", lambda path: path.unlink())
    with pytest.raises(ProgressError, match=r"another command at the same time.*choose another workspace with -o"):
        ProgressFile(tmp_path / "progress", {}).save({"counts": torch.zeros(1)}, {})
