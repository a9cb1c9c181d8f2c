"""From a rough plan – which dense units are wanted on GPUs and how many bundles of each layer – to a placement that meets
every constraint, with the memory that is left filled by what saves most time per byte.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .gpu_assignment import home_gpus
from .latency_problem import Answer, LatencyProblem
from .token_time import CPU


@dataclass(frozen=True)
class Plan:
    """What is wanted on GPUs: bool [layers] attention and predictors, the head, and bundles per layer, hottest first.

    ``homes``: the GPU of each layer; None for neighbouring layers together. ``head_gpu``: that of the head, which then goes
    first; None for the last GPU with room when everything else has its place.
    """

    attention: np.ndarray
    predictor: np.ndarray
    head: bool
    bundles: Sequence[int]
    homes: np.ndarray | None = None
    head_gpu: int | None = None


def dense_first(problem: LatencyProblem) -> Plan:
    """All dense units before any bundle, as the paper does."""
    layers = len(problem.layers)
    return Plan(np.ones(layers, bool), np.ones(layers, bool), True, [0] * layers)


def layers_first(problem: LatencyProblem) -> Plan:
    """Whole layers, one after the other, as llama.cpp does; the head, which it moves last, when all of them fit."""
    room, wanted = sum(problem.gpu_bytes), np.zeros(len(problem.layers), bool)
    whole = problem.attention_bytes + problem.predictor_bytes + problem.layer_bytes
    wanted[: int(np.searchsorted(whole.cumsum(), room, side="right"))] = True
    bundles = [
        len(b) if want and problem.open_to_gpu(i) else 0
        for i, (b, want) in enumerate(zip(problem.layers, wanted, strict=True))
    ]
    return Plan(wanted, wanted.copy(), bool(wanted.all()), bundles)


def realise(problem: LatencyProblem, plan: Plan, fill: bool = True) -> Answer:
    """*plan* as far as memory and C_l allow; with *fill* what is left of the memory goes to whatever saves most per byte.

    The answer may still be infeasible where the CPU's memory is too small for what does not fit the GPUs.
    """
    filling = _Filling(problem, plan)
    filling.place_pins()
    filling.place_dense(plan)
    filling.place_bundles(plan)
    if fill:
        filling.fill()
        filling.complete_layers()
    return filling.answer()


class _Filling:
    """One placement in the making: the room left on every GPU and, per layer, the bundles from the first that are placed."""

    def __init__(self, problem: LatencyProblem, plan: Plan) -> None:
        self.problem = problem
        layers, gpus = len(problem.layers), len(problem.gpu_bytes)
        self.rooms = [int(room) for room in problem.gpu_bytes]
        self.attention, self.predictor, self.head = np.full(layers, CPU), np.full(layers, CPU), CPU
        self.devices = problem.neurons.nothing()
        self.placed = [0] * layers
        self.reads = np.zeros((layers, gpus))
        wanted_bytes = [
            int(a * wants_a + p * wants_p + b.num_bytes[:n].sum())
            for a, p, b, wants_a, wants_p, n in zip(
                problem.attention_bytes,
                problem.predictor_bytes,
                problem.layers,
                plan.attention,
                plan.predictor,
                plan.bundles,
                strict=True,
            )
        ]
        self.homes = np.zeros(layers, int)
        if gpus:
            self.homes = home_gpus(wanted_bytes, problem.gpu_bytes) if plan.homes is None else plan.homes

    def answer(self) -> Answer:
        return Answer(self.attention, self.predictor, self.head, tuple(self.devices))

    def place_pins(self) -> None:
        for layer, pin in enumerate(self.problem.neurons.pins):
            self._place(layer, pin or 0, partly=True)

    def place_dense(self, plan: Plan) -> None:
        if plan.head_gpu is not None:
            self._place_head([plan.head_gpu])
        for layer in np.flatnonzero(plan.attention).tolist():
            self._place_attention(layer)
            if plan.homes is None and plan.predictor[layer]:
                self._place_predictor(layer)
        self._place_predictors(plan.predictor & (self.problem.predictor_bytes > 0))
        if plan.head and self.head == CPU:
            self._place_head(range(len(self.rooms)))

    def place_bundles(self, plan: Plan) -> None:
        """Whole layers before those that are divided, which can do with a bundle less."""
        divided = [wanted < len(bundles) for wanted, bundles in zip(plan.bundles, self.problem.layers, strict=True)]
        for layer in np.argsort(divided, kind="stable").tolist():
            wanted = plan.bundles[layer]
            if self._is_free(layer):
                fewest = self._leading(layer)
                if wanted > 0 and not self._place(layer, max(wanted, fewest)):
                    self._place(layer, max(wanted, fewest), partly=True)
                    if self.placed[layer] < fewest:
                        self._take_back(layer)

    def fill(self) -> None:
        """Dense units that fit, then bundles by the seconds they save per byte, for as long as that is not negative or the
        CPU's memory asks for it."""
        for layer in range(len(self.placed)):
            if self.attention[layer] == CPU and self._dense_pays(layer):
                self._place_attention(layer)
            if self.predictor[layer] == CPU and self._dense_pays(layer):
                self._place_predictor(layer)
        if self.head == CPU and len(self.rooms):
            self._place_head(range(len(self.rooms)))
        too_much = self.problem.cpu_used(self.answer()) - self.problem.cpu_bytes
        queue = [step for layer in range(len(self.placed)) for step in self._next_step(layer)]
        heapq.heapify(queue)
        while queue:
            loss, layer, until = heapq.heappop(queue)
            if loss > 0 and too_much <= 0:
                break
            before = sum(self.rooms)
            if self._place(layer, until):
                too_much -= before - sum(self.rooms)
                for step in self._next_step(layer):
                    heapq.heappush(queue, step)

    def complete_layers(self) -> None:
        """Layers that lie on one GPU but for a few bundles: bring these as well, if that saves the synchronisation."""
        problem, sync = self.problem, self.problem.speeds.sync_seconds
        for layer in np.argsort(
            [int(b.num_bytes[n:].sum()) for b, n in zip(problem.layers, self.placed, strict=True)], kind="stable"
        ):
            gpu, bundles = self.attention[layer], problem.layers[layer]
            rest = slice(self.placed[layer], None)
            alone = self.reads[layer].sum() == self.reads[layer][gpu] if gpu != CPU else False
            dense = problem.predictor_bytes[layer] == 0 or self.predictor[layer] == gpu
            missing = int(bundles.num_bytes[rest].sum())
            if not (alone and dense and missing and self._is_free(layer)) or missing > self.rooms[gpu]:
                continue
            after = problem.layer_reads[layer] * problem.seconds_per_byte[gpu]
            if after < self._seconds(layer, self.reads[layer]) + sync:
                self._put(layer, len(bundles), int(gpu))

    def _is_free(self, layer: int) -> bool:
        return self.problem.neurons.pins[layer] is None and self.problem.open_to_gpu(layer)

    def _leading(self, layer: int) -> int:
        """Bundles that reach C_l."""
        return self.problem.layers[layer].leading(self.problem.neurons.min_gpu_neurons[layer] or 0)

    def _dense_pays(self, layer: int) -> bool:
        """Whether the layer is divided already, so that one more dense unit on a GPU costs no synchronisation."""
        return self.placed[layer] > 0 or self.attention[layer] != CPU or self.predictor[layer] != CPU

    def _place_attention(self, layer: int) -> None:
        gpu = self._gpu_with_room(layer, int(self.problem.attention_bytes[layer]), int(self.predictor[layer]))
        if gpu is not None:
            self.attention[layer] = gpu
            self.rooms[gpu] -= int(self.problem.attention_bytes[layer])

    def _place_predictor(self, layer: int) -> None:
        num_bytes = int(self.problem.predictor_bytes[layer])
        gpu = self._gpu_with_room(layer, num_bytes, int(self.attention[layer])) if num_bytes else None
        if gpu is not None:
            self.predictor[layer] = gpu
            self.rooms[gpu] -= num_bytes

    def _place_predictors(self, wanted: np.ndarray) -> None:
        """Those of *wanted* layers; where one does not fit beside its attention another layer's takes its place."""
        others = np.argsort(self.attention == CPU, kind="stable")
        for layer in [*np.flatnonzero(wanted).tolist(), *others[~wanted[others]].tolist()]:
            if self.predictor[layer] == CPU and int((self.predictor != CPU).sum()) < int(wanted.sum()):
                self._place_predictor(layer)

    def _place_head(self, gpus: Iterable[int]) -> None:
        head = self.problem.units.head
        price = self.problem.seconds_per_byte
        fitting = [gpu for gpu in gpus if self.rooms[gpu] >= head and price[gpu] < price[CPU]]
        if fitting:
            self.head = max(fitting)  # the last GPU, where the last layers are
            self.rooms[self.head] -= head

    def _gpu_with_room(self, layer: int, num_bytes: int, beside: int) -> int | None:
        """The GPU for a dense unit of *layer*: *beside*, unless that is the CPU, else the layer's home, else any other."""
        choices = [beside] if beside != CPU else self._gpus_from_home(layer)
        return next((int(gpu) for gpu in choices if self.rooms[gpu] >= num_bytes), None)

    def _gpus_from_home(self, layer: int) -> list[int]:
        home = int(self.homes[layer])
        return sorted(range(len(self.rooms)), key=lambda gpu: (gpu != home, -self.rooms[gpu]))

    def _place(self, layer: int, until: int, partly: bool = False) -> bool:
        """Put the bundles up to *until* on GPUs, on the home one first; all of them, or with *partly* those that fit."""
        bundles, rooms, puts = self.problem.layers[layer], list(self.rooms), []
        position = self.placed[layer]
        for gpu in self._gpus_from_home(layer):
            ends = bundles.num_bytes[position:until].cumsum()
            fitting = int(np.searchsorted(ends, rooms[gpu], side="right"))
            if fitting:
                puts.append((gpu, position + fitting))
                position += fitting
        if position < until and not partly:
            return False
        for gpu, end in puts:
            self._put(layer, end, gpu)
        return position == until

    def _put(self, layer: int, until: int, gpu: int) -> None:
        bundles, new = self.problem.layers[layer], slice(self.placed[layer], until)
        self.devices[layer][new] = gpu
        self.rooms[gpu] -= int(bundles.num_bytes[new].sum())
        self.reads[layer, gpu] += float(bundles.read_bytes[new].sum())
        self.placed[layer] = until

    def _take_back(self, layer: int) -> None:
        for gpu in range(len(self.rooms)):
            self.rooms[gpu] += int(self.problem.layers[layer].num_bytes[self.devices[layer] == gpu].sum())
        self.devices[layer][:] = CPU
        self.reads[layer] = 0.0
        self.placed[layer] = 0

    def _next_step(self, layer: int) -> Iterator[tuple[float, int, int]]:
        """(seconds lost per byte, layer, end) of the next bundle, or of the first C_l."""
        bundles, first = self.problem.layers[layer], self.placed[layer]
        if not self._is_free(layer) or first == len(bundles) or not self.rooms:
            return
        until = max(first + 1, self._leading(layer) if first == 0 else 0)
        reads = self.reads[layer].copy()
        reads[self.homes[layer]] += float(bundles.read_bytes[first:until].sum())
        change = self._seconds(layer, reads) - self._seconds(layer, self.reads[layer])
        if first == 0 and self.attention[layer] == CPU and self.predictor[layer] == CPU:
            change += self.problem.speeds.sync_seconds
        yield change / float(bundles.num_bytes[first:until].sum()), layer, until

    def _seconds(self, layer: int, reads_on_gpus: np.ndarray) -> float:
        price = self.problem.seconds_per_byte
        on_cpu = self.problem.layer_reads[layer] - reads_on_gpus.sum()
        return max(on_cpu * price[CPU], float((reads_on_gpus * price[:-1]).max(initial=0.0)))
