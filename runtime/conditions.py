"""The conditions of a measurement: processor, cores, memory, what else is running, versions."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from pi_toolkit.profiler.command_line import note

BUSY_LOAD = 0.5  # processes that want a core at once, on average over a minute; an idle machine has about 0.1


def cpu_name() -> str:
    """As /proc/cpuinfo says it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 * 2**30  # no POSIX: a common machine


def load_average() -> float | None:
    """Of the last minute; None where the system does not count it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def warn_if_busy() -> None:
    load = load_average()
    if load is not None and load > BUSY_LOAD:
        note(f"load average {load:.1f}: something else is or was running, so that these figures may be too low")


def describe(threads: int) -> dict[str, Any]:
    """What to print beside figures, for JSON."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": threads,
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": load_average(),
        "versions": {name: version for name in ("powerinfer-toolkit", "torch") if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
