"""Perplexity of the ``transformers`` twin with the predictors' masks applied: what sizing has to know about the whole model.

The runtime computes the same from its own weights; each is the other's check.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.errors import CheckpointError, CorpusError
from pi_toolkit.profiler.hf_model import observe_ffn
from pi_toolkit.profiler.model_families import FAMILIES, ModelShape
from pi_toolkit.profiler.processes import Processes

from .masks import CopyMask, Mask, MlpMask

if TYPE_CHECKING:
    import torch


MOST_NATS = 700.0  # per token; exp(710) is beyond a float


@contextmanager
def masked_ffn(model: Any, shape: ModelShape, predictors: Sequence[Mask]) -> Iterator[None]:
    """Inside the block, neurons that their layer's predictor does not name contribute nothing.

    Scores are computed in float32.
    """
    masks: dict[int, torch.Tensor] = {}

    def by(kind: type[Mask]) -> "Callable[[int, torch.Tensor], None]":
        def decide(layer: int, inputs: "torch.Tensor") -> None:
            if isinstance(predictors[layer], kind):
                masks[layer] = predictors[layer].named(inputs)

        return decide

    def silence(layer: int) -> Callable[..., Any]:
        def hook(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            activation = args[0]
            return (activation * masks.pop(layer).view(activation.shape), *args[1:])

        return hook

    down = FAMILIES[shape.family].ffn_modules.down
    handles = [
        model.get_submodule(down.format(i=layer)).register_forward_pre_hook(silence(layer))
        for layer in range(shape.num_layers)
    ]
    try:
        with observe_ffn(model, shape, predictor_input=by(MlpMask), ffn_input=by(CopyMask)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def masked_perplexity(
    model: Any,
    shape: ModelShape,
    predictors: Sequence[Mask] | None,
    batches: "Iterable[torch.Tensor]",
    processes: Processes | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window, with the masks of
    *predictors*, or dense without them.

    *batches*: token ids int64 [windows, tokens]. Several *processes* share them, and all get the result. Raises
    ``CorpusError`` when no window has two tokens, ``CheckpointError`` when the result is beyond a float or no number.
    """
    import torch
    from torch.nn.functional import cross_entropy

    processes = processes or Processes()
    device = next(model.parameters()).device
    totals = torch.zeros(2, dtype=torch.float64)
    masks = masked_ffn(model, shape, predictors) if predictors is not None else nullcontext()
    with torch.inference_mode(), masks:
        for number, batch in enumerate(batches):
            if number % processes.count == processes.rank:
                hidden = model.base_model(input_ids=batch.to(device), use_cache=False).last_hidden_state
                for row, window in zip(
                    hidden, batch.to(device), strict=True
                ):  # row by row: logits of a batch are large
                    logits = model.get_output_embeddings()(row[:-1]).float()
                    totals[0] += float(cross_entropy(logits, window[1:], reduction="sum"))
                    totals[1] += len(window) - 1
            advance(batch.numel())
    loss, predictions = processes.sum(totals.to(device)).tolist()
    if not predictions:
        raise CorpusError("the corpus holds no window of at least two tokens: give a longer one")
    if not loss / predictions < MOST_NATS:
        raise CheckpointError(
            f"the model's perplexity is beyond every number (a loss of {loss / predictions:.4g} nats per token), so its head "
            "or its last norm is damaged or the type is too narrow: download the model again, or use --dtype float32"
        )
    return math.exp(loss / predictions)
