"""Decoding with a GPU whose streams are as late and as early as they may be: the CPU's tokens, or somebody did not wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_gpu import GPU, SCHEDULES, Schedule, emulated_gpu
from gpu_cases import CPU, decoder_for, five_placements, greedy_tokens, random_predictors, step_of
from pi_toolkit.predictor_training.predictor_file import PredictorSet, RowsCopy
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.runtime import prompt_streaming
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.overlap import ColdPart, GpuSideStream, Overlap
from pi_toolkit.runtime.prompt_streaming import PromptSpeeds, PromptStream
from pi_toolkit.runtime.step_graphs import StepGraphs
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights
from tiny_models import DEMO_MODELS, save_family

PROMPT, TOKENS, CONTEXT = (414, 136, 1099), 5, 32
STREAM = PromptSpeeds(1.0, 1e18)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp("model"), "llama"))


def decoder_on_gpu(checkpoint: Checkpoint, mode: Mode, placement: str = "half", slots: int = 1) -> Decoder:
    hot = five_placements(checkpoint.shape.ffn_sizes)[placement]
    return decoder_for(checkpoint, mode, hot, CONTEXT, GPU, slots)


def on_the_cpu(checkpoint: Checkpoint, mode: Mode, slots: int = 1) -> Decoder:
    return decoder_for(checkpoint, mode, five_placements(checkpoint.shape.ffn_sizes)["half"], CONTEXT, slots=slots)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_tokens_whatever_the_schedule(
    mode: Mode,
    schedule: Schedule,
    graphs: bool,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A copy, a sum or a buffer that is used before somebody is done with it, in a layer or from token to token."""
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, mode)), PROMPT, TOKENS)
    with emulated_gpu(monkeypatch, schedule) as gpu:
        decoder = decoder_on_gpu(checkpoint, mode)
        assert decoder.gpu is not None and decoder.gpu.graphs is not None
        if not graphs:
            decoder.gpu.graphs = None
        assert greedy_tokens(step_of(decoder), PROMPT, TOKENS) == want
        layers = checkpoint.shape.num_layers
        assert gpu.calls == {"graphs": int(graphs), "host functions": layers if graphs else 0}
    assert "does not capture" not in capsys.readouterr().err


def logits_of_batches(decoder: Decoder, slots: int) -> torch.Tensor:
    """Of a prompt in the first slot, and of three tokens of all sequences at a time behind it, or behind nothing."""
    tokens = torch.randint(0, 1000, (slots, 20), generator=torch.Generator().manual_seed(3))
    numbers = torch.arange(slots)
    logits = [decoder.step(tokens[:1, :17], torch.arange(17)[None], numbers[:1]).cpu()]
    for place in range(17, 20):
        logits.append(decoder.step(tokens[:, place : place + 1], torch.full((slots, 1), place), numbers).cpu())
    return torch.cat(logits)


@pytest.mark.parametrize("streams", [False, True], ids=["on the CPU", "over the bus"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slots", [3, 17])
def test_prompts_and_batches_whatever_the_schedule(
    slots: int,
    schedule: Schedule,
    streams: bool,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cold rows that are overwritten before they were multiplied, or that a graph fetched once and never again."""
    want = logits_of_batches(on_the_cpu(checkpoint, "predicted", slots), slots)
    for tile_bytes in (5000, 2**24):
        monkeypatch.setattr(prompt_streaming, "TILE_BYTES", tile_bytes)
        with monkeypatch.context() as patch, emulated_gpu(patch, schedule):
            decoder = decoder_on_gpu(checkpoint, "predicted", slots=slots)
            stream = decoder.weights.layers[0].ffn.overlap.stream  # type: ignore[union-attr]
            assert stream is not None
            stream.speeds = STREAM if streams else PromptSpeeds(1e18, 1.0)
            torch.testing.assert_close(logits_of_batches(decoder, slots), want, atol=1e-4, rtol=1e-4)
    assert "does not capture" not in capsys.readouterr().err


@pytest.mark.parametrize("family", ["mistral", "opt", "falcon-7b", "falcon-40b"])
def test_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, a window of keys, learned positions, or attention and FFN side by side that a graph gets wrong."""
    checkpoint = Checkpoint(save_family(tmp_path / "model", family))
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, "predicted")), PROMPT, 10)  # beyond the window
    with emulated_gpu(monkeypatch, "random") as gpu:
        assert greedy_tokens(step_of(decoder_on_gpu(checkpoint, "predicted")), PROMPT, 10) == want
        assert gpu.calls["graphs"] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "attention", [(True, True, True), (True, False, True)], ids=["all attention", "some attention"]
)
def test_units_on_either_side(
    attention: tuple[bool, ...], schedule: Schedule, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, a residual stream or a head's input that is fetched before it is there."""
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, "predicted")), PROMPT, TOKENS)
    hot = five_placements(checkpoint.shape.ffn_sizes)["half"]
    with emulated_gpu(monkeypatch, schedule):
        plan = TierPlan(GPU, CPU, hot, attention, (False, True, True), False)
        weights = load_weights(checkpoint, plan, random_predictors(checkpoint), "float32")
        decoder = Decoder(checkpoint.shape, weights, 1, CONTEXT, "predicted")
        assert (decoder.gpu is not None) == all(attention)
        assert greedy_tokens(step_of(decoder), PROMPT, TOKENS) == want


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_rows_as_predictors(
    schedule: Schedule, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, "exact")), PROMPT, TOKENS)
    copies = PredictorSet((RowsCopy(-1e30),) * 3, 0.0, None, None)  # of which every neuron is a candidate
    hot, everywhere = five_placements(checkpoint.shape.ffn_sizes)["half"], (True,) * 3
    with emulated_gpu(monkeypatch, schedule) as gpu:
        plan = TierPlan(GPU, CPU, hot, everywhere, everywhere, True)
        decoder = Decoder(checkpoint.shape, load_weights(checkpoint, plan, copies, "float32"), 1, CONTEXT, "predicted")
        assert greedy_tokens(step_of(decoder), PROMPT, TOKENS) == want
        assert gpu.calls == {"graphs": 1, "host functions": 3}


def nothing(*_: Any) -> None:
    """In the place of something that waits."""


def computed_at_once(self: GpuSideStream, part: ColdPart) -> None:
    part()


FORGOTTEN: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "the side stream does not wait for its input": (GpuSideStream, "fork", nothing),
    "the sum does not wait for the side stream": (GpuSideStream, "join", nothing),
    "the host does not wait for the copies": (GpuSideStream, "call", computed_at_once),
    "the host does not wait for a tile to leave its buffer": (GpuSideStream, "mark", lambda self: nothing),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_the_emulation_notices_what_is_forgotten(
    what: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emulation that is kinder than a GPU, and proves nothing."""
    monkeypatch.setattr(prompt_streaming, "TILE_BYTES", 5000)
    want, different = logits_of_batches(on_the_cpu(checkpoint, "predicted", 2), 2), []
    for schedule in SCHEDULES:
        with monkeypatch.context() as patch, emulated_gpu(patch, schedule):
            decoder = decoder_on_gpu(checkpoint, "predicted", slots=2)
            assert decoder.gpu is not None
            decoder.gpu.graphs = None
            decoder.weights.layers[0].ffn.overlap.stream.speeds = STREAM  # type: ignore[union-attr]
            patch.setattr(*FORGOTTEN[what])
            different.append(not torch.allclose(logits_of_batches(decoder, 2), want, atol=1e-3))
    assert any(different)


@pytest.mark.parametrize("what", list(FORGOTTEN)[:2])
def test_the_emulation_notices_what_a_graph_forgets(
    what: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, "exact")), PROMPT, TOKENS)
    with emulated_gpu(monkeypatch, "late"):
        decoder = decoder_on_gpu(checkpoint, "exact")
        assert decoder.gpu is not None and decoder.gpu.graphs is not None
        step = step_of(decoder)
        step(PROMPT[0], 0)
        monkeypatch.setattr(*FORGOTTEN[what])
        try:
            step(PROMPT[1], 1)
        except AssertionError as error:
            assert "a capture leaves out" in str(error)
            return
        assert decoder.gpu.graphs.refused or greedy_tokens(step, PROMPT, TOKENS) != want


def test_measuring_the_bus_waits_for_queued_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers for tiles in memory that tensors have just left, and that kernels are still going to read."""
    monkeypatch.setattr(prompt_streaming, "TILE_BYTES", 5000)
    cold = on_the_cpu(Checkpoint(DEMO_MODELS / "relu-llama-5m"), "exact").weights.layers[0].ffn.tiers[-1]
    with emulated_gpu(monkeypatch, "side first"):
        overlap = Overlap(GpuSideStream(GPU, None))
        stream = PromptStream(overlap.side, GPU)
        left = [torch.ones(1400, device=GPU) for _ in range(2)]  # as long as a buffer
        torch.cuda.synchronize()
        doubled = [tensor + tensor for tensor in left]
        del left
        stream.pays(20, cold)
        assert all((tensor.cpu() == 2).all() for tensor in doubled)


def test_a_step_is_captured_once_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step captured before its kernels are compiled, captured on every token, or replayed for another length."""
    launched = []
    with emulated_gpu(monkeypatch, "late") as gpu:
        graphs, number = StepGraphs(GPU, None), torch.zeros(1, device=GPU)
        for count, key in enumerate(("short", "short", "short", "long", "long", "short")):
            number.copy_(torch.full((1,), float(count)))
            assert graphs.run(key, lambda key=key: launched.append(key) or number + 1).item() == count + 1  # type: ignore[misc]
        assert launched == ["short", "short", "long", "long"] and gpu.calls["graphs"] == 2


@pytest.mark.parametrize("why", ["a wait", "no kernels"])
def test_steps_go_on_where_no_graph_can_be_captured(
    why: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is lost, or computed twice, or on a stream of its own, because capturing it failed; a complaint on every
    token, or one that does not say why."""
    want = greedy_tokens(step_of(on_the_cpu(checkpoint, "exact")), PROMPT, TOKENS)
    with emulated_gpu(monkeypatch, "late") as gpu:
        decoder = decoder_on_gpu(checkpoint, "exact")
        if why == "a wait":
            join = GpuSideStream.join
            waits = lambda self: self.stream.synchronize() if gpu.current.graph else join(self)  # noqa: E731
            monkeypatch.setattr(GpuSideStream, "join", waits)
        else:
            monkeypatch.setattr(ColdPart, "native", nothing)
        assert greedy_tokens(step_of(decoder), PROMPT, TOKENS) == want
        assert gpu.current is gpu.main and gpu.calls["graphs"] == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "does not capture" in line]
    assert len(said) == 1
    assert ("operation not permitted" if why == "a wait" else "without native kernels") in said[0]
