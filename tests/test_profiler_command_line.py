"""What the commands share: exact counts, finite numbers, and ``--help`` without the wait."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import pytest

from pi_toolkit.profiler import interruption
from pi_toolkit.profiler.atomic_write import atomic_file
from pi_toolkit.profiler.cli import main
from pi_toolkit.profiler.command_line import CountType, FiniteFloatType, ToolkitCommand, emit_json


@pytest.mark.parametrize("tokens", ["0", "-5", "abc", "", "1.5", "0.0001k", "nan", "1e6", "9" * 50, "9" * 500, "٣"])
def test_malformed_token_count_is_a_usage_error(refuses: Callable[..., str], tokens: str) -> None:
    """Prevents an endless or empty run, or a traceback, from a slip of the keyboard."""
    message = refuses(main, "model", f"--tokens={tokens}", exit_code=2)
    assert message.startswith("Error: Invalid value for '--tokens'")
    assert message.endswith(": write for example 200k or 1M")


@pytest.mark.parametrize(
    ("text", "count"), [("1.001k", 1001), ("4.35k", 4350), ("1.5M", 1_500_000), ("2g", 2 * 10**9), ("7", 7)]
)
def test_token_counts_are_exact(text: str, count: int) -> None:
    """Prevents binary rounding: 1.001 × 1000 is 1000.9999999999999 in floating point."""
    assert CountType().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "0", "1.01", "x", "", "٠.٥"])
def test_number_out_of_range_is_refused(text: str) -> None:
    """Prevents nan, which passes every comparison that click makes, from reaching a computation."""
    with pytest.raises(click.BadParameter):
        FiniteFloatType(exclusive=True, maximum=1.0).convert(text, None, None)


@pytest.mark.parametrize(("text", "number"), [("0", 0.0), ("1e-3", 0.001), ("7", 7.0)])
def test_number_in_range_is_taken(text: str, number: float) -> None:
    """Prevents the bound itself, or a number in another notation, from being refused."""
    assert FiniteFloatType().convert(text, None, None) == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_from_outside_is_one_sentence(refuses: Callable[..., str], tmp_path: Path, number: int) -> None:
    """Prevents ``kill`` and schedulers from leaving temporary files, and ``no output was changed`` after one was."""

    @click.command(cls=ToolkitCommand)
    @click.option("--write", is_flag=True)
    def command(write: bool) -> None:
        if write:
            with atomic_file(tmp_path / "output") as temporary:
                temporary.touch()
        with atomic_file(tmp_path / "unfinished") as temporary:
            temporary.touch()
            os.kill(os.getpid(), number)
            time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    assert refuses(command) == "Error: interrupted before the end: no output was changed, run the command again"
    assert not list(tmp_path.iterdir())
    message = refuses(command, "--write")
    assert message.endswith(f"{str(tmp_path / 'output')!r} was already written, run the command again")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
    assert signal.getsignal(signal.SIGTERM) == before


class Dropping:
    """Python drops what is raised while this is destroyed."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)


def drop() -> None:
    Dropping()


def swallow() -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)


def replace() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except BaseException:
        raise ImportError("a library that was interrupted at its import") from None


@pytest.mark.parametrize("loses", [drop, swallow, replace])
def test_an_interruption_that_a_library_loses_comes_again(
    refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch, loses: Callable[[], None]
) -> None:
    """Prevents Ctrl-C or ``kill`` from being ignored for ever, or from ending in a library's words, because of the moment
    they came at."""
    monkeypatch.setattr(interruption, "SECONDS_BEFORE_ANOTHER", 0.05)

    @click.command(cls=ToolkitCommand)
    def command() -> None:
        loses()
        time.sleep(60)

    assert refuses(command) == "Error: interrupted before the end: no output was changed, run the command again"


def test_cleaning_up_is_not_interrupted(
    tmp_path: Path, refuses: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents the second coming of an interruption from leaving half of what the first was removing."""
    monkeypatch.setattr(interruption, "SECONDS_BEFORE_ANOTHER", 0.01)

    @click.command(cls=ToolkitCommand)
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        finally:
            for _ in range(20):
                time.sleep(0.01)
            (tmp_path / "cleaned").touch()

    assert "interrupted before the end" in refuses(command)
    assert (tmp_path / "cleaned").exists()


def test_command_runs_outside_the_main_thread(run: Callable[..., object]) -> None:
    """Prevents programs that call a command in a thread, where signals cannot be handled, from failing."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(click.command(cls=ToolkitCommand)(lambda: None))))
    thread.start()
    thread.join()
    assert getattr(results[0], "exit_code", None) == 0, results


def test_json_line_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents NaN, which no other JSON reader takes, and names that are escaped beyond recognition."""
    emit_json({"workspace": "été"})
    assert capsys.readouterr().out == '{"workspace": "été"}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit_json({"share": float("nan")})


def test_help_is_quick() -> None:
    """Prevents two seconds of importing torch before ``--help`` answers."""
    code = (
        "import sys\nfrom pi_toolkit.profiler.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'pandas', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "pi-profile facebook/opt-6.7b --tokens 1M" in result.stdout
