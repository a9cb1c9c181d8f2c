"""The ``transformers`` twin of a checkpoint without its weights, to be given them piece by piece."""

from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .hf_from_file import compute_activation, computed_here, hf_config
from .hf_model import cannot_load
from .model_gguf import GgufModel

if TYPE_CHECKING:
    import torch


def hf_skeleton(checkpoint: Checkpoint | GgufModel, device: "torch.device", dtype: "torch.dtype") -> Any:
    """The model in evaluation mode with every weight on the meta device; what is computed once, the rotations, on *device*.

    Raises ``CheckpointError`` when ``transformers`` cannot read the config.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    shape = checkpoint.shape
    if isinstance(checkpoint, GgufModel) or computed_here(shape):
        config = hf_config(shape)
        kind = getattr(transformers, config.architectures[0])._from_config
    else:
        config = _read_config(checkpoint)
        kind = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = kind(config, dtype=dtype)
    if computed_here(shape):
        compute_activation(model, shape)
    for module in list(model.modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            computed = type(module)(config=config).to(device)
            for name, buffer in computed.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)
    return model.eval()


def _read_config(checkpoint: Checkpoint) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=False
        )
    except PermissionError:
        raise
    except Exception as error:  # its validators raise any type
        raise cannot_load(checkpoint, error) from error
