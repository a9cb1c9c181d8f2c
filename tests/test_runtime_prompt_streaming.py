"""Cold rows of a prompt over the bus: the same result as on the CPU, and the way that two speeds say is sooner."""

from typing import Any

import pytest
import torch

from gpu_cases import CPU, LateStream
from pi_toolkit.runtime import prompt_streaming
from pi_toolkit.runtime.kernels.packed_matrix import Kind, pack
from pi_toolkit.runtime.overlap import Overlap
from pi_toolkit.runtime.placed_ffn import NeuronTier
from pi_toolkit.runtime.prompt_streaming import PromptSpeeds, PromptStream

HIDDEN, TOKENS = 128, 20
STREAM, COMPUTE = PromptSpeeds(1.0, 1e18), PromptSpeeds(1e18, 1.0)


def neurons_of(count: int, kind: Kind, gated: bool) -> NeuronTier:
    generator = torch.Generator().manual_seed(count)
    first, up, down = (pack(torch.randn(count, HIDDEN, generator=generator), kind, CPU) for _ in range(3))
    bias = None if gated else torch.randn(count, generator=generator)
    return NeuronTier(first, up if gated else None, down, bias, "relu", 0.0)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "q8_0", "q4_0"])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_streamed_rows_add_what_the_cpu_does(
    kind: Kind, gated: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is filled again before it was read, a tile that meets another one's scores, a last tile forgotten."""
    monkeypatch.setattr(prompt_streaming, "TILE_BYTES", 5000)  # one to thirteen neurons
    cold, generator = neurons_of(count, kind, gated), torch.Generator().manual_seed(1)
    x, scores = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(TOKENS, count, generator=generator)
    stream = PromptStream(LateStream(captures=True), CPU, STREAM)
    for given in (scores, None, scores.flip(0)):
        want = cold(x, "dense" if given is None else "predicted", given, 0.3)
        got = stream(cold, x, given, 0.3)
        tolerance = 1e-4 if kind in ("float32", "float16") else 0.02
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max() + 1))


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_long_prompts_go_the_way_that_is_sooner(mode: Any) -> None:
    """Rows that cross a slow bus, a GPU that waits for a slow CPU; a hot part that is left out or counted twice."""
    cold, x, side = neurons_of(40, "float32", True), torch.randn(TOKENS, HIDDEN), LateStream(captures=False)
    scores, beside = (torch.randn(TOKENS, 40) if mode == "predicted" else None), torch.randn(TOKENS, HIDDEN)
    want = cold(x, mode, scores, 0.3) + beside
    for speeds, calls in ((COMPUTE, 1), (STREAM, 0)):
        side.log.clear()
        overlap = Overlap(side, PromptStream(side, CPU, speeds))
        torch.testing.assert_close(overlap(lambda: beside, cold, x, scores, mode, 0.3), want, atol=1e-3, rtol=1e-4)
        assert side.log.count("call") == calls
    few = None if scores is None else scores[:3]
    side.log.clear()
    overlap(lambda: beside[:3], cold, x[:3], few, mode, 0.3)
    assert side.log.count("call") == 1, "few tokens read their own rows alone"


def test_the_cost_model() -> None:
    """A threshold at the wrong end: more tokens make the CPU slower and the bus no busier."""
    speeds = PromptSpeeds(cpu_flops_per_second=1e12, bus_bytes_per_second=2e10)
    values = 3 * 4096 * 5500
    for bytes_per_value, turning in ((2.0, 50), (0.5625, 14)):  # 2 · values · tokens / 1e12 = bytes / 2e10
        num_bytes = int(values * bytes_per_value)
        assert not speeds.streaming_pays(turning, values, num_bytes)
        assert speeds.streaming_pays(turning + 1, values, num_bytes)


def test_speeds_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess in place of this machine's speeds, or a measurement in every layer."""
    monkeypatch.setattr(prompt_streaming, "PROBE_BYTES", 2**16)
    stream = PromptStream(LateStream(captures=False), CPU)
    stream.pays(64, neurons_of(50, "float32", True))
    measured = stream.speeds
    assert measured is not None and measured.cpu_flops_per_second > 1e6 and measured.bus_bytes_per_second > 1e6
    stream.pays(64, neurons_of(3, "float32", True))
    assert stream.speeds is measured
