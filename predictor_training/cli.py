"""``pi-train-predictor``: from a workspace to its predictors."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi_toolkit.profiler.command_line import (
    CountType,
    FiniteFloatType,
    ToolkitCommand,
    device_option,
    dtype_option,
    emit_json,
    json_option,
    note,
    percent,
    print_table,
    progress_bar,
    version_option,
)

from .sizing import MAX_WIDTH

if TYPE_CHECKING:
    from .predictor_file import LayerQuality


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path))
@click.option("--corpus", default="wikipedia", show_default=True, help="wikipedia, wikipedia-intros, or a file.")
@click.option(
    "--tokens", type=CountType(), default="200k", show_default=True, help="Tokens to sample from all documents."
)
@click.option("--window", type=click.IntRange(min=1), help="Tokens per window.  [default: 512, or the model's limit]")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Windows per pass.")
@click.option(
    "--hidden",
    type=click.IntRange(1, MAX_WIDTH),
    help="Hidden units per layer.  [default: the largest multiple of 32 with all predictors within 10 % of the model]",
)
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True, help="Passes over the samples.")
@click.option("--learning-rate", type=FiniteFloatType(exclusive=True, maximum=1e30), default=5e-3, show_default=True)
@click.option(
    "--recall",
    type=FiniteFloatType(exclusive=True, maximum=0.9999),
    default=0.98,
    show_default=True,
    help="Share of the firings that thresholds are chosen to keep.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--model", help="Where the weights are now, if not where pi-profile found them.")
@device_option
@dtype_option
@json_option
@version_option
def main(
    workspace: Path,
    corpus: str,
    tokens: int,
    window: int | None,
    batch_size: int,
    hidden: int | None,
    epochs: int,
    learning_rate: float,
    recall: float,
    seed: int,
    model: str | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Train, per layer, a predictor of which FFN neurons will fire; quality is measured on held-out documents.

    WORKSPACE is what pi-profile wrote.

    \b
    Example:
      pi-train-predictor opt-6.7b-pi --tokens 400k
    """
    from pi_toolkit.profiler.atomic_write import check_writable, temporary_directory
    from pi_toolkit.profiler.corpus import corpus_name, documents
    from pi_toolkit.profiler.device import resolve_device, resolve_dtype
    from pi_toolkit.profiler.hf_model import load_hf_model
    from pi_toolkit.profiler.token_windows import check_window, load_tokenizer
    from pi_toolkit.profiler.workspace import Workspace, open_checkpoint, read_model

    from . import predictor_file
    from .sample import SampleStore, collect_samples, split_tokens
    from .sizing import width_within_share
    from .train import TrainingOptions, train_layer

    began = time.perf_counter()
    place = Workspace(workspace)
    record = read_model(place)
    shape = record.shape
    shape.require_silence()
    check_writable(place.predictor, "mend the permissions of the workspace", kind="directory")
    window = window or min(512, shape.max_positions)
    check_window(window, shape.max_positions)
    documents(corpus)  # a corpus that cannot be read is reported before the model is loaded
    checkpoint = open_checkpoint(place, record, model)

    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, checkpoint.dtype(), shape.num_parameters())
    width = hidden or width_within_share(shape)
    options = TrainingOptions(epochs, batch_size_for(tokens), learning_rate, recall, seed)
    note(f"training {shape.num_layers} predictors of width {width} for {record.name} on {torch_device}")
    with temporary_directory(place.path) as directory:
        store = SampleStore(directory, shape, split_tokens(tokens), torch_device)
        hf_model = load_hf_model(checkpoint, torch_device, torch_dtype)
        tokenizer = load_tokenizer(checkpoint.directory, shape.vocabulary_size)
        with progress_bar("sampling", tokens) as progress:
            collect_samples(hf_model, store, corpus, tokenizer, window, batch_size, progress.advance)
        del hf_model
        sampled = store.tokens()
        if sampled < tokens:
            note(f"the corpus ended after {sampled:,} of {tokens:,} tokens")
        total = shape.num_layers * epochs * len(store.layer("training", 0))
        with progress_bar("training", total, "samples") as progress:
            trained = [
                train_layer(*store.splits(layer), width, options, progress.advance) for layer in range(shape.num_layers)
            ]

    quality = tuple(
        predictor_file.LayerQuality(
            layer, width, t.quality.recall, t.quality.precision, t.quality.density, t.quality.firing_share
        )
        for layer, t in enumerate(trained)
    )
    predictors = predictor_file.PredictorSet(
        tuple(t.fc1 for t in trained), tuple(t.fc2 for t in trained), 1.0, record.fingerprint, quality
    )
    about = {"corpus": corpus_name(corpus), "tokens": sampled, "window": window, **vars(options)}
    predictor_file.write(place.predictor, predictors, about)

    seconds, parameters = time.perf_counter() - began, predictors.num_parameters()
    print_quality(quality, parameters / shape.num_parameters())
    if as_json:
        layers = [
            {name: value for name, value in vars(layer).items() if name not in ("kind", "input")} for layer in quality
        ]
        result = {"layers": layers, "predictor_parameters": parameters, "predictor_bytes": 2 * parameters}
        emit_json(result | {"seconds": seconds, "workspace": str(workspace)})


def batch_size_for(tokens: int) -> int:
    """Samples per optimiser step: 512, or fewer where a short run would otherwise take too few steps to learn at all."""
    return max(32, min(512, tokens // 200))


def print_quality(quality: "tuple[LayerQuality, ...]", share_of_model: float) -> None:
    """One row per layer, then the means over firings and the predictors' size."""
    print_table(
        {
            "layer": [layer.layer for layer in quality],
            "width": [layer.hidden for layer in quality],
            "recall": [f"{layer.recall:.4f}" for layer in quality],
            "precision": [f"{layer.precision:.4f}" for layer in quality],
            "candidates": [percent(layer.density) for layer in quality],
            "fire": [percent(layer.firing_share) for layer in quality],
        }
    )
    mean_recall = sum(layer.recall for layer in quality) / len(quality)
    firing = sum(layer.firing_share for layer in quality)
    per_firing = sum(layer.density for layer in quality) / firing if firing else 0.0
    click.echo(
        f"\nmean recall {mean_recall:.4f} on held-out documents, {per_firing:.2f} candidates per firing, "
        f"predictors {percent(share_of_model)} of the model's parameters"
    )
