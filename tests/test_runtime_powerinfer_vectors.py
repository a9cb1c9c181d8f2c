"""Files that PowerInfer's own programs wrote, and what its engine computes from them.

The figures are in ``golden/powerinfer``: every key and tensor of its F16 and Q4_0 file by checksum, its perplexities, and
the placement its solver wrote. The files themselves, with the model they were made from, are where the environment
variable PI_VECTORS says; without it the comparisons that need them are skipped.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.gguf_container import BLOCKS, GgufFile, KeyValue, ValueType
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.workspace import Workspace
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.engine import Engine, EngineOptions, open_engine
from pi_toolkit.runtime.eval_cli import main as pi_eval
from pi_toolkit.runtime.placed_predictor import MlpPredictor
from pi_toolkit.solver import gpuidx

GOLDEN = Path(__file__).parent / "golden" / "powerinfer"
FIGURES = json.loads((GOLDEN / "files.json").read_text("utf-8"))
F16_FILE, Q4_0_FILE = "tiny.powerinfer.gguf", "tiny.q4_0.powerinfer.gguf"
VECTORS = Path(os.environ.get("PI_VECTORS", ""))
needs_vectors = pytest.mark.skipif(
    not (VECTORS / F16_FILE).is_file(),
    reason="set PI_VECTORS to the folder with PowerInfer's files to compare with them",
)
WINDOW, FIRST_SCORED = 128, 64


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A folder with our F16 and Q4_0 file of the vectors' model."""
    folder = tmp_path_factory.mktemp("converted")
    for name, kind in ((F16_FILE, "f16"), (Q4_0_FILE, "q4_0")):
        arguments = [VECTORS / "hf", "--predictor", VECTORS / "predictor", "-o", folder / name, "--quantize", kind]
        pi_convert.main([str(argument) for argument in arguments], standalone_mode=False)
    return folder


def digest(item: KeyValue) -> list[object]:
    """A key's type and value, arrays by checksum."""
    if item.item_type is None:
        return [item.type.name, None, item.value]
    content = "\0".join(item.value).encode() if item.item_type == ValueType.STRING else np.asarray(item.value).tobytes()
    return [item.type.name, item.item_type.name, hashlib.sha256(content).hexdigest()]


def tensor_digests(file: GgufFile) -> dict[str, list[object]]:
    return {
        info.name: [info.type.name, list(info.shape), hashlib.sha256(file.data(info.name).tobytes()).hexdigest()]
        for info in file.tensors.values()
    }


def test_a_placement_that_powerinfer_wrote():
    """1536 of the 3840 neurons on the GPU, in blocks of 256."""
    path = GOLDEN / "tiny.powerinfer.gguf.generated.gpuidx"
    index = gpuidx.read(path, (1280, 1280, 1280), "0" * 64)
    assert sum(len(ids) for ids in index.gpu_neurons) == 1536
    assert index.vram_capacity_bytes == 2_000_000
    assert index.fingerprint is None


@needs_vectors
@pytest.mark.parametrize("name", [F16_FILE, Q4_0_FILE])
def test_the_figures_are_those_of_the_files(name):
    """Checksums of other files than the ones compared with below."""
    file = gguf_container.read(VECTORS / name, "PWRI")
    assert tensor_digests(file) == FIGURES[name]["tensors"]


@needs_vectors
@pytest.mark.parametrize("name", [F16_FILE, Q4_0_FILE])
def test_our_file_has_the_same_keys(name, converted):
    """A key that PowerInfer's engine asks for under another name, type or value."""
    file = gguf_container.read(converted / name, "PWRI")
    found = {key: digest(item) for key, item in file.key_values.items()}
    assert {key: found.get(key) for key in FIGURES[name]["keys"]} == FIGURES[name]["keys"]
    ours = set(found) - set(FIGURES[name]["keys"])
    assert all(key.startswith("powerinfer_toolkit.") or key == "tokenizer.huggingface.json" for key in ours), ours


@needs_vectors
def test_our_f16_file_has_the_same_tensors(converted):
    """Any difference in a name, type, shape or byte."""
    assert tensor_digests(gguf_container.read(converted / F16_FILE, "PWRI")) == FIGURES[F16_FILE]["tensors"]


@needs_vectors
def test_our_q4_0_file_has_the_same_blocks_but_for_roundings(converted):
    """At most one block in a thousand, each by one step: PowerInfer's compiler fuses a product with a sum."""
    ours = gguf_container.read(converted / Q4_0_FILE, "PWRI")
    theirs = gguf_container.read(VECTORS / Q4_0_FILE, "PWRI")
    assert ours.tensors == theirs.tensors
    blocks = different = 0
    for info in theirs.tensors.values():
        size = BLOCKS[info.type][1]
        mine, wanted = (file.data(info.name).reshape(-1).view(np.uint8).reshape(-1, size) for file in (ours, theirs))
        rows = np.flatnonzero((mine != wanted).any(axis=1))
        if size == 4:
            assert not len(rows), info.name
            continue
        blocks += len(mine)
        different += len(rows)
        for row in rows:
            nothing = set(mine[row, :2].view("<f2")) <= {0.0} and not (wanted[row, :2].view("<f2")).any()
            steps = [
                abs((mine[row, 2:] >> shift & 15).astype(int) - (wanted[row, 2:] >> shift & 15)) for shift in (0, 4)
            ]
            assert nothing or (np.array_equal(mine[row, :2], wanted[row, :2]) and np.sum(steps) == 1), info.name
    assert different <= blocks / 1000


@needs_vectors
@pytest.mark.parametrize("origin", ["theirs", "ours"])
def test_predicted_logits_and_candidates(origin, converted, monkeypatch):
    """The wrong predictor input (0.043 away) or a threshold that is not applied (0.029)."""
    reference = load_file(VECTORS / "reference.safetensors")
    scores: list[torch.Tensor] = []
    original = MlpPredictor.scores

    def recorded(self: MlpPredictor, normed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        scores.append(original(self, normed, residual))
        return scores[-1]

    monkeypatch.setattr(MlpPredictor, "scores", recorded)
    engine = open_f32(converted / F16_FILE)
    if origin == "theirs":
        engine = open_f32(VECTORS / F16_FILE)
    logits = window_logits(engine, reference["tokens"].long())
    wanted = reference["logits"].float()
    assert (logits - wanted).norm() / wanted.norm() <= 1e-3
    threshold = GgufModel(converted / F16_FILE).threshold
    if origin == "ours":  # without a placement, columns are in the order of the neurons
        for layer, layer_scores in enumerate(scores):
            disputed = (layer_scores >= threshold) != reference["candidates"][layer].bool()
            assert not (disputed & ((layer_scores - threshold).abs() > 1e-4)).any()


@needs_vectors
@pytest.mark.parametrize(("name", "bound"), [(F16_FILE, 0.001), (Q4_0_FILE, 0.005)])
def test_perplexities_of_powerinfers_engine(name, bound, run_json):
    """A model that is nearly right, or windows that are not those of its perplexity tool."""
    options = ["--corpus", VECTORS / "text.txt", "--window", WINDOW, "--score-from", FIRST_SCORED, "--prompts", 0]
    for windows, wanted in enumerate(FIGURES["perplexities"][name], start=1):
        result = run_json(pi_eval, VECTORS / name, *options, "--tokens", windows * WINDOW, "--device", "cpu")
        assert (result["windows"], result["tokens"]) == (windows, windows * (WINDOW - 1 - FIRST_SCORED))
        assert result["perplexity_predicted"] == pytest.approx(wanted, rel=bound)


def open_f32(path: Path) -> Engine:
    return open_engine(Workspace(path), EngineOptions(mode="predicted", device="cpu", dtype="float32", context=WINDOW))


def window_logits(engine: Engine, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, vocabulary]."""
    positions = torch.arange(len(tokens))[None]
    return engine.decoder.logits(engine.decoder.hidden_states(tokens[None], positions, torch.tensor([0])))[0]
