"""What belongs to a model file: its predictors, and the counts and the placement that lie beside it."""

from pathlib import Path

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.quantisation import dense


def gpuidx_beside(path: Path) -> Path:
    """PowerInfer's name for the placement of the model file *path*."""
    return path.with_name(f"{path.name}.generated.gpuidx")


def activation_beside(path: Path) -> Path:
    """Where PowerInfer looks for the activation counts of the model file *path*."""
    return path.parent / "activation"


def predictors_of(model: GgufModel) -> PredictorSet | None:
    """The predictors inside *model*, quantised ones as float32; None in a file without them."""
    if not model.num_predictors:
        return None
    weights = [tuple(map(dense, model.predictor(layer))) for layer in range(model.num_predictors)]
    fc1, fc2 = zip(*weights, strict=True)
    return PredictorSet(fc1, fc2, model.threshold, model.fingerprint(), None)
