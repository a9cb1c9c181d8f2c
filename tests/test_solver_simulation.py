"""Predicted speeds: parts that add up, systems that differ in what they say, and the paper's figures as they are claimed."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import GIB, Hardware, read_hardware
from pi_toolkit.solver.memory import unit_bytes
from pi_toolkit.solver.model_presets import REGLU
from pi_toolkit.solver.paper_figures import ComparedSpeed, compare, fit, median_error, wrong_orders
from pi_toolkit.solver.simulate_cli import LAWS, SYSTEMS
from pi_toolkit.solver.simulate_cli import main as pi_simulate
from pi_toolkit.solver.simulated_model import LAWS as KNOWN_LAWS
from pi_toolkit.solver.simulated_model import (
    ModelFacts,
    SimulatedModel,
    model_facts,
    predictor_widths,
    simulated_model,
)
from pi_toolkit.solver.simulated_systems import DENSE, System, system_reads, unit_devices
from pi_toolkit.solver.simulated_systems import SYSTEMS as KNOWN_SYSTEMS
from pi_toolkit.solver.simulation import FITTED, UNPACKING_SHARE, simulate
from solver_cases import machine, make_workspace, tiny_shape, zipf_counts

DOCUMENT = Path(__file__).parent.parent / "docs" / "simulation.md"
SHAPE = tiny_shape((512,) * 6)
SPARSE: tuple[System, ...] = ("powerinfer", "random", "sparse layers")


def model(dtype: str = "float16", density: float = 0.1, **changes: Any) -> SimulatedModel:
    facts = ModelFacts(replace(SHAPE, **changes))
    return simulated_model(facts, dtype, 64, density, REGLU)


def pc(gpu_share: float, dtype: str = "float16") -> Hardware:
    """A machine whose GPU holds *gpu_share* of the model."""
    units = unit_bytes(SHAPE, dtype, 64, 1, predictor_widths(SHAPE, 0.0709), "q8_0")
    everything = sum(units.attention) + sum(units.predictor) + units.head + 6 * 512 * units.neuron
    return machine(memory_bytes=int(gpu_share * everything), sync_seconds=1e-9)


@pytest.mark.parametrize("system", SYSTEMS)
def test_parts_add_up(system: System) -> None:
    """Time that is counted twice, or that no part has."""
    hardware = pc(2.0 if system == "gpu only" else 0.6)
    speed = simulate(model(), system, hardware)
    parts = speed.parts()
    both = parts.pop("overlapped_seconds")
    assert sum(parts.values()) - both == pytest.approx(speed.time.total_seconds)
    assert speed.tokens_per_second == pytest.approx(1 / speed.time.total_seconds)


@pytest.mark.parametrize("dtype", ["float16", "q4_0"])
def test_a_layer_by_hand(dtype: str) -> None:
    """Bytes over bandwidth, by plain loops over neurons in place of arrays."""
    simulated, hardware = model(dtype), pc(0.6, dtype)
    gpu = hardware.gpu
    assert gpu
    speed = simulate(simulated, "powerinfer", hardware)
    units = unit_bytes(SHAPE, dtype, 64, 1, simulated.predictor_sizes, "q8_0")
    cpu_speed = hardware.cpu_bytes_per_second * UNPACKING_SHARE.get(dtype, 1.0)
    placed, _ = unit_devices(simulated, "powerinfer", hardware)
    for layer, (shares, devices) in enumerate(zip(simulated.firing_shares, placed.neurons, strict=True)):
        density = shares.mean()
        false_share = 0.4 * density / (1 - density)
        read = {0: [0.0], -1: [0.0]}
        for share, device in zip(shares, devices, strict=True):
            candidate = share + false_share * (1 - share)
            read[int(device)].append((2 * candidate + share) / 3)
        cpu_density = sum(read[-1]) / max(1, len(read[-1]) - 1)
        scattered = (1 - cpu_density) / FITTED.scattered_read_share + cpu_density
        on_gpu = sum(read[0]) * units.neuron / gpu.bytes_per_second
        on_cpu = sum(read[-1]) * units.neuron / cpu_speed * scattered
        assert speed.time.gpu_seconds[layer] == pytest.approx(on_gpu)
        assert speed.time.cpu_seconds[layer] == pytest.approx(on_cpu)
        attention_speed = gpu.bytes_per_second if placed.attention[layer] == 0 else cpu_speed
        assert speed.time.attention_seconds[layer] == pytest.approx(units.attention[layer] / attention_speed)
        assert speed.time.overhead_seconds[layer] == FITTED.overhead_seconds_per_layer


@pytest.mark.parametrize("gpu_share", [0.4, 0.6])
def test_each_part_of_the_system_helps(gpu_share: float) -> None:
    """An ablation in another order than dense < predictors < hybrid < policy (PowerInfer §8.3)."""
    order: tuple[System, ...] = ("llama.cpp", "sparse layers", "random", "powerinfer")
    speeds = [simulate(model(), system, pc(gpu_share)).tokens_per_second for system in order]
    assert speeds == sorted(speeds)


def test_the_policy_is_what_random_lacks() -> None:
    """A random split of another number of neurons."""
    placed = {system: unit_devices(model(), system, pc(0.6))[0] for system in ("powerinfer", "random")}
    counts = {system: sum(int((layer == 0).sum()) for layer in devices.neurons) for system, devices in placed.items()}
    assert counts["powerinfer"] == counts["random"] > 0
    assert not all(map(np.array_equal, placed["powerinfer"].neurons, placed["random"].neurons))


def test_more_memory_and_fewer_firings_are_never_slower() -> None:
    """A sign that is the wrong way round."""
    budgets = [simulate(model(), "powerinfer", pc(share)).tokens_per_second for share in (0.3, 0.5, 0.7, 1.5)]
    assert budgets == sorted(budgets)
    densities = [simulate(model(density=d), "powerinfer", pc(0.5)).tokens_per_second for d in (0.3, 0.2, 0.1, 0.05)]
    assert densities == sorted(densities)


def test_whole_layers_fill_gpus_one_after_the_other() -> None:
    """A second GPU that is left empty, or a layer beyond the memory of one."""
    one = pc(0.4)
    two = replace(one, gpus=one.gpus * 2)
    first, _ = unit_devices(model(), "llama.cpp", one)
    both, _ = unit_devices(model(), "llama.cpp", two)
    assert first.attention.tolist() == [-1, -1, -1, -1, 0, 0]
    assert both.attention.tolist() == [-1, -1, 1, 1, 0, 0]


def test_gpu_only_needs_room() -> None:
    """A speed of something that does not fit."""
    with pytest.raises(PlacementError, match="does not fit the GPU: leave out"):
        simulate(model(), "gpu only", pc(0.6))


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    """Seconds of a GPU that is not there."""
    speed = simulate(model(), "powerinfer", replace(pc(1.0), gpus=()))
    assert speed.parts()["gpu_seconds"] == 0 and speed.reads.gpu_share == 0 and speed.parts()["sync_seconds"] == 0


@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_reads_are_shares(density: float) -> None:
    """More of a neuron than there is, or candidates that are fewer than the neurons that fire."""
    shares = (np.full(64, density), np.linspace(1, 0, 64))
    simulated = replace(model(), firing_shares=shares)
    for system in SPARSE:
        for read, share in zip(system_reads(simulated, system), shares, strict=True):
            assert (read >= share - 1e-12).all() and (read <= 1 + 1e-12).all()
    assert all((read == 1).all() for system in DENSE for read in system_reads(simulated, system))


# What the paper prints.


@pytest.fixture(scope="module")
def compared() -> list[ComparedSpeed]:
    return compare()


def test_the_constants_are_the_fitted_ones() -> None:
    """Constants that were typed, or fitted to something else."""
    fitted = fit()
    assert FITTED.overhead_seconds_per_layer == pytest.approx(fitted.overhead_seconds_per_layer, rel=1e-3)
    assert FITTED.scattered_read_share == pytest.approx(fitted.scattered_read_share, rel=1e-3)


def test_the_papers_figures(compared: list[ComparedSpeed]) -> None:
    """The claim: a median error of at most 35 % over the speeds that were not fitted, and systems in the right order."""
    fitted = [row for row in compared if row.published.fitted]
    assert [(row.published.model, row.published.output_tokens) for row in fitted] == [
        ("falcon-40b", 512),
        ("llama2-70b", 512),
    ]
    assert all(abs(row.error) < 0.005 for row in fitted)
    assert median_error(compared) <= 0.35
    high = [row for row in compared if row.published.hardware == "rtx4090-i9-13900k"]
    assert median_error(high) <= 0.35


def test_the_order_of_the_models(compared: list[ComparedSpeed]) -> None:
    """Right for PowerInfer and for llama.cpp, wherever what is published has an order."""
    assert [(a.published, b.published) for a, b in wrong_orders(compared)] == []


def test_the_ablation_of_the_paper(compared: list[ComparedSpeed]) -> None:
    """Parts of the system that do not help in simulation (figure 15)."""
    ablations = [row for row in compared if row.published.baseline]
    assert len(ablations) == 6
    for first in (0, 3):
        ratios = [row.predicted for row in ablations[first : first + 3]]
        assert 1 < ratios[0] < ratios[1] < ratios[2]


def test_the_document_shows_every_row(compared: list[ComparedSpeed]) -> None:
    """A table from before the last change, or one without its bad rows."""
    rows = re.findall(r"^\| (?:figure|table) .*\|$", DOCUMENT.read_text("utf-8"), flags=re.MULTILINE)
    assert rows == [table_row(row) for row in compared]


def table_row(row: ComparedSpeed) -> str:
    """As in the document."""
    p = row.published
    sign = " ×" if p.baseline else ""
    published = f"{p.low:.4g}" if p.low == p.high else f"{p.low:.3g}–{p.high:.3g}"
    error = "fitted" if p.fitted else f"{100 * row.error:+.0f} %"
    machine_name = p.hardware.partition("-")[0]
    cells = (
        p.source,
        machine_name,
        p.model,
        p.dtype,
        p.system,
        p.output_tokens,
        published + sign,
        f"{row.predicted:.2f}{sign}",
        error,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


# The command.

KEYS = ("predicted_tokens_per_second", "gap", "gpu_seconds", "cpu_seconds", "sync_seconds", "predictor_seconds")


def test_the_command(run_json: Callable[..., dict[str, Any]]) -> None:
    """Keys that a script asks for, and the systems it compares."""
    arguments = (
        "--shape",
        "llama2-7b",
        "--dtype",
        "q4_0",
        "--hardware",
        "rtx4090-i9-13900k",
        "--vram",
        3,
        "--density",
        0.2,
    )
    result = run_json(pi_simulate, *arguments)
    assert set(KEYS) <= set(result) and result["density"] == pytest.approx(0.2)
    assert list(result["systems"]) == [system for system in SYSTEMS if system != "gpu only"]  # 3 GiB do not hold it
    speeds = [
        result["systems"][system]["predicted_tokens_per_second"] for system in ("powerinfer", "random", "llama.cpp")
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert result["predicted_tokens_per_second"] == speeds[0]


def test_options_name_what_there_is() -> None:
    """A system or law that the command does not know: it imports neither, so that --help is quick."""
    assert SYSTEMS == KNOWN_SYSTEMS and list(KNOWN_LAWS) == list(LAWS)


def test_a_workspaces_own_profile(tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """A law in place of what was measured."""
    workspace = make_workspace(tmp_path / "tiny-pi", SHAPE, zipf_counts(SHAPE.ffn_sizes))
    result = run_json(pi_simulate, "--shape", workspace.path, "--hardware", "rtx4090-i9-13900k", "--ctx", 64)
    profile = json.loads((workspace.activation / "profile.json").read_text())
    assert result["density"] == pytest.approx(np.mean(profile["firing_share"]))
    by_law = run_json(
        pi_simulate,
        "--shape",
        workspace.path,
        "--hardware",
        "cpu-only",
        "--ctx",
        64,
        "--law",
        "reglu",
        "--density",
        0.3,
    )
    assert by_law["density"] == pytest.approx(0.3)


def test_a_hugging_face_config(tmp_path: Path, run_json: Callable[..., Any], refuses: Callable[..., str]) -> None:
    """Weights asked for where a config says everything."""
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"word_embed_proj_dim": 64}))
    arguments = ("--shape", tmp_path, "--hardware", "rtx4090-i9-13900k")
    assert "give --density" in refuses(pi_simulate, *arguments)
    result = run_json(pi_simulate, *arguments, "--density", 0.05)
    assert result["density"] == pytest.approx(0.05)
    assert model_facts(str(tmp_path)).shape.num_layers == 2


@pytest.mark.parametrize(
    ("arguments", "sentence", "exit_code"),
    [
        ((), "give --shape", 2),
        (("--shape", "opt-66b", "--paper"), "give --shape", 2),
        (("--paper", "--density", 0.3), "leave out --density", 2),
        (("--paper", "--hardware", "abacus"), "leave out --hardware", 2),
        (("--shape", "opt-66b", "--density", 0), "out of range", 2),
        (("--shape", "opt-66b", "--ctx", 10**6), "beyond the model's 2048 positions: give at most 2048", 2),
        (("--shape", "opt-66b", "--ctx", 512, "--filled", 513), "513 is more than the 512 tokens of --ctx", 2),
        (("--shape", "gpt-9"), "'gpt-9' is neither a workspace, a Hugging Face directory nor a preset: give one of", 1),
        (("--shape", "opt-66b", "--hardware", "abacus"), "neither a hardware file nor a preset", 1),
        (("--shape", "opt-66b", "--hardware", "cpu-only", "--density", 0.9), "give a lower --density", 1),
        (("--shape", "opt-6.7b", "--hardware", "cpu-only", "--system", "gpu only"), "leave out the system", 1),
    ],
)
def test_usage_errors(
    arguments: tuple[object, ...], sentence: str, exit_code: int, refuses: Callable[..., str]
) -> None:
    """A traceback, or a speed of something that was not asked for."""
    assert sentence in refuses(pi_simulate, *arguments, exit_code=exit_code)


def test_vram_replaces_the_gpus_memory(run_json: Callable[..., dict[str, Any]]) -> None:
    """A budget that is believed to be the preset's."""
    few, many = (
        run_json(
            pi_simulate,
            "--shape",
            "bamboo-7b",
            "--hardware",
            "rtx2080ti-i7-12700k",
            "--vram",
            vram,
            "--system",
            "llama.cpp",
        )
        for vram in (4, 11)
    )
    assert few["predicted_tokens_per_second"] < many["predicted_tokens_per_second"]
    gpu = read_hardware("rtx2080ti-i7-12700k").gpu
    assert gpu and gpu.memory_bytes == 11 * GIB


def test_vram_of_several_gpus(run_json: Callable[..., dict[str, Any]]) -> None:
    """The second GPU of a machine forgotten where --vram is given."""
    arguments = ("--shape", "bamboo-7b", "--hardware", "rtx2080ti-i7-12700k", "--system", "llama.cpp")
    one, two = (run_json(pi_simulate, *arguments, "--vram", vram) for vram in ("4", "4,4"))
    assert one["gpu_share_of_ffn_reads"] < two["gpu_share_of_ffn_reads"]


def test_predictors_of_widths_that_have_no_blocks(
    tmp_path: Path, run_json: Callable[..., Any], refuses: Callable[..., str]
) -> None:
    """It was --dtype that the sentence blamed."""
    config = {"model_type": "opt", "hidden_size": 65, "ffn_dim": 77, "num_hidden_layers": 2, "num_attention_heads": 5}
    (tmp_path / "config.json").write_text(json.dumps(config | {"word_embed_proj_dim": 65}))
    arguments = ("--shape", tmp_path, "--hardware", "rtx4090-i9-13900k", "--density", 0.05)
    sentence = "rows of 65 values are no whole number of its blocks: give bfloat16"
    assert sentence in refuses(pi_simulate, *arguments, exit_code=2)
    assert run_json(pi_simulate, *arguments, "--predictor-dtype", "bfloat16")["predicted_tokens_per_second"] > 0


def test_room_in_the_kv_cache_and_what_is_read_of_it(run_json: Callable[..., Any]) -> None:
    """Memory that nobody takes, or a cache that is read where nothing was written yet."""
    arguments = ("--shape", "opt-66b", "--dtype", "q4_0", "--hardware", "rtx4090-i9-13900k", "--system", "llama.cpp")
    results = [
        run_json(pi_simulate, *arguments, "--ctx", room, "--filled", filled)
        for room, filled in ((2048, 2048), (2048, 320), (320, 320))
    ]
    assert [(result["context"], result["tokens_read"]) for result in results] == [(2048, 2048), (2048, 320), (320, 320)]
    read, room, little = results
    assert read["gpu_share_of_ffn_reads"] == room["gpu_share_of_ffn_reads"] < little["gpu_share_of_ffn_reads"]
    speeds = [result["predicted_tokens_per_second"] for result in results]
    assert speeds == sorted(speeds) and speeds[0] < speeds[1]
    default = run_json(pi_simulate, *arguments)
    assert (default["context"], default["tokens_read"]) == (2048, 320)


def test_context_within_a_small_models_positions(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    """A default that the model of the own workspace refuses."""
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"word_embed_proj_dim": 64, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--shape", tmp_path, "--hardware", "rtx4090-i9-13900k", "--density", 0.05)
    assert run_json(pi_simulate, *arguments)["context"] == 128
