"""The same windows through ``transformers``."""

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.device import resolve_device, resolve_dtype
from pi_toolkit.profiler.errors import WorkspaceError
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.workspace import open_weights

from .perplexity import LanguageModel


def open_other(model: str, shape: ModelShape) -> Checkpoint:
    """The weights of a directory, hub id or model file that is to stand beside a model of *shape*.

    Raises ``WorkspaceError`` for a model of other sizes, and what opening one raises.
    """
    checkpoint = open_weights(model, None, shape.activation)
    sizes = [(s.vocabulary_size, s.hidden_size, s.ffn_sizes, s.num_heads) for s in (checkpoint.shape, shape)]
    if sizes[0] != sizes[1]:
        raise WorkspaceError(
            f"the reference {model!r} is a model of other sizes: give the directory of the original with --reference"
        )
    return checkpoint


def load_reference(checkpoint: Checkpoint, device: str) -> LanguageModel:
    """The ``transformers`` model of *checkpoint*, on a CPU in float32 where the memory allows."""
    import torch

    where = resolve_device(device)
    dtype = resolve_dtype("auto", where, checkpoint.dtype(), checkpoint.shape.num_parameters())
    model = load_hf_model(checkpoint, where, dtype)

    def read(token_ids: torch.Tensor) -> torch.Tensor:
        return model.base_model(input_ids=token_ids.to(where), use_cache=False).last_hidden_state

    def logits(states: torch.Tensor) -> torch.Tensor:
        return model.get_output_embeddings()(states).float()

    return LanguageModel(read, logits)
