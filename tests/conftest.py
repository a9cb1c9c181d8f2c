"""Fixtures shared by all tests: no network, few threads, and one way to call a command."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tiny_corpus import save_corpus

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell that starts the tests in the background has SIGINT ignored, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_measured_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured on this machine, or its GPU, decides no test."""
    monkeypatch.setattr("click.get_app_dir", lambda name: str(tmp_path / "configuration" / name))
    monkeypatch.setattr("pi_toolkit.solver.machine_choice.has_gpu", lambda: False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny ReGLU LLaMA, to be copied before it is changed."""
    from tiny_models import save_family

    return save_family(tmp_path_factory.mktemp("models") / "tiny_llama", "llama")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory, model: Path, corpus: Path) -> Path:
    """A workspace after pi-profile, to be copied before use."""
    from pi_toolkit.profiler.cli import main

    out = tmp_path_factory.mktemp("workspace") / "pi"
    result = CliRunner().invoke(main, [str(model), "--corpus", str(corpus), "--tokens", "100", "-o", str(out)])
    assert result.exit_code == 0, result.stderr
    return out


@pytest.fixture
def workspace(tmp_path: Path, profiled: Path) -> Any:
    """A copy of :func:`profiled`; test files of later stages have workspaces of their own."""
    return shutil.copytree(profiled, tmp_path / "pi")


@pytest.fixture
def run() -> Callable[..., Result]:
    """``run(main, *arguments)`` calls a command in this process."""

    def call(main: Any, *arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Like ``run`` with ``--json``; the object on the last line of stdout. Fails with the command's own words."""

    def call(main: Any, *arguments: object) -> dict[str, Any]:
        result = run(main, *arguments, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return call


@pytest.fixture
def refuses(run: Callable[..., Result]) -> Callable[..., str]:
    """``refuses(main, *arguments, exit_code=1)``: the one-sentence error a command ends with; no traceback."""

    def call(main: Any, *arguments: object, exit_code: int = 1) -> str:
        result = run(main, *arguments)
        assert result.exit_code == exit_code, (result.exit_code, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        message = result.stderr.strip().splitlines()[-1]
        assert message.startswith("Error: ") and ": " in message.removeprefix("Error: "), message
        return message

    return call
