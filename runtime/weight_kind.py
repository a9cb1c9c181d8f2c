"""What the weights of a run are held in: as asked for, as placed, or as stored."""

from typing import TYPE_CHECKING

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.solver.gpuidx import GpuIndex

from .kernels.packed_matrix import KINDS, Kind

if TYPE_CHECKING:
    import torch

FLOATING_POINT: tuple[Kind, ...] = ("float32", "bfloat16", "float16")


def choose_kind(wanted: str, index: GpuIndex | None, hot: "torch.device", checkpoint: Checkpoint | GgufModel) -> Kind:
    """*wanted*, unless it is "auto": then the type of the placement where a GPU is in use, because its bytes were counted
    in it, and else the type of the checkpoint.

    Nothing is lost by staying with what is stored: products are computed in float32 on a CPU whatever the weights' type.
    """
    if wanted != "auto":
        assert wanted in KINDS, "the command offers no other"
        return wanted
    quantised = checkpoint.quantised_kind() if isinstance(checkpoint, GgufModel) else None
    placed = index.dtype if index and hot.type != "cpu" else None
    if placed in FLOATING_POINT:
        return placed
    if quantised and placed == quantised:
        return quantised
    if placed:
        note(f"the placement was made for {placed} weights, and the model is stored in others: using those")
    stored = quantised or str(checkpoint.dtype()).removeprefix("torch.")
    return stored if stored in KINDS else "float32"
