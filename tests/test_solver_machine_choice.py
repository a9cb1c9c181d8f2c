"""``--hardware auto``: this machine's own figures, measured once, and never another machine's."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pi_toolkit.profiler import this_machine
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.profiler.hardware import GIB, Hardware, write_hardware
from pi_toolkit.solver import machine_choice
from pi_toolkit.solver.cli import main as pi_place
from pi_toolkit.solver.machine_choice import resolve_hardware
from solver_cases import machine, make_workspace, tiny_shape, zipf_counts

MEASURED, NO_GPU = machine(cpu_gib=32), Hardware("this-machine", "CPU", 8 * GIB, 50e9)


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], list[str]]:
    """``measures(hardware)`` stands for ``pi-bench --machine`` finding that; the list grows with every run."""
    runs: list[str] = []

    def install(hardware: Hardware) -> list[str]:
        def measure() -> None:
            runs.append(hardware.name)
            write_hardware(this_machine.measured_hardware_file(), hardware, {})

        monkeypatch.setattr(machine_choice, "measure_this_machine", measure)
        return runs

    return install


def test_this_machine_is_measured_once(
    measures: Callable[[Hardware], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds of measuring before every placement, or speeds of a machine that is not this one."""
    runs = measures(MEASURED)
    assert resolve_hardware("auto", None) == MEASURED
    assert resolve_hardware("auto", 12.0) == MEASURED
    assert runs == ["test"]
    messages = capsys.readouterr().err
    assert messages.count("measuring this machine, once") == 1
    assert "speeds are those of this machine, a GPU: give another with --hardware" in messages


@pytest.mark.parametrize("content", ["", "format = 1", "format ="])
def test_a_damaged_measurement_is_measured_again(content: str) -> None:
    """Prevents being sent to mend a file that the user never wrote."""
    file = this_machine.measured_hardware_file()
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(
        HardwareError, match=r"this-machine\.toml.*: run pi-bench --machine to measure this machine again$"
    ):
        resolve_hardware("auto", None)


def test_a_machine_without_a_gpu_says_so(
    measures: Callable[[Hardware], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A placement for a GPU that nobody has."""
    runs = measures(NO_GPU)
    assert resolve_hardware("auto", None) == NO_GPU
    assert "this machine has no GPU: give another with --hardware" in capsys.readouterr().err
    assert resolve_hardware("auto", 24.0).name == "rtx4090-i9-13900k"
    assert "no usable GPU here, so speeds are those of rtx4090-i9-13900k (24 GiB)" in capsys.readouterr().err
    assert runs == ["this-machine"]


def test_vram_without_a_gpu_measures_nothing(measures: Callable[[Hardware], list[str]]) -> None:
    """Seconds of measuring for figures that are not used."""
    runs = measures(NO_GPU)
    assert resolve_hardware("auto", 11.0).name == "rtx2080ti-i7-12700k"
    assert runs == []


def test_vram_with_a_gpu_measures_it(
    measures: Callable[[Hardware], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--vram as a reason to take a preset's speeds where there is a GPU to measure."""
    monkeypatch.setattr(machine_choice, "has_gpu", lambda: True)
    assert measures(MEASURED) == [] and resolve_hardware("auto", 11.0) == MEASURED


@pytest.mark.parametrize("fact", ["node", "gpus", "cpu", "visible"])
def test_a_copied_home_directory_is_not_believed(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidths of the computer that the home directory came from, or of a GPU that was taken out or hidden."""
    before = this_machine.measured_hardware_file()
    assert before == this_machine.measured_hardware_file()
    if fact == "node":
        monkeypatch.setattr("platform.node", lambda: "another")
    elif fact == "gpus":
        monkeypatch.setattr(this_machine, "gpu_drivers", lambda: ["Model: another"])
    elif fact == "cpu":
        monkeypatch.setattr(this_machine, "cpu_name", lambda: "another")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine.measured_hardware_file() != before


def test_the_identity_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's name in a path that is printed."""
    monkeypatch.setattr("platform.node", lambda: "a-secret-name")
    assert "secret" not in str(this_machine.measured_hardware_file())


def test_measuring_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, or a placement from half a measurement."""
    monkeypatch.setattr(machine_choice, "MEASURE", (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(HardwareError, match="did not measure this machine: give --hardware"):
        resolve_hardware("auto", None)
    monkeypatch.setattr(machine_choice, "MEASURE", ("/no/such/program",))
    with pytest.raises(HardwareError, match="cannot be started"):
        resolve_hardware("auto", None)


def test_the_command_that_measures_exists() -> None:
    """A module that is no command: measuring would end at once, having written nothing."""
    result = subprocess.run([*machine_choice.MEASURE, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "--machine" in result.stdout


def test_pi_place_needs_no_option_where_there_is_a_gpu(
    tmp_path: Path, measures: Callable[[Hardware], list[str]], run_json: Callable[..., dict[str, object]]
) -> None:
    """The default that does not reach the command."""
    measures(MEASURED)
    shape = tiny_shape((64,))
    workspace = make_workspace(tmp_path / "tiny-pi", shape, zipf_counts(shape.ffn_sizes))
    assert run_json(pi_place, workspace.path)["hardware"] == "test"
