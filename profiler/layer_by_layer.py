"""Passes of a model that is larger than the memory: the weights of one layer at a time, out of the mapped checkpoint.

A block of windows goes through the first layer, then all of them through the second, and so on; only their hidden states
are kept in between. The larger the block, the less often the weights are read. Every window passes alone, as in
:class:`.whole_model.WholeModel` unless batches have the same bits, so the counts are equal to those of an ordinary run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .hf_from_file import layer_state, shared_state
from .hf_model import observe_ffn
from .hf_skeleton import hf_skeleton
from .model_families import FAMILIES
from .model_gguf import DequantisedModel, GgufModel
from .record import FiringCounter, verify_activation
from .window_batch import WindowBatch

if TYPE_CHECKING:
    import torch

HIDDEN_STATE_BYTES = 512 * 2**20  # of one block: 65,536 tokens of a 7B model in BF16, whose weights take 14 GB


class LayerByLayer:
    """An :class:`.record.Execution` that holds the embedding, one layer and the hidden states of one block.

    Its batches must hold one window each, none longer than *window*. The first one also proves the activation.
    """

    def __init__(self, checkpoint: Checkpoint, device: "torch.device", dtype: "torch.dtype", window: int) -> None:
        self.device, self._dtype, self._shape = device, dtype, checkpoint.shape
        self._weights = DequantisedModel(checkpoint, dtype) if isinstance(checkpoint, GgufModel) else checkpoint
        self._model = hf_skeleton(checkpoint, device, dtype)
        family, shared = FAMILIES[self._shape.family], shared_state(self._weights)
        shared.pop(family.shared_tensors["head.weight"], None)  # firing is over before it
        self._model.load_state_dict(self._on_device(shared), strict=False, assign=True)
        path = family.ffn_modules.fires.split(".{i}.")[0]
        self._path, self._layers = path, self._model.get_submodule(path)
        self.batches_per_round = max(1, HIDDEN_STATE_BYTES // (window * self._shape.hidden_size * dtype.itemsize))
        self._arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._verified = False
        self._layer = self._windows_done = 0  # where the round under way is
        self._hidden: list[torch.Tensor] = []

    def steps(self, batches: Sequence[WindowBatch], counter: FiringCounter) -> Iterator[int]:
        import torch

        if not batches:
            return
        if not self._verified:
            with self._layers_come_and_go():
                verify_activation(self._model, self._shape, batches[0].ids())
            self._verified = True
        arguments = [self._arguments_of(batch) for batch in batches]
        if not self._hidden:
            self._hidden = [self._embedded(batch) for batch in batches]
        for layer in range(self._layer, self._shape.num_layers):
            with self._resident(layer) as module, observe_ffn(self._model, self._shape, pre_activation=counter.count):
                for number in range(self._windows_done, len(batches)):
                    counter.expect(batches[number])
                    others, named = arguments[number][layer]
                    with torch.inference_mode():
                        output = module(self._hidden[number], *others, **named)
                    self._hidden[number] = output if isinstance(output, torch.Tensor) else output[0]
                    last = number + 1 == len(batches)
                    self._layer, self._windows_done = (layer + 1, 0) if last else (layer, number + 1)
                    yield self._worth(batches[number].tokens, layer)
        self._layer, self._hidden = 0, []

    def state(self) -> "dict[str, torch.Tensor]":
        import torch

        hidden = {f"hidden.{number}": tensor for number, tensor in enumerate(self._hidden)}
        return {"at": torch.tensor([self._layer, self._windows_done]), **hidden}

    def restore(self, state: "dict[str, torch.Tensor]") -> None:
        self._layer, self._windows_done = state["at"].tolist()
        self._hidden = [state[f"hidden.{number}"].to(self.device) for number in range(len(state) - 1)]

    def _worth(self, tokens: int, layer: int) -> int:
        """The work of one window in *layer*, such that all layers together make its *tokens*."""
        return tokens * (layer + 1) // self._shape.num_layers - tokens * layer // self._shape.num_layers

    def _embedded(self, batch: WindowBatch) -> "torch.Tensor":
        """What the first layer is given, [1, window, hidden]."""
        import torch

        class FirstLayerReached(Exception):
            pass

        given: list[torch.Tensor] = []

        def stop(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append(args[0] if args else kwargs["hidden_states"])
            raise FirstLayerReached

        handle = self._layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._pass(batch)
        except FirstLayerReached:
            pass
        finally:
            handle.remove()
        return given[0]

    def _arguments_of(self, batch: WindowBatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Per layer what it is given beside hidden states: masks and rotations, which depend on the length alone."""
        if batch.tokens not in self._arguments:
            given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

            def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                given.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))

            handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers]
            try:
                with self._layers_come_and_go():
                    self._pass(batch)
            finally:
                for handle in handles:
                    handle.remove()
            self._arguments[batch.tokens] = given
        return self._arguments[batch.tokens]

    def _pass(self, batch: WindowBatch) -> None:
        import torch

        with torch.inference_mode():
            self._model.base_model(input_ids=batch.ids().to(self.device), use_cache=False)

    @contextmanager
    def _layers_come_and_go(self) -> Iterator[None]:
        """Inside the block a pass of the whole model reads each layer before it runs and drops it after."""
        handles = []
        for number, layer in enumerate(self._layers):
            handles.append(layer.register_forward_pre_hook(self._calls(self._read_layer, number), prepend=True))
            handles.append(layer.register_forward_hook(self._calls(self._drop_layer, number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for number in range(self._shape.num_layers):
                self._drop_layer(number)

    @staticmethod
    def _calls(function: Callable[[int], None], layer: int) -> Callable[..., None]:
        return lambda *_: function(layer)

    @contextmanager
    def _resident(self, layer: int) -> Iterator[Any]:
        """The module of *layer* with its weights, for the time of the block."""
        try:
            self._read_layer(layer)
            yield self._layers[layer]
        finally:
            self._drop_layer(layer)

    def _read_layer(self, layer: int) -> None:
        prefix = f"{self._path}.{layer}."
        state = {name.removeprefix(prefix): tensor for name, tensor in layer_state(self._weights, layer).items()}
        self._layers[layer].load_state_dict(self._on_device(state), assign=True)

    def _drop_layer(self, layer: int) -> None:
        self._layers[layer].to("meta")

    def _on_device(self, state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """In the type and on the device to compute; what is so already stays in its file."""
        return {name: tensor.to(self.device, self._dtype).contiguous() for name, tensor in state.items()}
