"""From what ``pi-eval`` was asked for to what is measured and printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.command_line import note, progress_bar

if TYPE_CHECKING:
    from .engine import Engine
    from .eval_windows import Bos
    from .kernels.sparse_ffn_reference import Mode
    from .perplexity import LanguageModel


@dataclass(frozen=True)
class TextOptions:
    """What to measure on text, sizes in tokens."""

    corpus: str
    split: str
    tokens: int
    window: int
    stride: int
    score_from: int
    bos: "Bos"
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def context(self) -> int:
        """Positions that the windows and the texts to generate need."""
        return max(self.window, self.prompt_tokens + self.new_tokens + 1 if self.prompts else 0)

    def check(self, max_positions: int) -> None:
        """Report what cannot work before a model is loaded for it.

        Raises ``CorpusError`` for a corpus that cannot be read and a window beyond *max_positions*, and a usage error for
        windows that leave text out or score nothing.
        """
        from pi_toolkit.profiler.corpus import documents
        from pi_toolkit.profiler.token_windows import check_window

        check_window(self.window, max_positions)
        if self.stride > self.window:
            raise click.UsageError(f"--stride {self.stride} beyond --window {self.window} would leave text out")
        if self.score_from > self.window - 2:
            raise click.UsageError(
                f"--score-from {self.score_from} leaves nothing of --window {self.window} to predict"
            )
        if self.prompts and self.prompt_tokens >= min(self.context, max_positions):
            raise click.UsageError(
                f"--prompt-tokens {self.prompt_tokens} leave no room to generate in {max_positions} positions"
            )
        documents(self.corpus)


@dataclass(frozen=True)
class TaskOptions:
    """``tasks`` are local .jsonl files, or names and .yaml files of lm-eval; ``limit`` and ``fewshot`` None for all
    questions and for what the task says."""

    tasks: tuple[str, ...]
    limit: int | None
    fewshot: int | None

    @property
    def files(self) -> list[Path]:
        return [Path(task) for task in self.tasks if task.endswith(".jsonl")]

    @property
    def of_lm_eval(self) -> list[str]:
        return [task for task in self.tasks if not task.endswith(".jsonl")]

    def check(self) -> None:
        """Raise ``TaskError`` for malformed files and where lm-eval is needed and missing."""
        from pi_toolkit.profiler.errors import TaskError

        from .eval_tasks import read_questions

        for file in self.files:
            read_questions(file, self.limit)
        if self.of_lm_eval:
            try:
                import lm_eval  # noqa: F401
            except ImportError:
                raise TaskError(
                    f"{self.of_lm_eval[0]!r} is no .jsonl file, and the tasks of lm-eval need a package that is not "
                    "installed: pip install 'powerinfer-toolkit[eval]', or give a .jsonl file"
                ) from None


def describe_engine(engine: "Engine") -> dict[str, Any]:
    """Conditions of every measurement: model, weights, machine."""
    import torch

    from .conditions import describe

    decoder = engine.decoder
    return {
        "model": engine.record.name,
        "fingerprint": engine.record.fingerprint,
        "dtype": decoder.weights.kind,
        "device": str(engine.plan.hot),
        "gpu_neuron_share": engine.hot_share,
        "slots": len(decoder.cache.keys[0]),
        "context": decoder.cache.context,
        **describe(torch.get_num_threads()),
    }


def measure_text(
    engine: "Engine",
    modes: "Sequence[Mode]",
    options: TextOptions,
    reference: "LanguageModel | None",
    conditions: dict[str, Any],
) -> dict[str, Any]:
    """Measure, print, and return for JSON; adds what was measured on to *conditions*.

    Raises ``CorpusError`` for a text shorter than one window.
    """
    from pi_toolkit.profiler.corpus import corpus_name

    from .eval_neurons import GenerationOptions
    from .eval_report import print_text_evaluation, text_json
    from .eval_text import evaluate_text
    from .eval_windows import WindowOptions, bos_id_of, cut_windows, read_tokens

    ids = read_tokens(options.corpus, options.split == "all", engine.tokenizer, options.tokens)
    if len(ids) < options.tokens:
        held_out = "held-out " if options.split == "held-out" else ""
        note(f"the {held_out}documents of the corpus end after {len(ids):,} of {options.tokens:,} tokens")
    bos_id = bos_id_of(engine.tokenizer)
    windows = cut_windows(ids, WindowOptions(options.window, options.stride, options.score_from, options.bos), bos_id)
    generation = GenerationOptions(
        options.prompts, min(options.prompt_tokens, options.window), options.new_tokens, bos_id
    )
    found = evaluate_text(engine, modes, windows, generation, reference)
    names = ("split", "window", "stride", "score_from", "bos", "prompts", "prompt_tokens", "new_tokens")
    conditions |= {
        "corpus": corpus_name(options.corpus),
        **{name: getattr(options, name) for name in names},
        "bos_id": bos_id,
        "tokens_read": len(ids),
        "decoding_steps": found.decoding_steps,
    }
    print_text_evaluation(found, conditions)
    return text_json(found)


def measure_tasks(engine: "Engine", modes: "Sequence[Mode]", options: TaskOptions) -> dict[str, Any]:
    """Measure, print, and return for JSON: ``tasks`` by name or file, mode and metric."""
    from .eval_report import print_tasks
    from .eval_tasks import answer, encode_questions, fitting, read_questions
    from .eval_text import with_mode

    results: dict[str, dict[str, dict[str, float]]] = {}
    for file in options.files:
        questions = read_questions(file, options.limit)
        context = engine.decoder.cache.context
        asked, encoded = fitting(questions, encode_questions(questions, engine.tokenizer), context)
        left_out = len(questions) - len(asked)
        if left_out:
            note(
                f"{left_out} of {len(questions)} questions of {file.name} have a choice longer than the context of {context} "
                "tokens and are left out: raise --ctx"
            )
        with progress_bar(file.stem, len(modes) * sum(map(len, encoded)), "choices") as bar:
            for mode in modes:
                found = answer(with_mode(engine.decoder, mode), asked, encoded, bar.advance)
                results.setdefault(str(file), {})[mode] = found.to_json() | {"left_out": left_out}
    if options.of_lm_eval:
        from .eval_lm import run_tasks

        results |= run_tasks(engine, modes, options.of_lm_eval, options.limit, options.fewshot)
    print_tasks(results)
    return {"tasks": results}
