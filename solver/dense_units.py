"""The paper's rule for what runs on every token: attention, predictors and head go on GPUs before any neuron."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_toolkit.profiler.command_line import readable_bytes
from pi_toolkit.profiler.errors import PlacementError

from .gpu_assignment import home_gpus
from .memory import UnitBytes
from .token_time import CPU


@dataclass(frozen=True)
class DensePlacement:
    """The device of each unit, int [layers], and the bytes they take: on each GPU, and with the embedding on the CPU.

    ``homes``: the GPU that each layer belongs to.
    """

    attention: np.ndarray
    predictor: np.ndarray
    head: int
    gpu_bytes: tuple[int, ...]
    cpu_bytes: int
    homes: np.ndarray


def place_dense_units(
    units: UnitBytes, budgets: Sequence[int], neuron_bytes: Sequence[int], cpu_memory_bytes: int | None = None
) -> DensePlacement:
    """Attention with KV cache and predictor of each layer in layer order, then the head: each goes on a GPU if it fits into
    what the ones before it left, and otherwise stays on the CPU.

    *neuron_bytes*: per layer, so that neighbouring layers share the GPUs fairly. Raises ``PlacementError`` when what stays on
    the CPU exceeds *cpu_memory_bytes*.
    """
    layers, gpus = len(units.attention), len(budgets)
    rooms = list(budgets)
    sizes = [a + p + n for a, p, n in zip(units.attention, units.predictor, neuron_bytes, strict=True)]
    homes = home_gpus(sizes, budgets) if gpus else np.zeros(layers, dtype=np.int64)
    attention, predictor = np.full(layers, CPU), np.full(layers, CPU)

    def takes(num_bytes: int, choices: Sequence[int]) -> int:
        for gpu in choices:
            if num_bytes <= rooms[gpu]:
                rooms[gpu] -= num_bytes
                return int(gpu)
        return CPU

    for layer in range(layers):
        from_home = [int(homes[layer]), *(gpu for gpu in range(gpus) if gpu != homes[layer])] if gpus else []
        attention[layer] = takes(units.attention[layer], from_home)
        if units.predictor[layer]:
            beside = [int(attention[layer])] if attention[layer] != CPU else from_home
            predictor[layer] = takes(units.predictor[layer], beside)
    head = takes(units.head, range(gpus)[::-1])
    used = tuple(budget - room for budget, room in zip(budgets, rooms, strict=True))
    cpu_bytes = units.embedding + sum(units.attention) + sum(units.predictor) - sum(used)
    # On a GPU a tied head is a copy; on the CPU it is the embedding itself.
    cpu_bytes += units.head if head != CPU or not units.head_is_embedding else 0
    if cpu_memory_bytes is not None and cpu_bytes > cpu_memory_bytes:
        raise PlacementError(
            f"embeddings, attention and head of {readable_bytes(cpu_bytes)} on the CPU exceed its memory of "
            f"{readable_bytes(cpu_memory_bytes)}: use a smaller --dtype, a shorter --ctx or more --vram"
        )
    return DensePlacement(attention, predictor, head, used, cpu_bytes, homes)
