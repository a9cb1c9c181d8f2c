"""Shapes, counts, machines and workspaces for the solver's tests, all made in code from seeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.hardware import GIB, Gpu, Hardware
from pi_toolkit.profiler.model_families import ModelShape, Rotary
from pi_toolkit.profiler.workspace import ModelRecord, Workspace, write_model

FINGERPRINT = "ab" * 32

LLAMA_7B = ModelShape(
    family="llama",
    vocabulary_size=32000,
    hidden_size=4096,
    ffn_sizes=(11008,) * 32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=4096,
    activation="relu",
    gated=True,
    norm="rms",
    norm_epsilon=1e-5,
    attention_bias=False,
    ffn_bias=False,
    tied_embeddings=False,
    rotary=Rotary(10000.0),
)
MISTRAL_7B = replace(LLAMA_7B, ffn_sizes=(14336,) * 32, num_kv_heads=8, max_positions=32768)
OPT_175B = ModelShape(
    family="opt",
    vocabulary_size=50272,
    hidden_size=12288,
    ffn_sizes=(49152,) * 96,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    max_positions=2048,
    activation="relu",
    gated=False,
    norm="layer",
    norm_epsilon=1e-5,
    attention_bias=True,
    ffn_bias=True,
    tied_embeddings=True,
    rotary=None,
    position_offset=2,
)


LLAMA_70B = replace(LLAMA_7B, hidden_size=8192, ffn_sizes=(28672,) * 80, num_heads=64, num_kv_heads=8)
OPT_30B = replace(OPT_175B, hidden_size=7168, ffn_sizes=(28672,) * 48, num_heads=56, num_kv_heads=56)
FALCON_40B = replace(
    LLAMA_7B,
    family="falcon",
    vocabulary_size=65024,
    hidden_size=8192,
    ffn_sizes=(32768,) * 60,
    num_heads=128,
    num_kv_heads=8,
    head_dim=64,
    gated=False,
    norm="layer",
    parallel_block=True,
)


def tiny_shape(ffn_sizes: tuple[int, ...], **changes: object) -> ModelShape:
    """A LLaMA of hidden size 32 with any numbers of neurons."""
    tiny = {"vocabulary_size": 64, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    return replace(LLAMA_7B, ffn_sizes=ffn_sizes, max_positions=64, **tiny | changes)


def machine(cpu_gib: float = 512, **gpu: float) -> Hardware:
    """The paper's PC-High with any CPU memory; *gpu* overrides fields of :class:`Gpu`."""
    description = Gpu("GPU", 24 * GIB, 1008e9, 64e9, 2e-5, 0)
    return Hardware("test", "CPU", int(cpu_gib * GIB), 67.2e9, (replace(description, **gpu),))


def zipf_counts(ffn_sizes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Firing counts with the power law of real models, another exponent and another hot set in each layer."""
    rng = np.random.default_rng(seed)
    layers = []
    for neurons in ffn_sizes:
        rate = np.arange(1, neurons + 1) ** -rng.uniform(0.5, 1.2)
        layers.append(rng.permutation((rate * rng.uniform(3e5, 1e6)).astype(np.int64)))
    return tuple(layers)


def make_workspace(
    path: Path, shape: ModelShape, counts: tuple[np.ndarray, ...], fingerprint: str | None = FINGERPRINT
) -> Workspace:
    """A workspace with ``model.json`` and firing counts; *fingerprint* is what the counts state."""
    workspace = Workspace(path)
    write_model(workspace, ModelRecord("tiny", "nowhere/tiny", None, FINGERPRINT, shape))
    tokens = int(max(layer.max() for layer in counts)) + 1
    activation_stats.write(workspace.activation, activation_stats.ActivationStats(counts, fingerprint, tokens))
    return workspace
