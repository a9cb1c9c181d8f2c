"""A placement on several GPUs, with CPUs standing in for them: from the file to the same text."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.engine import hot_devices
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.tier_plan import TierPlan, all_cold, from_index
from pi_toolkit.runtime.weights import load_weights
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.memory import unit_bytes
from pi_toolkit.solver.token_time import UnitDevices
from solver_cases import FINGERPRINT, tiny_shape
from test_runtime_decoder import TOKENS, decoder_for
from tiny_models import CONFIGS, VOCABULARY, save_family

CPU, META = torch.device("cpu"), torch.device("meta")


def index_on_two_gpus(sizes: tuple[int, ...]) -> GpuIndex:
    """Every unit on one of two GPUs or the CPU, drawn at random; layer 1 has no neuron on the second."""
    rng = np.random.default_rng(3)
    neurons = [rng.integers(-1, 2, size).astype(np.int8) for size in sizes]
    neurons[1][neurons[1] == 1] = 0
    devices = UnitDevices(np.array([0, 1, -1]), np.array([0, -1, 1]), 1, tuple(neurons))
    return GpuIndex(
        gpu_neurons=tuple(np.flatnonzero(layer >= 0).astype(np.int32) for layer in neurons),
        ffn_sizes=sizes,
        vram_capacity_bytes=1000,
        fingerprint=FINGERPRINT,
        hardware="test",
        dtype="float32",
        context=64,
        batch_size=1,
        gpu_budget_bytes=3000,
        attention_on_gpu=(True, True, False),
        predictor_on_gpu=(True, False, True),
        head_on_gpu=True,
        objective_value=0.01,
        upper_bound=0.009,
        status="optimal",
        objective="latency",
        devices=devices,
        gpu_budgets=(1000, 2000),
    )


def greedy_text(decoder: Decoder, prompt: torch.Tensor, length: int) -> list[int]:
    """A prompt in one piece, then token by token."""
    slots, text = torch.tensor([0]), []
    step, position = prompt[None], 0
    for _ in range(length):
        positions = torch.arange(position, position + step.shape[1])[None]
        logits = decoder.logits(decoder.hidden_states(step, positions, slots))
        text.append(int(logits[0, -1].argmax()))
        position, step = position + step.shape[1], torch.tensor([[text[-1]]])
    return text


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_three_tiers_give_the_text_of_one(family: str, mode: Mode, tmp_path: Path) -> None:
    """A neuron that is lost between GPUs, or a hidden state that stays on the wrong one."""
    checkpoint = Checkpoint(save_family(tmp_path / "model", family))
    sizes = checkpoint.shape.ffn_sizes
    gpuidx.write(tmp_path / "two.gpuidx", index_on_two_gpus(sizes))
    index = gpuidx.read(tmp_path / "two.gpuidx", sizes, FINGERPRINT)
    plan = from_index(index, CPU, CPU, hot_devices(index, CPU))
    assert max(len(plan.tiers(layer, sizes[layer])) for layer in range(3)) == 3
    prompt = torch.randint(0, VOCABULARY, (TOKENS - 8,), generator=torch.Generator().manual_seed(0))
    one, three = (decoder_for(checkpoint, mode, p) for p in (all_cold(checkpoint.shape, CPU, CPU), plan))
    assert greedy_text(three, prompt, 12) == greedy_text(one, prompt, 12)


def test_the_units_of_each_gpu_are_counted(tmp_path: Path) -> None:
    """Both GPUs' bytes on the first is an allocation that fails after minutes."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    index = index_on_two_gpus(checkpoint.shape.ffn_sizes)
    units = unit_bytes(checkpoint.shape, "float32", 64, 1, [32] * 3)
    plan = from_index(index, META, CPU, [META, CPU])
    (_, first), (_, second) = plan.bytes_by_gpu(units)
    neurons = [sum(int((layer == gpu).sum()) for layer in index.devices.neurons) for gpu in range(2)]
    assert first == units.attention[0] + units.predictor[0] + neurons[0] * units.neuron
    assert second == units.attention[1] + units.predictor[2] + units.head + neurons[1] * units.neuron
    assert first + second == plan.hot_bytes(units)
    weights = load_weights(checkpoint, plan, None, "float32")
    assert weights.layers[0].device == META and weights.layers[1].device == CPU


def test_one_gpu_is_counted_as_before() -> None:
    plan = TierPlan(META, CPU, (np.arange(3),), (True,), (False,), False)
    units = unit_bytes(tiny_shape((64,)), "float32", 64, 1)
    assert plan.bytes_by_gpu(units) == [(META, units.attention[0] + 3 * units.neuron)]


def test_too_few_gpus_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    index = index_on_two_gpus((96, 96, 96))
    with pytest.raises(HardwareError, match="is for 2 GPUs and 1 are here: run pi-place with --vram for those"):
        hot_devices(index, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [str(device) for device in hot_devices(index, torch.device("cuda", 1))] == ["cuda:1", "cuda:2"]
