"""Native kernels against plain torch, for every instruction set of this machine, weight type, mode and thread count."""

from typing import get_args

import pytest
import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels import sparse_ffn_reference as reference
from pi_toolkit.runtime.kernels.native import ACTIVATIONS, MODES, address, extension, matrix, multiply, products
from pi_toolkit.runtime.kernels.packed_matrix import KINDS, Kind, PackedMatrix, allocate, fill, pack, row_bytes
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode, NeuronRows

CPU = torch.device("cpu")
BLOCK = 32


def instruction_sets() -> list[str]:
    """Those that this machine can run, found by asking for each."""
    found, module = [], extension()
    assert module is not None, "the tests need a compiler at installation"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("portable", "avx2", "avx512", "avx512_vnni"):
            patch.setenv("PI_CPU_ISA", name)
            try:
                found.append(module.Kernels(1).instruction_set)
            except ValueError:
                continue
    return found


ISAS = instruction_sets()


def kernels(monkeypatch: pytest.MonkeyPatch, isa: str, threads: int = 1) -> object:
    module = extension()
    assert module is not None
    monkeypatch.setenv("PI_CPU_ISA", isa)
    made = module.Kernels(threads)
    assert made.instruction_set == isa
    return made


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def as_kernels_see(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Block types meet a vector rounded to int8 in blocks of 32."""
    if kind not in ("q8_0", "q4_0"):
        return x.double()
    blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    quants = (blocks * torch.where(largest > 0, 127.0 / largest, 0.0)).round()
    return (quants.double() * (largest / 127.0).double()).flatten()[: len(x)]


def shapes_for(kind: Kind) -> list[int]:
    """Row lengths on and off every block size."""
    return [32, 64, 96, 128, 160, 512, 2048] if kind in ("q8_0", "q4_0") else [1, 7, 16, 33, 64, 100, 2048]


CASES = [(kind, columns) for kind in KINDS for columns in shapes_for(kind)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "columns"), CASES)
def test_multiply(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, columns: int) -> None:
    """A product wrong in a remainder, a padding, a sign or a scale."""
    weight = pack(draw(37, columns), kind, CPU)
    x, bias, y = draw(columns, seed=1), draw(37, seed=2), torch.empty(37)
    module = extension()
    kernels(monkeypatch, isa).multiply(matrix(module, weight), address(x), address(bias), address(y))  # type: ignore[attr-defined]
    want = weight.values().double() @ as_kernels_see(x, kind) + bias.double()
    torch.testing.assert_close(y.double(), want, atol=1e-5 * columns**0.5, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "columns"), CASES)
def test_add_row(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, columns: int) -> None:
    """The other half of every kernel: y += a · row."""
    weight = pack(draw(5, columns), kind, CPU)
    y = torch.zeros(columns + 128)  # block types write whole groups
    y[:columns] = draw(columns, seed=3)
    before = y.clone()
    kernels(monkeypatch, isa).add_row(matrix(extension(), weight), 3, -1.75, address(y))  # type: ignore[attr-defined, arg-type]
    torch.testing.assert_close(y[:columns], before[:columns] - 1.75 * weight.values()[3].float(), atol=1e-5, rtol=1e-5)
    assert y[columns:].abs().max() == 0, "padding adds nothing"


class Ffn:
    """Random neurons in one kind, for the kernels and for the reference."""

    def __init__(self, kind: Kind, neurons: int, hidden: int, gated: bool, activation: Activation = "relu") -> None:
        self.kind, self.gated, self.activation = kind, gated, activation
        self.threshold = 0.4 if activation == "fatrelu" else 0.0
        self.first = pack(draw(neurons, hidden, seed=1) / hidden**0.5, kind, CPU)
        length = row_bytes(kind, hidden)
        pairs = allocate(neurons, 2 * length, CPU)
        self.up = fill(pairs[:, :length], kind, draw(neurons, hidden, seed=2) / hidden**0.5) if gated else None
        self.down = fill(pairs[:, length:], kind, draw(neurons, hidden, seed=3) / hidden**0.5)
        self.up_bias = None if gated else draw(neurons, seed=4)

    def native(self, made: object, mode: Mode, x: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        module = extension()
        assert module is not None
        parts = [matrix(module, part) for part in (self.first, self.up, self.down)]
        y = torch.empty_like(x)
        neurons = module.Neurons(*parts, address(self.up_bias), ACTIVATIONS.index(self.activation), self.threshold)
        made.sparse_ffn(neurons, MODES.index(mode), address(x), address(scores), threshold, address(y))  # type: ignore[attr-defined]
        return y

    def wanted(self, mode: Mode, x: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        first, down = self.first.values().double(), self.down.values().double()
        if self.up is not None:
            rows = NeuronRows(self.up.values().double(), down, first, None, self.activation, self.threshold)
        else:
            assert self.up_bias is not None
            rows = NeuronRows(first, down, None, self.up_bias.double(), self.activation, self.threshold)
        seen = as_kernels_see(x, self.kind)[None]
        if mode == "predicted":
            return reference.predicted(seen, rows, scores[None], threshold)[0]
        return (reference.dense if mode == "dense" else reference.exact)(seen, rows)[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("activation", "gated", "mode"),
    [
        *[
            (activation, gated, mode)
            for activation in ("relu", "fatrelu")
            for gated in (True, False)
            for mode in get_args(Mode)
        ],
        *[("drelu", True, mode) for mode in get_args(Mode)],
        *[(activation, gated, "dense") for activation in ("silu", "gelu") for gated in (True, False)],
    ],
)
@pytest.mark.parametrize(("neurons", "hidden"), [(1, 32), (5, 160), (203, 64), (300, 256)])
def test_sparse_ffn(
    monkeypatch: pytest.MonkeyPatch,
    isa: str,
    kind: Kind,
    activation: Activation,
    gated: bool,
    mode: Mode,
    neurons: int,
    hidden: int,
) -> None:
    """A kernel that computes something else than the reference in some type, mode, activation or shape."""
    ffn, x = Ffn(kind, neurons, hidden, gated, activation), draw(hidden, seed=5)
    scores = draw(neurons, seed=6)
    got = ffn.native(kernels(monkeypatch, isa), mode, x, scores, 0.3)
    torch.testing.assert_close(got.double(), ffn.wanted(mode, x, scores, 0.3), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [0, 1, 150, 300])
def test_any_number_of_candidates(monkeypatch: pytest.MonkeyPatch, kind: Kind, candidates: int) -> None:
    """No candidate at all, a single one, all of them; a score at the threshold counts."""
    ffn, x = Ffn(kind, 300, 96, gated=True), draw(96, seed=5)
    scores = torch.full((300,), 0.999)
    scores[torch.randperm(300, generator=torch.Generator().manual_seed(7))[:candidates]] = 1.0
    got = ffn.native(kernels(monkeypatch, ISAS[-1], 2), "predicted", x, scores, 1.0)
    torch.testing.assert_close(got.double(), ffn.wanted("predicted", x, scores, 1.0), atol=2e-5, rtol=2e-5)
    assert candidates or got.abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("activation", ["relu", "fatrelu", "drelu"])
def test_the_same_bits_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, mode: Mode, activation: Activation
) -> None:
    """Text that changes from run to run, because threads add up in the order they finish."""
    ffn, x, scores = Ffn(kind, 300, 256, True, activation), draw(256, seed=5), draw(300, seed=6)
    one = ffn.native(kernels(monkeypatch, ISAS[-1], 1), mode, x, scores, 0.3)
    for threads in (2, 3, 5, 8):
        pool = kernels(monkeypatch, ISAS[-1], threads)
        for _ in range(20):
            assert torch.equal(ffn.native(pool, mode, x, scores, 0.3), one)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", get_args(Mode))
def test_fatrelu_at_zero_is_relu_bit_for_bit(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, mode: Mode) -> None:
    """A ReLU model converted to FATReLU's notation that answers something else."""
    relu, fatrelu = (Ffn(kind, 203, 64, True, activation) for activation in ("relu", "fatrelu"))
    fatrelu.threshold = 0.0
    x, scores, made = draw(64, seed=5), draw(203, seed=6), kernels(monkeypatch, isa)
    assert torch.equal(fatrelu.native(made, mode, x, scores, 0.3), relu.native(made, mode, x, scores, 0.3))


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_gate_at_the_threshold_stays_silent(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """FATReLU's boundary: z has to exceed the threshold, so that with a threshold of zero it is ReLU."""
    ffn, x = Ffn("float32", 2, 32, True, "fatrelu"), torch.ones(32)
    ffn.threshold = 0.5
    ffn.first.values().zero_()
    ffn.first.values()[:, 0] = torch.tensor([0.5, torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))])
    assert ffn.up is not None
    got = ffn.native(kernels(monkeypatch, ISAS[-1]), mode, x, torch.ones(2), 0.3)
    z = ffn.first.values()[1, 0]
    torch.testing.assert_close(got, z * ffn.up.values()[1].sum() * ffn.down.values()[1])


@pytest.mark.parametrize("mode", ["exact", "predicted"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_no_neuron_is_skipped_that_never_falls_silent(
    monkeypatch: pytest.MonkeyPatch, activation: Activation, mode: Mode
) -> None:
    """A SiLU model's neurons left out as if they were worth nothing."""
    ffn = Ffn("float32", 20, 32, gated=True, activation=activation)
    with pytest.raises(ValueError, match="can be skipped"):
        ffn.native(kernels(monkeypatch, ISAS[-1]), mode, draw(32), draw(20), 0.3)


def test_an_instruction_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fall back while somebody measures."""
    monkeypatch.setenv("PI_CPU_ISA", "avx9000")
    module = extension()
    assert module is not None
    with pytest.raises(ValueError, match="PI_CPU_ISA"):
        module.Kernels(1)


@pytest.mark.parametrize("isa", [ISAS[-1], "torch"])
@pytest.mark.parametrize(("kind", "columns"), CASES)
def test_packing_keeps_the_values(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, columns: int) -> None:
    """Weights that change by being packed: plain types exactly, blocks as GGUF dequantises them."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    from pi_toolkit.profiler.gguf_container import TensorType
    from pi_toolkit.profiler.quantisation import dequantise, quantise

    source = draw(9, columns)
    packed = pack(source, kind, CPU)
    assert packed.data.shape == (9, row_bytes(kind, columns))
    if kind in ("q8_0", "q4_0"):
        stored = TensorType[kind.upper()]
        want = dequantise(quantise(source, stored), stored, torch.float32)
    else:
        want = source.to(getattr(torch, kind)).float()
    assert torch.equal(packed.values().float(), want)
    assert torch.equal(packed.select(torch.tensor([[3, 0], [8, 3]])), want[torch.tensor([[3, 0], [8, 3]])])


@pytest.mark.parametrize("isa", [*ISAS, "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 49, 130])
def test_products_of_many_tokens(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, tokens: int) -> None:
    """A tile lost or repeated where weights are converted piece by piece; a token lost in the padding."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    packed, x = pack(draw(301, 288), kind, CPU), draw(tokens, 288, seed=1)
    want = x.double() @ packed.values().double().T
    torch.testing.assert_close(multiply(packed, x, exactly=True).double(), want, atol=1e-4, rtol=1e-4)
    assert (multiply(packed, x).double() - want).norm() / want.norm() < 1e-2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (300, 96), (257, 160)])
def test_transposed_products(monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, rows: int, columns: int) -> None:
    """Down rows, which are summed over neurons, taken for rows of outputs."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    native = products(CPU)
    assert native is not None
    packed, h = pack(draw(rows, columns), kind, CPU), draw(rows, 32, seed=1)
    want = packed.values().double().T @ h.double()
    torch.testing.assert_close(native.multiply_transposed(packed, h).double(), want, atol=1e-4, rtol=1e-4)


def test_strided_rows_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of the weights made for prompts."""
    pairs = allocate(10, 2 * row_bytes("float32", 64), CPU)
    up = fill(pairs[:, : row_bytes("float32", 64)], "float32", draw(10, 64))
    assert isinstance(up, PackedMatrix)
    assert up.values().data_ptr() == pairs.data_ptr()
