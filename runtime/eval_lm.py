"""This toolkit's decoder as a model of lm-eval (EleutherAI's harness, the extra ``eval``), registered there under
"powerinfer-toolkit". Importing this module needs lm-eval.

    from lm_eval import simple_evaluate
    import pi_toolkit.runtime.eval_lm
    simple_evaluate("powerinfer-toolkit", {"workspace": "opt-6.7b-pi", "mode": "predicted"}, tasks=["piqa"])
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from pi_toolkit.profiler.command_line import note, progress_bar
from pi_toolkit.profiler.errors import TaskError
from pi_toolkit.profiler.workspace import Workspace

from .engine import Engine, EngineOptions, open_engine
from .eval_likelihood import Pair, encode, encode_pair, log_likelihoods, prefix_id, shortened
from .eval_text import with_mode
from .generate import generate
from .kernels.sparse_ffn_reference import Mode
from .sampling import Sampler, SamplingOptions
from .text_stream import TextStream

DEFAULT_NEW_TOKENS = 256  # lm-eval's own


class _StopText(Exception):
    """Ends a generation when its text holds what it is to stop at."""


@register_model("powerinfer-toolkit")
class PowerInferLM(TemplateLM):
    """Opens *workspace* (a model file may stand for it) in *mode*; *options* are those of :class:`EngineOptions`."""

    def __init__(self, workspace: str | Path | None = None, engine: Engine | None = None, **options: Any) -> None:
        super().__init__()
        if engine is None:
            if workspace is None:
                raise TaskError("lm-eval was told no workspace: give --model_args workspace=DIR")
            options.pop("max_batch_size", None)
            slots = options.pop("batch_size", None) or options.pop("slots", 8)
            engine = open_engine(Workspace(Path(workspace)), EngineOptions(slots=int(slots), **options))
        self._engine, self.tokenizer = engine, engine.tokenizer
        self._decoder = engine.decoder

    @property
    def max_length(self) -> int:
        return self._decoder.cache.context

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return prefix_id(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self._engine.record.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            return encode(self.tokenizer, string)
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = encode_pair(self.tokenizer, context, continuation)
        return pair.context, pair.continuation

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        whole = [Pair(context, continuation) for _, context, continuation in requests]
        pairs = [shortened(pair, self.max_length) for pair in whole]
        if longer := sum(len(pair.continuation) > self.max_length for pair in whole):
            note(
                f"{longer} of {len(whole)} continuations are longer than the context, and their last {self.max_length} "
                "tokens are scored: raise --ctx"
            )
        with progress_bar("likelihoods", len(pairs), "continuations") as bar:
            found = log_likelihoods(self._decoder, pairs, bar.advance)
        results = [(likelihood.log_probability, likelihood.is_greedy) for likelihood in found]
        for (texts, *_ids), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *utils.make_disjoint_window(pair)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_probability
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        with progress_bar("generating", len(requests), "texts") as bar:
            for request in requests:
                texts.append(self._generate(*request.args))
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
                bar.advance(1)
        return texts

    def _generate(self, context: str, wanted: dict[str, Any]) -> str:
        until = wanted.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        new_tokens = int(wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or DEFAULT_NEW_TOKENS)
        if new_tokens >= self.max_length:
            raise TaskError(
                f"the task asks for {new_tokens} new tokens and the context has {self.max_length}: raise --ctx"
            )
        ids = self.tok_encode(context)[-(self.max_length - new_tokens) :] or [self.prefix_token_id]
        stream = TextStream(self.tokenizer, ids)

        def show(token: int) -> None:
            stream.push(token)
            if any(stop in stream.text for stop in stops):
                raise _StopText

        temperature = float(wanted.get("temperature") or 0.0) if wanted.get("do_sample") else 0.0
        sampler = Sampler(replace(SamplingOptions(temperature), top_p=float(wanted.get("top_p") or 1.0)))
        try:
            generate(self._decoder, ids, new_tokens, sampler, self._engine.end_ids, show)
            stream.finish()
        except _StopText:
            pass
        return stream.text[: min((stream.text.find(stop) for stop in stops if stop in stream.text), default=None)]


def run_tasks(
    engine: Engine, modes: Sequence[Mode], tasks: list[str], limit: int | None, fewshot: int | None
) -> dict[str, dict[str, dict[str, float]]]:
    """lm-eval's figures by task, mode and metric; *tasks* are its names or YAML files.

    Raises ``TaskError`` with lm-eval's own words for what it refuses.
    """
    results: dict[str, dict[str, dict[str, float]]] = {}
    for mode in modes:
        model = PowerInferLM(engine=replace(engine, decoder=with_mode(engine.decoder, mode)))
        try:
            found = simple_evaluate(
                model, tasks=list(tasks), limit=limit, num_fewshot=fewshot, log_samples=False, bootstrap_iters=0
            )
        except (KeyError, ValueError, TypeError, OSError, ImportError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TaskError(
                f"lm-eval cannot run {', '.join(tasks)} ({reason[:300]}): check the names, and that the data sets can be "
                "reached"
            ) from error
        for task, metrics in found["results"].items():
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            results.setdefault(task, {})[mode] = {
                name.removesuffix(",none"): float(value) for name, value in numbers.items() if "stderr" not in name
            }
    return results
