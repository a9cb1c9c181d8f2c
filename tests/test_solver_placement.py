"""Whole placements: units in order, budgets never exceeded, and a check that notices every kind of wrong answer."""

from dataclasses import replace

import numpy as np
import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import GIB, read_hardware
from pi_toolkit.solver.dense_exchange import beside_neurons
from pi_toolkit.solver.dense_units import place_dense_units
from pi_toolkit.solver.memory import unit_bytes
from pi_toolkit.solver.placement import Placement, PlacementRequest, place
from pi_toolkit.solver.placement_check import check_placement
from pi_toolkit.solver.placement_rivals import random_answer
from pi_toolkit.solver.token_time import CPU
from solver_brute_force import random_instance
from solver_cases import MISTRAL_7B, OPT_175B, machine, tiny_shape, zipf_counts

BUDGETS_GIB = [0.5, 1, 2, 4, 8, 12, 16, 24]


def request(vram_gib: float, dtype: str = "bfloat16", context: int = 2048, **changes: object) -> PlacementRequest:
    return replace(PlacementRequest(int(vram_gib * GIB), int(0.25 * GIB), dtype, context, 1), **changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_mistral_fits_every_budget(dtype):
    """A budget that is too small for the attention must not be an error, and none may be exceeded."""
    counts, served = zipf_counts(MISTRAL_7B.ffn_sizes), -1
    for vram in BUDGETS_GIB:
        placement = place(MISTRAL_7B, counts, machine(), request(vram, dtype))
        assert placement.gpu_bytes <= placement.gpu_budget_bytes == int((vram - 0.25) * GIB)
        assert placement.status == "optimal" and placement.gap <= 1e-4
        if all(placement.attention_on_gpu):
            assert placement.objective_value >= served
            served = placement.objective_value


@pytest.mark.parametrize(("dtype", "vram"), [("bfloat16", 24), ("q4_0", 24)])
def test_opt_175b_is_solved(dtype, vram):
    """73,728 groups; only part of the attention fits."""
    placement = place(OPT_175B, zipf_counts(OPT_175B.ffn_sizes), machine(), request(vram, dtype))
    assert 0 < sum(placement.attention_on_gpu) < 96
    assert placement.gpu_bytes <= placement.gpu_budget_bytes
    assert placement.status == "optimal" and placement.gap <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_opt_175b_fits_every_budget_without_a_solver(dtype):
    counts = zipf_counts(OPT_175B.ffn_sizes)
    for vram in BUDGETS_GIB:
        placement = place(OPT_175B, counts, machine(), request(vram, dtype, solver="greedy"))
        assert placement.gpu_bytes <= placement.gpu_budget_bytes
        assert placement.gap < 0.02


def test_dense_units_go_first_in_layer_order():
    shape = tiny_shape((64, 64, 64))
    units = unit_bytes(shape, "float32", 64, 1, [32, 32, 32])
    attention, predictor = units.attention[0], units.predictor[0]
    budget = 2 * attention + predictor + 1
    neurons = [64 * units.neuron] * 3
    dense = place_dense_units(units, [budget], neurons)
    assert dense.attention.tolist() == [0, 0, CPU]
    assert dense.predictor.tolist() == [0, CPU, CPU]
    assert dense.gpu_bytes == (2 * attention + predictor,)
    everything = place_dense_units(units, [10**9], neurons)
    assert everything.head == 0 and everything.cpu_bytes == units.embedding


@pytest.mark.parametrize("widths", [None, [32, 32, 32], [32, 64, 96]])
def test_layers_with_neurons_on_the_gpu_have_their_attention_there(widths):
    """Attention in layer order and the hottest neurons in the last layer divide a layer more than need be."""
    shape = tiny_shape((64, 64, 64), vocabulary_size=512)
    units = unit_bytes(shape, "float32", 512, 1, widths)
    counts = tuple(np.full(64, hot) for hot in (1, 1, 1000))
    budget = units.attention[0] + sum(units.predictor) + 64 * units.neuron
    ask = PlacementRequest(budget, 0, "float32", 512, 1, sync_seconds=1e-5, min_gpu_neurons=0, tokens=10**6)
    placement = place(shape, counts, machine(), ask, widths)
    assert [len(ids) for ids in placement.gpu_neurons] == [0, 0, 64]
    assert placement.attention_on_gpu == (False, False, True)
    assert np.flatnonzero(placement.time.sync_seconds).tolist() == ([0, 1] if widths else [])


@pytest.mark.parametrize("seed", range(20))
def test_exchanges_keep_what_is_on_gpus_and_never_cost_time(seed):
    """Dense units exchanged into memory that is not there, or for nothing."""
    problem = random_instance(seed)
    answer = random_answer(problem)
    if answer is None:
        return
    before = place_dense_units(problem.units, problem.gpu_bytes, problem.layer_bytes.tolist())
    plain = replace(answer, attention=before.attention, predictor=before.predictor)
    after = beside_neurons(problem, plain)
    assert problem.is_feasible(after) and problem.seconds(after) <= problem.seconds(plain)
    assert sorted(after.attention) == sorted(plain.attention) and after.head == plain.head
    assert all(map(np.array_equal, after.bundles, plain.bundles))


def test_a_tied_head_on_the_cpu_is_the_embedding():
    """Counting it twice refuses models that fit."""
    units = unit_bytes(tiny_shape((64,), tied_embeddings=True), "float32", 64, 1)
    assert place_dense_units(units, [0], [0]).cpu_bytes == units.embedding + sum(units.attention)


def test_no_gpu_means_an_empty_placement():
    shape = tiny_shape((64, 64))
    placement = place(shape, zipf_counts(shape.ffn_sizes), read_hardware("cpu-only"), request(24, context=64))
    assert placement.gpu_bytes == 0 and not any(len(ids) for ids in placement.gpu_neurons)
    assert placement.min_gpu_neurons == (None, None) and placement.status == "optimal"


def test_a_model_beyond_both_memories_is_refused():
    with pytest.raises(PlacementError, match="--vram"):
        place(OPT_175B, zipf_counts(OPT_175B.ffn_sizes), machine(cpu_gib=192), request(24))
    with pytest.raises(PlacementError, match="--dtype"):
        place(OPT_175B, zipf_counts(OPT_175B.ffn_sizes), machine(cpu_gib=16), request(1))


def test_cpu_memory_is_respected():
    """The CPU holds half of the neurons, so the GPU must take more than pays."""
    shape = tiny_shape((640, 640))
    units = unit_bytes(shape, "float32", 64, 1)
    cpu_bytes = units.embedding + 640 * units.neuron
    hardware = replace(machine(), cpu_memory_bytes=cpu_bytes)
    ask = request(1, "float32", 64, sync_seconds=0.0)
    counts = tuple(np.zeros(640, dtype=np.int64) for _ in range(2))
    placement = place(shape, counts, hardware, ask)
    assert placement.cpu_bytes <= cpu_bytes and sum(len(ids) for ids in placement.gpu_neurons) >= 640


def moved(placement: Placement, **units: object) -> dict[str, object]:
    return {"devices": replace(placement.devices, **units)}


def neurons(placement: Placement, layer: int, change) -> dict[str, object]:
    layers = [devices.copy() for devices in placement.devices.neurons]
    layers[layer] = change(layers[layer])
    return moved(placement, neurons=tuple(layers))


WRONG = {
    "a neuron more": lambda p: neurons(
        p, 0, lambda d: np.where(np.arange(len(d)) == np.flatnonzero(d == CPU)[0], 0, d)
    ),
    "a neuron less": lambda p: neurons(
        p, 0, lambda d: np.where(np.arange(len(d)) == np.flatnonzero(d == 0)[0], CPU, d)
    ),
    "another neuron": lambda p: neurons(p, 0, lambda d: d[::-1].copy()),
    "a device too many": lambda p: neurons(p, 0, lambda d: np.where(d == 0, 1, d)),
    "a device before the CPU": lambda p: neurons(p, 0, lambda d: np.where(d == CPU, -2, d)),
    "a neuron that is none": lambda p: neurons(p, 0, lambda d: np.append(d, CPU)),
    "a layer less": lambda p: moved(p, neurons=p.devices.neurons[:1]),
    "attention moved": lambda p: moved(p, attention=np.array([CPU, 0])),
    "attention nowhere": lambda p: moved(p, attention=np.array([1, 0])),
    "head moved": lambda p: moved(p, head=CPU if p.devices.head == 0 else 0),
    "no layer of neurons allowed": lambda p: {"min_gpu_neurons": (None, 0)},
    "C_l above": lambda p: {"min_gpu_neurons": (len(p.gpu_neurons[0]) + 1, 0)},
    "bytes": lambda p: {"gpu_used": (p.gpu_used[0] - 1,)},
    "budget": lambda p: {"gpu_budgets": (p.gpu_used[0] - 1,)},
    "bytes of the CPU": lambda p: {"cpu_bytes": p.cpu_bytes + 1},
    "objective": lambda p: {"objective_value": p.objective_value * 1.001},
    "bound above": lambda p: {"bound": p.objective_value * 1.01},
    "bound below": lambda p: {"bound": p.objective_value * 0.99},
    "firings": lambda p: {"gpu_firings": p.gpu_firings + 1},
    "gap": lambda p: {"gap": p.gap + 1e-6},
    "time": lambda p: {"time": replace(p.time, head_seconds=p.time.head_seconds * 2)},
    "speeds": lambda p: {"speeds": replace(p.speeds, cpu_bytes_per_second=1e12)},
    "synchronisation": lambda p: {"speeds": replace(p.speeds, sync_seconds=1e-3)},
}


@pytest.mark.parametrize("objective", ["firings", "latency"])
@pytest.mark.parametrize("wrong", WRONG)
def test_the_check_notices(wrong, objective):
    """A solver's answer is believed only after this; each lambda is one way of being wrong."""
    shape = tiny_shape((640, 640))
    counts = zipf_counts(shape.ffn_sizes)
    ask = request(1, "float32", 64, vram_bytes=400_000, reserve_bytes=0, tokens=10**6, objective=objective)
    ask = replace(ask, sync_seconds=0.0, mode="predicted")
    placement = place(shape, counts, machine(), ask)
    units = unit_bytes(shape, "float32", 64, 1)
    assert 0 < len(placement.gpu_neurons[0]) < 640 and placement.devices.attention.tolist() == [0, 0]
    check_placement(placement, units, counts, machine().cpu_memory_bytes)
    with pytest.raises(PlacementError, match="did not pass"):
        check_placement(replace(placement, **WRONG[wrong](placement)), units, counts, machine().cpu_memory_bytes)
