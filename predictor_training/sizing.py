"""How wide a layer's predictor may be."""

from pi_toolkit.profiler.model_families import ModelShape

MAX_WIDTH = 2**20  # hidden units of one layer that a file may state; nothing real comes near
# Rows of fc2 in blocks of 32 can be quantised to Q4_0 and Q8_0.
WIDTH_MULTIPLE = 32
# PowerInfer keeps its predictors within a tenth of the model (mean 7 %, Table 6 of the paper).
SHARE_OF_MODEL = 0.10


def width_within_share(shape: ModelShape, share: float = SHARE_OF_MODEL) -> int:
    """The largest multiple of 32, the same for every layer, at which all predictors together hold at most *share* of the
    model's parameters; 32 where even that is more."""
    per_unit = sum(shape.hidden_size + neurons for neurons in shape.ffn_sizes)
    return max(1, int(share * shape.num_parameters() / per_unit) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
