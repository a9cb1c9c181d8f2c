"""Every notebook runs from top to bottom on a small workspace."""

from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient

from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.runtime import bench_setup
from pi_toolkit.runtime.bench_cli import main as pi_bench
from test_runtime_cli import make_workspace, write_predictors
from tiny_models import save_family

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "text.txt").write_text("\n\n".join(f"Document {i} says a few words about number {i}." for i in range(80)))
    model = save_family(folder / "tiny", "llama")
    arguments = [str(model), "--corpus", str(folder / "text.txt"), "--tokens", "500", "-o", str(folder / "tiny-pi")]
    result = CliRunner().invoke(pi_profile, arguments)
    assert result.exit_code == 0, result.stderr
    return folder / "tiny-pi"


@pytest.fixture(scope="module")
def bench_reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pi-bench --json says about a tiny model at two densities."""
    folder = tmp_path_factory.mktemp("bench")
    workspace = make_workspace(folder, "llama", "tiny")
    write_predictors(workspace)
    quick = ["-p", "4", "-n", "3", "--runs", "2", "--threads", "1", "--density", "0.05,0.4", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_setup, "READ_BYTES", 2**22)
        result = CliRunner().invoke(pi_bench, [str(workspace.path), *quick])
    assert result.exit_code == 0, result.stderr
    (folder / "reports").mkdir()
    (folder / "reports" / "tiny.json").write_text(result.stdout.splitlines()[-1])
    return folder / "reports"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, workspace: Path, bench_reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that the code has moved away from."""
    monkeypatch.setenv("PI_WORKSPACE", str(workspace))
    monkeypatch.setenv("PI_BENCH", str(bench_reports))
    monkeypatch.setenv("PI_TOKENS", "3000")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, startup_timeout=300, resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_output(path: Path) -> None:
    """Text of Wikipedia, paths of somebody's machine or megabytes of figures in the repository."""
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
