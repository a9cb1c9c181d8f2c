"""What ``transformers`` with ``accelerate`` reaches under the same memory cap: whole layers on the GPU, the others copied
there for every token. The baseline of :mod:`.gpu_check`, with weights of the same shape."""

import importlib.util
import time
from typing import TYPE_CHECKING, Any

from .synthetic_model import SyntheticSize

if TYPE_CHECKING:
    import torch

TOKENS, MOST_SECONDS = 6, 12.0


def missing() -> list[str]:
    """The packages this baseline needs and this installation lacks."""
    return [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]


def offloaded_tokens_per_second(size: SyntheticSize, budget_bytes: int, device: "torch.device") -> dict[str, Any]:
    """Greedy tokens per second of a ReLU LLaMA in F16 with at most *budget_bytes* of weights on *device*."""
    import torch

    model = _dispatched(size, budget_bytes, device)
    first = device if device.type == "cuda" else torch.device("cpu")
    with torch.inference_mode():
        past, token = None, torch.tensor([list(range(10, 18))], device=first)
        timed, seconds = 0, 0.0
        while timed < TOKENS and seconds < MOST_SECONDS:
            began = time.perf_counter()
            output = model(token, past_key_values=past, use_cache=True)
            past, token = output.past_key_values, output.logits[:, -1:].argmax(-1).to(first)
            int(token)
            if timed or past.get_seq_length() > 8:  # the prompt does not count
                seconds, timed = seconds + time.perf_counter() - began, timed + 1
    on_gpu = sum(all(part.is_cuda for part in layer.parameters()) for layer in model.model.layers)  # others are "meta"
    return {"tokens_per_second": timed / seconds, "timed_tokens": timed, "layers_on_gpu": on_gpu}


def _dispatched(size: SyntheticSize, budget_bytes: int, device: "torch.device") -> Any:
    import torch
    import transformers
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights

    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.neurons,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocabulary,
        hidden_act="relu",
        max_position_embeddings=size.context,
    )
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # Written to, because memory that never was is one page of zeros, which a cache holds.
            filled = torch.full(parameter.shape, 0.001, dtype=dtype)
            setattr(module, name, torch.nn.Parameter(filled, requires_grad=False))
    memory: dict[int | str, int | str] = {"cpu": 2**50}
    if device.type == "cuda":
        memory[device.index or 0] = budget_bytes
    places = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=["LlamaDecoderLayer"], dtype=dtype)
    return dispatch_model(
        model, places, main_device=device.index or 0 if device.type == "cuda" else "cpu", force_hooks=True
    )
