"""The conditions of a measurement: processor, cores, memory, what else is running, versions."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.this_machine import cpu_name, memory_bytes

BUSY_LOAD = 0.5  # processes that want a core at once, on average over a minute; an idle machine has about 0.1


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Of the last minute; None where the system does not count it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def warn_if_busy() -> None:
    load = load_average()
    if load is not None and load > BUSY_LOAD:
        note(f"load average {load:.1f}: something else is or was running, so that these figures may be too low")


class OthersLoad:
    """How many cores everything but *processes* used since this was made.

    A load average lags by a minute and counts the benchmark itself; the counters of Linux do neither.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._began, self._before = time.perf_counter(), self._others_seconds()

    def cores(self) -> float | None:
        """None where the system does not tell."""
        now = self._others_seconds()
        if now is None or self._before is None:
            return None
        return max(0.0, now - self._before) / (time.perf_counter() - self._began)

    def _others_seconds(self) -> float | None:
        try:
            ticks = os.sysconf("SC_CLK_TCK")
            # user, nice, system, idle, iowait, irq, softirq, steal
            fields = [int(part) for part in Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]]
            busy = sum(fields) - fields[3] - fields[4]
            for process in self._processes:
                after_name = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()
                busy -= int(after_name[11]) + int(after_name[12])
            return busy / ticks
        except (OSError, ValueError, IndexError, AttributeError):
            return None


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
