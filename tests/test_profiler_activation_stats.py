"""Counts survive the disk in PowerInfer's format, in layer order; every malformed directory is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.activation_stats import ActivationStats
from pi_toolkit.profiler.errors import ActivationStatsError, FingerprintMismatchError

FINGERPRINT = "ab" * 32
SIZES = (5, 8, 3)


def example(sizes: tuple[int, ...] = SIZES) -> ActivationStats:
    generator = np.random.default_rng(0)
    counts = tuple(generator.integers(0, 101, size, dtype=np.int64) for size in sizes)
    return ActivationStats(counts, FINGERPRINT, 100, "corpus.txt", 64, "float32")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    activation_stats.write(tmp_path / "activation", example())
    return tmp_path / "activation"


def refusal(directory: Path, error: type[Exception] = ActivationStatsError) -> str:
    """The sentence *directory* is refused with, which ends in a remedy."""
    with pytest.raises(error) as caught:
        activation_stats.read(directory, SIZES, FINGERPRINT)
    message = str(caught.value)
    assert message.split(": ")[-1].startswith(("run pi-profile", "move it elsewhere", "make the file again"))
    return message


def assert_equal(found: ActivationStats, expected: ActivationStats) -> None:
    assert len(found.counts) == len(expected.counts)
    for ours, theirs in zip(found.counts, expected.counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert replace(found, counts=()) == replace(expected, counts=())


def test_counts_and_their_origin_survive(directory: Path) -> None:
    """Prevents a count, or where it comes from, from being lost between pi-profile and the solver."""
    assert_equal(activation_stats.read(directory, SIZES, FINGERPRINT), example())


@pytest.mark.parametrize("tensor", [torch.ones(5, device="meta"), torch.ones(5).to_sparse()], ids=["meta", "sparse"])
def test_counts_without_content_are_refused(directory: Path, tensor: torch.Tensor) -> None:
    """Prevents a NotImplementedError from a tensor that states a shape and holds no numbers."""
    torch.save(tensor, directory / "activation_0.pt")
    assert "does not hold one numeric vector of counts" in refusal(directory)


def test_absent_fingerprint_is_announced_once(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a placement from counts of nobody knows which model without a word."""
    (directory / "profile.json").unlink()
    assert activation_stats.read(directory, SIZES, FINGERPRINT).fingerprint is None
    assert capsys.readouterr().err.splitlines() == [
        f"{str(directory)!r} states no model fingerprint: it was checked by its shapes alone"
    ]


def test_full_disk_is_an_error_of_the_system(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the RuntimeError "unexpected pos" that torch's own writer raises, and the loss of the old counts."""

    def refuse(self: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        activation_stats.write(directory, example())
    assert_equal(activation_stats.read(directory, SIZES, FINGERPRINT), example())


def test_files_are_powerinfers(directory: Path) -> None:
    """Prevents a format that PowerInfer's solver, which calls ``torch.load`` and ``topk``, cannot read."""
    for layer, counts in enumerate(example().counts):
        tensor = torch.load(directory / f"activation_{layer}.pt")
        assert tensor.dtype == torch.int64
        assert tensor.shape == (SIZES[layer],)
        assert tensor.tolist() == counts.tolist()


def test_description_states_what_was_counted(directory: Path) -> None:
    """Prevents a profile.json that a person or the next release cannot interpret."""
    about = json.loads((directory / "profile.json").read_text())
    assert about.pop("firing_share") == [counts.sum() / (len(counts) * 100) for counts in example().counts]
    assert about == {
        "format": "powerinfer-toolkit/activation",
        "version": 1,
        "convergence": None,
        "comparison": None,
        "fingerprint": FINGERPRINT,
        "tokens": 100,
        "corpus": "corpus.txt",
        "window": 64,
        "dtype": "float32",
        "firing_threshold": 0.0,
    }


def test_layers_are_read_in_numeric_order(tmp_path: Path) -> None:
    """Prevents PowerInfer's defect: sorted as strings, layer 10 comes before layer 2."""
    sizes = tuple(range(3, 15))
    activation_stats.write(tmp_path / "activation", example(sizes))
    assert_equal(activation_stats.read(tmp_path / "activation", sizes, FINGERPRINT), example(sizes))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_powerinfers_own_directory_is_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    """Prevents refusing published counts, which have any numeric type and no profile.json."""
    for layer, size in enumerate(SIZES):
        values = torch.arange(size, dtype=torch.float32).to(dtype)
        torch.save(values.requires_grad_(values.is_floating_point()), tmp_path / f"activation_{layer}.pt")
    stats = activation_stats.read(tmp_path, SIZES, FINGERPRINT)
    assert [counts.tolist() for counts in stats.counts] == [list(range(size)) for size in SIZES]
    assert stats.tokens is None and stats.fingerprint is None
    with pytest.raises(ActivationStatsError, match=r"without profile.json, so shares are unknown: run pi-profile"):
        stats.firing_share()


def test_views_of_larger_tensors_are_read_by_value(tmp_path: Path) -> None:
    """Prevents reading the storage in place of the tensor: foreign files may hold strided views."""
    for layer, size in enumerate(SIZES):
        torch.save(torch.arange(2 * size)[::2], tmp_path / f"activation_{layer}.pt")
    counts = activation_stats.read(tmp_path, SIZES, FINGERPRINT).counts
    assert [c.tolist() for c in counts] == [list(range(0, 2 * size, 2)) for size in SIZES]


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (torch.tensor([1, 2, 3, 4, -1]), "layer 0 of '{directory}' holds negative counts"),
        (torch.tensor([1, 2, 3, 4, float("nan")]), "layer 0 of '{directory}' holds counts that are not finite"),
        (torch.tensor([1, 2, 3, 4, float("inf")]), "holds counts that are not finite"),
        (torch.tensor([1, 2, 3, 4, 101]), "layer 0 of '{directory}' counts more firings than tokens"),
        (torch.ones(6, dtype=torch.int64), "activation_0.pt' counts 6 neurons and the model has 5"),
        (torch.ones(1, dtype=torch.int64).expand(2**50), "neurons and the model has 5"),
        (torch.ones(5, 1, dtype=torch.int64), "activation_0.pt' does not hold one numeric vector"),
        (torch.tensor(1), "does not hold one numeric vector"),
        (torch.ones(5, dtype=torch.bool), "does not hold one numeric vector"),
        (torch.ones(5, dtype=torch.complex64), "does not hold one numeric vector"),
        (torch.ones(5).to_sparse(), "does not hold one numeric vector"),
        ([1, 2, 3, 4, 5], "does not hold one numeric vector"),
        ({"counts": torch.ones(5)}, "does not hold one numeric vector"),
    ],
)
def test_content_that_is_no_counts_is_refused(directory: Path, content: object, sentence: str) -> None:
    """Prevents a placement from numbers that are not how often neurons fired."""
    torch.save(content, directory / "activation_0.pt")
    assert sentence.format(directory=directory) in refusal(directory)


def test_code_in_a_file_is_not_run(directory: Path, tmp_path: Path) -> None:
    """Prevents an untrusted workspace from running code through a pickle."""
    torch.save(Payload(tmp_path / "trap"), directory / "activation_1.pt")
    assert "activation_1.pt' holds something else than plain tensors and was not opened" in refusal(directory)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("change", [lambda b: b[:-20], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\0" * 64])
def test_damaged_file_is_named(directory: Path, change: Callable[[bytes], bytes]) -> None:
    """Prevents a traceback from an interrupted copy."""
    file = directory / "activation_2.pt"
    file.write_bytes(change(file.read_bytes()))
    assert "activation_2.pt'" in refusal(directory)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_no_changed_byte_crashes_the_reader(directory: Path) -> None:
    """Prevents an exception of another type than ours from any damaged byte; what still opens has the right shape."""
    file = directory / "activation_0.pt"
    content = file.read_bytes()
    for position in range(0, len(content), 3):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        try:
            stats = activation_stats.read(directory, SIZES, FINGERPRINT)
        except ActivationStatsError as error:
            assert str(directory) in str(error)
        else:
            assert [len(counts) for counts in stats.counts] == list(SIZES)


def test_enormous_file_is_not_opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a foreign file from filling the memory."""
    size = (directory / "activation_0.pt").stat().st_size
    monkeypatch.setattr(activation_stats, "MAX_COUNTS_FILE_BYTES", size - 1)
    monkeypatch.setattr(activation_stats, "load_tensors", lambda *_: pytest.fail("the file was opened"))
    assert f"has {size:,} bytes, too many for firing counts" in refusal(directory)


def test_missing_directory_says_what_to_run(tmp_path: Path) -> None:
    """Prevents FileNotFoundError for a workspace without its first stage."""
    assert "activation' is missing: run pi-profile first" in refusal(tmp_path / "activation")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("activation_2.pt.bak", "holds the foreign file 'activation_2.pt.bak': move it elsewhere"),
        ("activation_02.pt", "holds the foreign file 'activation_02.pt'"),
        ("activation_²" + ".pt", "holds the foreign file"),
        ("activation_-1.pt", "holds the foreign file 'activation_-1.pt'"),
        ("activation_3.pt", "holds 'activation_3.pt' and the model has 3 layers"),
        ("activation_10.pt", "holds 'activation_10.pt' and the model has 3 layers"),
    ],
)
def test_file_that_looks_like_a_layer_is_refused(directory: Path, name: str, sentence: str) -> None:
    """Prevents a layer's counts from being taken from, or lost to, a file beside the expected ones."""
    (directory / name).write_bytes((directory / "activation_2.pt").read_bytes())
    assert sentence in refusal(directory)


def test_missing_layer_is_named(directory: Path) -> None:
    """Prevents the remaining layers from moving up."""
    (directory / "activation_1.pt").unlink()
    assert "lacks 'activation_1.pt' of 3 layers" in refusal(directory)


def test_directory_in_place_of_a_file_is_named(directory: Path) -> None:
    """Prevents IsADirectoryError."""
    (directory / "activation_1.pt").unlink()
    (directory / "activation_1.pt").mkdir()
    assert "activation_1.pt'" in refusal(directory)


def test_counts_of_another_model_are_refused(directory: Path) -> None:
    """Prevents a placement of one model from the counts of another of the same shape."""
    about = json.loads((directory / "profile.json").read_text())
    (directory / "profile.json").write_text(json.dumps({**about, "fingerprint": "cd" * 32}))
    assert "belongs to another model" in refusal(directory, FingerprintMismatchError)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "states format 'other' version 1, and this release reads"),
        ({"version": 2}, "version 2, and this release reads 'powerinfer-toolkit/activation' version 1"),
        ({"tokens": 0}, "states 0 tokens"),
        ({"tokens": "100"}, "states '100' tokens"),
        ({"tokens": 1e2}, "states 100.0 tokens"),
        ({"tokens": 10**400}, "tokens: run pi-profile"),
        ({"tokens": True}, "states True tokens"),
        ({"tokens": None}, "states None tokens"),
    ],
)
def test_malformed_description_is_refused(directory: Path, change: dict[str, Any], sentence: str) -> None:
    """Prevents counts of unknown meaning from being used."""
    about = json.loads((directory / "profile.json").read_text())
    (directory / "profile.json").write_text(json.dumps({**about, **change}))
    assert sentence in refusal(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_description_that_is_no_json_is_refused(directory: Path, content: bytes) -> None:
    """Prevents a damaged profile.json from passing as PowerInfer's directory, which has none."""
    (directory / "profile.json").write_bytes(content)
    assert "profile.json'" in refusal(directory)


def test_nonsense_is_not_written_over_good_counts(directory: Path) -> None:
    """Prevents a run that went wrong from replacing the last good profile."""
    bad = replace(example(), counts=(*example().counts[:2], np.array([1, 2, 101])))
    with pytest.raises(ActivationStatsError, match="more firings than tokens"):
        activation_stats.write(directory, bad)
    assert_equal(activation_stats.read(directory, SIZES, FINGERPRINT), example())


def test_writing_replaces_the_directory_as_a_whole(directory: Path) -> None:
    """Prevents layers of an earlier, deeper model from staying beside the new ones."""
    smaller = example((4,))
    activation_stats.write(directory, smaller, {"locality.png": b"png"})
    assert {file.name for file in directory.iterdir()} == {"activation_0.pt", "profile.json", "locality.png"}
    assert_equal(activation_stats.read(directory, (4,), FINGERPRINT), smaller)
    assert [file.name for file in directory.parent.iterdir()] == ["activation"]
