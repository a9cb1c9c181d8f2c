"""Hardware descriptions: one TOML file per machine, the numbers a placement is computed from.

    format = "powerinfer-toolkit/hardware"
    version = 1
    name = "rtx4090-i9-13900k"

    [cpu]                                  [gpu]      (absent on a machine without one; [[gpu]] once for each of several)
    name = "…"                             name = "…"
    memory_gib = 192                       memory_gib = 24
    bandwidth_gb_per_second = 67.2         bandwidth_gb_per_second = 1008
                                           pcie_gb_per_second = 32    in one direction
                                           sync_seconds = 2e-5     one CPU–GPU synchronisation, without the transfer
                                           context_gib = 0.5       what the driver and the loaded kernels take
                                           scratch_gib = 0.125     buffers of a prompt
                                           margin_gib = 0.125      left free

GiB are 2^30 bytes, GB/s are 10^9 bytes per second. Unknown keys are errors. Comments carry each number's source. In place
of the last three a file may give their sum as ``reserve_gib``.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .atomic_write import atomic_file
from .errors import HardwareError, shown

FORMAT, VERSION = "powerinfer-toolkit/hardware", 1
GIB = 2**30
LARGEST_NUMBER = 1e9  # an exbibyte in GiB: beyond it only mistakes lie, and bytes leave the 64 bits of a file's key
SMALLEST_NUMBER = 1e-9  # of sizes and speeds: about a byte, and times stay finite
_CPU_KEYS = {"name", "memory_gib", "bandwidth_gb_per_second"}
_GPU_KEYS = _CPU_KEYS | {"pcie_gb_per_second", "sync_seconds"}
_RESERVE_KEYS = {"context_gib", "scratch_gib", "margin_gib"}


@dataclass(frozen=True)
class Gpu:
    """``context_bytes``, ``scratch_bytes`` and ``margin_bytes`` of its memory are not there for a model."""

    name: str
    memory_bytes: int
    bytes_per_second: float
    pcie_bytes_per_second: float
    sync_seconds: float
    context_bytes: int
    scratch_bytes: int = 0
    margin_bytes: int = 0

    @property
    def reserve_bytes(self) -> int:
        return self.context_bytes + self.scratch_bytes + self.margin_bytes


@dataclass(frozen=True)
class Hardware:
    """One machine with any number of GPUs."""

    name: str
    cpu_name: str
    cpu_memory_bytes: int
    cpu_bytes_per_second: float
    gpus: tuple[Gpu, ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The first one; None on a machine without."""
        return self.gpus[0] if self.gpus else None


def preset_names() -> list[str]:
    """Names of the descriptions that ship with the toolkit."""
    folder = resources.files(__package__) / "hardware_presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_hardware(name_or_file: str) -> Hardware:
    """A preset by name or a file by path; raises ``HardwareError``."""
    if name_or_file in preset_names():
        text = (resources.files(__package__) / "hardware_presets" / f"{name_or_file}.toml").read_text("utf-8")
        return parse_hardware(text, name_or_file)
    try:
        text = Path(name_or_file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise HardwareError(f"{name_or_file!r} is not UTF-8 text: give a TOML file") from error
    except PermissionError:
        raise
    except (OSError, ValueError):  # not there, a folder, or no possible file name at all
        raise HardwareError(
            f"{name_or_file!r} is neither a hardware file nor a preset: give a TOML file or one of "
            f"{', '.join(preset_names())}"
        ) from None
    return parse_hardware(text, name_or_file)


def nearest_preset(gpu_bytes: float) -> Hardware:
    """The preset whose GPU memory is nearest to *gpu_bytes*; of equals the one with the fastest memory."""
    presets = [(hardware, hardware.gpu) for hardware in map(read_hardware, preset_names()) if hardware.gpu]
    return min(presets, key=lambda pair: (abs(pair[1].memory_bytes - gpu_bytes), -pair[1].bytes_per_second))[0]


def parse_hardware(text: str, source: str) -> Hardware:
    """The description in TOML *text*; *source* names it in errors. Raises ``HardwareError``."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, tables nested as deep
        raise HardwareError(f"hardware {source!r} is not valid TOML ({error}): mend the file") from error
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise HardwareError(f"hardware {source!r} does not state format {FORMAT!r} version {VERSION}: add both keys")
    _check_keys(content, {"format", "version", "name", "cpu"}, {"gpu"}, source, "")
    cpu = _table(content, "cpu", _CPU_KEYS, source)
    return Hardware(
        name=_text(content, "name", source),
        cpu_name=_text(cpu, "name", source),
        cpu_memory_bytes=_bytes(cpu, "memory_gib", source),
        cpu_bytes_per_second=_number(cpu, "bandwidth_gb_per_second", source) * 1e9,
        gpus=tuple(_parse_gpu(table, source) for table in _gpu_tables(content, source)),
    )


def _gpu_tables(content: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    """One table, an array of tables, or none."""
    tables = content.get("gpu", [])
    tables = tables if isinstance(tables, list) else [tables]
    if not all(isinstance(table, dict) for table in tables) or (not tables and "gpu" in content):
        raise HardwareError(f"hardware {source!r}: gpu is not a table: write [gpu], or [[gpu]] once for each")
    return tables


def _parse_gpu(gpu: Mapping[str, Any], source: str) -> Gpu:
    reserve = {"reserve_gib"} if "reserve_gib" in gpu else _RESERVE_KEYS
    _check_keys(gpu, _GPU_KEYS | reserve, set(), source, "[gpu] ")
    sizes = {key: _bytes(gpu, key, source, allow_zero=True) for key in reserve}
    return Gpu(
        name=_text(gpu, "name", source),
        memory_bytes=_bytes(gpu, "memory_gib", source),
        bytes_per_second=_number(gpu, "bandwidth_gb_per_second", source) * 1e9,
        pcie_bytes_per_second=_number(gpu, "pcie_gb_per_second", source) * 1e9,
        sync_seconds=_number(gpu, "sync_seconds", source, allow_zero=True),
        context_bytes=sizes.get("context_gib", sizes.get("reserve_gib", 0)),
        scratch_bytes=sizes.get("scratch_gib", 0),
        margin_bytes=sizes.get("margin_gib", 0),
    )


def write_hardware(path: Path, hardware: Hardware, sources: Mapping[str, str]) -> None:
    """Write *hardware* as a TOML file, atomically; *sources* are the comments, by ``cpu.memory_gib`` and the like.

    Raises ``HardwareError`` for numbers that no reader would take.
    """
    text = format_hardware(hardware, sources)
    parse_hardware(text, str(path))
    with atomic_file(path) as temporary:
        temporary.write_text(text, "utf-8")


def format_hardware(hardware: Hardware, sources: Mapping[str, str]) -> str:
    """Inverse of :func:`parse_hardware` up to the digits a person wants to read."""
    cpu: dict[str, str | float] = {
        "name": hardware.cpu_name,
        "memory_gib": hardware.cpu_memory_bytes / GIB,
        "bandwidth_gb_per_second": hardware.cpu_bytes_per_second / 1e9,
    }
    lines = [f"format = {_toml(FORMAT)}", f"version = {VERSION}", f"name = {_toml(hardware.name)}"]
    lines += _table_lines("[cpu]", cpu, sources)
    for gpu in hardware.gpus:
        lines += _table_lines("[gpu]" if len(hardware.gpus) == 1 else "[[gpu]]", _gpu_entries(gpu), sources)
    return "\n".join(lines) + "\n"


def _gpu_entries(gpu: Gpu) -> dict[str, str | float]:
    return {
        "name": gpu.name,
        "memory_gib": gpu.memory_bytes / GIB,
        "bandwidth_gb_per_second": gpu.bytes_per_second / 1e9,
        "pcie_gb_per_second": gpu.pcie_bytes_per_second / 1e9,
        "sync_seconds": gpu.sync_seconds,
        "context_gib": gpu.context_bytes / GIB,
        "scratch_gib": gpu.scratch_bytes / GIB,
        "margin_gib": gpu.margin_bytes / GIB,
    }


def _table_lines(header: str, entries: Mapping[str, str | float], sources: Mapping[str, str]) -> list[str]:
    table = header.strip("[]")
    lines = ["", header]
    for key, value in entries.items():
        source = sources.get(f"{table}.{key}")
        lines.append(f"{key} = {_toml(value)}" + (f"  # {source}" if source else ""))
    return lines


def _toml(value: str | float) -> str:
    """A JSON string without control characters is a TOML one; numbers to four digits or more."""
    if isinstance(value, str):
        return json.dumps("".join(sign for sign in value if sign.isprintable()), ensure_ascii=False)
    return f"{value:.6g}"


def _table(content: Mapping[str, Any], key: str, keys: set[str], source: str) -> Mapping[str, Any]:
    table = content[key]
    if not isinstance(table, dict):
        raise HardwareError(f"hardware {source!r}: {key} is not a table: write [{key}]")
    _check_keys(table, keys, set(), source, f"[{key}] ")
    return table


def _check_keys(content: Mapping[str, Any], required: set[str], optional: set[str], source: str, where: str) -> None:
    if missing := sorted(required - set(content)):
        raise HardwareError(f"hardware {source!r}: {where}lacks {', '.join(missing)}: add it")
    if unknown := sorted(set(content) - required - optional):
        raise HardwareError(f"hardware {source!r}: {where}has unknown keys {', '.join(unknown)}: remove them")


def _text(table: Mapping[str, Any], key: str, source: str) -> str:
    if not isinstance(table[key], str) or not table[key].isprintable():
        raise HardwareError(f"hardware {source!r}: {key} is not printable text: put a name in quotes")
    return table[key]


def _number(table: Mapping[str, Any], key: str, source: str, allow_zero: bool = False) -> float:
    value = table[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    smallest = 0 if allow_zero else SMALLEST_NUMBER
    if not number or not smallest <= value < LARGEST_NUMBER:
        raise HardwareError(
            f"hardware {source!r}: {key} = {shown(value)}: give a number of at least {smallest:g} and "
            f"below {LARGEST_NUMBER:g}"
        )
    return float(value)


def _bytes(table: Mapping[str, Any], key: str, source: str, allow_zero: bool = False) -> int:
    """Of a size in GiB."""
    return int(_number(table, key, source, allow_zero) * GIB)
