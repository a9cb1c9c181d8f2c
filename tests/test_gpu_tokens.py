"""Greedy tokens of the demo models on a GPU, where there is one, against those of the CPU, both in float32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_cases import (
    CLEAR_TOKENS,
    CPU,
    PROMPT,
    decoder_for,
    five_placements,
    greedy_tokens,
    random_predictors,
    step_of,
)
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights
from tiny_models import DEMO_MODELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("placement", ["none", "one neuron", "half", "all but one", "all"])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
@pytest.mark.parametrize("model", ["relu-llama-5m", "relu-opt-3m"])
def test_greedy_tokens_equal_those_of_the_cpu(
    model: str, mode: Mode, placement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum read before it is there, a graph that remembers an older token, a tier left out: another text."""
    checkpoint = Checkpoint(DEMO_MODELS / model)
    hot, context = five_placements(checkpoint.shape.ffn_sizes)[placement], len(PROMPT) + CLEAR_TOKENS
    want = greedy_tokens(step_of(decoder_for(checkpoint, mode, hot, context)), PROMPT, CLEAR_TOKENS)
    decoder = decoder_for(checkpoint, mode, hot, context, torch.device("cuda"))
    assert decoder.gpu is not None and decoder.gpu.graphs is not None
    assert greedy_tokens(step_of(decoder), PROMPT, CLEAR_TOKENS) == want
    assert not decoder.gpu.graphs.refused and "does not capture" not in capsys.readouterr().err
    decoder.gpu.graphs = None
    assert greedy_tokens(step_of(decoder), PROMPT, CLEAR_TOKENS) == want, "every step launched anew"


@pytest.mark.parametrize("streams", [False, True], ids=["on the CPU", "over the bus"])
@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("model", ["relu-llama-5m", "relu-opt-3m"])
def test_prompts_equal_those_of_the_cpu(model: str, mode: Mode, streams: bool) -> None:
    """Cold rows that arrive late or in another order than the tokens meet them."""
    from pi_toolkit.runtime.prompt_streaming import PromptSpeeds

    checkpoint = Checkpoint(DEMO_MODELS / model)
    hot = five_placements(checkpoint.shape.ffn_sizes)["half"]
    tokens = torch.randint(0, 1000, (1, 60), generator=torch.Generator().manual_seed(3))
    arguments = tokens, torch.arange(60)[None], torch.zeros(1, dtype=torch.int64)
    want = decoder_for(checkpoint, mode, hot, 64).step(*arguments)
    decoder = decoder_for(checkpoint, mode, hot, 64, torch.device("cuda"))
    stream = decoder.weights.layers[0].ffn.overlap.stream  # type: ignore[union-attr]
    assert stream is not None
    stream.speeds = PromptSpeeds(1.0, 1e18) if streams else PromptSpeeds(1e18, 1.0)
    torch.testing.assert_close(decoder.step(*arguments).cpu(), want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tokens", [1, 7, 30])
@pytest.mark.parametrize("attention", [True, False], ids=["attention on the GPU", "some attention"])
def test_units_on_either_side(attention: bool, tokens: int) -> None:
    """Scores of a predictor on the CPU in an order of their own; a residual stream that is fetched too early."""
    checkpoint = Checkpoint(DEMO_MODELS / "relu-llama-5m")
    hot, layers = five_placements(checkpoint.shape.ffn_sizes)["half"], checkpoint.shape.num_layers
    attention_hot = tuple(attention or layer % 2 == 0 for layer in range(layers))
    plan = TierPlan(torch.device("cuda"), CPU, hot, attention_hot, (False,) * layers, False)
    weights = load_weights(checkpoint, plan, random_predictors(checkpoint), "float32")
    on_gpu, on_cpu = (
        Decoder(checkpoint.shape, weights, 1, 64, "predicted"),
        decoder_for(checkpoint, "predicted", hot, 64),
    )
    text = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(3))
    arguments = text, torch.arange(tokens)[None], torch.zeros(1, dtype=torch.int64)
    torch.testing.assert_close(on_gpu.step(*arguments).cpu(), on_cpu.step(*arguments), atol=1e-3, rtol=1e-3)


EAGER = """
import torch
from gpu_cases import decoder_for, five_placements, step_of
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.runtime.prompt_streaming import PromptSpeeds
from tiny_models import DEMO_MODELS

checkpoint = Checkpoint(DEMO_MODELS / "relu-llama-5m")
hot = five_placements(checkpoint.shape.ffn_sizes)["half"]
for speeds in (None, PromptSpeeds(1.0, 1e18), PromptSpeeds(1e18, 1.0)):
    decoder = decoder_for(checkpoint, "predicted", hot, 48, torch.device("cuda"))
    decoder.gpu.graphs = None
    decoder.weights.layers[0].ffn.overlap.stream.speeds = speeds
    decoder.step(torch.arange(40)[None], torch.arange(40)[None], torch.zeros(1, dtype=torch.int64)).cpu()
    for position in range(40, 43):
        step_of(decoder)(5, position).cpu()
"""


def test_no_stream_touches_what_another_is_writing() -> None:
    """A missing wait, whether or not it was late this time: torch's own sanitizer looks for them."""
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", EAGER], cwd=Path(__file__).parent, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
