"""Greedy tokens of the demo models on a GPU, where there is one, against those of the CPU, both in float32."""

import pytest
import torch

from gpu_cases import CLEAR_TOKENS, PROMPT, decoder_for, five_placements, greedy_tokens, step_of
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
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
