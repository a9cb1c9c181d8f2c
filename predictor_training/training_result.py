"""What a training has come to: the predictors as they are written, their table, and what of the request was not reached."""

from dataclasses import dataclass
from typing import Any, Literal

import click

from pi_toolkit.profiler.command_line import percent, print_table
from pi_toolkit.profiler.model_families import ModelShape

from .firing_copy import CopiedLayer
from .predictor_file import LayerQuality, MlpWeights, PredictorSet, RowsCopy
from .predictor_size import F16_BYTES, predictor_bytes
from .sizing import ACCURACY
from .training_files import PredictedLayer


def predictor_set(layers: list[PredictedLayer], fingerprint: str) -> PredictorSet:
    """What is written, with the quality on held-out documents."""
    found: list[MlpWeights | RowsCopy] = []
    quality: list[LayerQuality] = []
    for number, layer in enumerate(layers):
        q = layer.quality
        shares = (q.recall, q.precision, q.density, q.firing_share)
        if isinstance(layer, CopiedLayer):
            found.append(RowsCopy(layer.threshold))
            quality.append(LayerQuality(number, 0, *shares, kind="copy", input="normed", threshold=layer.threshold))
        else:
            found.append(MlpWeights(layer.fc1, layer.fc2))
            quality.append(LayerQuality(number, len(layer.fc1), *shares))
    return PredictorSet(tuple(found), 1.0, fingerprint, tuple(quality))


@dataclass(frozen=True)
class TrainingResult:
    """*quality* of every layer and perplexity without (*dense*) and with predictors (*predicted*), on held-out documents,
    beside the *recall* and *rule* that were asked for."""

    shape: ModelShape
    quality: tuple[LayerQuality, ...]
    dense: float
    predicted: float
    recall: float
    rule: Literal["perplexity", "accuracy"]

    def show(self, target: float | None) -> None:
        """Print the table, and plainly what was not reached: of perplexity, a change within the share *target*."""
        change = self.predicted / self.dense - 1
        self._print_quality()
        click.echo(f"perplexity on held-out documents {self.dense:.2f} → {self.predicted:.2f} ({change:+.2%})")
        if failed := self.failed_layers():
            layers = f"layer {failed[0]}" if len(failed) == 1 else f"layers {', '.join(map(str, failed))}"
            click.echo(
                f"{layers}: less than was asked for (recall {self.recall:g}) on held-out documents; more --tokens help"
            )
        if target and abs(change) > target:
            click.echo(f"perplexity changes by more than {percent(target)}: more --tokens, --share or --recall help")

    def as_json(self) -> dict[str, Any]:
        """The part of ``--json`` that is about quality and size."""
        mlps = sum(size for size, q in zip(self._bytes(), self.quality, strict=True) if q.kind == "mlp")
        layers = [
            {k: v for k, v in layer.entry().items() if k != "input" and (k, v) != ("kind", "mlp")}
            for layer in self.quality
        ]
        return {
            "layers": layers,
            "predictor_parameters": mlps // F16_BYTES,
            "predictor_bytes": sum(self._bytes()),
            "perplexity_dense": self.dense,
            "perplexity_predicted": self.predicted,
            "failed_layers": self.failed_layers(),
        }

    def failed_layers(self) -> list[int]:
        """Layers whose predictor misses more firings than asked for, or decides wrongly too often."""
        by_accuracy = self.rule == "accuracy"
        return [q.layer for q in self.quality if q.recall < self.recall or (by_accuracy and _accuracy(q) < ACCURACY)]

    def _bytes(self) -> list[int]:
        sizes = zip(self.shape.ffn_sizes, self.quality, strict=True)
        return [predictor_bytes(self.shape.hidden_size, neurons, q.size) for neurons, q in sizes]

    def _print_quality(self) -> None:
        """One row per layer, then the means over firings and the predictors' share of the model in F16."""
        quality = self.quality
        print_table(
            {
                "layer": [layer.layer for layer in quality],
                "width": [layer.size for layer in quality],
                "recall": [f"{layer.recall:.4f}" for layer in quality],
                "precision": [f"{layer.precision:.4f}" for layer in quality],
                "candidates": [percent(layer.density) for layer in quality],
                "fire": [percent(layer.firing_share) for layer in quality],
            }
        )
        copies = any(layer.kind == "copy" for layer in quality)
        mean_recall = sum(layer.recall for layer in quality) / len(quality)
        firing = sum(layer.firing_share for layer in quality)
        per_firing = sum(layer.density for layer in quality) / firing if firing else 0.0
        share = sum(self._bytes()) / (F16_BYTES * self.shape.num_parameters())
        click.echo(
            f"\nmean recall {mean_recall:.4f} on held-out documents, {per_firing:.2f} candidates per firing, "
            f"predictors {percent(share)} of the model's {'bytes in F16' if copies else 'parameters'}"
        )


def _accuracy(layer: LayerQuality) -> float:
    """Share of the decisions that are right."""
    return 1 - layer.firing_share * (1 - layer.recall) - layer.density * (1 - layer.precision)
