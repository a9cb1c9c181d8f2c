"""One evaluation on text: the modes of one engine on the same windows, and the neurons while they run and generate."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from pi_toolkit.predictor_training.predictor import Quality
from pi_toolkit.profiler.command_line import progress_bar
from pi_toolkit.profiler.workspace import ModelRecord, Workspace

from .bench_replay import watched
from .decoder import Decoder
from .engine import Engine, has_predictors
from .eval_alarm import find_alarm
from .eval_neurons import GenerationOptions, NeuronCounts, count_while_generating
from .eval_windows import ScoredWindow
from .kernels.native import MODES
from .kernels.sparse_ffn_reference import Mode
from .perplexity import LanguageModel, Score, compare, of_decoder

REFERENCE = "transformers"


@dataclass(frozen=True)
class TextEvaluation:
    """``scores`` by mode, dense first where it was asked for, then the reference; ``watched_mode`` is the sparsest of them
    and the one that the neurons of ``evaluating`` and ``generating``, by layer, were counted in; both are empty for a
    model whose neurons never fall silent, ``generating`` also without a decoding step."""

    windows: list[ScoredWindow]
    scores: dict[str, Score]
    watched_mode: Mode
    evaluating: list[Quality]
    generating: list[Quality]
    decoding_steps: int
    alarm: str | None

    @property
    def predictions(self) -> int:
        return sum(window.scored for window in self.windows)


def possible_modes(workspace: Workspace, record: ModelRecord, wanted: Sequence[Mode] | None) -> tuple[Mode, ...]:
    """The modes to run, in the order dense, exact, predicted: all that the model can run, or those of *wanted*.

    What it cannot run is refused where the engine is opened.
    """
    silent = record.shape.falls_silent
    able = {"dense": True, "exact": silent, "predicted": silent and has_predictors(workspace)}
    return tuple(mode for mode in MODES if (able[mode] if wanted is None else mode in wanted))


def with_mode(decoder: Decoder, mode: Mode) -> Decoder:
    """A decoder over the same weights and cache; all modes run on one layout."""
    twin = copy.copy(decoder)
    twin.mode = mode
    return twin


def evaluate_text(
    engine: Engine,
    modes: Sequence[Mode],
    windows: list[ScoredWindow],
    generation: GenerationOptions,
    reference: LanguageModel | None = None,
) -> TextEvaluation:
    """Run *windows* through every mode, and *reference*, at once; then generate text in the sparsest mode."""
    decoders = {mode: with_mode(engine.decoder, mode) for mode in modes}
    sparsest, silent = modes[-1], engine.record.shape.falls_silent
    counts = NeuronCounts(engine.record.shape.num_layers)
    everybody: dict[str, LanguageModel] = {mode: of_decoder(decoder) for mode, decoder in decoders.items()}
    if silent:
        everybody[sparsest] = of_decoder(watched(decoders[sparsest], counts.observe))
    if reference:
        everybody[REFERENCE] = reference
    rows = len(engine.decoder.cache.keys[0])
    with progress_bar(f"perplexity of {', '.join(everybody)}", sum(len(w.token_ids) for w in windows)) as bar:
        scores = compare(everybody, windows, rows, engine.record.shape.vocabulary_size, bar.advance)
    generating, steps = _generate(decoders[sparsest], windows, generation, engine.end_ids) if silent else ([], 0)
    alarm = None
    if "dense" in decoders:
        theirs = scores[REFERENCE].perplexity if reference else None
        alarm = find_alarm(decoders["dense"], scores["dense"].perplexity, windows, theirs)
    return TextEvaluation(windows, scores, sparsest, counts.qualities(), generating, steps, alarm)


def _generate(
    decoder: Decoder, windows: list[ScoredWindow], options: GenerationOptions, end_ids: frozenset[int]
) -> tuple[list[Quality], int]:
    with progress_bar("generating", options.prompts, "prompts") as bar:
        counts, steps = count_while_generating(decoder, windows, options, end_ids, bar.advance)
    return counts.qualities(), steps
