"""A profile that was killed and resumed is the profile of a run that was not, and nothing of the interruption is left."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from folder_contents import contents
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.cli import main
from pi_toolkit.profiler.workspace import Workspace
from pi_toolkit.profiler.workspace_lock import locked
from random_kills import WORKSPACE, kill_at_random
from tiny_models import save_family

TOKENS = "1.2k"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model: Path, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("whole") / "pi"
    result = CliRunner().invoke(main, [*arguments(model, corpus, out), "--batch-size", "8"])
    assert result.exit_code == 0, result.output
    return out


def arguments(model: Path, corpus: Path, out: Path) -> list[str]:
    options = ["--corpus", str(corpus), "--tokens", TOKENS, "--window", "16", "--save-every", "0", "-o", str(out)]
    return [str(model), *options]


class Stopped(BaseException):
    """A kill that leaves the test's own process alive."""


def stop_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Let the profiler end at once when it has saved its progress so many times."""
    from pi_toolkit.profiler.progress_file import ProgressFile

    save, count = ProgressFile.save, 0

    def counting(self: ProgressFile, *given: Any) -> None:
        nonlocal count
        save(self, *given)
        count += 1
        if count == saves:
            raise Stopped

    monkeypatch.setattr(ProgressFile, "save", counting)


@pytest.mark.parametrize("low_memory", [False, True])
def test_resuming_at_any_step_gives_the_counts_of_one_run(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, low_memory: bool
) -> None:
    """Prevents a window counted twice or not at all, halves mixed up, and a position beside the counts it belongs to."""
    how = ["--low-memory"] if low_memory else ["--batch-size", "3"]
    if low_memory:
        monkeypatch.setattr("pi_toolkit.profiler.layer_by_layer.HIDDEN_STATE_BYTES", 20 * 16 * 32 * 4)
    for saves in (1, 2, 11, 5):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            stop_after(patch, saves)
            CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "pi"), *how, "--resume"])
        assert set(contents(tmp_path / "pi")) == {"activation.progress"}
    result = CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "pi"), *how, "--resume", "--json"])
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "pi") == contents(uninterrupted)


@pytest.mark.parametrize("low_memory", [False, True])
def test_kills_at_random_moments_cost_little_and_leave_nothing(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, low_memory: bool
) -> None:
    """Prevents what only real kills show: half a file under its name, temporary files, a lock that stays, a moment at which
    counts and position do not belong together."""
    given = [*arguments(model, corpus, Path(WORKSPACE)), *(["--low-memory"] if low_memory else ["--batch-size", "1"])]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    moments = kill_at_random("pi_toolkit.profiler.cli", given, whole, killed, kills=5, seed=int(low_memory))
    assert contents(killed) == contents(whole) == contents(uninterrupted), moments


def test_low_memory_progress_serves_an_ordinary_run(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents the counts of half a round from being taken for those of a whole one."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 9)
        CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "pi"), "--low-memory"])
    assert CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "pi"), "--resume"]).exit_code == 0
    assert contents(tmp_path / "pi") == contents(uninterrupted)


def test_without_resume_old_progress_is_no_part_of_the_counts(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a plain run from continuing what an earlier one left, and from leaving it there."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        CliRunner().invoke(main, arguments(model, corpus, tmp_path / "pi"))
    assert CliRunner().invoke(main, arguments(model, corpus, tmp_path / "pi")).exit_code == 0
    assert contents(tmp_path / "pi") == contents(uninterrupted)


def test_nothing_to_resume_is_said(
    tmp_path: Path, model: Path, corpus: Path, run: Callable[..., Any], uninterrupted: Path
) -> None:
    """Prevents --resume from being an error in a script that always gives it."""
    result = run(main, *arguments(model, corpus, tmp_path / "pi"), "--resume")
    assert result.exit_code == 0
    assert "resuming at the beginning, because no progress was saved" in result.stderr
    assert contents(tmp_path / "pi") == contents(uninterrupted)


def test_progress_of_other_options_model_or_text_is_refused(
    tmp_path: Path, model: Path, corpus: Path, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents counts over two kinds of windows, two models, or a corpus that was changed in between."""
    text = tmp_path / corpus.name
    text.write_text(corpus.read_text())
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        CliRunner().invoke(main, arguments(model, text, tmp_path / "pi"))
    saved = contents(tmp_path / "pi")
    given = [*arguments(model, text, tmp_path / "pi"), "--resume"]
    other = save_family(tmp_path / "tiny_llama", "llama", seed=1)
    for changed, sentence in (
        ([*given, "--window", "17"], "was saved with window 16 where this command has 17: give the same options"),
        ([*given, "--tokens", "5k"], "was saved with tokens 1200 where this command has 5000: give the same options"),
        ([*given, "--dtype", "bfloat16"], "was saved with dtype 'float32'"),
        ([str(other), *given[1:]], "was saved with fingerprint"),
    ):
        message = refuses(main, *changed)
        assert sentence in message and message.endswith("or run the command again without --resume")
    text.write_text("Another beginning.\n\n" * 3 + corpus.read_text())
    message = refuses(main, *given)
    assert "the corpus does not begin with the text that the saved progress was made on" in message
    text.write_text("The only document is held out.\n\nOne more.")
    assert "the corpus does not begin with the text" in refuses(main, *given)
    assert contents(tmp_path / "pi") == saved


def test_a_resumed_run_keeps_its_dtype(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a refusal, "was saved with dtype float32", because less memory is free than when the run began."""
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        CliRunner().invoke(main, arguments(model, corpus, tmp_path / "pi"))
    weights = 4 * Checkpoint(model).shape.num_parameters()
    monkeypatch.setattr("pi_toolkit.profiler.device._free_bytes", lambda: weights + 1)
    result = CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "pi"), "--resume"])
    assert result.exit_code == 0 and "in float32" in result.stderr
    assert contents(tmp_path / "pi") == contents(uninterrupted)
    result = CliRunner().invoke(main, [*arguments(model, corpus, tmp_path / "other"), "--resume"])
    assert result.exit_code == 0 and "in bfloat16" in result.stderr, "nothing was resumed"


def test_interrupted_run_says_how_to_go_on(
    tmp_path: Path, model: Path, corpus: Path, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a user from starting hours of work again because nothing said that they need not."""
    from pi_toolkit.profiler.progress_file import ProgressFile

    save = ProgressFile.save

    def interrupted(self: ProgressFile, *given: Any) -> None:
        save(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressFile, "save", interrupted)
    message = refuses(main, *arguments(model, corpus, tmp_path / "pi"))
    assert "the work done so far is in" in message and message.endswith("run the command again with --resume")


def test_a_long_run_saves_within_a_minute(
    model: Path, corpus: Path, refuses: Callable[..., str], tmp_path: Path
) -> None:
    """Prevents an option that makes a kill cost an hour."""
    given = arguments(model, corpus, tmp_path / "pi")
    assert "--save-every" in refuses(main, *given, "--save-every", "61", exit_code=2)


def test_two_profiles_in_one_workspace_are_refused(
    tmp_path: Path, model: Path, corpus: Path, refuses: Callable[..., str]
) -> None:
    """Prevents two runs from saving their progress over each other's, and counts of one beside the report of the other."""
    given = arguments(model, corpus, tmp_path / "new" / "pi")
    with locked(tmp_path / "new" / "pi"):
        assert "another pi-profile or pi-train-predictor is at work in" in refuses(main, *given)
    assert CliRunner().invoke(main, given).exit_code == 0


def test_a_file_system_without_locks_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a workspace on NFS, which refuses a lock of what is open for reading alone, from being no workspace."""
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EBADF, "Bad file descriptor")))
    with locked(tmp_path):
        pass


def test_a_folder_that_an_error_leaves_empty_goes_away(tmp_path: Path) -> None:
    """Prevents an empty workspace from a command that failed."""
    with pytest.raises(KeyError), locked(tmp_path / "new" / "pi"):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_the_profile_of_another_model_is_refused(
    tmp_path: Path, model: Path, corpus: Path, uninterrupted: Path, refuses: Callable[..., str]
) -> None:
    """Prevents counts of a model of the same shape with other weights from being placed, compared or replaced."""
    from pi_toolkit.profiler import activation_stats
    from pi_toolkit.profiler.errors import FingerprintMismatchError

    other = save_family(tmp_path / "other", "llama", seed=1)
    checkpoint = Checkpoint(other)
    assert checkpoint.shape == Checkpoint(model).shape
    with pytest.raises(FingerprintMismatchError, match="belongs to another model than this workspace"):
        activation_stats.read(Workspace(uninterrupted).activation, checkpoint.shape.ffn_sizes, checkpoint.fingerprint())
    given = arguments(other, corpus, tmp_path / "pi")
    assert "belongs to another model" in refuses(main, *given, "--compare", uninterrupted)
    assert "already belongs to another model" in refuses(main, *arguments(other, corpus, uninterrupted))
    about = json.loads((uninterrupted / "activation" / "profile.json").read_text())
    assert about["tokens"] == 1200 and torch.load(uninterrupted / "activation" / "activation_0.pt").sum() > 0
