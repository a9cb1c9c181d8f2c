"""The predicted time of a token against sums written out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pi_toolkit.solver.memory import UnitBytes
from pi_toolkit.solver.token_time import CPU, Speeds, UnitDevices, expected_reads, firing_shares, speeds_of, token_time
from solver_cases import machine

UNITS = UnitBytes(
    attention=(1000, 1000), kv_cache=100, predictor=(50, 0), neuron=10, head=400, embedding=800, head_is_embedding=False
)
SPEEDS = Speeds(cpu_bytes_per_second=100.0, gpu_bytes_per_second=(1000.0, 2000.0), sync_seconds=0.5)
READS = (np.array([1.0, 0.5, 0.25]), np.array([0.5, 0.5]))
ON_CPU = UnitDevices(np.array([CPU, CPU]), np.array([CPU, CPU]), CPU, (np.array([CPU] * 3), np.array([CPU] * 2)))


def test_everything_on_the_cpu_needs_no_synchronisation():
    time = token_time(UNITS, ON_CPU, READS, SPEEDS)
    assert time.attention_seconds.tolist() == [10.0, 10.0] and time.predictor_seconds.tolist() == [0.5, 0.0]
    assert time.cpu_seconds == pytest.approx([0.175, 0.1]) and time.gpu_seconds.tolist() == [0.0, 0.0]
    assert time.sync_seconds.tolist() == [0.0, 0.0] and time.head_seconds == 4.0
    assert time.total_seconds == pytest.approx(24.775) and time.tokens_per_second == pytest.approx(1 / 24.775)


def test_parts_on_several_devices_run_at_the_same_time():
    """A sum in place of the maximum, or the wrong device's bandwidth."""
    devices = UnitDevices(np.array([0, 1]), np.array([0, CPU]), 1, (np.array([0, 1, CPU]), np.array([1, 1])))
    time = token_time(UNITS, devices, READS, SPEEDS)
    assert time.attention_seconds == pytest.approx([1.0, 0.5]) and time.predictor_seconds == pytest.approx([0.05, 0.0])
    assert time.gpu_seconds == pytest.approx([0.01, 0.005])  # the slower of 10/1000 and 5/2000; 10/2000
    assert time.cpu_seconds == pytest.approx([0.025, 0.0])
    assert time.sync_seconds.tolist() == [0.5, 0.0]  # the missing predictor of layer 1 splits nothing
    assert time.layer_seconds == pytest.approx([1.0 + 0.05 + 0.025 + 0.5, 0.505]) and time.head_seconds == 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"attention": np.array([0, CPU])},
        {"predictor": np.array([0, CPU])},
        {"neurons": (np.array([CPU, CPU, 0]), ON_CPU.neurons[1])},
    ],
)
def test_one_unit_elsewhere_costs_a_synchronisation(change):
    assert token_time(UNITS, replace(ON_CPU, **change), READS, SPEEDS).sync_seconds.tolist() == [0.5, 0.0]


def test_the_two_constants():
    fitted = replace(SPEEDS, overhead_seconds_per_layer=2.0, cpu_bandwidth_share=0.5)
    assert token_time(UNITS, ON_CPU, READS, fitted).total_seconds == pytest.approx(2 * 24.775 + 2 * 2.0)


def test_reads_of_the_modes():
    """Gate of candidates, up and down of what fires."""
    shares = (np.array([0.1, 0.9, 0.0]),)
    assert expected_reads(shares, "dense", 3)[0].tolist() == [1, 1, 1]
    assert expected_reads(shares, "exact", 3)[0] == pytest.approx([(1 + 0.2) / 3, (1 + 1.8) / 3, 1 / 3])
    assert expected_reads(shares, "predicted", 3, 2.0)[0] == pytest.approx([(0.2 + 0.2) / 3, (1 + 1.8) / 3, 0])
    assert expected_reads(shares, "predicted", 2, [2.0])[0] == pytest.approx([(0.2 + 0.1) / 2, (1 + 0.9) / 2, 0])
    # Below 1, the overshoot names fewer than fire, and what is not named is not read.
    assert expected_reads(shares, "predicted", 2, 0.5)[0] == pytest.approx([0.05, 0.45, 0])


def test_a_batch_reads_what_any_of_its_sequences_does():
    (reads,) = expected_reads((np.array([0.1, 1.0, 0.0]),), "predicted", 2, 1.0, batch_size=4)
    assert reads == pytest.approx([1 - 0.9**4, 1, 0])


def test_counts_become_shares():
    """PowerInfer's own files state no number of tokens."""
    counts = (np.array([5, 10]), np.array([20, 0]))
    assert [s.tolist() for s in firing_shares(counts, 40)] == [[0.125, 0.25], [0.5, 0.0]]
    assert [s.tolist() for s in firing_shares(counts, None)] == [[0.25, 0.5], [1.0, 0.0]]
    assert [s.tolist() for s in firing_shares((np.array([0.5, 0.2]),), None)] == [[0.5, 0.2]]
    assert firing_shares((np.zeros(2),), None)[0].tolist() == [0, 0]


def test_speeds_of_a_machine():
    speeds = speeds_of(machine(), hidden_size=4096)
    assert speeds.gpu_bytes_per_second == (1008e9,) and speeds.cpu_bytes_per_second == 67.2e9
    assert speeds.sync_seconds == 2e-5 + 2 * 4096 * 4 / 64e9
    assert speeds_of(machine(), 4096, sync_seconds=0.0).sync_seconds == 0.0
