"""Several processes on one job, as ``torchrun --nproc-per-node 2 -m pi_toolkit.profiler …`` starts them.

Each process takes its share of the work, sums are made over all of them (gloo between CPUs, nccl between GPUs), and only
the first writes. A command that was started alone is a job of one process, for which none of this costs anything.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from .command_line import is_out_of_memory
from .errors import ToolkitError

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
PATIENCE = timedelta(minutes=30)  # with a process that loads its model more slowly than the others


class ProcessesError(ToolkitError):
    """The processes of one job cannot find each other, or one of them was lost."""


@dataclass(frozen=True)
class Processes:
    """The job seen from one of its processes: *rank* of *count*, *local_rank* on this machine."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every *count*-th of *items*, beginning with the *rank*-th."""
        return items[self.rank :: self.count]

    def local_device(self, name: str) -> str:
        """*name* of ``--device`` for this process: of several on one machine each gets a GPU of its own.

        Raises ``ProcessesError`` when one GPU is named for all of them.
        """
        if self.count == 1 or name == "cpu":
            return name
        if name.startswith("cuda:"):
            raise ProcessesError(f"--device {name} would put {self.count} processes on one GPU: use --device cuda")
        import torch

        return f"cuda:{self.local_rank}" if name == "cuda" or torch.cuda.is_available() else name

    def sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """The sum of every process's *tensor*, a new tensor where there are several; all must call."""
        if self.count == 1:
            return tensor
        import torch.distributed

        total = tensor.clone()
        with _others_may_be_lost():
            torch.distributed.all_reduce(total)
        return total

    def wait(self, device: "torch.device") -> None:
        """Return when all processes have called."""
        import torch

        self.sum(torch.zeros(1, device=device))

    def first_says(self, answer: bool, device: "torch.device") -> bool:
        """The first process's *answer*, in all of them; all must call."""
        if self.count == 1:
            return answer
        import torch.distributed

        told = torch.tensor([answer], dtype=torch.int32, device=device)
        with _others_may_be_lost():
            torch.distributed.broadcast(told, src=0)
        return bool(told.item())

    def require_same(self, what: str, value: str, device: "torch.device") -> None:
        """Raise ``ProcessesError`` in all of them unless every process has the same *value*; all must call."""
        if self.count == 1:
            return
        import torch.distributed

        mine = torch.tensor([zlib.crc32(value.encode())], dtype=torch.int64, device=device)
        first = mine.clone()
        with _others_may_be_lost():
            torch.distributed.broadcast(first, src=0)
        if self.sum((mine != first).long()).item():
            raise ProcessesError(
                f"the processes of this job do not have the same {what}: give every machine the same options and files"
            )


def this_process() -> Processes:
    """What ``torchrun`` says in the environment; raises ``ProcessesError`` when that makes no sense."""
    if "WORLD_SIZE" not in os.environ:
        return Processes()
    try:
        rank, count, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if not 0 <= rank < count or local < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise ProcessesError(
            "RANK, WORLD_SIZE and LOCAL_RANK are set to something other than torchrun does: unset them, or use torchrun"
        ) from None
    return Processes(rank, count, local)


@contextmanager
def connected(processes: Processes, device: "torch.device", job: object = None) -> Iterator[None]:
    """Inside the block the processes can call each other; *device* is where this one computes.

    Raises ``ProcessesError`` when they do not find each other, and in all of them when they were not asked for the same
    *job*, for example because the dtype was chosen by the memory of different machines.
    """
    if processes.count == 1:
        yield
        return
    import torch.distributed

    # Its functions keep the group of the time of their import as a default argument. Imported later, as transformers does,
    # they would keep gloo's threads alive to the end of the interpreter, which then aborts now and then.
    import torch.distributed.nn.functional

    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _others_may_be_lost():
        torch.distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        processes.require_same("model, options or dtype", str(job), device)
        yield
    except BaseException:
        if backend == "gloo":  # its threads abort an exit without this; nccl may wait here for a process that is gone
            torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


@contextmanager
def _others_may_be_lost() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ProcessesError(
            f"another process of this job ended or cannot be reached ({reason}): look for its own message above, then "
            "run the same command again, with --resume if it has that option"
        ) from error
