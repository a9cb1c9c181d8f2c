"""What a model takes on a GPU: promised before it is loaded, named when it does not fit, compared when it is there."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pi_toolkit.profiler.command_line import note, readable_bytes
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.profiler.hardware import GIB

if TYPE_CHECKING:
    import torch

# Left free on a GPU that --vram-budget may fill: what kernels and the driver take beside the model.
MARGIN_BYTES = 2**28

Loaded = TypeVar("Loaded")


class PartDoesNotFit(HardwareError):
    """A GPU had no room for ``part`` of a model, which is otherwise loaded."""

    def __init__(self, part: str) -> None:
        super().__init__(f"{part} did not fit in the GPU's memory: lower --vram-budget")
        self.part = part


@contextmanager
def allocating(part: str) -> Iterator[None]:
    """A GPU that runs out of memory inside raises :class:`PartDoesNotFit` with this part."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PartDoesNotFit(part) from error


def loaded_or_freed(load: Callable[[], Loaded], workspace: str, free_bytes: int) -> Loaded:
    """What *load* returns. Where a part does not fit, all that was loaded is freed before the error, which names the part
    and the ``pi-place`` line for the *free_bytes* that there were."""
    try:
        return load()
    except PartDoesNotFit as error:
        part = error.part
    # Here the error and its frames, which hold the tensors, are gone.
    gc.collect()
    free_cached_memory()
    gib = max(0.1, int(10 * 0.95 * free_bytes / GIB) / 10)
    raise HardwareError(
        f"{part} did not fit in the GPU's memory, of which {readable_bytes(free_bytes)} were free: run pi-place {workspace} "
        f"--vram {gib:g}, or lower --ctx"
    )


def free_cached_memory() -> None:
    """Give back what torch keeps for later."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def usable_bytes(budget_gib: float | None, free_bytes: int | None) -> int:
    """Bytes for a model: the budget, but no more than what other processes leave free; without a budget, or with a negative
    one, all of that. *free_bytes* None: no GPU here, and the budget is that of an imagined one."""
    if free_bytes is None:
        if budget_gib is None or budget_gib < 0:
            raise HardwareError("there is no GPU whose memory could be placed on: give --vram-budget in GiB")
        return int(budget_gib * GIB)
    room = max(0, free_bytes - MARGIN_BYTES)
    return room if budget_gib is None or budget_gib < 0 else min(int(budget_gib * GIB), room)


def report_allocation(
    planned: "Sequence[tuple[torch.device, int]]", allocated_bytes: "Callable[[torch.device], int]"
) -> None:
    """Say for every GPU what was planned and what is allocated, as *allocated_bytes* measures it."""
    for device, planned_bytes in planned:
        measured = allocated_bytes(device)
        difference = (measured - planned_bytes) / max(planned_bytes, 1)
        note(
            f"{device}: {readable_bytes(planned_bytes)} planned, {readable_bytes(measured)} allocated ({difference:+.1%})"
        )
