"""Who takes part in a benchmark, out of what was asked for: recipes, one entrant per row of the report, conditions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pi_toolkit.profiler.errors import BenchmarkError, GenerationError
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.workspace import ModelRecord, Workspace, read_model

from . import conditions
from .bench_contenders import LlamaCppRecipe, OwnRecipe, ReadRecipe, TransformersRecipe
from .bench_worker import Recipe, Worker
from .benchmark import Entrant
from .engine import check_context, has_predictors
from .kernels.sparse_ffn_reference import Mode

READ_BYTES = 2**29  # sixteen times a large L3 cache


@dataclass(frozen=True)
class Baseline:
    """Whom to compare with: llama.cpp on a dense file, or transformers on a directory or hub id."""

    kind: Literal["llama.cpp", "transformers"]
    model: str


@dataclass(frozen=True)
class Setup:
    """What ``pi-bench`` was asked for; None takes all modes that are possible, or as many positions as are needed."""

    workspace: Workspace
    modes: tuple[Mode, ...] | None
    dtypes: tuple[str, ...]
    baselines: tuple[Baseline, ...]
    densities: tuple[float, ...] | None
    threads: int
    lengths: tuple[int, ...]
    steps: int
    context: int | None
    device: str
    model: str | None


@dataclass(frozen=True)
class Recipes:
    """``own`` per dtype, then ``others``; ``reader`` measures the limit."""

    reader: ReadRecipe
    own: list[OwnRecipe]
    others: list[Recipe]
    modes: tuple[Mode, ...]

    @property
    def all(self) -> list[Recipe]:
        return [self.reader, *self.own, *self.others]


def make_recipes(setup: Setup) -> Recipes:
    """Check what can be checked without loading anything.

    Raises ``GenerationError`` for prompts beyond the model's positions and ``BenchmarkError`` for a baseline that is
    another model.
    """
    record = read_model(setup.workspace)
    record.shape.require_silence()
    context = _context(setup, record)
    modes = _modes(setup)
    own = [
        OwnRecipe(setup.workspace.path, dtype, context, setup.threads, setup.device, "predicted" in modes, setup.model)
        for dtype in setup.dtypes
    ]
    others = [_baseline(baseline, setup, record, context) for baseline in setup.baselines]
    return Recipes(ReadRecipe(setup.threads, READ_BYTES), own, others, modes)


def make_entrants(recipes: Recipes, workers: Sequence[Worker], densities: tuple[float, ...] | None) -> list[Entrant]:
    """Rows of the report: our modes by dtype, at each density if there are any, then the baselines.

    Dense reads everything at any density and runs once.
    """
    entrants = []
    for worker in workers[: len(recipes.own)]:
        kind = worker.facts["kind"]
        for mode in recipes.modes:
            for density in (None,) if mode == "dense" or not densities else densities:
                name = f"{mode} {kind}" + ("" if density is None else f" at {100 * density:g} %")
                entrants.append(Entrant(name, worker, kind, mode, density))
    for recipe, worker in zip(recipes.others, workers[len(recipes.own) :], strict=True):
        kind = worker.facts["kind"]
        entrants.append(Entrant(f"{recipe.title} {kind}", worker, kind))
    return entrants


def describe_conditions(setup: Setup) -> dict[str, Any]:
    """Machine, load, versions, and the sizes of the files that take part."""
    files = [Path(baseline.model) for baseline in setup.baselines if baseline.kind == "llama.cpp"]
    if setup.workspace.is_file:
        files.insert(0, setup.workspace.path)
    sizes = {file.name: file.stat().st_size for file in files}
    return conditions.describe(setup.threads) | {"file_bytes": sizes}


def add_worker_facts(described: dict[str, Any], recipes: Recipes, workers: Sequence[Worker]) -> None:
    """Versions, instruction sets and bytes in memory, which only the workers know."""
    described["instruction_sets"], described["weight_bytes"] = {}, {}
    for recipe, worker in zip([*recipes.own, *recipes.others], workers, strict=True):
        facts = worker.facts
        if "version" in facts:
            package, version = facts["version"].split()
            described["versions"][package] = version
        for key, where in (("instruction_set", "instruction_sets"), ("weight_bytes", "weight_bytes")):
            if key in facts:
                described[where][recipe.title] = facts[key]


def _context(setup: Setup, record: ModelRecord) -> int:
    needed, positions = max(max(setup.lengths) + 1, min(setup.lengths) + setup.steps + 1), record.shape.max_positions
    check_context(record.shape, setup.context)
    if needed > (setup.context or positions):
        what = f"the context of {setup.context}" if setup.context else f"the model's {positions} positions"
        raise GenerationError(
            f"prompts of up to {max(setup.lengths)} tokens and {setup.steps} decoded ones need {needed} positions, more than "
            f"{what}: lower -p or -n" + (", or raise --ctx" if setup.context else "")
        )
    return setup.context or needed


def _modes(setup: Setup) -> tuple[Mode, ...]:
    workspace = setup.workspace
    predictors = has_predictors(workspace)
    if setup.modes and "predicted" in setup.modes and not predictors:
        raise GenerationError(
            f"{str(workspace.path)!r} has no predictors for --mode predicted: run pi-train-predictor, or leave it out"
        )
    return setup.modes or (("dense", "exact", "predicted") if predictors else ("dense", "exact"))


def _baseline(baseline: Baseline, setup: Setup, record: ModelRecord, context: int) -> Recipe:
    if baseline.kind == "transformers":
        if Path(baseline.model).is_absolute() and not Path(baseline.model).is_dir():
            raise BenchmarkError(
                f"there is no directory {baseline.model!r} for transformers: give a Hugging Face directory"
            )
        # F16 products take torch some 600 times longer on a CPU, so that BF16 stands in for it.
        dtype = "float32" if setup.dtypes == ("float32",) else "bfloat16"
        return TransformersRecipe(baseline.model, dtype, setup.threads)
    path = Path(baseline.model)
    if not path.is_file():
        raise BenchmarkError(f"there is no file {baseline.model!r} for llama.cpp: write a dense one with pi-convert")
    theirs, ours = GgufModel(path).shape, record.shape
    sizes = [(shape.vocabulary_size, shape.hidden_size, shape.ffn_sizes, shape.num_heads) for shape in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise BenchmarkError(
            f"{baseline.model!r} is a model of other sizes than {str(setup.workspace.path)!r}: convert the same one with "
            "pi-convert"
        )
    return LlamaCppRecipe(path, context, setup.threads)
