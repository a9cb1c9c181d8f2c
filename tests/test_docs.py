"""The README says what is there: its commands parse, its tree lists every module, nothing names this or that machine."""

import re
import shlex
from pathlib import Path

import click
import pytest

from pi_toolkit.predictor_training.cli import main as pi_train_predictor
from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.runtime.bench_cli import main as pi_bench
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.eval_cli import main as pi_eval
from pi_toolkit.solver.cli import main as pi_place
from pi_toolkit.solver.simulate_cli import main as pi_simulate

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS: dict[str, click.Command] = {
    "pi-profile": pi_profile,
    "pi-train-predictor": pi_train_predictor,
    "pi-place": pi_place,
    "pi-run": pi_run,
    "pi-convert": pi_convert,
    "pi-bench": pi_bench,
    "pi-eval": pi_eval,
    "pi-simulate": pi_simulate,
}
CALLS = re.findall(r"^ *(?:\$ )?(pi-[a-z-]+ .+?)(?:  +#.*)?$", README, flags=re.MULTILINE)
HELP_CALLS = [
    line.strip() for command in COMMANDS.values() for line in (command.help or "").splitlines() if "  pi-" in line
]


@pytest.mark.parametrize("call", [*CALLS, *HELP_CALLS])
def test_documented_calls_parse(call: str) -> None:
    """A documented option that has been renamed."""
    name, *arguments = shlex.split(call)
    COMMANDS[name].make_context(name, arguments)


def test_every_command_is_documented() -> None:
    """A command that nobody hears of, in the README or in its own help."""
    for calls in (CALLS, HELP_CALLS):
        assert {call.split()[0] for call in calls} == set(COMMANDS)


def test_the_tree_lists_every_module() -> None:
    """A tree that has gone stale."""
    tree = README.split("## Reading the code")[1]
    listed = set(re.findall(r"\b(\w+\.py)\b", tree))
    stages = ("profiler", "predictor_training", "solver", "runtime")
    present = {path.name for stage in stages for path in (ROOT / stage).rglob("*.py") if not path.name.startswith("__")}
    assert listed == present


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist(target: str) -> None:
    """A set-up command that the Makefile does not know."""
    assert f"make {target} " in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
