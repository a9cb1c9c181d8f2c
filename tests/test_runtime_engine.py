"""What opening a workspace counts and checks before it allocates."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import HardwareError
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.engine import check_gpu_memory, read_end_ids
from pi_toolkit.runtime.kernels.packed_matrix import Kind
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.memory import unit_bytes
from tiny_models import CONFIGS, save_family

CPU, META = torch.device("cpu"), torch.device("meta")
CONTEXT, SLOTS, WIDTH = 40, 3, 32


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors inside dataclasses, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_counted_bytes_are_those_allocated(tmp_path: Path, family: str, kind: Kind) -> None:
    """A budget that leaves out a bias, a norm or the KV cache, and an allocation that fails after minutes of loading."""
    checkpoint = Checkpoint(save_family(tmp_path / "m", family))
    shape = checkpoint.shape
    fc1 = tuple(torch.zeros(WIDTH, shape.hidden_size) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.zeros(neurons, WIDTH) for neurons in shape.ffn_sizes)
    neurons = (np.arange(10), np.arange(0), np.arange(96))
    # "meta" tensors have a size and no memory, so they stand in for a GPU.
    plan = TierPlan(META, CPU, neurons, (True, False, True), (False, True, True), True)
    weights = load_weights(checkpoint, plan, PredictorSet.of_mlps(fc1, fc2, 1.0, None, None), kind)
    decoder = Decoder(shape, weights, SLOTS, CONTEXT, "predicted")
    allocated = sum(t.nbytes for t in tensors_of([weights, decoder.cache]) if t.device == META)
    if shape.family == "opt":
        # The bias of the FFN's output follows the attention; that of the up rows follows the neurons.
        assert any(t.device == META for t in tensors_of(weights.layers[0].ffn.down_bias))
    units = unit_bytes(shape, kind, CONTEXT, SLOTS, [WIDTH] * 3)
    assert plan.hot_bytes(units) == allocated


def index(budget: int | None) -> GpuIndex:
    return GpuIndex((np.arange(0),), (8,), 0, dtype="bfloat16", context=16, gpu_budget_bytes=budget)


def test_too_little_gpu_memory_is_refused_before_loading() -> None:
    """CUDA out of memory after minutes of loading, with a traceback."""
    with pytest.raises(HardwareError, match=r"needs 3.0 MiB .* 2.0 MiB are free: run pi-place with a smaller --vram"):
        check_gpu_memory(3 * 2**20, 2 * 2**20, index(None))


def test_more_than_was_planned_for_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """A context or dtype beyond the placement's that overruns the budget unnoticed."""
    check_gpu_memory(2000, 2**30, index(1000))
    assert "take 2.0 KiB of GPU memory, more than the 1,000 bytes the placement was made for" in capsys.readouterr().err
    check_gpu_memory(1000, 2**30, index(1000))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ('{"eos_token_id": [2, 7]}', '{"eos_token_id": 3}', {2, 7}),
        ('{"eos_token_id": 2}', "{}", {2}),
        ("{}", '{"eos_token_id": 3}', {3}),
        (None, '{"eos_token_id": 3}', {3}),
        ("not json", '{"eos_token_id": 3}', {3}),
        (None, '{"eos_token_id": null}', set()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: str | None, config: str, want: set[int]
) -> None:
    """A chat model that never stops, because only config.json was read."""
    (tmp_path / "config.json").write_text(config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert read_end_ids(tmp_path) == want
