"""profiler ◀ predictor_training ◀ solver ◀ runtime: who may import whom, and what no module may import at its top."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("profiler", "predictor_training", "solver", "runtime")
MODULES = [path for stage in STAGES for path in sorted((ROOT / stage).rglob("*.py"))]
HEAVY = set(
    "torch transformers datasets matplotlib pandas safetensors tokenizers huggingface_hub gguf sentencepiece".split()
)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Absolute names imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def runtime_imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Names imported when the module is, which leaves out functions and TYPE_CHECKING blocks."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_the_modules_are_found() -> None:
    """A moved folder that turns the checks below into nothing."""
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(STAGES)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_stages_import_only_earlier_ones(path: Path) -> None:
    """A profiler that needs the runtime, so that no stage can be understood alone."""
    stage = path.relative_to(ROOT).parts[0]
    allowed = STAGES[: STAGES.index(stage) + 1]
    for name in imports_of(ast.parse(path.read_text("utf-8"))):
        if name.startswith("pi_toolkit."):
            assert name.split(".")[1] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_late(path: Path) -> None:
    """Two seconds of importing torch before ``--help``, or a placement that needs torch."""
    top = {name.split(".")[0] for name in runtime_imports_at_top(ast.parse(path.read_text("utf-8")))}
    assert not top & HEAVY


@pytest.mark.parametrize("stage", STAGES)
def test_help_leaves_torch_alone(stage: str) -> None:
    """A slow ``--help``."""
    code = (
        f"import sys; from pi_toolkit.{stage}.cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'transformers', 'pulp', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Example:" in result.stdout
