"""Predictors survive the disk in PowerInfer's format; every malformed directory is refused by name."""

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.predictor_file import LayerQuality, MlpWeights, PredictorSet, RowsCopy
from pi_toolkit.profiler.errors import FingerprintMismatchError, PredictorFileError

FINGERPRINT = "ab" * 32
HIDDEN, SIZES, WIDTHS = 6, (10, 7, 4), (3, 5, 2)


def example(sizes: tuple[int, ...] = SIZES, widths: tuple[int, ...] = WIDTHS) -> PredictorSet:
    """Weights that F16 can hold; ``fc1`` is a transposed view, as training may leave it."""
    generator = torch.Generator().manual_seed(0)
    fc1 = tuple(torch.randn(HIDDEN, r, generator=generator).half().float().T for r in widths)
    fc2 = tuple(torch.randn(n, r, generator=generator).half().float() for n, r in zip(sizes, widths, strict=True))
    quality = tuple(LayerQuality(i, r, 0.98, 0.7, 0.3, 0.2) for i, r in enumerate(widths))
    return PredictorSet.of_mlps(fc1, fc2, 1.0, FINGERPRINT, quality)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    predictor_file.write(tmp_path / "predictor", example(), {"tokens": 100})
    return tmp_path / "predictor"


def read(directory: Path) -> PredictorSet:
    return predictor_file.read(directory, HIDDEN, SIZES, FINGERPRINT)


def refusal(directory: Path, error: type[Exception] = PredictorFileError) -> str:
    """The sentence *directory* is refused with, which ends in a remedy."""
    with pytest.raises(error) as caught:
        read(directory)
    message = str(caught.value)
    assert message.split(": ")[-1].startswith(("run pi-train-predictor", "move it elsewhere", "make the file again"))
    return message


def edit_config(directory: Path, change: dict[str, Any]) -> None:
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **change}))


def assert_same_weights(found: PredictorSet, expected: PredictorSet) -> None:
    for ours, theirs in zip(weights_of(found), weights_of(expected), strict=True):
        assert torch.equal(ours.float(), theirs)


def pairs(weights: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(weights[::2], weights[1::2], strict=True))


def weights_of(predictors: PredictorSet) -> list[torch.Tensor]:
    """fc1 and fc2 of every layer."""
    return [weight for layer in predictors.layers if isinstance(layer, MlpWeights) for weight in (layer.fc1, layer.fc2)]


def test_predictors_survive(directory: Path) -> None:
    """Prevents weights, threshold or measured quality from being lost between training and running."""
    found = read(directory)
    assert_same_weights(found, example())
    assert (found.threshold, found.fingerprint, found.quality) == (1.0, FINGERPRINT, example().quality)
    assert found.sizes() == list(WIDTHS) and not found.has_copies


def test_files_are_powerinfers(directory: Path) -> None:
    """Prevents files its converter reads wrongly in silence: it takes the zip's raw bytes for a contiguous matrix."""
    for layer, (fc1, fc2) in enumerate(pairs(weights_of(example()))):
        content = torch.load(directory / f"model_{layer}.pt")
        assert list(content) == ["fc1.weight", "fc2.weight"]
        assert all(weight.dtype == torch.float16 and weight.is_contiguous() for weight in content.values())
        with zipfile.ZipFile(directory / f"model_{layer}.pt") as archive:
            raw = [archive.read(f"archive/data/{number}") for number in (0, 1)]
        assert raw == [weight.half().contiguous().numpy().tobytes() for weight in (fc1, fc2)]
    assert json.loads((directory / "config.json").read_text())["sparse_threshold"] == 1.0


def test_config_is_what_is_documented(directory: Path) -> None:
    """Prevents an undocumented change of the format."""
    content = json.loads((directory / "config.json").read_text())
    assert (content["format"], content["version"]) == ("powerinfer-toolkit/predictor", 1)
    assert (content["fingerprint"], content["training"]) == (FINGERPRINT, {"tokens": 100})
    assert content["layers"][1] == {
        "layer": 1,
        "hidden": 5,
        "recall": 0.98,
        "precision": 0.7,
        "density": 0.3,
        "firing_share": 0.2,
        "kind": "mlp",
        "input": "residual",
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [None, {"sparse_threshold": 0.5}, {"sparse_threshold": -1, "note": "x"}])
def test_powerinfers_own_directory_is_accepted(
    tmp_path: Path, dtype: torch.dtype, config: dict[str, Any] | None
) -> None:
    """Prevents refusing published predictors, which have a threshold and nothing else, or not even that."""
    for layer, (fc1, fc2) in enumerate(pairs(weights_of(example()))):
        weights = {"fc1.weight": fc1.to(dtype), "fc2.weight": torch.nn.Parameter(fc2.to(dtype))}
        torch.save(weights, tmp_path / f"model_{layer}.pt")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    found = read(tmp_path)
    assert found.threshold == (config or {}).get("sparse_threshold", 0.0)
    assert found.fingerprint is None and found.quality is None
    assert all(weight.dtype == dtype and not weight.requires_grad for weight in weights_of(found))
    assert [tuple(weight.shape) for weight in weights_of(found)[::2]] == [(r, HIDDEN) for r in WIDTHS]
    assert predictor_file.read_sizes(tmp_path, HIDDEN, SIZES, FINGERPRINT) == list(WIDTHS)


def test_layers_are_read_in_numeric_order(tmp_path: Path) -> None:
    """Prevents layer 10 from being read before layer 2."""
    predictors = example(tuple(range(3, 15)), tuple(range(1, 13)))
    predictor_file.write(tmp_path / "predictor", predictors, {})
    found = predictor_file.read(tmp_path / "predictor", HIDDEN, tuple(range(3, 15)), FINGERPRINT)
    assert_same_weights(found, predictors)


def test_widths_are_read_without_the_weights(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents pi-place from loading gigabytes of predictors to learn their sizes."""
    monkeypatch.setattr(predictor_file, "load_tensors", lambda *_: pytest.fail("weights were loaded"))
    assert predictor_file.read_sizes(directory, HIDDEN, SIZES, FINGERPRINT) == list(WIDTHS)


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


GOOD = {"fc1.weight": torch.ones(3, HIDDEN), "fc2.weight": torch.ones(10, 3)}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({**GOOD, "fc1.weight": torch.ones(3, 7)}, "has shapes [3, 7] and [10, 3] where [r, 6] and [10, r] belong"),
        ({**GOOD, "fc2.weight": torch.ones(9, 3)}, "has shapes [3, 6] and [9, 3]"),
        ({**GOOD, "fc2.weight": torch.ones(10, 4)}, "has shapes [3, 6] and [10, 4]"),
        ({**GOOD, "fc2.weight": torch.ones(3, 10)}, "has shapes [3, 6] and [3, 10]"),
        ({**GOOD, "fc1.weight": torch.full((3, HIDDEN), float("nan"))}, "holds weights that are not finite"),
        ({**GOOD, "fc2.weight": torch.full((10, 3), float("inf"))}, "holds weights that are not finite"),
        ({**GOOD, "fc1.weight": torch.ones(3, HIDDEN, dtype=torch.int8)}, "does not hold two matrices in F16"),
        ({**GOOD, "fc1.weight": torch.ones(3 * HIDDEN)}, "does not hold two matrices in F16, BF16 or F32"),
        ({**GOOD, "fc1.weight": torch.ones(3, HIDDEN).to_sparse()}, "does not hold two matrices in F16, BF16 or F32"),
        ({**GOOD, "fc1.weight": torch.ones(3, HIDDEN).to(torch.float8_e4m3fn)}, "does not hold two matrices in F16"),
        ({**GOOD, "fc1.weight": torch.ones(3, HIDDEN, device="meta")}, "does not hold two matrices in F16"),
        ({**GOOD, "fc1.weight": [1.0]}, "does not hold two matrices in F16, BF16 or F32"),
        ({"fc1.weight": torch.ones(0, HIDDEN), "fc2.weight": torch.ones(10, 0)}, "has 0 hidden units"),
        (
            {"fc1.weight": torch.ones(1, 1).expand(2**40, HIDDEN), "fc2.weight": torch.ones(1, 1).expand(10, 2**40)},
            "hidden units, which cannot be right",
        ),
        ({"fc1.weight": torch.ones(3, HIDDEN)}, "does not hold exactly fc1.weight and fc2.weight"),
        ({**GOOD, "fc1.bias": torch.ones(3)}, "does not hold exactly fc1.weight and fc2.weight"),
        (torch.ones(3), "does not hold exactly fc1.weight and fc2.weight"),
    ],
)
def test_content_that_is_no_predictor_is_refused(directory: Path, content: object, sentence: str) -> None:
    """Prevents masks from weights of another shape, a bias that is dropped, or memory filled by a few bytes."""
    torch.save(content, directory / "model_0.pt")
    assert f"model_0.pt' {sentence}" in refusal(directory).replace("has 1,099,511,627,776 hidden", "hidden")


def test_code_in_a_file_is_not_run(directory: Path, tmp_path: Path) -> None:
    """Prevents an untrusted workspace from running code through a pickle."""
    torch.save({**GOOD, "x": Payload(tmp_path / "trap")}, directory / "model_1.pt")
    assert "model_1.pt' holds something else than plain tensors and was not opened" in refusal(directory)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("change", [lambda b: b[:-20], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\0" * 64])
def test_damaged_file_is_named(directory: Path, change: Callable[[bytes], bytes]) -> None:
    """Prevents a traceback from an interrupted copy."""
    file = directory / "model_2.pt"
    file.write_bytes(change(file.read_bytes()))
    assert "model_2.pt'" in refusal(directory)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_changed_byte_crashes_the_reader(directory: Path) -> None:
    """Prevents an exception of another type than ours from any damaged byte; what still opens has the right shape."""
    file = directory / "model_0.pt"
    content = file.read_bytes()
    for position in range(0, len(content), 5):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        try:
            found = read(directory)
        except PredictorFileError as error:
            assert str(directory) in str(error)
        else:
            assert weights_of(found)[1].shape == (10, 3)


def test_missing_directory_says_what_to_run(tmp_path: Path) -> None:
    """Prevents FileNotFoundError for a workspace without predictors."""
    assert "predictor' is missing: run pi-train-predictor first" in refusal(tmp_path / "predictor")


def test_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    """Prevents a file called ``predictor`` from being reported as missing."""
    (tmp_path / "predictor").touch()
    with pytest.raises(PredictorFileError, match="is no directory: move it away and run pi-train-predictor"):
        read(tmp_path / "predictor")


def test_absent_fingerprint_is_announced_once(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents predictors of nobody knows which model from being used without a word."""
    edit_config(directory, {"fingerprint": None})
    assert read(directory).fingerprint is None
    assert capsys.readouterr().err.splitlines() == [
        f"{str(directory)!r} states no model fingerprint: it was checked by its shapes alone"
    ]


def test_file_that_may_not_be_read_is_not_called_damaged(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the remedy of training again where permissions are wrong; simulated, because root may read anything."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "model_0.pt")

    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(torch, "load", refuse)
        read(directory)
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(Path, "read_text", refuse)
        read(directory)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model_2.pt.bak", "holds the foreign file 'model_2.pt.bak': move it elsewhere"),
        ("model_02.pt", "holds the foreign file 'model_02.pt'"),
        ("model_3.pt", "holds 'model_3.pt' and the model has 3 layers"),
    ],
)
def test_file_that_looks_like_a_layer_is_refused(directory: Path, name: str, sentence: str) -> None:
    """Prevents predictors of a deeper model, or a copy kept beside, from being taken for these."""
    (directory / name).write_bytes((directory / "model_2.pt").read_bytes())
    assert sentence in refusal(directory)


def test_missing_layer_is_named(directory: Path) -> None:
    """Prevents a layer without a predictor from being run dense, or with the next layer's."""
    (directory / "model_1.pt").unlink()
    assert "lacks 'model_1.pt' of 3 layers" in refusal(directory)


def test_predictors_of_another_model_are_refused(directory: Path) -> None:
    """Prevents masks of one model from silently spoiling another of the same shape."""
    edit_config(directory, {"fingerprint": "cd" * 32})
    assert "belongs to another model" in refusal(directory, FingerprintMismatchError)


def layers(**changes: Any) -> list[dict[str, Any]]:
    return [{**entry.entry(), **changes} for entry in example().quality or ()]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "states format 'other' version 1"),
        ({"version": 2}, "version 2, and this release reads 'powerinfer-toolkit/predictor' version 1"),
        ({"sparse_threshold": float("nan")}, "states threshold nan"),
        ({"sparse_threshold": float("inf")}, "states threshold inf"),
        ({"sparse_threshold": 10**400}, "states threshold 1000"),
        ({"layers": layers(hidden=10**400)}, "has a malformed list of layers"),
        ({"sparse_threshold": "1.0"}, "states threshold '1.0'"),
        ({"sparse_threshold": True}, "states threshold True"),
        ({"sparse_threshold": None}, "states threshold None"),
        ({"layers": layers(kind="int4 gate")}, "states a predictor of kind 'int4 gate' on 'residual'"),
        ({"layers": layers(input="normed")}, "states a predictor of kind 'mlp' on 'normed'"),
        ({"layers": layers(hidden=4)}, "states other widths than its files"),
        ({"layers": layers()[:2]}, "has a malformed list of layers"),
        ({"layers": layers()[::-1]}, "has a malformed list of layers"),
        ({"layers": layers(extra=1)}, "has a malformed list of layers"),
        ({"layers": layers(hidden="3")}, "has a malformed list of layers"),
        ({"layers": layers(recall=None)}, "has a malformed list of layers"),
        ({"layers": layers(density=float("nan"))}, "has a malformed list of layers"),
        ({"layers": {}}, "has a malformed list of layers"),
        ({"layers": [1, 2, 3]}, "has a malformed list of layers"),
        ({"layers": None}, "has a malformed list of layers"),
    ],
)
def test_malformed_config_is_refused(directory: Path, change: dict[str, Any], sentence: str) -> None:
    """Prevents a threshold that names all or no neurons, or a predictor that is computed differently."""
    edit_config(directory, change)
    assert sentence in refusal(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_config_that_is_no_json_is_refused(directory: Path, content: bytes) -> None:
    """Prevents a damaged config from passing as PowerInfer's, with threshold 0."""
    (directory / "config.json").write_bytes(content)
    assert "config.json'" in refusal(directory)


def test_weights_beyond_f16_keep_the_old_predictors(directory: Path) -> None:
    """Prevents infinities, which name every neuron or none, from replacing good predictors."""
    good = example()
    huge = replace(good, layers=(*good.layers[:2], MlpWeights(torch.ones(2, HIDDEN), torch.full((4, 2), 1e6))))
    with pytest.raises(PredictorFileError, match="layer 2 does not fit in F16: train with a lower --learning-rate"):
        predictor_file.write(directory, huge, {})
    assert_same_weights(read(directory), example())
    assert [path.name for path in directory.parent.iterdir()] == ["predictor"]


def test_writing_replaces_the_directory_as_a_whole(directory: Path) -> None:
    """Prevents predictors of two trainings from being mixed."""
    predictor_file.write(directory, example((4,), (2,)), {})
    assert {path.name for path in directory.iterdir()} == {"model_0.pt", "config.json"}
    assert [path.name for path in directory.parent.iterdir()] == ["predictor"]


def with_copy() -> PredictorSet:
    """The example with a copy of its rows as predictor of layer 1."""
    mlps = example()
    quality = list(mlps.quality or ())
    quality[1] = LayerQuality(1, 0, 0.99, 0.9, 0.2, 0.2, kind="copy", input="normed", threshold=-0.25)
    return replace(mlps, layers=(mlps.layers[0], RowsCopy(-0.25), mlps.layers[2]), quality=tuple(quality))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    predictor_file.write(tmp_path / "predictor", with_copy(), {})
    return tmp_path / "predictor"


def test_copies_survive(mixed: Path) -> None:
    """Prevents a copy's threshold from being lost, or another layer's MLP from taking its place."""
    found = read(mixed)
    assert found.layers[1] == RowsCopy(-0.25) and found.has_copies
    assert_same_weights(found, with_copy())
    assert found.quality == with_copy().quality
    assert found.sizes() == predictor_file.read_sizes(mixed, HIDDEN, SIZES, FINGERPRINT) == [3, "copy", 2]
    assert {path.name for path in mixed.iterdir()} == {"config.json", "model_0.pt", "model_2.pt"}
    assert json.loads((mixed / "config.json").read_text())["layers"][1] == {
        "layer": 1,
        "recall": 0.99,
        "precision": 0.9,
        "density": 0.2,
        "firing_share": 0.2,
        "kind": "copy",
        "input": "normed",
        "threshold": -0.25,
    }


def test_files_of_the_other_layers_are_as_without_copies(directory: Path, tmp_path: Path) -> None:
    """Prevents copies from changing the files that PowerInfer's programs read."""
    predictor_file.write(tmp_path / "mixed", with_copy(), {})
    for name in ("model_0.pt", "model_2.pt"):
        assert (tmp_path / "mixed" / name).read_bytes() == (directory / name).read_bytes()


def copy_entries(**changes: Any) -> list[dict[str, Any]]:
    entries = [entry.entry() for entry in with_copy().quality or ()]
    return [entry | (changes if entry["kind"] == "copy" else {}) for entry in entries]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"threshold": None}, "has a malformed list of layers"),
        ({"threshold": float("nan")}, "has a malformed list of layers"),
        ({"threshold": 10**400}, "has a malformed list of layers"),
        ({"threshold": True}, "has a malformed list of layers"),
        ({"hidden": 5}, "has a malformed list of layers"),
        ({"input": "residual"}, "states a predictor of kind 'copy' on 'residual', which this release does not know"),
        ({"kind": ["copy"]}, "states a predictor of kind ['copy'] on 'normed'"),
        ({"kind": "mlp", "input": "residual"}, "has a malformed list of layers"),
    ],
)
def test_malformed_copies_are_refused(mixed: Path, change: dict[str, Any], sentence: str) -> None:
    """Prevents a threshold that names all or no neurons, and kinds that are mixed up."""
    edit_config(mixed, {"layers": copy_entries(**change)})
    assert sentence in refusal(mixed)


def test_a_file_for_a_copied_layer_is_refused(mixed: Path) -> None:
    """Prevents an MLP from being left out in silence because the layer is said to be a copy."""
    (mixed / "model_1.pt").write_bytes((mixed / "model_0.pt").read_bytes())
    assert "holds 'model_1.pt' for a layer that needs no file" in refusal(mixed)


def test_a_missing_file_beside_copies_is_named(mixed: Path) -> None:
    """Prevents a layer whose MLP is gone from being taken for a copy."""
    (mixed / "model_2.pt").unlink()
    assert "lacks 'model_2.pt' of 3 layers" in refusal(mixed)
