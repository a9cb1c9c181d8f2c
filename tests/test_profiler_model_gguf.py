"""Model files that are damaged, foreign or half understood end in one sentence, quickly and in little memory."""

import random
import resource
import struct
import time
from pathlib import Path

import pytest

from gguf_cases import random_predictors
from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import GgufError, ToolkitError
from pi_toolkit.profiler.gguf_container import KeyValue, TensorInfo, TensorType, ValueType
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.model_gguf_export import ExportSource, export
from tiny_models import save_family

MUTATIONS = 20_000
SECONDS_PER_FILE, BYTES_OF_ALL_FILES = 1.0, 200 * 2**20


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A sparse file of 8 tokens, one layer and a tokenizer of 8 words."""
    folder = tmp_path_factory.mktemp("small")
    sizes = dict(vocab_size=8, num_hidden_layers=1, intermediate_size=32)
    checkpoint = Checkpoint(save_family(folder / "hf", "llama", **sizes))
    fingerprint = checkpoint.fingerprint()
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581", "\u2581a"]
    keys = [
        KeyValue("tokenizer.ggml.model", ValueType.STRING, "llama"),
        KeyValue("tokenizer.ggml.tokens", ValueType.ARRAY, tokens, ValueType.STRING),
        KeyValue("tokenizer.ggml.scores", ValueType.ARRAY, [float(-i) for i in range(8)], ValueType.F32),
        KeyValue("tokenizer.ggml.token_type", ValueType.ARRAY, [2, 3, 3, 1, 1, 1, 1, 1], ValueType.I32),
        KeyValue("tokenizer.ggml.bos_token_id", ValueType.U32, 1),
    ]
    predictors = random_predictors(checkpoint, fingerprint)
    path = folder / "small.powerinfer.gguf"
    export(path, "PWRI", ExportSource(checkpoint, "small", fingerprint, predictors, keys), TensorType.Q4_0)
    return path


def rewritten(small: Path, path: Path, keys=None, infos=None, magic="PWRI") -> Path:
    """A copy of the small file with some keys replaced (None: left out) and some tensors renamed or left out."""
    file = gguf_container.read(small, "PWRI")
    kept = [item for item in file.key_values.values() if item.name not in (keys or {})]
    kept += [item for item in (keys or {}).values() if item is not None]
    pairs = [((infos or {}).get(info.name, info), file.data(info.name)) for info in file.tensors.values()]
    pairs = [(info, data) for info, data in pairs if info is not None]
    gguf_container.write(path, magic, kept, [info for info, _ in pairs], [data for _, data in pairs])
    return path


def u32(name: str, value: int) -> dict[str, KeyValue | None]:
    return {name: KeyValue(name, ValueType.U32, value)}


KEY_DAMAGES = {
    "another architecture": (
        {"general.architecture": KeyValue("general.architecture", ValueType.STRING, "mamba")},
        "architecture 'mamba': use one of llama, opt, falcon",
    ),
    "no architecture": ({"general.architecture": None}, "no key 'general.architecture'"),
    "a billion layers": (u32("llama.block_count", 10**9), "block_count = 1000000000 where"),
    "no layer": (u32("llama.block_count", 0), "block_count = 0 where"),
    "two layers of one": (u32("llama.block_count", 2), "predictors of 1 of its 2 layers"),
    "another hidden size": (u32("llama.embedding_length", 64), "rope.dimension_count = 8 where only 16"),
    "no heads": (u32("llama.attention.head_count", 0), "head_count = 0 where"),
    "heads that do not divide": (u32("llama.attention.head_count_kv", 3), "over 3 key/value heads"),
    "other widths": (u32("llama.feed_forward_length", 33), r"ffn_gate.weight' is \[32, 32\] where .* \[33, 32\]"),
    "experts": (u32("llama.expert_count", 8), "effect on the maths is not known here .expert_count"),
    "a size as text": (
        {"llama.context_length": KeyValue("llama.context_length", ValueType.STRING, "64")},
        "context_length = '64' where a whole number",
    ),
    "epsilon of nan": (
        {
            "llama.attention.layer_norm_rms_epsilon": KeyValue(
                "llama.attention.layer_norm_rms_epsilon", ValueType.F32, float("nan")
            )
        },
        "layer_norm_rms_epsilon = nan where a number above 0",
    ),
    "rotary scaling of another kind": (
        {"llama.rope.scaling.type": KeyValue("llama.rope.scaling.type", ValueType.STRING, "yarn")},
        "rotary scaling 'yarn'",
    ),
    "threshold of nan": (
        {"powerinfer.sparse_threshold": KeyValue("powerinfer.sparse_threshold", ValueType.F32, float("nan"))},
        "predictor threshold of nan",
    ),
    "another version of ours": (u32("powerinfer_toolkit.version", 2), "toolkit version 2"),
    "another activation": (
        {"powerinfer_toolkit.activation": KeyValue("powerinfer_toolkit.activation", ValueType.U32, 1)},
        "no key 'powerinfer_toolkit.activation' of type STRING",
    ),
}


@pytest.mark.parametrize("case", KEY_DAMAGES)
def test_keys_that_make_no_model_are_refused(case, small, tmp_path):
    """A shape that nothing was checked against, and hours later a wrong text."""
    keys, message = KEY_DAMAGES[case]
    with pytest.raises(GgufError, match=message):
        GgufModel(rewritten(small, tmp_path / "x.powerinfer.gguf", keys))


TENSOR_DAMAGES = {
    "a missing tensor": ({"blk.0.attn_k.weight": None}, "has no tensor 'blk.0.attn_k.weight'"),
    "a missing embedding": ({"token_embd.weight": None}, "has no tensor 'token_embd.weight'"),
    "a tensor of another name": (
        {"blk.0.attn_k.weight": TensorInfo("blk.0.attn_x.weight", (16, 32), TensorType.Q4_0)},
        "has no tensor 'blk.0.attn_k.weight'",
    ),
    "half a predictor": ({"blk.0.fc1.weight": None}, "are not understood .blk.0.fc2.weight"),
    "a turned matrix": (
        {"blk.0.attn_k.weight": TensorInfo("blk.0.attn_k.weight", (8, 64), TensorType.Q4_0)},
        r"is \[8, 64\] where",
    ),
    "integers for a norm": (
        {"output_norm.weight": TensorInfo("output_norm.weight", (32,), TensorType.I32)},
        "stored as I32",
    ),
}


@pytest.mark.parametrize("case", TENSOR_DAMAGES)
def test_tensors_that_make_no_model_are_refused(case, small, tmp_path):
    """A missing tensor found after minutes of loading, or never."""
    infos, message = TENSOR_DAMAGES[case]
    with pytest.raises(GgufError, match=message):
        GgufModel(rewritten(small, tmp_path / "x.powerinfer.gguf", infos=infos))


def test_many_empty_tensors_are_refused_at_the_first_layer_that_is_missing(small, tmp_path):
    """A hundred thousand claimed layers, for each of which a shape is made before the first is looked for."""
    count = 120_000
    file = gguf_container.read(small, "PWRI")
    keys = {"llama.block_count": KeyValue("llama.block_count", ValueType.U32, count)}
    path = rewritten(small, tmp_path / "x.powerinfer.gguf", keys)
    infos = [*file.tensors.values()] + [
        TensorInfo(f"blk.{i}.fc1.weight", (0,), TensorType.F32) for i in range(1, count)
    ]
    items = list(gguf_container.read(path, "PWRI").key_values.values())
    empty = [file.data(name) for name in file.tensors] + [file.data("output_norm.weight")[:0]] * (count - 1)
    gguf_container.write(path, "PWRI", items, infos, empty)
    began = time.process_time()
    with pytest.raises(GgufError, match=r"has no tensor 'blk.1.attn_norm.weight'"):
        GgufModel(path)
    assert time.process_time() - began < 5


def test_a_dense_file_with_predictors_is_refused(small, tmp_path):
    """The magic decides how the down matrix lies; a file of both kinds is neither."""
    with pytest.raises(GgufError, match="in a dense file"):
        GgufModel(rewritten(small, tmp_path / "x.gguf", magic="GGUF"))


@pytest.mark.parametrize("sixteenths", range(16))
def test_truncated_files_are_refused(sixteenths, small, tmp_path):
    """A download that broke off."""
    content = small.read_bytes()
    path = tmp_path / "x.powerinfer.gguf"
    path.write_bytes(content[: len(content) * sixteenths // 16])
    with pytest.raises(GgufError, match=r"is empty|ends within"):
        GgufModel(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer, not the file itself: fetch it with"),
        (b"<!doctype html>\n<html>", "is a web page, not the file itself: download it again"),
        (b"GGML" + bytes(60), "begins with b'GGML' instead of 'GGUF or PWRI': give a file of that kind"),
        (b"PWRI" + struct.pack("<IQQ", 2, 1, 1), "has GGUF version 2 and this release reads 3: convert the file"),
        (b"PWRI" + struct.pack("<IQQ", 3, 2**62, 1), "a number of tensors of 4611686018427387904 is beyond the limit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**62), "a number of keys of 4611686018427387904 is beyond the limit"),
    ],
)
def test_pi_run_names_what_is_wrong_with_a_file(content, message, refuses, tmp_path):
    """A traceback, or "not a workspace directory" for a file that is there."""
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert message in refuses(pi_run, path, "-p", "x")


def resident_file_bytes() -> int:
    """Bytes of mapped files that are in this process's memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_tensors_leave_the_memory_when_the_next_is_read(tmp_path):
    """A loaded model and its whole file in memory at once."""
    sizes = dict(hidden_size=512, intermediate_size=4096, num_hidden_layers=4, vocab_size=64)
    checkpoint = Checkpoint(save_family(tmp_path / "hf", "llama", **sizes))
    path = tmp_path / "x.gguf"
    export(path, "GGUF", ExportSource(checkpoint, "x", checkpoint.fingerprint(), None, []), TensorType.F32)
    del checkpoint
    model, before = GgufModel(path), resident_file_bytes()
    largest = 4 * 512 * 4096
    peak = 0
    for layer in range(4):
        for role in ("gate.weight", "up.weight", "down.weight"):
            model.layer(layer, role).sum()
            peak = max(peak, resident_file_bytes() - before)
    assert path.stat().st_size > 12 * largest
    assert peak < 3 * largest


def mutate(content: bytes, header_bytes: int, source: random.Random) -> bytes:
    """One damage: bytes, a whole number that means trouble, a piece cut out, doubled or moved, or the end cut off."""
    damaged = bytearray(content)
    place = source.randrange(header_bytes)
    kind = source.randrange(6)
    if kind <= 1:
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(header_bytes)] = source.randrange(256)
    elif kind == 2:
        number = source.choice([0, 1, 3, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 2**48, 1000])
        damaged[place : place + 8] = struct.pack("<Q", number)
    elif kind == 3:
        del damaged[place : place + source.randint(1, 64)]
    elif kind == 4:
        damaged[place:place] = damaged[place : place + source.randint(1, 64)]
    else:
        del damaged[source.randrange(len(damaged)) :]
    return bytes(damaged)


def test_twenty_thousand_damaged_files(small, tmp_path):
    """A crash, a hang, exhausted memory, or a file that is accepted though it does not say what it was read as.

    The header of what is accepted, written again from what was read, is the header that was there.
    """
    content = small.read_bytes()
    header_bytes = content.index(b"blk.0.fc2.weight") + 64
    path = tmp_path / "x.powerinfer.gguf"
    source, accepted, slowest = random.Random(0), 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTATIONS):
        damaged = mutate(content, header_bytes, source)
        path.write_bytes(damaged)
        began = time.process_time()
        try:
            model = GgufModel(path)
            read_everything(model)
        except ToolkitError as error:
            assert ": " in error.message
            continue
        finally:
            slowest = max(slowest, time.process_time() - began)
        accepted += 1
        file = model.file
        header = gguf_container.encode_header(model.magic, [*file.key_values.values()], [*file.tensors.values()])
        assert damaged.startswith(header) or "general.alignment" in file.key_values
    assert accepted < MUTATIONS / 2
    assert slowest < SECONDS_PER_FILE
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES_OF_ALL_FILES


def read_everything(model: GgufModel) -> None:
    for role in model.shape.shared_shapes():
        model.shared(role)
    for layer in range(model.shape.num_layers):
        model.attention(layer)
        for role in model.shape.ffn_shapes(layer):
            model.layer(layer, role)
    model.fingerprint()
    model.end_ids()
