"""pi-train-predictor --kind copy and auto: what is chosen, what is written, and that later commands take it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.cli import main
from pi_toolkit.predictor_training.firing_copy import CopiedLayer, firing_copy
from pi_toolkit.predictor_training.firing_map import ffn_input
from pi_toolkit.predictor_training.kind_choice import better_as_copies, copy_share, layers_to_copy
from pi_toolkit.predictor_training.masked_perplexity import masked_perplexity
from pi_toolkit.predictor_training.masks import CopyMask
from pi_toolkit.predictor_training.predictor import Quality
from pi_toolkit.predictor_training.predictor_file import RowsCopy
from pi_toolkit.predictor_training.predictor_size import copy_bytes
from pi_toolkit.predictor_training.sizing import LayerNeed
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.profiler.hf_model import load_hf_model, observe_ffn
from pi_toolkit.profiler.workspace import Workspace, read_model
from pi_toolkit.runtime.bench_cli import main as pi_bench
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.engine import EngineOptions, open_engine
from pi_toolkit.runtime.eval_cli import main as pi_eval
from pi_toolkit.runtime.eval_windows import ScoredWindow
from pi_toolkit.runtime.perplexity import compare, of_decoder
from pi_toolkit.solver.cli import main as pi_place
from pi_toolkit.solver.memory import unit_bytes
from pi_toolkit.solver.simulate_cli import main as pi_simulate
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, VOCABULARY, save_family

RunJson = Callable[..., dict[str, Any]]
CPU = torch.device("cpu")
WORDS = "the cat sat on a mat with dogs and birds near rivers while rain fell over old towns".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(" ".join(WORDS[n % 7 :] + WORDS[: n % 11]) for n in range(120)))
    return path


def profiled(folder: Path, family: str, corpus: Path) -> Path:
    model = save_family(folder / "model", family)
    arguments = [str(model), "--corpus", str(corpus), "--tokens", "100", "-o", str(folder / "pi")]
    result = CliRunner().invoke(pi_profile, arguments)
    assert result.exit_code == 0, result.output
    return folder / "pi"


@pytest.mark.parametrize("family", [*CONFIGS, BAMBOO, PROSPARSE])
def test_scores_are_what_decides_on_firing(tmp_path: Path, family: str) -> None:
    """A copy of the wrong matrix, a bias that is forgotten, or an input that is normed otherwise than the model's."""
    checkpoint = Checkpoint(save_family(tmp_path, family))
    shape, model = checkpoint.shape, load_hf_model(checkpoint, CPU, torch.float32)
    seen: dict[str, dict[int, torch.Tensor]] = {"residual": {}, "normed": {}}
    gates: dict[int, torch.Tensor] = {}
    first = model.get_submodule  # of dReLU neurons what is observed is the smaller of two products
    if family == BAMBOO:
        for layer in range(3):
            first(f"model.layers.{layer}.mlp.gate_proj").register_forward_hook(
                lambda _m, _i, z, layer=layer: gates.__setitem__(layer, z.flatten(0, 1))
            )
    with (
        torch.inference_mode(),
        observe_ffn(
            model,
            shape,
            predictor_input=seen["residual"].__setitem__,
            ffn_input=seen["normed"].__setitem__,
            pre_activation=None if family == BAMBOO else gates.__setitem__,
        ),
    ):
        model(torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1)))
    for layer in range(3):
        normed = ffn_input(checkpoint, layer, seen["residual"][layer])
        torch.testing.assert_close(normed, seen["normed"][layer], atol=1e-4, rtol=1e-4)
        scores, exact = firing_copy(checkpoint, layer, CPU).scores(normed), gates[layer]
        assert float((scores - exact).norm() / exact.norm()) < 0.12, "four bits"
        assert float(((scores > 0) == (exact > 0)).float().mean()) > 0.9


@pytest.mark.parametrize("family", ["llama", "opt", "falcon-7b", BAMBOO, PROSPARSE])
def test_calibrated_copies(tmp_path: Path, corpus: Path, run_json: RunJson, family: str) -> None:
    """A recall that is not reached, files that nobody needs, or perplexities of other masks than the runtime's."""
    workspace = Workspace(profiled(tmp_path, family, corpus))
    options = ("--corpus", corpus, "--tokens", 3000, "--window", 32, "--kind", "copy")
    result = run_json(main, workspace.path, *options, "--recall", 0.9, "--rounds", 1)
    record = read_model(workspace)
    shape = record.shape
    assert {path.name for path in workspace.predictor.iterdir()} == {"config.json", "report.html"}
    assert result["predictor_parameters"] == 0
    assert result["predictor_bytes"] == sum(copy_bytes(32, n) for n in shape.ffn_sizes)
    for layer in result["layers"]:
        assert layer["kind"] == "copy" and "hidden" not in layer
        assert layer["recall"] > 0.85 and layer["density"] < 1.3 * layer["firing_share"] / (
            0.5 if family == BAMBOO else 1
        )
    found = predictor_file.read(workspace.predictor, 32, shape.ffn_sizes, record.fingerprint)
    assert [layer.threshold for layer in found.layers if isinstance(layer, RowsCopy)] == [
        layer["threshold"] for layer in result["layers"]
    ]
    checkpoint = Checkpoint(Path(record.model))
    masks = [
        CopyMask(firing_copy(checkpoint, number, CPU), layer.threshold)
        for number, layer in enumerate(found.layers)
        if isinstance(layer, RowsCopy)
    ]
    windows = torch.randint(3, 4096, (4, 24), generator=torch.Generator().manual_seed(3))
    twin = masked_perplexity(load_hf_model(checkpoint, CPU, torch.float32), shape, masks, [windows])
    engine = open_engine(workspace, EngineOptions(mode="predicted", device="cpu", dtype="float32", context=32, slots=4))
    scored = [ScoredWindow(tuple(row.tolist()), 0) for row in windows]
    ours = compare({"predicted": of_decoder(engine.decoder)}, scored, 4, 4096)["predicted"].perplexity
    assert ours == pytest.approx(twin, rel=1e-4)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A workspace whose predictors are copies."""
    path = profiled(tmp_path_factory.mktemp("copied"), "llama", corpus)
    arguments = [str(path), "--corpus", str(corpus), *"--tokens 1500 --window 32 --kind copy --rounds 1".split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "copy" in result.stdout and "of the model's bytes in F16" in result.stdout
    return path


def test_every_later_command(tmp_path: Path, corpus: Path, copied: Path, run_json: RunJson) -> None:
    """A command that looks for matrices that a copy does not have."""
    path = shutil.copytree(copied, tmp_path / "pi")
    placed = run_json(pi_place, path, "--vram", 0.0004, "--reserve", 0, "--sync-seconds", 0, "--dtype", "float32")
    assert Path(placed["gpuidx"]).exists()
    assert run_json(pi_simulate, "--shape", path, "--hardware", "rtx4090-i9-13900k")["systems"]
    texts = {mode: run_json(pi_run, path, "-p", "the cat", "-n", 6, "--mode", mode) for mode in ("exact", "predicted")}
    assert all(len(text["token_ids"]) == 6 for text in texts.values())
    bench = run_json(pi_bench, path, "-n", 4, "--runs", 1, "--prompt-tokens", 4, "--dtype", "float32")
    assert bench
    quality = run_json(pi_eval, path, "--corpus", corpus, "--window", 32, "--tokens", 200)
    assert quality["perplexity_predicted"] == pytest.approx(quality["perplexity_dense"], rel=0.05)


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_copies_in_a_model_file(tmp_path: Path, copied: Path, run_json: RunJson, run: Any, kind: str) -> None:
    """A model file that forgets its copies, or PowerInfer's engine recommended for it."""
    path = shutil.copytree(copied, tmp_path / "pi")
    file = tmp_path / "copies.powerinfer.gguf"
    result = run(pi_convert, path, "-o", file, "--quantize", kind)
    assert result.exit_code == 0, result.output
    assert "PowerInfer's engine has no copies" in result.stderr
    engine = open_engine(Workspace(file), EngineOptions(device="cpu", context=32))
    thresholds = [layer["threshold"] for layer in json.loads((path / "predictor/config.json").read_text())["layers"]]
    for layer, threshold in zip(engine.decoder.weights.layers, thresholds, strict=True):
        assert layer.ffn.predictor is not None and layer.ffn.predictor.threshold == threshold
    assert engine.decoder.mode == "predicted"
    run_json(pi_place, file, "--vram", 0.0004, "--reserve", 0, "--sync-seconds", 0)
    mine = [run_json(pi_run, source, "-p", "the cat", "-n", 6)["token_ids"] for source in (path, file)]
    assert kind != "f32" or mine[0] == mine[1]
    again = tmp_path / "again.powerinfer.gguf"
    assert run(pi_convert, file, "-o", again).exit_code == 0
    assert again.read_bytes() == file.read_bytes()


REFUSALS = {
    "--kind copy --hidden 32": "--hidden is the width of MLPs: drop it, or use --kind mlp",
    "--kind auto --hidden 32": "--hidden is the width of MLPs",
    "--kind copy --weights q4_0": "--weights is what --kind auto compares by",
    "--weights q4_0": "--weights is what --kind auto compares by",
}


@pytest.mark.parametrize("options", REFUSALS)
def test_options_that_would_be_ignored(copied: Path, run: Any, options: str) -> None:
    """A width that somebody asked for and nobody trained."""
    result = run(main, copied, *options.split())
    assert result.exit_code == 2 and REFUSALS[options] in result.stderr


def test_rows_that_are_no_whole_blocks(tmp_path: Path, corpus: Path, refuses: Callable[..., str]) -> None:
    """A traceback from the quantiser after all samples were taken."""
    model = save_family(tmp_path / "model", "opt", hidden_size=48, word_embed_proj_dim=48)
    workspace = tmp_path / "pi"
    CliRunner().invoke(pi_profile, [str(model), "--corpus", str(corpus), "--tokens", "100", "-o", str(workspace)])
    assert "use --kind mlp" in refuses(main, workspace, "--corpus", corpus, "--kind", "copy")


def test_auto_reads_the_least(tmp_path: Path, corpus: Path, run_json: RunJson) -> None:
    """Layers of the kind that reads more, by the figures that are reported."""
    path = profiled(tmp_path, "llama", corpus)
    options = ("--corpus", corpus, "--tokens", 1500, "--window", 32, "--epochs", 1, "--share", 0.2)
    result = run_json(main, path, *options, "--kind", "auto")
    # an MLP of 32 units reads 2 · 32 · (32 + 96) bytes, a copy 96 · (18 + 4), and random models need hundreds of units
    assert [layer["kind"] for layer in result["layers"]] == ["copy"] * 3
    assert run_json(pi_run, path, "-p", "the cat", "-n", 4, "--mode", "predicted")["token_ids"]


def test_both_kinds_in_one_model(tmp_path: Path, corpus: Path, run_json: RunJson) -> None:
    """Copies beyond --share, or a model whose layers are of two kinds that a later command cannot read."""
    path = profiled(tmp_path, "opt", corpus)
    record = read_model(Workspace(path))
    share = 1.5 * copy_share(record.shape, [0])
    options = ("--corpus", corpus, "--tokens", 1500, "--window", 32, "--epochs", 1, "--share", share, "--rounds", 2)
    layers = run_json(main, path, *options, "--kind", "auto")["layers"]
    assert sorted(layer.get("kind", "mlp") for layer in layers) == ["copy", "mlp", "mlp"]
    sizes = predictor_file.read_sizes(path / "predictor", 32, record.shape.ffn_sizes, record.fingerprint)
    assert sizes == ["copy" if "kind" in layer else layer["hidden"] for layer in layers]
    file = tmp_path / "both.powerinfer.gguf"
    run_json(pi_convert, path, "-o", file, "--quantize", "f32")
    texts = [run_json(pi_run, source, "-p", "the cat", "-n", 6)["token_ids"] for source in (path, file)]
    assert texts[0] == texts[1]
    placed = run_json(pi_place, file, "--vram", 0.0004, "--reserve", 0, "--sync-seconds", 0)
    assert Path(placed["gpuidx"]).exists()


def quality(density: float) -> Quality:
    return Quality(10_000, 900, int(10_000 * density), 890)


def test_choice_by_bytes() -> None:
    """A choice that forgets a part of what is read: by hand, 4096 × 11008 in F16."""
    from dataclasses import replace

    from test_solver_memory import LLAMA_7B as shape

    shape = replace(shape, ffn_sizes=(11008, 11008))
    copied = [CopiedLayer(quality(0.091), quality(0.091), 0.0)] * 2
    # copy: 11008 · (2304 + 4) = 25.4 MB and 0.091 · 11008 · 8192 = 8.2 MB of candidates' rows
    cheap = LayerNeed(11008, 0.09, (0.05, 0.0), 1.0)  # 32 units: 1.0 MB, and hardly a candidate too many
    dear = LayerNeed(11008, 0.09, tuple(0.99**b for b in range(1, 128)), 4.0)
    assert layers_to_copy(shape, [cheap, dear], copied, 0.98, "f16", 1.0) == {1}
    assert layers_to_copy(shape, [dear, dear], copied, 0.98, "f16", 1.5 * copy_share(shape, [0])) == {0}
    assert layers_to_copy(shape, [cheap, dear], copied, 0.98, "f16", 0.0) == frozenset()
    # 1024 units measured at density 0.126: 30.9 MB and 11.4 MB, against 33.6; 512 units: 15.5 and 11.4
    assert better_as_copies(shape, {0: (1024, 0.126), 1: (512, 0.126)}, copied, frozenset(), "f16", 1.0) == {0}


def test_sizes_in_the_budget(copied: Path) -> None:
    """A copy that a placement counts as nothing, or in another type than it is loaded in."""
    shape = read_model(Workspace(copied)).shape
    for dtype in ("float32", "bfloat16", "q4_0"):
        units = unit_bytes(shape, dtype, 16, 1, ["copy", 32, "copy"])
        assert units.predictor[0] == units.predictor[2] == 96 * (18 + 4)
        assert units.predictor[1] == unit_bytes(shape, dtype, 16, 1, [32] * 3).predictor[1]
