"""From a workspace to a decoder that is ready to run: finds weights, predictors and placement, checks that they belong
together, and says on stderr what is missing and what that means."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.command_line import note, percent, progress_bar, readable_bytes
from pi_toolkit.profiler.device import resolve_device
from pi_toolkit.profiler.errors import GenerationError, HardwareError
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.token_windows import load_tokenizer, read_end_ids
from pi_toolkit.profiler.workspace import ModelRecord, Workspace, open_checkpoint, read_model
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.memory import DEFAULT_CONTEXT, unit_bytes

from .decoder import Decoder
from .gpu_memory import loaded_or_freed, report_allocation, usable_bytes
from .kernels.sparse_ffn_reference import Mode
from .model_gguf_predictors import predictors_of
from .placement_choice import PlacementOptions, RunConditions, find_placement, placement_of_run
from .read_ahead import read_ahead
from .tier_plan import TierPlan, all_cold, from_index
from .weight_kind import choose_kind
from .weights import load_weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class EngineOptions:
    """How to run; None takes what the workspace offers.

    ``mode``: predicted where there are predictors, else exact; dense where no neuron falls silent. ``gpuidx``: the
    workspace's placement. ``context``: the placement's, else the model's limit up to 4096. ``device`` is the hot tier's.
    ``dtype``: see :func:`choose_kind`. ``model``: where the weights are now. ``slots``: sequences at once. ``threads``: as
    many as torch uses. ``vram_budget_gib``, ``reset_gpu_index``, ``disable_gpu_index``: see :class:`.placement_choice.
    PlacementOptions`. ``cpu_only``: heed neither GPU nor placement.
    """

    mode: Mode | None = None
    gpuidx: Path | None = None
    context: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    model: str | None = None
    slots: int = 1
    threads: int | None = None
    vram_budget_gib: float | None = None
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False
    cpu_only: bool = False

    @property
    def placement(self) -> PlacementOptions:
        if self.cpu_only:
            return PlacementOptions(disabled=True)
        return PlacementOptions(self.gpuidx, self.vram_budget_gib, self.reset_gpu_index, self.disable_gpu_index)


@dataclass(frozen=True)
class Engine:
    """A decoder and what belongs to it."""

    record: ModelRecord
    decoder: Decoder
    tokenizer: Any
    plan: TierPlan
    end_ids: frozenset[int]

    @property
    def hot_share(self) -> float:
        """Share of the FFN neurons on the hot tier."""
        return self.plan.hot_share(self.record.shape)


def open_engine(workspace: Workspace, options: EngineOptions) -> Engine:
    """Load the model of *workspace*.

    Raises named errors for files that are missing where they were asked for, damaged, or of another model, and for a
    context beyond the model's positions.
    """
    import torch

    record = read_model(workspace)
    shape = record.shape
    shape.known_activation()
    predictors, mode = choose_mode(workspace, record, options.mode)
    index = find_placement(workspace, record, options.placement)
    hot, cold = resolve_device("cpu" if options.cpu_only else options.device), torch.device("cpu")
    checkpoint = open_checkpoint(workspace, record, options.model, read_ahead)
    kind, context = choose_kind(options.dtype, index, hot, checkpoint), _context(shape, options.context, index)
    widths = predictors.sizes() if predictors else None
    units = unit_bytes(shape, kind, context, options.slots, widths)
    free_bytes = torch.cuda.mem_get_info(hot)[0] if hot.type == "cuda" else None

    def conditions() -> RunConditions:
        budget_bytes = usable_bytes(options.vram_budget_gib, free_bytes)
        return RunConditions(kind, context, options.slots, mode, widths, budget_bytes)

    def plan_of(index: GpuIndex | None) -> TierPlan:
        return from_index(index, hot, cold, hot_devices(index, hot)) if index else all_cold(shape, hot, cold)

    fullest = max(num_bytes for _, num_bytes in plan_of(index).bytes_by_gpu(units))
    index = placement_of_run(workspace, record, options.placement, index, fullest, conditions)
    plan = plan_of(index)
    file = checkpoint if isinstance(checkpoint, GgufModel) else None
    tokenizer = file.tokenizer() if file else load_tokenizer(checkpoint.directory, shape.vocabulary_size)
    if index and hot.type == "cpu":
        note(
            f"no GPU in use: both tiers are on the CPU ({percent(plan.hot_share(shape))} of the neurons on the hot one)"
        )
    planned = plan.bytes_by_gpu(units) if index and hot.type == "cuda" else []
    for number, (gpu, num_bytes) in enumerate(planned):
        assert index is not None, "without a placement nothing is planned"
        budget = index.gpu_budgets[number] if index.gpu_budgets else index.gpu_budget_bytes
        check_gpu_memory(num_bytes, torch.cuda.mem_get_info(gpu)[0], index, budget)

    def load() -> Decoder:
        with progress_bar("loading", shape.num_layers, "layers") as progress:
            weights = load_weights(checkpoint, plan, predictors, kind, progress.advance)
        return Decoder(shape, weights, options.slots, context, mode, options.threads)

    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu, _ in planned}
    decoder = loaded_or_freed(load, str(workspace.path), free_bytes or 0)
    report_allocation(planned, lambda gpu: torch.cuda.memory_allocated(gpu) - before[gpu])
    return Engine(record, decoder, tokenizer, plan, file.end_ids() if file else read_end_ids(checkpoint.directory))


def choose_mode(workspace: Workspace, record: ModelRecord, wanted: Mode | None) -> tuple[PredictorSet | None, Mode]:
    """The predictors, if the mode needs them, and the mode.

    Raises ``GenerationError`` when mode predicted is asked for and there are no predictors, and when neurons are to be
    skipped of a model where none falls silent.
    """
    activation = record.shape.activation
    if not record.shape.falls_silent:
        if wanted in ("exact", "predicted"):
            raise GenerationError(
                f"the model's activation is {activation!r}, so no neuron falls silent that --mode {wanted} could skip: use "
                "--mode dense, or a ReLU version of the model"
            )
        assumed = workspace.is_file and not workspace.model_file.states_activation
        note(
            f"the model's activation is {activation}{', which its file leaves unsaid' if assumed else ''}, so no neuron "
            "falls silent or can be skipped: running in mode dense"
        )
        return None, "dense"
    present = has_predictors(workspace)
    if wanted == "predicted" and not present:
        raise GenerationError(
            f"{str(workspace.path)!r} has no predictors for --mode predicted: run pi-train-predictor, or use --mode exact"
        )
    if wanted is None and not present:
        where = "file" if workspace.is_file else "workspace"
        note(f"no predictors in the {where}: running in mode exact (pi-train-predictor makes them)")
    mode: Mode = wanted or ("predicted" if present else "exact")
    if mode != "predicted":
        return None, mode
    if workspace.is_file and (inside := predictors_of(workspace.model_file)):
        return inside, mode
    shape = record.shape
    return predictor_file.read(workspace.predictor, shape.hidden_size, shape.ffn_sizes, record.fingerprint), mode


def has_predictors(workspace: Workspace) -> bool:
    """Whether there are predictors, in a model file or beside the counts; reads none of them."""
    inside = workspace.is_file and workspace.model_file.num_predictors > 0
    return inside or workspace.predictor.exists()


def check_context(shape: ModelShape, wanted: int | None) -> None:
    """Raise ``GenerationError`` for a context that is asked for beyond the model's positions."""
    if wanted is not None and wanted > shape.max_positions:
        raise GenerationError(
            f"--ctx {wanted} is beyond the model's {shape.max_positions} positions: choose a smaller one"
        )


def _context(shape: ModelShape, wanted: int | None, index: GpuIndex | None) -> int:
    check_context(shape, wanted)
    placed_for = index.context if index else None
    return min(wanted or placed_for or DEFAULT_CONTEXT, shape.max_positions)


def hot_devices(index: GpuIndex, hot: "torch.device") -> "list[torch.device]":
    """The devices of a placement's GPUs: *hot* and those after it, or the CPU for all.

    Raises ``HardwareError`` when this machine has fewer.
    """
    import torch

    number = len(index.gpu_budgets or (0,))
    if number == 1 or hot.type == "cpu":
        return [hot] * number
    first = hot.index or 0
    if first + number > torch.cuda.device_count():
        raise HardwareError(
            f"the placement is for {number} GPUs and {torch.cuda.device_count() - first} are here: run pi-place with "
            "--vram for those, or use --device cpu"
        )
    return [torch.device(hot.type, first + gpu) for gpu in range(number)]


def check_gpu_memory(need_bytes: int, free_bytes: int, index: GpuIndex, budget_bytes: int | None = None) -> None:
    """Compare what will be allocated on a GPU with what is free and with the budget the placement was made for, which is
    *budget_bytes* where the GPU is one of several.

    Raises ``HardwareError`` when it is more than is free; says so when it is merely more than was planned.
    """
    if need_bytes > free_bytes:
        raise HardwareError(
            f"the placement needs {readable_bytes(need_bytes)} of GPU memory and {readable_bytes(free_bytes)} are free: run "
            "pi-place with a smaller --vram, or lower --ctx"
        )
    budget_bytes = index.gpu_budget_bytes if budget_bytes is None else budget_bytes
    if budget_bytes is not None and need_bytes > budget_bytes:
        note(
            f"this dtype and context take {readable_bytes(need_bytes)} of GPU memory, more than the "
            f"{readable_bytes(budget_bytes)} the placement was made for ({index.dtype}, context {index.context})"
        )
