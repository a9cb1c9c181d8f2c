"""What the PowerInfer paper (arXiv 2312.12456v2) prints about speed, what the simulation makes of it, and the fit.

Two rows fit the two constants; every other row is a test of the model. Speeds of figures were read off their data labels.
Where a bar could only be read as a range, errors are against its middle.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import combinations

import numpy as np

from pi_toolkit.profiler.hardware import read_hardware

from .simulated_model import CONTEXT, SimulatedModel, model_facts, simulated_model
from .simulated_systems import System, unit_devices
from .simulation import FITTED, FittedConstants, ReadTimes, SimulatedSpeed, read_times
from .token_time import UnitDevices

PC_HIGH, PC_LOW, A100 = "rtx4090-i9-13900k", "rtx2080ti-i7-12700k", "a100-80gb-epyc-7742"
PROMPT_TOKENS = 64  # the paper's inputs have 8 to 128 tokens
READING_ERROR = 0.1  # of a figure's label, tokens per second
_LOWEST_SHARE, _HIGHEST_SHARE, _STEPS = 0.01, 1.0, 30


@dataclass(frozen=True)
class PublishedSpeed:
    """Tokens per second between ``low`` and ``high``, prompt included. ``baseline``: the speed is that many times the one
    of this system, in place of tokens per second. ``fitted``: used to fit the constants."""

    source: str
    hardware: str
    model: str
    dtype: str
    system: System
    output_tokens: int
    low: float
    high: float
    baseline: System | None = None
    fitted: bool = False

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class ComparedSpeed:
    """A published figure and the predicted one; ``error`` is relative to the published."""

    published: PublishedSpeed
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published.middle - 1


def _figure_13() -> Iterator[PublishedSpeed]:
    """INT4 on PC-High, outputs of 8, 128 and 512 tokens."""
    rows: dict[str, dict[System, tuple[float, float, float]]] = {
        "opt-66b": {"powerinfer": (7.6, 12, 12), "llama.cpp": (1.9, 2.9, 2.9)},
        "opt-175b": {"powerinfer": (1.2, 1.8, 1.9), "llama.cpp": (0.5, 0.7, 0.7)},
        "falcon-40b": {"powerinfer": (22, 27, 29), "llama.cpp": (15, 17, 17)},
        "llama2-70b": {"powerinfer": (6.4, 9.5, 10), "llama.cpp": (2.4, 3.2, 3.2)},
    }
    for model, systems in rows.items():
        for system, speeds in systems.items():
            for tokens, speed in zip((8, 128, 512), speeds, strict=True):
                fitted = tokens == 512 and system == "powerinfer" and model in ("falcon-40b", "llama2-70b")
                yield PublishedSpeed("figure 13", PC_HIGH, model, "q4_0", system, tokens, speed, speed, fitted=fitted)


def _f16(
    source: str, hardware: str, model: str, system: System, tokens: int, low: float, high: float | None = None
) -> PublishedSpeed:
    return PublishedSpeed(source, hardware, model, "float16", system, tokens, low, low if high is None else high)


def _ablation(hardware: str, model: str, *ratios: float) -> Iterator[PublishedSpeed]:
    """Figure 15: how many times llama.cpp's speed, adding one part of the system after the other."""
    systems: tuple[System, ...] = ("sparse layers", "random", "powerinfer")
    for system, ratio in zip(systems, ratios, strict=True):
        yield PublishedSpeed("figure 15", hardware, model, "float16", system, 512, ratio, ratio, baseline="llama.cpp")


PUBLISHED: tuple[PublishedSpeed, ...] = (
    *_figure_13(),
    _f16("figure 10", PC_HIGH, "opt-30b", "powerinfer", 512, 16.06),
    _f16("figure 10", PC_HIGH, "opt-30b", "llama.cpp", 512, 1.6),
    _f16("figure 10", PC_HIGH, "falcon-40b", "powerinfer", 128, 11),
    _f16("figure 10", PC_HIGH, "falcon-40b", "powerinfer", 512, 13),
    _f16("figure 10", PC_HIGH, "falcon-40b", "llama.cpp", 512, 1.1),
    _f16("figure 10", PC_HIGH, "opt-66b", "powerinfer", 512, 2.0, 2.3),
    _f16("figure 10", PC_HIGH, "opt-66b", "llama.cpp", 512, 0.6),
    _f16("figure 10", PC_HIGH, "llama2-70b", "powerinfer", 512, 2.3, 2.7),
    _f16("figure 10", PC_HIGH, "llama2-70b", "llama.cpp", 512, 0.6),
    _f16("table 8", PC_HIGH, "opt-30b", "powerinfer", 512, 12.0),
    _f16("table 8", PC_HIGH, "opt-30b", "llama.cpp", 512, 1.1),
    _f16("table 8", PC_HIGH, "yi-34b", "powerinfer", 512, 1.7),
    _f16("table 8", PC_HIGH, "yi-34b", "llama.cpp", 512, 1.0),
    _f16("table 8", PC_LOW, "llama2-13b-swiglu", "powerinfer", 512, 3.1),
    _f16("table 8", PC_LOW, "llama2-13b-swiglu", "llama.cpp", 512, 2.1),
    _f16("table 5", PC_LOW, "bamboo-7b", "powerinfer", 512, 1000 / 38.1, 1000 / 36.7),
    _f16("figure 3", A100, "opt-30b", "gpu only", 512, 1000 / 45),
    *_ablation(PC_HIGH, "falcon-40b", 3.32, 7.80, 11.69),
    *_ablation(PC_LOW, "bamboo-7b", 1.87, 2.60, 3.62),
)


@lru_cache(maxsize=1)  # tens of megabytes each; the rows of one model follow each other
def _model(name: str, dtype: str) -> SimulatedModel:
    return simulated_model(model_facts(name), dtype, CONTEXT)


@cache
def _unit_devices(name: str, dtype: str, system: System, hardware: str) -> tuple[UnitDevices, float]:
    return unit_devices(_model(name, dtype), system, read_hardware(hardware))


@cache
def _read_times(name: str, dtype: str, tokens_read: int, system: System, hardware: str) -> ReadTimes:
    model = replace(_model(name, dtype), tokens_read=tokens_read)
    return read_times(model, system, read_hardware(hardware), *_unit_devices(name, dtype, system, hardware))


def _simulated(row: PublishedSpeed, system: System, constants: FittedConstants) -> SimulatedSpeed:
    """With as many tokens in the KV cache as there are in the middle of the answer."""
    tokens_read = PROMPT_TOKENS + row.output_tokens // 2
    return _read_times(row.model, row.dtype, tokens_read, system, row.hardware).speed(constants)


def _speed(row: PublishedSpeed, system: System, constants: FittedConstants) -> float:
    return _simulated(row, system, constants).tokens_per_second_with_prompt(row.output_tokens)


def compare(constants: FittedConstants = FITTED, rows: Iterable[PublishedSpeed] = PUBLISHED) -> list[ComparedSpeed]:
    """Published figures beside the predicted ones."""
    compared = []
    for row in rows:
        speed = _speed(row, row.system, constants)
        compared.append(ComparedSpeed(row, speed / _speed(row, row.baseline, constants) if row.baseline else speed))
    return compared


def median_error(compared: list[ComparedSpeed]) -> float:
    """Of the speeds that were not used for fitting."""
    rows = [row for row in compared if not row.published.fitted and row.published.baseline is None]
    return float(np.median([abs(row.error) for row in rows]))


def wrong_orders(compared: list[ComparedSpeed]) -> list[tuple[ComparedSpeed, ComparedSpeed]]:
    """Pairs of one figure that are predicted in the other order: two systems on one model, or two models on one system.

    Pairs whose published ranges touch within the error of reading a label have no order.
    """
    return [(a, b) for a, b in combinations(compared, 2) if _comparable(a, b) and _order(a, b) < 0]


def _comparable(a: ComparedSpeed, b: ComparedSpeed) -> bool:
    first, second = a.published, b.published
    same = ("source", "hardware", "dtype", "output_tokens")
    if any(getattr(first, key) != getattr(second, key) for key in same):
        return False
    apart = max(first.low, second.low) - min(first.high, second.high) > 2 * READING_ERROR
    return apart and (first.model == second.model or first.system == second.system)


def _order(a: ComparedSpeed, b: ComparedSpeed) -> float:
    return (a.published.middle - b.published.middle) * (a.predicted - b.predicted)


def fit() -> FittedConstants:
    """The two constants at which the two fitted rows are predicted as published."""
    falcon, llama = (row for row in PUBLISHED if row.fitted)
    low, high = _LOWEST_SHARE, _HIGHEST_SHARE
    for _ in range(_STEPS):
        middle = FittedConstants(_overhead(falcon, share := (low + high) / 2), share)
        low, high = (share, high) if _speed(llama, llama.system, middle) < llama.middle else (low, share)
    return FittedConstants(_overhead(falcon, high), high)


def _overhead(row: PublishedSpeed, share: float) -> float:
    """Every layer has it once a token and once in the prompt."""
    without = _simulated(row, row.system, FittedConstants(0.0, share))
    tokens = row.output_tokens
    missing = tokens / row.middle - tokens / without.tokens_per_second_with_prompt(tokens)
    return missing / (tokens + 1) / len(without.time.layer_seconds)
