"""Model files of the trained demo models: the text of their originals, and how little the quantised kernels lose."""

import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from gguf_cases import source_of
from pi_toolkit.profiler.corpus import documents, split_of
from pi_toolkit.profiler.gguf_container import Magic, TensorType
from pi_toolkit.profiler.token_windows import token_windows
from pi_toolkit.profiler.workspace import Workspace, describe, open_weights, write_model
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.engine import Engine, EngineOptions, open_engine
from pi_toolkit.runtime.generate import generate
from pi_toolkit.runtime.model_gguf_export import export
from pi_toolkit.runtime.sampling import Sampler, SamplingOptions
from tiny_models import DEMO_MODELS

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 20, 12, 32
WINDOWS, WINDOW = 6, 128


def held_out_windows(engine: Engine, count: int, length: int) -> list[list[int]]:
    texts = (text for index, text in enumerate(documents("wikipedia-intros")) if split_of(index) == "held-out")
    return list(islice(token_windows(texts, engine.tokenizer, length, None), count))


def convert(directory: Path, folder: Path, kind: str) -> Path:
    path = folder / f"{directory.name}.{kind}.gguf"
    pi_convert.main([str(directory), "-o", str(path), "--quantize", kind], standalone_mode=False)
    return path


@pytest.mark.parametrize(("kind", "dtype"), [("f32", "float32"), ("f16", "float16")])
@pytest.mark.parametrize("name", ["relu-llama-5m", "relu-opt-3m"])
def test_greedy_text_of_a_file_is_that_of_its_original(name: str, kind: str, dtype: str, tmp_path: Path) -> None:
    """A file that runs to another text than the directory it was made from does in the same type."""
    directory, workspace = DEMO_MODELS / name, Workspace(tmp_path / "workspace")
    write_model(workspace, describe(str(directory), None, open_weights(str(directory), None)))
    options = EngineOptions(mode="dense", device="cpu", dtype=dtype, context=PROMPT_TOKENS + NEW_TOKENS)
    original = open_engine(workspace, options)
    copy = open_engine(Workspace(convert(directory, tmp_path, kind)), options)
    for prompt in held_out_windows(original, PROMPTS, PROMPT_TOKENS):
        texts = [
            generate(engine.decoder, prompt, NEW_TOKENS, Sampler(SamplingOptions())).token_ids
            for engine in (original, copy)
        ]
        assert texts[0] == texts[1]


def step_logits(engine: Engine, windows: list[list[int]]) -> torch.Tensor:
    """float32 [tokens, vocabulary], one token at a time: the kernels that meet vectors rounded to int8."""
    slot = torch.zeros(1, dtype=torch.int64)
    steps = [
        engine.decoder.step(torch.tensor([[token]]), torch.tensor([[position]]), slot)[0].clone()
        for window in windows
        for position, token in enumerate(window)
    ]
    return torch.stack(steps)


def perplexity(logits: torch.Tensor, windows: list[list[int]]) -> float:
    by_window = logits.view(WINDOWS, WINDOW, -1)
    losses = [
        torch.nn.functional.cross_entropy(by_window[i, :-1], torch.tensor(window[1:]))
        for i, window in enumerate(windows)
    ]
    return math.exp(float(torch.stack(losses).mean()))


@pytest.mark.parametrize(
    ("magic", "kind", "logits_bound", "perplexity_bound"),
    [
        ("PWRI", "q8_0", 0.01, 0.003),
        ("PWRI", "q4_0", 0.01, 0.003),
        ("GGUF", "q8_0", 0.01, 0.003),
        ("GGUF", "q4_0", 0.05, 0.01),  # its down matrix lies the other way round, so that its blocks are made anew
    ],
)
@pytest.mark.parametrize("name", ["relu-llama-5m", "relu-opt-3m"])
def test_rounded_activations_cost_nearly_nothing(
    name: str, magic: Magic, kind: str, logits_bound: float, perplexity_bound: float, tmp_path: Path
) -> None:
    """Kernels that lose more by rounding vectors than the file lost by rounding weights: the same file, dequantised."""
    path = tmp_path / "x.gguf"
    export(path, magic, source_of(DEMO_MODELS / name), TensorType[kind.upper()])
    quantised, dequantised = (
        open_engine(Workspace(path), EngineOptions(mode="exact", device="cpu", dtype=dtype, context=WINDOW))
        for dtype in (kind, "float32")
    )
    windows = held_out_windows(quantised, WINDOWS, WINDOW)
    got, wanted = step_logits(quantised, windows), step_logits(dequantised, windows)
    errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 0 < float(errors.mean()) <= logits_bound
    assert abs(perplexity(got, windows) / perplexity(wanted, windows) - 1) <= perplexity_bound
