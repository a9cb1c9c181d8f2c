"""Small model files for tests: exported from the tiny models, with random predictors."""

from pathlib import Path

import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.gguf_container import Magic, TensorType
from pi_toolkit.profiler.gguf_tokenizer_keys import tokenizer_keys
from pi_toolkit.runtime.model_gguf_export import ExportSource, export
from tiny_models import save_family

WIDTH = 32


def random_predictors(checkpoint: Checkpoint, fingerprint: str, seed: int = 0) -> PredictorSet:
    """F16 predictors of width 32 that name about half of the neurons."""
    torch.manual_seed(seed)
    hidden, sizes = checkpoint.shape.hidden_size, checkpoint.shape.ffn_sizes
    fc1 = tuple((torch.randn(WIDTH, hidden) / hidden**0.5).half() for _ in sizes)
    fc2 = tuple((torch.randn(neurons, WIDTH) / WIDTH**0.5).half() for neurons in sizes)
    return PredictorSet.of_mlps(fc1, fc2, 0.25, fingerprint, None)


def source_of(directory: Path) -> ExportSource:
    """A model directory with random predictors, as the exporter takes it."""
    checkpoint = Checkpoint(directory)
    fingerprint = checkpoint.fingerprint()
    keys = tokenizer_keys(directory, checkpoint.shape.vocabulary_size)
    return ExportSource(checkpoint, "tiny", fingerprint, random_predictors(checkpoint, fingerprint), keys)


def export_family(
    directory: Path, family: str, magic: Magic, kind: TensorType, **changes: object
) -> tuple[ExportSource, Path]:
    """Save a tiny model and write it as a file; the source and the file."""
    source = source_of(save_family(directory / "hf", family, **changes))
    path = directory / ("tiny.powerinfer.gguf" if magic == "PWRI" else "tiny.gguf")
    export(path, magic, source, kind)
    return source, path
