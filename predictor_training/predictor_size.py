"""How large a layer's predictor is: the width of an MLP, or a copy of the rows that decide on firing."""

from typing import Literal

from pi_toolkit.profiler.gguf_types import TensorType, tensor_bytes

PredictorSize = int | Literal["copy"]
COPY_TYPE = TensorType.Q4_0
BIAS_BYTES, F16_BYTES = 4, 2


def copy_bytes(hidden_size: int, neurons: int) -> int:
    """Bytes of a layer's copy, all of which a token reads: a row of blocks and a bias for each neuron."""
    return neurons * (tensor_bytes((hidden_size,), COPY_TYPE) + BIAS_BYTES)


def predictor_bytes(hidden_size: int, neurons: int, size: PredictorSize) -> int:
    """One layer's predictor, an MLP in F16."""
    return copy_bytes(hidden_size, neurons) if size == "copy" else F16_BYTES * size * (hidden_size + neurons)
