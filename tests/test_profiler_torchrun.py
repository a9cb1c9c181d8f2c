"""Real jobs of two processes: their counts are those of one, one of them writes, and a lost one is one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from folder_contents import contents
from meeting import meeting_point
from pi_toolkit.profiler.cli import main
from tiny_corpus import save_corpus
from tiny_models import save_family

PLAIN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of pi-profile without the output."""
    folder = tmp_path_factory.mktemp("given")
    model = save_family(folder / "tiny_llama", "llama")
    corpus = folder / "corpus.txt"
    save_corpus(corpus, 200)
    return [str(model), "--corpus", str(corpus), "--tokens", "1.2k", "--window", "16", "--save-every", "0"]


def test_two_processes_give_the_files_of_one(tmp_path: Path, given: list[str], run_json: Callable[..., Any]) -> None:
    """Prevents windows that depend on the number of processes, shares that overlap, and two writers."""
    alone = run_json(main, *given, "--batch-size", "8", "-o", tmp_path / "one" / "pi")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    profiler = [sys.executable, "-m", "pi_toolkit.profiler", *given, "--batch-size", "4", "--device", "cpu"]
    result = subprocess.run(
        [*launcher, *profiler, "-o", str(tmp_path / "two" / "pi"), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=PLAIN | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "two" / "pi") == contents(tmp_path / "one" / "pi")
    objects = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(objects) == 1
    for changing in ("tokens_per_second", "workspace"):
        del objects[0][changing], alone[changing]
    assert objects[0] == alone
    assert result.stderr.count("profiling tiny_llama, shared by 2 processes, on cpu in float32") == 1


def test_saved_progress_does_not_depend_on_the_number_of_processes(tmp_path: Path, given: list[str]) -> None:
    """Prevents a job from being bound to the machines it was begun on; and one process that fails from being a traceback
    in the others, or from leaving them waiting."""
    fail = (
        "import os, sys\nfrom pi_toolkit.profiler import cli\nfrom pi_toolkit.profiler.whole_model import WholeModel\n"
        "steps, rounds = WholeModel.steps, []\n"
        "def failing(self, batches, counter):\n    rounds.append(1)\n"
        "    if len(rounds) == 5 and os.environ['RANK'] == '1': raise OSError(5, 'Input/output error')\n"
        "    yield from steps(self, batches, counter)\n"
        "WholeModel.steps = failing\ncli.main(sys.argv[1:])"
    )
    with meeting_point(2) as meeting:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", fail, *given, "--batch-size", "2", "-o", str(tmp_path / "two" / "pi")],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=PLAIN | meeting | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            )
            for rank in ("0", "1")
        ]
        messages = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], messages
    assert "Traceback" not in "".join(messages), messages
    assert "Error: Input/output error: check that the path is readable" in messages[1]
    assert "Error: another process of this job ended or cannot be reached" in messages[0]
    assert messages[0].rstrip().endswith("then run the same command again, with --resume if it has that option")
    assert set(contents(tmp_path / "two" / "pi")) == {"activation.progress"}
    for out, more in (("two", ["--resume"]), ("one", [])):
        result = CliRunner().invoke(main, [*given, "-o", str(tmp_path / out / "pi"), *more])
        assert result.exit_code == 0, result.output
    assert contents(tmp_path / "two" / "pi") == contents(tmp_path / "one" / "pi")
