"""Which placement a run uses, and what it says when a GPU's memory ends."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.activation_stats import ActivationStats
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.profiler.hardware import GIB, Gpu, Hardware
from pi_toolkit.profiler.workspace import Workspace, describe, read_model, write_model
from pi_toolkit.runtime import gpu_memory, placement_choice
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.gpu_memory import PartDoesNotFit, allocating, loaded_or_freed, report_allocation, usable_bytes
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights
from pi_toolkit.solver import gpuidx
from tiny_models import save_family

CPU = torch.device("cpu")
PROMPT = ("-p", "Hello", "-n", 3, "--ctx", 32)
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def quick_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a few of a tiny model's neurons are worth a transfer."""
    gpu = Gpu("made", GIB, 1e12, 1e15, sync_seconds=0.0, context_bytes=0)
    machine = Hardware("made", "made", 8 * GIB, 1e9, (gpu,))
    monkeypatch.setattr(placement_choice, "resolve_hardware", lambda _name, _vram: machine)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A model and its firing counts; enough neurons for groups of them."""
    model = save_family(tmp_path / "m", "llama", hidden_size=64, intermediate_size=640, tie_word_embeddings=True)
    workspace = Workspace(tmp_path / "m-pi")
    record = describe(str(model), None, Checkpoint(model))
    write_model(workspace, record)
    counts = tuple(np.random.default_rng(0).integers(0, 1000, n) for n in record.shape.ffn_sizes)
    activation_stats.write(
        workspace.activation, ActivationStats(counts=counts, tokens=1000, corpus="made", fingerprint=record.fingerprint)
    )
    return workspace


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_budget_places_for_this_run(workspace: Workspace, run: Run) -> None:
    """A --vram-budget that does nothing without pi-place, or a file that appears without being asked for; other text."""
    nothing = answer(run(pi_run, workspace.path, *PROMPT, "--json"))
    some = run(pi_run, workspace.path, *PROMPT, "--vram-budget", 0.0015, "--json")
    everything = answer(run(pi_run, workspace.path, *PROMPT, "--vram-budget", 1, "--json"))
    assert nothing["gpu_neuron_share"] == 0.0
    assert 0.0 < answer(some)["gpu_neuron_share"] < 1.0 == everything["gpu_neuron_share"]
    assert nothing["token_ids"] == answer(some)["token_ids"] == everything["token_ids"]
    assert not workspace.gpuidx(read_model(workspace)).exists()


def test_a_file_that_fits_the_budget_is_used(workspace: Workspace, run: Run) -> None:
    """A placement solved for nothing, or one beyond the budget taken all the same."""
    path = workspace.gpuidx(read_model(workspace))
    assert (
        f"placement {path}" in run(pi_run, workspace.path, *PROMPT, "--vram-budget", 0.0015, "--reset-gpu-index").stderr
    )
    written, share = path.read_bytes(), None
    for budget in (None, 0.0016, 1):
        options = () if budget is None else ("--vram-budget", budget)
        result = run(pi_run, workspace.path, *PROMPT, *options, "--json")
        share = share or answer(result)["gpu_neuron_share"]
        assert answer(result)["gpu_neuron_share"] == share and "placed" not in result.stderr
    smaller = run(pi_run, workspace.path, *PROMPT, "--vram-budget", 0.001, "--json")
    assert (
        answer(smaller)["gpu_neuron_share"] != share and "neurons are placed anew, for this run only" in smaller.stderr
    )
    assert path.read_bytes() == written
    run(pi_run, workspace.path, *PROMPT, "--vram-budget", 0.001, "--reset-gpu-index")
    assert path.read_bytes() != written


def test_a_file_can_be_ignored(workspace: Workspace, run: Run) -> None:
    """A damaged or unwanted file that cannot be got around."""
    path = workspace.gpuidx(read_model(workspace))
    path.write_bytes(b"damaged")
    assert run(pi_run, workspace.path, *PROMPT).exit_code == 1
    for options in (["--disable-gpu-index"], ["--cpu-only"], ["--disable-gpu-index", "--vram-budget", 1]):
        assert answer(run(pi_run, workspace.path, *PROMPT, *options, "--json"))["gpu_neuron_share"] == 0.0
    assert path.read_bytes() == b"damaged"


def test_contradictions_are_refused(workspace: Workspace, refuses: Callable[..., str]) -> None:
    """Of two options that exclude each other, one heeded silently; a reset without memory to place on."""
    both = ("--cpu-only", "--reset-gpu-index")
    assert "exclude one another" in refuses(pi_run, workspace.path, *PROMPT, *both, exit_code=2)
    assert "no GPU whose memory" in refuses(pi_run, workspace.path, *PROMPT, "--reset-gpu-index")
    assert not list(workspace.path.glob("*.gpuidx"))


def test_a_budget_is_no_more_than_what_others_leave() -> None:
    """Memory that another process holds, planned a second time."""
    assert usable_bytes(4, 10 * GIB) == 4 * GIB
    assert usable_bytes(4, 3 * GIB) == usable_bytes(None, 3 * GIB) == usable_bytes(-1, 3 * GIB) == 3 * GIB - 2**28
    assert usable_bytes(4, 2**20) == 0
    assert usable_bytes(0.5, None) == GIB // 2


def test_the_part_that_does_not_fit_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator's traceback that leaves open what was too large, and memory that stays taken behind it."""
    import pi_toolkit.runtime.weights as weights_module

    checkpoint, calls = Checkpoint(workspace.path.parent / "m"), iter(range(1000))
    shape, really = checkpoint.shape, weights_module.pack
    plan = TierPlan(
        CPU, CPU, tuple(np.arange(n, dtype=np.int32) for n in shape.ffn_sizes), (True,) * 3, (True,) * 3, True
    )

    def full(*arguments: Any) -> Any:
        if next(calls) == 4:  # embedding; output and gate of two layers
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(*arguments)

    monkeypatch.setattr(weights_module, "pack", full)
    freed: list[int] = []
    monkeypatch.setattr(gpu_memory, "free_cached_memory", lambda: freed.append(1))
    with pytest.raises(HardwareError) as caught:
        loaded_or_freed(lambda: load_weights(checkpoint, plan, None, "float32"), "m-pi", 2 * GIB)
    assert caught.value.message == (
        "640 neurons of layer 1 did not fit in the GPU's memory, of which 2.00 GiB were free: run pi-place m-pi --vram 1.9, "
        "or lower --ctx"
    )
    assert freed == [1] and caught.value.__context__ is None, "the frames that hold the tensors are gone"


def test_the_innermost_part_is_named() -> None:
    """A layer blamed for its neurons."""

    def inside() -> Iterator[None]:
        with allocating("the attention of layer 2"), allocating("12 neurons of layer 2"):
            yield
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(PartDoesNotFit, match="12 neurons of layer 2"):
        list(inside())


def test_the_measured_allocation_stands_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that is wrong by a tenth, and nobody told."""
    report_allocation([(torch.device("cuda:0"), 10 * GIB)], lambda _device: 11 * GIB)
    assert "cuda:0: 10.00 GiB planned, 11.00 GiB allocated (+10.0%)" in capsys.readouterr().err


def test_a_reset_file_is_a_placement_for_this_model(workspace: Workspace, run: Run) -> None:
    """A file that the next command refuses."""
    run(pi_run, workspace.path, *PROMPT, "--vram-budget", 0.0015, "--reset-gpu-index")
    record = read_model(workspace)
    index = gpuidx.read(workspace.gpuidx(record), record.shape.ffn_sizes, record.fingerprint)
    assert index.gpu_budget_bytes == int(0.0015 * GIB) and index.dtype == "float32" and index.context == 32
