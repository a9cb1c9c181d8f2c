"""Perplexity with the predictors' masks: two implementations, the hooked twin and the runtime, say the same."""

from pathlib import Path

import pytest
import torch

from pi_toolkit.predictor_training.masked_perplexity import masked_perplexity
from pi_toolkit.predictor_training.masks import MlpMask
from pi_toolkit.predictor_training.predictor_file import MlpWeights, read
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import CorpusError
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.processes import Processes
from pi_toolkit.profiler.workspace import read_model
from pi_toolkit.runtime.engine import EngineOptions, open_engine
from pi_toolkit.runtime.eval_windows import ScoredWindow
from pi_toolkit.runtime.perplexity import compare, of_decoder
from test_runtime_cli import make_workspace, write_predictors
from tiny_models import CONFIGS

CPU = torch.device("cpu")


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 4096, (rows, 24), generator=generator) for rows in (4, 4, 1)]


@pytest.mark.parametrize("family", CONFIGS)
def test_runtime_computes_the_same(tmp_path: Path, family: str) -> None:
    """Sizing by a perplexity that the runtime then does not have."""
    workspace = make_workspace(tmp_path, family, "tiny")
    write_predictors(workspace)
    record = read_model(workspace)
    model = load_hf_model(Checkpoint(Path(record.model)), CPU, torch.float32)
    found = read(workspace.predictor, 32, record.shape.ffn_sizes, record.fingerprint)
    predictors = [
        MlpMask(layer.fc1.float(), layer.fc2.float()) for layer in found.layers if isinstance(layer, MlpWeights)
    ]
    expected = {}
    for mode in ("dense", "predicted"):
        options = EngineOptions(mode=mode, device="cpu", dtype="float32", context=32, slots=4)  # type: ignore[arg-type]
        decoder = open_engine(workspace, options).decoder
        windows = [ScoredWindow(tuple(row.tolist()), 0) for batch in batches() for row in batch]
        expected[mode] = compare({mode: of_decoder(decoder)}, windows, 4, 4096)[mode].perplexity
    dense = masked_perplexity(model, record.shape, None, batches())
    masked = masked_perplexity(model, record.shape, predictors, batches())
    assert dense == pytest.approx(expected["dense"], rel=1e-4)
    assert masked == pytest.approx(expected["predicted"], rel=1e-4)
    assert masked != pytest.approx(dense, rel=1e-4), "nothing was masked"
    assert masked_perplexity(model, record.shape, None, batches()) == dense, "hooks stay behind"


def test_processes_share_the_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that two processes both count, or neither."""
    workspace = make_workspace(tmp_path, "llama", "tiny")
    record = read_model(workspace)
    model = load_hf_model(Checkpoint(Path(record.model)), CPU, torch.float32)
    parts: list[torch.Tensor] = []
    monkeypatch.setattr(Processes, "sum", lambda _self, tensor: parts.append(tensor) or tensor)
    whole = masked_perplexity(model, record.shape, None, batches())
    for rank in range(2):
        masked_perplexity(model, record.shape, None, batches(), Processes(rank, 2, rank))
    torch.testing.assert_close(parts[1] + parts[2], parts[0])
    loss, predictions = parts[0].tolist()
    assert predictions == 9 * 23
    assert whole == pytest.approx(2.718281828459045 ** (loss / predictions))


def test_windows_of_one_token_are_refused(tmp_path: Path) -> None:
    """A division by no prediction."""
    workspace = make_workspace(tmp_path, "llama", "tiny")
    record = read_model(workspace)
    model = load_hf_model(Checkpoint(Path(record.model)), CPU, torch.float32)
    with pytest.raises(CorpusError, match="no window of at least two tokens"):
        masked_perplexity(model, record.shape, None, [torch.tensor([[5]])])
