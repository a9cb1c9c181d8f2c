"""The predictors inside a model file."""

from typing import Any, cast

from pi_toolkit.predictor_training.predictor_file import MlpWeights, PredictorSet, RowsCopy
from pi_toolkit.profiler.model_gguf import GgufModel


def predictors_of(model: GgufModel) -> PredictorSet | None:
    """The predictors inside *model*, Q4_0 and Q8_0 ones as blocks in place of tensors; None in a file without them."""
    if not model.num_predictors:
        return None
    layers: list[MlpWeights | RowsCopy] = []
    for layer in range(model.num_predictors):
        threshold = model.copy_thresholds.get(layer)
        if threshold is None:
            fc1, fc2 = cast("tuple[Any, Any]", model.predictor(layer))
            layers.append(MlpWeights(fc1, fc2))
        else:
            layers.append(RowsCopy(threshold))
    return PredictorSet(tuple(layers), model.threshold, model.fingerprint(), None)
