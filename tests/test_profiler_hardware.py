"""Hardware descriptions: the presets load with their units, and every malformed file has its own sentence."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from pi_toolkit.profiler import hardware as hardware_module
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.profiler.hardware import (
    GIB,
    nearest_preset,
    parse_hardware,
    preset_names,
    read_hardware,
    write_hardware,
)

EXAMPLE = """
format = "powerinfer-toolkit/hardware"
version = 1
name = "mine"

[cpu]
name = "a CPU"
memory_gib = 32
bandwidth_gb_per_second = 50.5

[gpu]
name = "a GPU"
memory_gib = 8
bandwidth_gb_per_second = 400
pcie_gb_per_second = 16
sync_seconds = 2e-5
context_gib = 0.5
scratch_gib = 0.25
margin_gib = 0.125
"""
CPU_ONLY, _, ONE_GPU = EXAMPLE.partition("[gpu]")
TWO_GPUS = CPU_ONLY + "[[gpu]]" + ONE_GPU + "[[gpu]]" + ONE_GPU.replace("a GPU", "another").replace("= 8", "= 24")
OF_OLD = EXAMPLE.replace("context_gib = 0.5\nscratch_gib = 0.25\nmargin_gib = 0.125\n", "reserve_gib = 0.5\n")


def refusal(text: str) -> str:
    with pytest.raises(HardwareError) as caught:
        parse_hardware(text, "mine.toml")
    assert caught.value.message.startswith("hardware 'mine.toml'")
    assert ": " in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads(name: str) -> None:
    """Prevents a release with a preset that its own reader refuses."""
    hardware = read_hardware(name)
    assert hardware.name == name
    assert hardware.cpu_memory_bytes > 8 * GIB and hardware.cpu_bytes_per_second > 1e9
    for gpu in hardware.gpus:
        assert gpu.reserve_bytes < gpu.memory_bytes
        assert gpu.bytes_per_second > hardware.cpu_bytes_per_second


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_has_its_source(name: str) -> None:
    """A bandwidth that nobody can check."""
    text = (resources.files(hardware_module.__package__) / "hardware_presets" / f"{name}.toml").read_text("utf-8")
    tables = text[text.index("[cpu]") :].splitlines()
    assert not [line for line in tables if " = " in line and "  # " not in line]


def test_presets_are_the_papers_machines() -> None:
    """Prevents the two machines of the paper, or the machine without a GPU, from missing in the installed package."""
    papers = {"cpu-only", "rtx2080ti-i7-12700k", "rtx4090-i9-13900k", "a100-80gb-epyc-7742"}
    assert papers | {"h200-xeon-8480c", "rtx3090-ryzen-5950x", "rtx5090-ryzen-9950x"} == set(preset_names())
    assert read_hardware("cpu-only").gpu is None


def test_units_are_converted(tmp_path: Path) -> None:
    """Prevents GiB from being read as GB, or bandwidths from being off by 2^30 / 10^9."""
    file = tmp_path / "été [x].toml"
    file.write_text(EXAMPLE, "utf-8")
    hardware = read_hardware(str(file))
    assert (hardware.cpu_memory_bytes, hardware.cpu_bytes_per_second) == (32 * 2**30, 50.5e9)
    gpu = hardware.gpu
    assert gpu is not None
    assert (gpu.memory_bytes, gpu.reserve_bytes) == (8 * 2**30, 7 * 2**27)
    assert (gpu.context_bytes, gpu.scratch_bytes, gpu.margin_bytes) == (2**29, 2**28, 2**27)
    assert (gpu.bytes_per_second, gpu.pcie_bytes_per_second, gpu.sync_seconds) == (400e9, 16e9, 2e-5)


def test_machine_without_gpu() -> None:
    """Prevents a missing [gpu] table from being an error or a GPU without memory."""
    assert parse_hardware(CPU_ONLY, "mine.toml").gpu is None


def test_several_gpus() -> None:
    """A second GPU that is an error, or that has the memory of the first."""
    gpus = parse_hardware(TWO_GPUS, "mine.toml").gpus
    assert [(gpu.name, gpu.memory_bytes) for gpu in gpus] == [("a GPU", 8 * GIB), ("another", 24 * GIB)]


def test_a_reserve_in_one_number() -> None:
    """Files from before the reserve had parts."""
    gpu = parse_hardware(OF_OLD, "mine.toml").gpu
    assert gpu and (gpu.reserve_bytes, gpu.scratch_bytes, gpu.margin_bytes) == (2**29, 0, 0)


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (1, "rtx2080ti-i7-12700k"),
        (11, "rtx2080ti-i7-12700k"),
        (17, "rtx2080ti-i7-12700k"),
        (18, "rtx4090-i9-13900k"),
        (24, "rtx4090-i9-13900k"),
        (80, "a100-80gb-epyc-7742"),
    ],
)
def test_nearest_preset(gib: int, name: str) -> None:
    """Prevents ``--vram 24`` alone from being priced with the bandwidths of a smaller machine, or of none."""
    assert nearest_preset(gib * GIB).name == name


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("version = 1", "version = 2", "does not state format 'powerinfer-toolkit/hardware' version 1: add both keys"),
        ('format = "powerinfer-toolkit/hardware"', "", "does not state format"),
        ('name = "mine"', "", "lacks name: add it"),
        ('name = "mine"', "name = 7", "name is not printable text: put a name in quotes"),
        ('name = "mine"', 'name = "mine"\ncolour = 1', "has unknown keys colour: remove them"),
        ('name = "a CPU"', "", "[cpu] lacks name"),
        ('name = "a GPU"', "name = true", "name is not printable text"),
        ("context_gib = 0.5", "", "[gpu] lacks context_gib"),
        ("context_gib = 0.5", "reserve_gib = 0.5", "[gpu] has unknown keys margin_gib, scratch_gib"),
        ('name = "mine"', r'name = "\u001b[31m"', "name is not printable text"),
        ("[gpu]", "gpu = 3\n[gpus]", "has unknown keys gpus"),
        ("sync_seconds = 2e-5", "sync_second = 2e-5", "[gpu] lacks sync_seconds"),
        ("sync_seconds = 2e-5", "sync_seconds = 2e-5\ncores = 2", "[gpu] has unknown keys cores"),
        ("memory_gib = 32", "memory_gib = 0", "memory_gib = 0: give a number of at least 1e-09 and below 1e+09"),
        ("memory_gib = 32", "memory_gib = -1", "memory_gib = -1: give a number"),
        ("memory_gib = 32", "memory_gib = nan", "memory_gib = nan: give a number"),
        ("memory_gib = 32", "memory_gib = inf", "memory_gib = inf"),
        ("memory_gib = 32", "memory_gib = 1e-320", "memory_gib = 1e-320: give a number"),
        ("memory_gib = 32", "memory_gib = 1e308", "memory_gib = 1e+308"),
        ("memory_gib = 32", f"memory_gib = 1{'0' * 400}", "memory_gib = 1"),
        ("memory_gib = 32", "memory_gib = 9e11", "memory_gib = 900000000000.0: give a number"),
        ("memory_gib = 32", f"memory_gib = {'1' * 5000}", "is not valid TOML"),
        ("memory_gib = 32", f"memory_gib = {'[' * 5000}{']' * 5000}", "is not valid TOML"),
        ("memory_gib = 32", 'memory_gib = "32"', "memory_gib = '32'"),
        ("memory_gib = 32", "memory_gib = true", "memory_gib = True"),
        ("sync_seconds = 2e-5", "sync_seconds = -1", "sync_seconds = -1: give a number of at least 0"),
        ("pcie_gb_per_second = 16", "pcie_gb_per_second = 0", "pcie_gb_per_second = 0: give a number"),
        ("[cpu]", "[[cpu]]", "cpu is not a table: write [cpu]"),
        ("[cpu]", "[gpu.cpu]", "lacks cpu"),
        ("[cpu]", "[cpu", "is not valid TOML"),
    ],
)
def test_malformed_file_has_its_sentence(old: str, new: str, sentence: str) -> None:
    """Prevents a placement from numbers that nobody wrote: no key is guessed, ignored or defaulted."""
    assert old in EXAMPLE
    assert sentence in refusal(EXAMPLE.replace(old, new, 1))


@pytest.mark.parametrize("value", ["3", "[3]", "[]", '"none"'])
def test_gpus_that_are_no_tables(value: str) -> None:
    """A machine that has silently lost its GPU."""
    text = CPU_ONLY.replace("[cpu]", f"gpu = {value}\n[cpu]")
    assert "gpu is not a table: write [gpu], or [[gpu]] once for each" in refusal(text)


@pytest.mark.parametrize(
    ("preset", "lanes_bytes_per_second"), [("rtx2080ti-i7-12700k", 16 * 0.985e9), ("rtx4090-i9-13900k", 16 * 1.969e9)]
)
def test_presets_state_pcie_in_one_direction(preset: str, lanes_bytes_per_second: float) -> None:
    """Prevents transfers at twice the speed: the paper prints both directions together, and transfers take turns."""
    gpu = read_hardware(preset).gpu
    assert gpu and gpu.pcie_bytes_per_second == pytest.approx(lanes_bytes_per_second, rel=0.05)


@pytest.mark.parametrize("key", ["sync_seconds", "scratch_gib"])
def test_zero_is_allowed_where_it_means_something(key: str) -> None:
    """Prevents refusing an idealised machine."""
    lines = [f"{key} = 0" if line.startswith(key) else line for line in EXAMPLE.splitlines()]
    gpu = parse_hardware("\n".join(lines), "mine.toml").gpu
    assert gpu and 0 in (gpu.sync_seconds, gpu.scratch_bytes)


@pytest.mark.parametrize("name", ["no-such-machine", "", ".", "x" * 5000, "a\0b", "rtx4090-i9-13900k.toml"])
def test_unknown_name_lists_the_presets(name: str) -> None:
    """Prevents a misspelt preset from looking like a missing file alone."""
    with pytest.raises(
        HardwareError,
        match="neither a hardware file nor a preset: give a TOML file or one of a100-80gb-epyc-7742, cpu-only, ",
    ):
        read_hardware(name)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Prevents UnicodeDecodeError."""
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match="is not UTF-8 text: give a TOML file"):
        read_hardware(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize("text", [EXAMPLE, CPU_ONLY, TWO_GPUS, OF_OLD])
def test_written_files_are_read_back(tmp_path: Path, text: str) -> None:
    """A measured machine that the reader refuses, or that has become another one."""
    hardware = parse_hardware(text, "mine.toml")
    path = tmp_path / "mine.toml"
    write_hardware(path, hardware, {"cpu.memory_gib": "counted"})
    assert parse_hardware(path.read_text("utf-8"), "mine.toml") == hardware
    assert "memory_gib = 32  # counted" in path.read_text("utf-8")


def test_any_name_can_be_written(tmp_path: Path) -> None:
    """TOML broken by the name of a processor."""
    hardware = replace(parse_hardware(CPU_ONLY, "mine.toml"), cpu_name='A "B" \\ C™ \x07')
    write_hardware(tmp_path / "mine.toml", hardware, {})
    assert read_hardware(str(tmp_path / "mine.toml")).cpu_name == 'A "B" \\ C™ '


def test_nothing_is_written_that_cannot_be_read(tmp_path: Path) -> None:
    """A file of nonsense under the name of a measured machine."""
    with pytest.raises(HardwareError):
        write_hardware(
            tmp_path / "mine.toml", replace(parse_hardware(CPU_ONLY, "mine.toml"), cpu_bytes_per_second=0.0), {}
        )
    assert list(tmp_path.iterdir()) == []
