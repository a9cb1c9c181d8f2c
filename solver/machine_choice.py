"""Which machine a placement is computed for: a preset, a file, or the machine this runs on."""

import subprocess
import sys

from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.profiler.hardware import GIB, Hardware, nearest_preset, read_hardware
from pi_toolkit.profiler.this_machine import has_gpu, measured_hardware_file

MEASURE = (sys.executable, "-m", "pi_toolkit.runtime.bench_cli", "--machine")


def resolve_hardware(name: str, vram: float | None) -> Hardware:
    """The machine by preset name or file, or with "auto" the one this runs on; announces what the user did not choose.

    *vram* are the GiB the user asked for. With "auto" this machine is measured once, by ``pi-bench --machine`` in a process
    of its own; where it has no GPU and *vram* was given, the placement is for some other machine, and speeds are those of
    the preset with the nearest GPU memory. Raises ``HardwareError``.
    """
    if name != "auto":
        machine = read_hardware(name)
        if machine.gpu is None and vram is not None:
            note(f"{machine.name} has no GPU: --vram is not used")
        return machine
    if vram is None or has_gpu() or measured_hardware_file().exists():
        machine = this_machine()
        if machine.gpu or vram is None:
            named = (
                f"speeds are those of this machine, a {machine.gpu.name}" if machine.gpu else "this machine has no GPU"
            )
            note(f"{named}: give another with --hardware")
            return machine
    machine = nearest_preset(vram * GIB)
    assert machine.gpu is not None
    note(
        f"no usable GPU here, so speeds are those of {machine.name} ({machine.gpu.memory_bytes / GIB:g} GiB): give yours "
        "with --hardware"
    )
    return machine


def this_machine() -> Hardware:
    """What ``pi-bench --machine`` measured here; measures now if it did not. Raises ``HardwareError``."""
    path = measured_hardware_file()
    if not path.exists():
        note("measuring this machine, once: pi-bench --machine")
        measure_this_machine()
    try:
        return read_hardware(str(path))
    except HardwareError as error:
        fault = error.message.rpartition(":")[0]
        raise HardwareError(f"{fault}: run pi-bench --machine to measure this machine again") from error


def measure_this_machine() -> None:
    """Run ``pi-bench --machine``, which writes the file; its progress goes to our stderr."""
    try:
        result = subprocess.run(MEASURE, stdout=subprocess.PIPE, check=False)
    except OSError as error:
        raise HardwareError(f"pi-bench cannot be started ({error}): give --hardware with a preset or file") from error
    if result.returncode:
        raise HardwareError("pi-bench --machine did not measure this machine: give --hardware with a preset or file")
