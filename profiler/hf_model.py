"""The ``transformers`` twin of a checkpoint, for observing what its FFN does."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .command_line import is_out_of_memory
from .errors import CheckpointError
from .model_families import FAMILIES, ModelShape
from .model_gguf import GgufModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    LayerCallback = Callable[[int, torch.Tensor], None]


def load_hf_model(checkpoint: Checkpoint | GgufModel, device: "torch.device", dtype: "torch.dtype") -> Any:
    """The model in evaluation mode; raises ``CheckpointError`` when ``transformers`` cannot load all its weights."""
    from transformers.utils import logging

    from .hf_from_file import build_hf_model, compute_activation, computed_here

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = build_hf_model(checkpoint, dtype) if isinstance(checkpoint, GgufModel) else _load(checkpoint, dtype)
    if computed_here(checkpoint.shape):
        compute_activation(model, checkpoint.shape)
    return model.eval().to(device)


def _load(checkpoint: Checkpoint, dtype: "torch.dtype") -> Any:
    """The model of a directory; one with an activation of ours before that is put right."""
    import transformers

    from .hf_from_file import computed_here, hf_config

    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if computed_here(checkpoint.shape):  # of an architecture that transformers does not have
        options["config"] = hf_config(checkpoint.shape)
        kind = getattr(transformers, options["config"].architectures[0])
    try:
        loaded: Any = kind.from_pretrained(
            checkpoint.directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except PermissionError:
        raise
    except Exception as error:  # a config that its validators do not expect makes transformers raise any type
        if is_out_of_memory(error):
            raise
        raise cannot_load(checkpoint, error) from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(
            f"{str(checkpoint.directory)!r} lacks {len(missing)} tensors ({missing[0]} …): download the complete model"
        )
    return model


def cannot_load(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    """What to say of an *error* of ``transformers``: a package that is missing or damaged is no fault of the model."""
    reason = (" ".join(str(error).split()) or type(error).__name__)[:300]  # validators name the field, then the fault
    remedy = (
        "install what is missing, or this toolkit in a new environment"
        if isinstance(error, ImportError)
        else "download the model again"
    )
    return CheckpointError(f"transformers cannot load {str(checkpoint.directory)!r} ({reason}): {remedy}")


@contextmanager
def observe_ffn(
    model: Any,
    shape: ModelShape,
    *,
    pre_activation: "LayerCallback | None" = None,
    activation: "LayerCallback | None" = None,
    predictor_input: "LayerCallback | None" = None,
    ffn_input: "LayerCallback | None" = None,
) -> "Iterator[None]":
    """Call back with (layer, tensor) on every forward pass inside the block; tensors are flattened to [tokens, size].

    ``pre_activation`` gets gate·x (or up·x + b), of dReLU neurons the smaller of gate·x and up·x: [tokens, neurons], a
    neuron fires where it is above the shape's ``activation_threshold``.
    ``activation`` gets what multiplies the down matrix: [tokens, neurons].
    ``predictor_input`` gets the residual stream that predictors read: [tokens, hidden]; it comes first.
    ``ffn_input`` gets the normed vector that the neurons read: [tokens, hidden]; it comes next.
    """
    modules, handles = FAMILIES[shape.family].ffn_modules, []
    try:
        for layer in range(shape.num_layers):

            def module(path: str, layer: int = layer) -> Any:
                return model.get_submodule(path.format(i=layer))

            if predictor_input:
                hook = _input_hook(predictor_input, layer)
                handles.append(module(modules.predictor_input).register_forward_pre_hook(hook, with_kwargs=True))
            if ffn_input:
                hook = _input_hook(ffn_input, layer)
                handles.append(module(modules.fires).register_forward_pre_hook(hook, with_kwargs=True))
            if pre_activation and shape.activation == "drelu":
                assert modules.up, "only gated neurons have two factors"
                gate_hook, up_hook = _smaller_output_hooks(pre_activation, layer)
                handles.append(module(modules.fires).register_forward_hook(gate_hook))
                handles.append(module(modules.up).register_forward_hook(up_hook))
            elif pre_activation:
                handles.append(module(modules.fires).register_forward_hook(_output_hook(pre_activation, layer)))
            if activation:
                hook = _input_hook(activation, layer)
                handles.append(module(modules.down).register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_hook(callback: "LayerCallback", layer: int) -> "Callable[..., None]":
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = args[0] if args else kwargs["hidden_states"]
        callback(layer, tensor.reshape(-1, tensor.shape[-1]))

    return hook


def _output_hook(callback: "LayerCallback", layer: int) -> "Callable[..., None]":
    def hook(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
        callback(layer, output.reshape(-1, output.shape[-1]))

    return hook


def _smaller_output_hooks(callback: "LayerCallback", layer: int) -> "tuple[Callable[..., None], Callable[..., None]]":
    """Hooks for two modules that run one after the other; the second calls back with the smaller output."""
    import torch

    earlier: list[torch.Tensor] = []

    def first(_module: Any, _args: tuple[Any, ...], output: torch.Tensor) -> None:
        earlier.append(output)

    def second(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        _output_hook(callback, layer)(module, args, torch.minimum(earlier.pop(), output))

    return first, second
