"""Measuring a machine: figures are figures of what they say, and the file is one that placements accept."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pi_toolkit.profiler.hardware import read_hardware
from pi_toolkit.profiler.this_machine import measured_hardware_file
from pi_toolkit.runtime import bench_machine, conditions, machine
from pi_toolkit.runtime.bench_cli import main as pi_bench
from pi_toolkit.runtime.conditions import OthersLoad
from pi_toolkit.runtime.machine import GpuSpeed, ReadBuffer, SparseKernel, SparseLayers, best_bytes_per_second

SMALL = SparseLayers(hidden=128, neurons=320, layers=2)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 2**22)
    monkeypatch.setattr(machine, "LAYERS", SMALL)
    monkeypatch.setattr(machine, "PASS_SECONDS", 0.005)


def test_the_fastest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run that brings pages in, or a pause, in the figure."""
    now, pauses = 0.0, iter([0.05, 0.01, 0.002, 0.01])

    def run() -> None:
        nonlocal now
        now += next(pauses)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert best_bytes_per_second(1, run) == pytest.approx(500)


def test_the_buffer_is_read() -> None:
    """A product over memory that was never written, which is one page of zeros."""
    buffer = ReadBuffer(2**20)
    assert buffer.num_bytes == 2**20
    assert (buffer.by_kernel(1) or 0) > 1e6 and buffer.by_sum(1) > 1e6
    assert bool((buffer._y == machine.COLUMNS).all())


def test_every_candidate_is_computed() -> None:
    """Candidates that stay silent, whose up and down rows are counted and not read."""
    kernel = SparseKernel(SMALL)
    assert (kernel.bytes_per_second(1, 1.0) or 0) > 1e6
    first, up, down = (part.values().float() for part in kernel._tensors[-1])
    x = torch.ones(SMALL.hidden)
    assert bool((first @ x > 0).all())
    torch.testing.assert_close(kernel._y, ((first @ x) * (up @ x)) @ down, rtol=1e-4, atol=0)


def test_scores_name_as_many_as_asked() -> None:
    """A density that is another."""
    scores = machine._random_scores(1000, 100, seed=1)
    assert int(scores.sum()) == 100
    assert not torch.equal(scores, machine._random_scores(1000, 100, seed=2))


def test_the_hardware_file(tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """A file that pi-place refuses, or one with other figures than were printed."""
    out = tmp_path / "mine.toml"
    result = run_json(pi_bench, "--machine", "-o", out, "--threads", 2)
    assert [row["threads"] for row in result["bandwidth"]] == [1, 2]
    for row in result["bandwidth"]:
        assert [entry["density"] for entry in row["sparse"]] == [0.1, 1.0]
        assert row["read_bytes_per_second"] == max(row["kernel_bytes_per_second"], row["sum_bytes_per_second"])
    hardware = read_hardware(str(out))
    best = max(row["read_bytes_per_second"] for row in result["bandwidth"])
    assert hardware.cpu_bytes_per_second == pytest.approx(best, rel=1e-4)
    assert (hardware.name, hardware.gpus) == ("mine", ())
    assert hardware.cpu_memory_bytes == pytest.approx(conditions.memory_bytes(), rel=1e-4)
    assert "# measured, " in out.read_text("utf-8")


def test_every_gpu_gets_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any]
) -> None:
    """Gigabytes and bytes mixed up, or the second GPU left out."""
    gpus = [GpuSpeed("a GPU", 24 * 2**30, 1.0e12, 25e9, 8e-6, 2**29), GpuSpeed("b", 2**33, 5.0e11, 12e9, 9e-6, 2**28)]
    monkeypatch.setattr(machine, "measure_gpus", lambda: gpus)
    result = run_json(pi_bench, "--machine", "-o", tmp_path / "mine.toml", "--threads", 1)
    assert [gpu["name"] for gpu in result["gpus"]] == ["a GPU", "b"]
    first, second = read_hardware(str(tmp_path / "mine.toml")).gpus
    assert (first.name, first.memory_bytes, first.bytes_per_second) == ("a GPU", 24 * 2**30, 1.0e12)
    assert (first.pcie_bytes_per_second, first.sync_seconds, first.context_bytes) == (25e9, 8e-6, 2**29)
    assert first.reserve_bytes == 2**29 + bench_machine.SCRATCH_BYTES + bench_machine.MARGIN_BYTES
    assert (second.name, second.memory_bytes) == ("b", 2**33)


def test_without_a_name_the_file_lies_where_pi_place_looks(run_json: Callable[..., dict[str, Any]]) -> None:
    """A measurement that --hardware auto does not find."""
    result = run_json(pi_bench, "--machine", "--threads", 1)
    assert result["hardware"] == str(measured_hardware_file())
    assert read_hardware(result["hardware"]).name == "this-machine"


def test_an_output_that_cannot_be_written(tmp_path: Path, refuses: Callable[..., str]) -> None:
    """A minute of measuring that ends in an error."""
    (tmp_path / "file").write_text("")
    message = refuses(pi_bench, "--machine", "-o", tmp_path / "file" / "x.toml", "--threads", 1)
    assert "choose another output with -o" in message


def test_the_load_of_others() -> None:
    """A benchmark that takes its own work for somebody else's, or overlooks somebody's."""

    def spin() -> float:
        """The cores that this process had, fewer on a machine that is busy."""
        began, end = time.perf_counter(), time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return 0.3 / (time.perf_counter() - began)

    others, everybody = OthersLoad([os.getpid()]), OthersLoad([])
    had = spin()
    without, total = others.cores(), everybody.cores()
    if without is not None and total is not None:  # elsewhere than on Linux
        assert total - without > 0.5 * had


def test_a_busy_machine_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a machine that worked on something else."""
    monkeypatch.setattr(conditions, "load_average", lambda: 3.2)
    conditions.warn_if_busy()
    assert "load average 3.2" in capsys.readouterr().err
    monkeypatch.setattr(conditions, "load_average", lambda: None)
    conditions.warn_if_busy()
    assert capsys.readouterr().err == ""
