"""The predictors inside a model file."""

from typing import Any

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.model_gguf import GgufModel


def predictors_of(model: GgufModel) -> PredictorSet | None:
    """The predictors inside *model*, Q4_0 and Q8_0 ones as blocks in place of tensors; None in a file without them."""
    if not model.num_predictors:
        return None
    weights: list[Any] = [model.predictor(layer) for layer in range(model.num_predictors)]
    fc1, fc2 = zip(*weights, strict=True)
    return PredictorSet(fc1, fc2, model.threshold, model.fingerprint(), None)
