"""Who is compared: this toolkit, llama.cpp and transformers, each answering the same task.

A task is a prompt of token ids, read at once, and a number of greedy tokens behind the first one, which belongs to the
prompt's time. Everything heavy is imported where a contender is opened, in its worker process.
"""

import importlib.metadata
import inspect
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.errors import BenchmarkError
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.model_gguf_layout import layer_name, shared_name
from pi_toolkit.profiler.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .bench_bytes import Touched
    from .kernels.sparse_ffn_reference import Mode


@dataclass(frozen=True)
class Task:
    """``prompt`` token ids, then ``steps`` decoding steps; ``mode`` and ``density``, made up or the model's own, are ours."""

    prompt: tuple[int, ...]
    steps: int
    mode: "Mode | None" = None
    density: float | None = None


@dataclass(frozen=True)
class Timing:
    """``token_ids`` are the greedy tokens, 1 + steps of them; empty where a contender does not tell them."""

    prompt_seconds: float
    decode_seconds: float
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnRecipe:
    """This toolkit on one workspace or model file in one dtype; all modes share its weights."""

    path: Path
    dtype: str
    context: int
    threads: int
    device: str
    with_predictors: bool
    model: str | None = None

    @property
    def title(self) -> str:
        return f"{self.path.name} ({self.dtype})"

    def open(self) -> "Own":
        import torch

        from .engine import EngineOptions, open_engine

        torch.set_num_threads(self.threads)
        options = EngineOptions(
            mode="predicted" if self.with_predictors else "exact",
            context=self.context,
            device=self.device,
            dtype=self.dtype,
            model=self.model,
            threads=self.threads,
        )
        return Own(open_engine(Workspace(self.path), options))


class Own:
    def __init__(self, engine: Any) -> None:
        from .bench_density import MadeUpDensity

        self._engine, self._decoder = engine, engine.decoder
        self._densities = MadeUpDensity(engine.decoder)

    def facts(self) -> dict[str, Any]:
        from .bench_bytes import weight_bytes

        native, plan = self._decoder.native, self._engine.plan
        return {
            "kind": self._decoder.weights.kind,
            "instruction_set": native.instruction_set if native else "torch reference",
            "on_cpu": plan.hot.type == "cpu",
            "weight_bytes": weight_bytes(self._decoder.weights),
        }

    def prompt(self, text: str, tokens: int) -> tuple[int, ...]:
        """Ids of the first *tokens* tokens of *text*, which is repeated if it is shorter."""
        if not text.strip():
            raise BenchmarkError("the text to take prompts from is empty: give another with --text")
        ids = list(self._engine.tokenizer(text)["input_ids"])
        more = self._engine.tokenizer(f"\n{text}", add_special_tokens=False)["input_ids"]
        while len(ids) < tokens:
            ids += more
        return tuple(ids[:tokens])

    def time(self, task: Task) -> Timing:
        from .generate import generate
        from .sampling import Sampler, SamplingOptions

        self._prepare(task)
        result = generate(self._decoder, list(task.prompt), 1 + task.steps, Sampler(SamplingOptions()))
        return Timing(result.prompt_seconds, result.decode_seconds, tuple(result.token_ids))

    def count(self, task: Task, token_ids: tuple[int, ...]) -> "Touched":
        """What decoding *token_ids* read."""
        from .bench_bytes import touched

        self._prepare(task)
        return touched(self._decoder, list(task.prompt), list(token_ids))

    def _prepare(self, task: Task) -> None:
        assert task.mode is not None, "a task for ourselves names a mode"
        self._decoder.mode = task.mode
        self._densities.choose(task.density, task.prompt)


@dataclass(frozen=True)
class LlamaCppRecipe:
    """llama.cpp, through the wheel ``xllamacpp``, on a dense model file."""

    file: Path
    context: int
    threads: int

    @property
    def title(self) -> str:
        return f"llama.cpp:{self.file.name}"

    def open(self) -> "LlamaCpp":
        return LlamaCpp(self)


class LlamaCpp:
    """One slot, no prompt cache, weights read into memory of its own, so that its repacked kernels may run."""

    def __init__(self, recipe: LlamaCppRecipe) -> None:
        try:
            import xllamacpp
        except ImportError:
            raise BenchmarkError(
                "llama.cpp is compared through the package xllamacpp, which is not installed: run pip install xllamacpp"
            ) from None
        options = xllamacpp.CommonParams()
        options.model.path = str(recipe.file)
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = recipe.threads
        options.n_ctx, options.n_parallel, options.n_gpu_layers = recipe.context, 1, 0
        options.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE
        options.fit_params = options.cont_batching = options.use_jinja = False
        options.cache_ram_mib = options.n_ctx_checkpoints = options.verbosity = 0
        try:
            self._server = xllamacpp.Server(options)
        except (RuntimeError, ValueError) as error:
            raise BenchmarkError(
                f"llama.cpp does not load {str(recipe.file)!r} ({error}): write a dense file with pi-convert"
            ) from error
        self._file, self._system = recipe.file, xllamacpp.get_system_info()

    def facts(self) -> dict[str, Any]:
        """Bytes of the file's tensors but for the embedding, of which a token reads one row; keys and values are F16."""
        model = GgufModel(self._file)
        sizes = {name: tensor.num_bytes for name, tensor in model.file.tensors.items()}
        embedding = 0 if model.shape.tied_embeddings else sizes[shared_name("embedding.weight")]
        features = [part.strip() for part in self._system.replace("CPU :", "").split("|")]
        stored = model.file.tensors[layer_name(model.shape, "GGUF", 0, "up.weight")].type.name.lower()
        return {
            "version": f"xllamacpp {importlib.metadata.version('xllamacpp')}",
            "instruction_set": " ".join(part.removesuffix(" = 1") for part in features if part.endswith(" = 1")),
            "kind": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(stored, stored),
            "bytes_per_token": sum(sizes.values()) - embedding,
            "cache_bytes_per_position": 4 * model.shape.num_layers * model.shape.num_kv_heads * model.shape.head_dim,
        }

    def time(self, task: Task) -> Timing:
        """llama.cpp's own clock, which starts at the first token it has sampled."""
        request = {"prompt": list(task.prompt), "n_predict": 1 + task.steps, "cache_prompt": False}
        request |= {"temperature": 0.0, "ignore_eos": True, "samplers": ["temperature"]}
        answer = self._server.handle_completions(request)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        timings = answer.get("timings", {})
        if (timings.get("prompt_n"), timings.get("predicted_n")) != (len(task.prompt), 1 + task.steps):
            raise BenchmarkError(
                f"llama.cpp answered another task than it was given ({json.dumps(answer)[:200]}): use a model file without a "
                "smaller context of its own"
            )
        return Timing(timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000)


@dataclass(frozen=True)
class TransformersRecipe:
    """transformers on a Hugging Face directory, in *dtype*."""

    directory: str
    dtype: str
    threads: int

    @property
    def title(self) -> str:
        return f"transformers:{Path(self.directory).name}"

    def open(self) -> "Transformers":
        return Transformers(self)


class Transformers:
    """The model's own forward pass, token by token, without what ``generate`` adds to it."""

    def __init__(self, recipe: TransformersRecipe) -> None:
        import torch
        import transformers

        transformers.logging.disable_progress_bar()
        torch.set_num_threads(recipe.threads)
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                recipe.directory, dtype=getattr(torch, recipe.dtype), local_files_only=Path(recipe.directory).exists()
            ).eval()
        except (OSError, ValueError) as error:
            raise BenchmarkError(
                f"transformers does not load {recipe.directory!r} ({str(error).splitlines()[0]}): give a Hugging Face "
                "directory"
            ) from error
        named = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"  # renamed on the way to transformers 6

    def facts(self) -> dict[str, Any]:
        config, num_bytes = self._model.config, sum(part.nbytes for part in self._model.parameters())
        embedding = self._model.get_input_embeddings().weight
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {
            "version": f"transformers {importlib.metadata.version('transformers')}",
            "kind": str(embedding.dtype).removeprefix("torch."),
            "bytes_per_token": num_bytes - (0 if config.tie_word_embeddings else embedding.nbytes),
            "cache_bytes_per_position": 2 * config.num_hidden_layers * heads * head_dim * embedding.itemsize,
        }

    def time(self, task: Task) -> Timing:
        import torch
        import transformers

        cache: Any = transformers.DynamicCache(config=self._model.config)

        def greedy_token(ids: "Sequence[int]") -> int:
            output = self._model(torch.tensor([ids]), use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
            return int(output.logits[0, -1].argmax())

        with torch.inference_mode():
            began = time.perf_counter()
            tokens = [greedy_token(task.prompt)]
            prompt_seconds, began = time.perf_counter() - began, time.perf_counter()
            for _ in range(task.steps):
                tokens.append(greedy_token(tokens[-1:]))
            return Timing(prompt_seconds, time.perf_counter() - began, tuple(tokens))


@dataclass(frozen=True)
class ReadRecipe:
    """Sequential reading, the limit that all are measured against."""

    threads: int
    num_bytes: int

    @property
    def title(self) -> str:
        return "read bandwidth"

    def open(self) -> "Read":
        return Read(self)


class Read:
    SECONDS = 0.15  # per measure and round

    def __init__(self, recipe: ReadRecipe) -> None:
        from .machine import ReadBuffer

        self._threads, self._buffer = recipe.threads, ReadBuffer(recipe.num_bytes)

    def facts(self) -> dict[str, Any]:
        return {}

    def bytes_per_second(self) -> tuple[float | None, float]:
        """By the native kernels, None without them, and by torch's sum."""
        by_kernel = self._buffer.by_kernel(self._threads, self.SECONDS)
        return by_kernel, self._buffer.by_sum(self._threads, self.SECONDS)
