"""The same weights give the same tensors and fingerprint in any file format; anything incomplete is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pi_toolkit.profiler.checkpoint import Checkpoint, locate
from pi_toolkit.profiler.errors import CheckpointError
from pi_toolkit.profiler.model_families.falcon import split_fused
from tiny_models import CONFIGS, make_model, save_family

Tensors = dict[str, torch.Tensor]


def tensors_of(family: str, seed: int = 0, **changes: Any) -> Tensors:
    """All tensors under the names ``transformers`` saves them, a tied head left out as there."""
    model = make_model(CONFIGS[family](**changes), seed)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    return tuple({name: tensors[name] for name in part} for part in (names[::2], names[1::2]))  # type: ignore[return-value]


def write_index(directory: Path, stem: str, shards: dict[str, Tensors]) -> None:
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (directory / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_safetensors(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_bin(directory: Path, tensors: Tensors) -> None:
    torch.save(tensors, directory / "pytorch_model.bin")


def write_old_bin(directory: Path, tensors: Tensors) -> None:
    """The layout before torch 1.6, which is no zip archive and cannot be mapped."""
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_safetensors_shards(directory: Path, tensors: Tensors) -> None:
    shards = dict(
        zip(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), halves(tensors), strict=True)
    )
    for name, part in shards.items():
        save_file(part, directory / name)
    write_index(directory, "model.safetensors", shards)


def write_bin_shards(directory: Path, tensors: Tensors) -> None:
    shards = dict(
        zip(("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), halves(tensors), strict=True)
    )
    for name, part in shards.items():
        torch.save(part, directory / name)
    write_index(directory, "pytorch_model.bin", shards)


WRITERS: list[Callable[[Path, Tensors], None]] = [
    write_safetensors,
    write_bin,
    write_old_bin,
    write_safetensors_shards,
    write_bin_shards,
]


def model_directory(
    path: Path, family: str, write: Callable[[Path, Tensors], None] = write_safetensors, tensors: Tensors | None = None
) -> Path:
    path.mkdir(parents=True)
    CONFIGS[family]().save_pretrained(path)
    write(path, tensors_of(family) if tensors is None else tensors)
    return path


def refusal(directory: Path) -> str:
    """The sentence opening *directory* and reading all of it is refused with."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).fingerprint()
    assert ": " in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("family", CONFIGS)
def test_every_file_format_holds_the_same_model(tmp_path: Path, family: str) -> None:
    """Prevents a workspace from being refused after its model was converted or sharded, and a shard from being missed."""
    original = Checkpoint(save_family(tmp_path / "saved", family))
    for write in WRITERS:
        other = Checkpoint(model_directory(tmp_path / write.__name__, family, write))
        assert other.fingerprint() == original.fingerprint(), write.__name__
        for layer, neurons in enumerate(other.shape.ffn_sizes):
            assert other.layer(layer, "up.weight").shape == (neurons, 32)
            for role in other.shape.ffn_shapes(layer):
                assert torch.equal(other.layer(layer, role), original.layer(layer, role)), (write.__name__, role)
            for role, tensor in other.attention(layer).items():
                assert torch.equal(tensor, original.attention(layer)[role]), (write.__name__, role)
        for role in other.shape.shared_shapes():
            assert torch.equal(other.shared(role), original.shared(role)), (write.__name__, role)


@pytest.mark.parametrize(
    ("family", "usual", "published"),
    [
        ("opt", "model.decoder.", "decoder."),
        ("llama", "model.", ""),
        ("mistral", "model.", ""),
        ("falcon-40b", "transformer.", ""),
    ],
)
def test_published_tensor_names_are_understood(tmp_path: Path, family: str, usual: str, published: str) -> None:
    """Prevents refusing OPT checkpoints saved from the bare model (``decoder.``) and LLaMA ones without ``model.``."""
    renamed = {
        published + name.removeprefix(usual) if name.startswith(usual) else name: tensor
        for name, tensor in tensors_of(family).items()
    }
    bare = Checkpoint(model_directory(tmp_path / "bare", family, tensors=renamed))
    assert bare.fingerprint() == Checkpoint(model_directory(tmp_path / "usual", family)).fingerprint()


@pytest.mark.parametrize("name", ["a b", "a;b", "été", "[x]", "a'b", "%41"])
def test_directory_names_are_taken_literally(tmp_path: Path, name: str) -> None:
    """Prevents a shell, URL or glob reading of the path."""
    directory = save_family(tmp_path / name, "llama")
    assert locate(str(directory)) == directory
    assert Checkpoint(directory).fingerprint() == Checkpoint(save_family(tmp_path / "plain", "llama")).fingerprint()


def test_only_named_weight_files_are_opened(tmp_path: Path) -> None:
    """Prevents training states and adapters beside the model from being read as weights."""
    directory = save_family(tmp_path, "llama")
    before = Checkpoint(directory).fingerprint()
    for name in ("optimizer.bin", "training_args.bin", "adapter_model.safetensors", "consolidated.safetensors"):
        (directory / name).write_bytes(b"not weights")
    assert Checkpoint(directory).fingerprint() == before


@pytest.mark.parametrize("write", [write_safetensors_shards, write_bin_shards])
def test_missing_shard_is_named(tmp_path: Path, write: Callable[[Path, Tensors], None]) -> None:
    """Prevents an interrupted download from passing as a smaller model."""
    directory = model_directory(tmp_path / "model", "llama", write)
    next(directory.glob("*-00002-of-*")).unlink()
    assert "lists 15 tensors that no shard holds" in refusal(directory)
    assert "download all shards" in refusal(directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": null}', "{}"])
def test_malformed_index_is_refused(tmp_path: Path, content: str) -> None:
    """Prevents a traceback from a damaged index file."""
    directory = model_directory(tmp_path / "model", "llama", write_safetensors_shards)
    (directory / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(directory)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("damage", ["truncated", "git-lfs pointer", "empty"])
def test_damaged_weight_file_is_named(tmp_path: Path, write: Callable[[Path, Tensors], None], damage: str) -> None:
    """Prevents garbage weights, or a traceback, from a broken download."""
    directory = model_directory(tmp_path / "model", "llama", write)
    file = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])[-1]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13\n"
    file.write_bytes({"truncated": file.read_bytes()[:-1000], "git-lfs pointer": pointer, "empty": b""}[damage])
    assert file.name in refusal(directory)
    assert "download it again" in refusal(directory)


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("content", ["payload", "list", "tensor"])
def test_bin_with_anything_but_named_tensors_is_refused(tmp_path: Path, content: str) -> None:
    """Prevents code in an untrusted checkpoint from running, and foreign content from crashing the reader."""
    trap = tmp_path / "trap"
    objects = {"payload": {"x": Payload(trap)}, "list": [torch.ones(2)], "tensor": torch.ones(2)}
    directory = model_directory(tmp_path / "model", "llama", write_bin, objects[content])  # type: ignore[arg-type]
    assert "pytorch_model.bin" in refusal(directory)
    assert not trap.exists()


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    """Prevents a directory with a config alone from passing."""
    CONFIGS["llama"]().save_pretrained(tmp_path)
    assert "no model*.safetensors or pytorch_model*.bin" in refusal(tmp_path)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    """Prevents a traceback for a directory that is no model."""
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"", b"[" * 100_000])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    """Prevents a traceback from a damaged config."""
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refusal(tmp_path)
    assert "download the model again" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.to(torch.float8_e5m2), "is stored as torch.float8_e5m2: use an unquantised checkpoint"),
        (lambda t: t.to(torch.int8), "is stored as torch.int8: use an unquantised checkpoint"),
        (lambda t: t.T.contiguous(), "has shape [32, 96] where config.json asks for [96, 32]"),
        (lambda t: t[:, :-1].contiguous(), "has shape [96, 31]"),
    ],
)
def test_foreign_tensor_is_named(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], sentence: str) -> None:
    """Prevents quantised codes, or weights of another model, from being multiplied as if they were ours."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of("llama")
    tensors[name] = change(tensors[name])
    message = refusal(model_directory(tmp_path / "model", "llama", tensors=tensors))
    assert sentence in message
    assert name in message


def test_absent_tensor_is_named(tmp_path: Path) -> None:
    """Prevents a model without one of its layers' matrices from failing in the middle of a run."""
    tensors = tensors_of("opt")
    del tensors["model.decoder.layers.2.fc2.bias"]
    assert "no tensor for 'down.bias'" in refusal(model_directory(tmp_path / "model", "opt", tensors=tensors))


@pytest.mark.parametrize(
    ("family", "changes"), [("falcon-7b", {}), ("falcon-7b", {"multi_query": False}), ("falcon-40b", {})]
)
def test_fused_falcon_matrix_splits_as_transformers_splits_it(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Prevents query, key and value rows from being swapped between heads."""
    checkpoint = Checkpoint(save_family(tmp_path, family, **changes))
    attention = make_model(CONFIGS[family](**changes)).transformer.h[1].self_attention
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        query, key, value = attention._split_heads(attention.query_key_value(x))
    parts = split_fused(checkpoint.shape, attention.query_key_value.weight.detach())
    shape, repeats = checkpoint.shape, checkpoint.shape.num_heads // checkpoint.shape.num_kv_heads
    for role, theirs in (("query", query), ("key", key), ("value", value)):
        ours = x @ checkpoint.attention(1)[f"{role}.weight"].T
        assert torch.equal(parts[f"{role}.weight"], checkpoint.attention(1)[f"{role}.weight"])
        heads = ours.view(1, 5, -1, shape.head_dim)
        if theirs.shape[2] != heads.shape[2]:
            heads = heads.repeat_interleave(repeats, dim=2)
        torch.testing.assert_close(heads, theirs)


def test_model_that_is_a_file_says_what_to_give(tmp_path: Path) -> None:
    """Prevents a path to the weights themselves from being sent to the hub as a model id."""
    file = save_family(tmp_path, "llama") / "model.safetensors"
    with pytest.raises(CheckpointError, match="is a file: give the model's directory"):
        locate(str(file))


@pytest.mark.parametrize("model", ["no-such-model", "a/b/c", "no such", "./nowhere"])
def test_model_that_is_nowhere_is_one_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the hub client's page-long errors from reaching the user."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    assert repr(model) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "change", [lambda t: t.to_sparse(), lambda t: torch.empty_like(t, device="meta")], ids=["sparse", "meta"]
)
def test_tensor_without_content_is_refused(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Prevents a traceback, or random weights, from a .bin whose tensors are not stored in full."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = tensors_of("llama")
    tensors[name] = change(tensors[name])
    message = refusal(model_directory(tmp_path / "model", "llama", write_bin, tensors))
    assert message.endswith("is sparse, quantised or without content: use a checkpoint with dense weights")


@pytest.mark.parametrize("write", [write_safetensors, write_bin])
def test_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Tensors], None]
) -> None:
    """Prevents the remedy of downloading 13 GB again where permissions are wrong; simulated, because root may read all."""

    real_open = Path.open

    def open_others(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix in (".safetensors", ".bin"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    directory = model_directory(tmp_path / "model", "llama", write)
    monkeypatch.setattr(Path, "open", open_others)
    monkeypatch.setattr(torch, "load", open_others)
    with pytest.raises(PermissionError):
        Checkpoint(directory)


def cached_on_the_hub(cache: Path, directory: Path, model: str) -> None:
    """Put *directory* where the hub client keeps what it downloaded of *model*."""
    place = cache / f"models--{model.replace('/', '--')}"
    shutil.copytree(directory, place / "snapshots" / "0123abcd")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abcd")


def test_downloaded_model_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a download, or "not on this disk", for a model that an earlier command fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError):
        locate("someone/tiny", local_only=True)
    original = save_family(tmp_path / "model", "opt")
    cached_on_the_hub(tmp_path / "cache", original, "someone/tiny")
    found = Checkpoint(locate("someone/tiny", local_only=True))
    assert found.fingerprint() == Checkpoint(original).fingerprint()


def test_copied_directory_opens_after_the_original_is_gone(tmp_path: Path) -> None:
    """Prevents tensors that silently refer to the place they were first read from."""
    shutil.copytree(save_family(tmp_path / "original", "opt"), tmp_path / "copy")
    fingerprint = Checkpoint(tmp_path / "original").fingerprint()
    shutil.rmtree(tmp_path / "original")
    assert Checkpoint(tmp_path / "copy").fingerprint() == fingerprint
