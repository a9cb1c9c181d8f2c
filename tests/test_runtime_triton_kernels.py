"""Triton kernels on a machine without a GPU: interpreted against the reference, and compiled for GPUs that are elsewhere.

Both happen in processes of their own, side by side: whether Triton interprets is decided when it is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels import triton_kernels

pytest.importorskip("triton", reason="Triton is not installed: pip install 'powerinfer-toolkit[gpu]'")

HERE = Path(__file__).parent
EVERYWHERE = ("cuda:80", "cuda:90", "hip:gfx942")
PREDICTED = ("cuda:89", "hip:gfx1100")
# 168 registers per thread leave room for 12 warps on a multiprocessor; 256 are half of what a thread of gfx942 may have.
MOST_REGISTERS = {"cuda": 168, "hip": 256}
MOST_SHARED_BYTES = 2048


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[dict[str, subprocess.Popen[str]]]":
    """All that takes long, started together. Nothing compiled earlier is found."""
    compile_check = str(HERE / "triton_compile_check.py")
    caches = [str(tmp_path_factory.mktemp("triton")) for _ in range(3)]
    started = {
        "interpreter": start(
            "-m", "pytest", "-p", "no:cacheprovider", "triton_interpreter_checks.py", TRITON_INTERPRET="1"
        ),
        "nvidia": start(compile_check, *EVERYWHERE[:2], TRITON_CACHE_DIR=caches[0]),
        "amd": start(compile_check, *EVERYWHERE[2:], TRITON_CACHE_DIR=caches[1]),
        "predicted": start(compile_check, "--predicted", *PREDICTED, TRITON_CACHE_DIR=caches[2]),
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def compiled(processes: "dict[str, subprocess.Popen[str]]") -> list[dict[str, Any]]:
    """What every kernel needs on every target."""
    reports = []
    for name in ("nvidia", "amd", "predicted"):
        output, _ = processes[name].communicate(timeout=600)
        assert processes[name].returncode == 0, output
        reports += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return reports


def test_every_kernel_compiles_for_every_gpu(compiled: list[dict[str, Any]]) -> None:
    """A construction that only the interpreter understands, or only NVIDIA's compiler."""
    kernels = {target: {report["kernel"] for report in compiled if report["target"] == target} for target in EVERYWHERE}
    assert kernels["cuda:80"] == kernels["cuda:90"] == kernels["hip:gfx942"]
    assert {name.split()[0] for name in kernels["cuda:80"]} == {
        "list_active",
        "gather_gemv",
        "gather_axpy",
        "add_chunks",
    }
    assert {"*fp32", "*fp16", "*bf16", "KIND=q8_0", "KIND=q4_0"} < set(" ".join(kernels["cuda:80"]).split())
    for target in PREDICTED:
        some = {report["kernel"] for report in compiled if report["target"] == target}
        assert some and some <= kernels["cuda:80"]


def test_no_kernel_spills_or_crowds_others_out(compiled: list[dict[str, Any]]) -> None:
    """Registers in slow memory, or so many that few warps are there to wait for memory."""
    for report in compiled:
        assert report["spills"] == 0, report
        assert 0 < report["registers"] <= MOST_REGISTERS[report["target"].partition(":")[0]], report
        assert report["shared_bytes"] <= MOST_SHARED_BYTES, report


def test_rows_are_read_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    """Rows whose alignment the compiler no longer knows, so that every value is a read of its own."""
    gemv = [report for report in compiled if "gather_gemv" in report["kernel"] and "wide_loads" in report]
    axpy = [report for report in compiled if "gather_axpy KIND=plain" in report["kernel"] and "wide_loads" in report]
    assert gemv and axpy
    assert all(report["wide_loads"] >= 4 for report in gemv + axpy)


def test_interpreted_kernels_equal_the_reference(processes: "dict[str, subprocess.Popen[str]]") -> None:
    """The checks of triton_interpreter_checks.py, each of which names its failure."""
    output, _ = processes["interpreter"].communicate(timeout=600)
    assert processes["interpreter"].returncode == 0, output
    assert " passed" in output and "skipped" not in output


GPU = torch.device("cuda")


def test_every_activation_is_known() -> None:
    """An activation function that is added elsewhere, and fails at the first token on a GPU."""
    kernels = triton_kernels.triton_kernels(GPU)
    assert kernels is not None and set(kernels.ACTIVATIONS) == set(get_args(Activation))


def test_triton_serves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors in a kernel that would read them as a GPU's, or a comparison with the reference that is none."""
    monkeypatch.delenv("PI_GPU_KERNELS", raising=False)
    assert triton_kernels.triton_kernels(torch.device("cpu")) is None
    assert triton_kernels.triton_kernels(GPU) is not None
    monkeypatch.setenv("PI_GPU_KERNELS", "torch")
    assert triton_kernels.triton_kernels(GPU) is None


@pytest.mark.parametrize(("hip", "package"), [(None, "pip install triton"), ("6.4", "pytorch-triton-rocm")])
def test_a_missing_triton_is_said_once(
    hip: str | None, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow GPU and nobody knows why, or the wrong vendor's package recommended."""
    monkeypatch.delenv("PI_GPU_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "hip", hip)
    triton_kernels._import_kernels.cache_clear()
    assert triton_kernels.triton_kernels(GPU) is None
    assert triton_kernels.triton_kernels(GPU) is None
    triton_kernels._import_kernels.cache_clear()
    said = capsys.readouterr().err
    assert said.count("Triton is not installed") == 1 and package in said
