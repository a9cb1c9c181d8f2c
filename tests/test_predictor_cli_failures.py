"""pi-train-predictor on full disks, read-only folders and interruptions: one sentence, and the old predictors stay."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from folder_contents import contents
from pi_toolkit.predictor_training.cli import main
from tiny_corpus import WORDS

Refuses = Callable[..., str]


@pytest.fixture
def quick(corpus: Path) -> list[object]:
    return ["--corpus", corpus, "--tokens", "400", "--epochs", "1", "--window", "32"]


@pytest.mark.parametrize("limit", [4, 20])
def test_disk_that_is_too_small_is_one_sentence(workspace: Path, corpus: Path, limit: int) -> None:
    """Prevents SIGBUS and torch's page of C++ for a full disk, here a limit in KiB on files."""
    code = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit} * 1024,) * 2)\n"
        "from pi_toolkit.predictor_training.cli import main\nmain()"
    )
    before = contents(workspace)
    command = [sys.executable, "-c", code, str(workspace), "--corpus", str(corpus), "--epochs", "1", "--window", "32"]
    # With 20 KiB the samples fit and predictors of this width do not.
    tokens = ["--tokens", "1k" if limit == 4 else "200", "--hidden", "128"]
    result = subprocess.run([*command, *tokens], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("Error: File too large"), result.stderr
    assert "Traceback" not in result.stderr
    assert contents(workspace) == before
    assert not list(workspace.glob(".tmp-*"))


def test_unwritable_workspace_is_reported_before_the_work(
    workspace: Path, quick: list[object], refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents minutes of training for a result that cannot be stored; simulated, because root may write anywhere."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pi_toolkit.profiler.hf_model.load_hf_model", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "(Permission denied): mend the permissions of the workspace" in refuses(main, workspace, *quick)


@pytest.mark.parametrize(
    "stage",
    [
        "profiler.hf_model.load_hf_model",
        "predictor_training.sample.collect_samples",
        "predictor_training.adaptive_training.train_layer",
        "profiler.atomic_write._sync",
    ],
)
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (KeyboardInterrupt(), "no output was changed, run the command again"),
        (OSError(28, "No space left on device"), "No space left on device: check that the path is readable"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB."), "out of memory: lower --batch-size"),
    ],
    ids=["Ctrl-C", "full disk", "GPU memory"],
)
def test_interruption_in_any_stage_keeps_the_old_predictors(
    workspace: Path,
    quick: list[object],
    refuses: Refuses,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: BaseException,
    remedy: str,
) -> None:
    """Prevents Ctrl-C, a full disk or exhausted memory from costing the last good predictors or leaving samples behind."""

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise error

    (workspace / "predictor").mkdir()
    (workspace / "predictor" / "model_0.pt").write_bytes(b"old")
    before = contents(workspace)
    monkeypatch.setattr(f"pi_toolkit.{stage}", fail)
    assert remedy in refuses(main, workspace, *quick)
    assert contents(workspace) == before
    assert {path.name for path in workspace.iterdir()} == {"model.json", "activation", "predictor"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_real_interrupt_is_one_sentence(tmp_path: Path, workspace: Path, number: int) -> None:
    """Prevents what only a real process shows: Ctrl-C swallowed by a library, a traceback, or left-over samples."""
    endless = tmp_path / "endless.txt"
    endless.write_text("\n\n".join([" ".join(WORDS)] * 100_000))
    code = "from pi_toolkit.predictor_training.cli import main; main()"  # what the console script holds
    command = [sys.executable, "-c", code, str(workspace), "--corpus", str(endless)]
    before = contents(workspace)
    with subprocess.Popen([*command, "--tokens", "1M"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("training 3 predictors"):
                break
        deadline = time.monotonic() + 300
        while not list(workspace.glob("training-progress/*.inputs")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(workspace.glob("training-progress/*.inputs")), "sampling did not begin"
        process.send_signal(number)
        message = process.stderr.read()
    assert process.returncode == 1
    assert message.strip() == "Error: interrupted before the end: no output was changed, run the command again"
    assert contents(workspace) == before
    assert {path.name for path in workspace.iterdir()} == {"model.json", "activation"}
