"""A tokenizer that went through a model file cuts text as the original does: from its JSON, and from llama.cpp's keys."""

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.corpus import documents
from pi_toolkit.profiler.errors import CheckpointError, GgufError
from pi_toolkit.profiler.gguf_container import KeyValue, ValueType
from pi_toolkit.profiler.gguf_tokenizer import HUGGINGFACE_JSON, load_tokenizer
from pi_toolkit.profiler.gguf_tokenizer_keys import tokenizer_keys
from pi_toolkit.profiler.token_windows import load_tokenizer as load_original
from tiny_models import DEMO_MODELS

ODD = [
    "",
    " ",
    "  a   b    c     ",
    "日本語のテキスト と 中文，한국어",
    "😀👨‍👩‍👧‍👦 🇩🇪 ❤️",
    "1234567890 3.14159 007 1,000,000",
    "\x00\x01\x07\x1b tab\t\r\n\n\n end",
    "don't I'LL they've",
    "<s> </s> <unk> <pad> <0x0A> <|endoftext|>",
    "\u200b\u00a0x\u3000y\ufeff",
    "a\ud7ffb \U0010ffff",
    "▁▁ mark ▁",
    "e\u0301 é ﬁ Å ͏",
    "def f(x):\n    return x  # ok\n",
]
MAGICS = ("PWRI", "GGUF")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*islice(documents("wikipedia-intros"), 500), *ODD]


@pytest.fixture(scope="module")
def sentencepiece_directory(tmp_path_factory) -> Path:
    """A LLaMA directory whose tokenizer is a ``tokenizer.model`` alone."""
    import sentencepiece

    directory = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(islice(documents("wikipedia-intros"), 300))),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens | {"tokenizer_class": "LlamaTokenizer"}))
    (directory / "config.json").write_text('{"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}')
    return directory


@pytest.fixture(scope="module")
def sentencepiece_json_directory(sentencepiece_directory, tmp_path_factory) -> Path:
    """The same with a ``tokenizer.json`` in place of the ``tokenizer.model``."""
    directory = tmp_path_factory.mktemp("spm-json")
    shutil.copy(sentencepiece_directory / "config.json", directory)
    load_original(sentencepiece_directory).save_pretrained(directory)
    (directory / "tokenizer.model").unlink(missing_ok=True)
    return directory


@pytest.fixture(scope="module")
def byte_level_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bpe")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO_MODELS / "relu-llama-5m" / name, directory / name)
    return directory


def through_a_file(keys: list[KeyValue], magic: gguf_container.Magic, path: Path):
    gguf_container.write(path, magic, keys, [], [])
    return load_tokenizer(gguf_container.read(path, magic), path.name)


def without_json(keys: list[KeyValue]) -> list[KeyValue]:
    return [item for item in keys if item.name != HUGGINGFACE_JSON]


@pytest.mark.parametrize("keep", [lambda keys: keys, without_json], ids=["whole", "llama.cpp's keys"])
@pytest.mark.parametrize("magic", MAGICS)
@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_json", "byte_level"])
def test_same_ids_and_same_text(kind, magic, keep, texts, tmp_path, request):
    """Another cut of digits, a space too many, bytes that become <unk>, a lost BOS."""
    directory = request.getfixturevalue(f"{kind}_directory")
    original = load_original(directory)
    found = through_a_file(keep(tokenizer_keys(directory, 4096)), magic, tmp_path / "x.gguf")
    wanted = original(texts)["input_ids"]
    for text, mine, theirs in zip(texts, found(texts)["input_ids"], wanted, strict=True):
        assert mine == theirs, repr(text[:60])
        assert found.decode(mine) == original.decode(theirs)
    assert (found.bos_token_id, found.eos_token_id) == (original.bos_token_id, original.eos_token_id)


def test_keys_of_a_sentencepiece_model(sentencepiece_directory):
    """What PowerInfer's engine reads: kinds of pieces, and rows beyond the last piece named as padding."""
    keys = {item.name: item.value for item in tokenizer_keys(sentencepiece_directory, 1010)}
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.tokens"][:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert keys["tokenizer.ggml.tokens"][-1] == "[PAD1009]"
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert keys["tokenizer.ggml.token_type"][-1] == 5
    assert len(keys["tokenizer.ggml.scores"]) == 1010
    assert "tokenizer.ggml.add_bos_token" not in keys  # what the engines assume


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        (
            "falcon",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Punctuation("contiguous"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                    pre_tokenizers.Digits(False),
                    pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
                ]
            ),
        ),
    ],
)
def test_cuts_have_llama_cpps_names(name, cut, byte_level_directory, texts, tmp_path):
    """Digits cut in threes by one program and one by one by the other."""
    directory = tmp_path / "hf"
    shutil.copytree(byte_level_directory, directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.pre_tokenizer = cut
    backend.save(str(directory / "tokenizer.json"))
    keys = tokenizer_keys(directory, 4096)
    assert {item.name: item.value for item in keys}["tokenizer.ggml.pre"] == name
    found = through_a_file(without_json(keys), "GGUF", tmp_path / "x.gguf")
    assert found(texts[:60] + ODD)["input_ids"] == load_original(directory)(texts[:60] + ODD)["input_ids"]


def test_begin_and_end_are_the_tokenizers(byte_level_directory, tmp_path):
    """A config.json written by default says 1 and 2 of any vocabulary, and llama.cpp would begin texts with token 1."""
    directory = tmp_path / "hf"
    shutil.copytree(byte_level_directory, directory)
    (directory / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 7}')
    keys = {item.name: item.value for item in tokenizer_keys(directory, 4096)}
    ids = [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")]
    assert ids == [0, 1, 7]


def test_an_unknown_cut_is_announced_in_the_file(byte_level_directory, tmp_path, capsys):
    """llama.cpp would cut text otherwise, and nobody would know."""
    directory = tmp_path / "hf"
    shutil.copytree(byte_level_directory, directory)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer_keys(directory, 4096)
    assert "it may cut otherwise" in capsys.readouterr().err


def test_a_tokenizer_of_another_kind_has_only_ours(byte_level_directory, tmp_path, capsys):
    """WordPiece squeezed into keys that mean byte pairs."""
    directory = tmp_path / "hf"
    shutil.copytree(byte_level_directory, directory)
    words = {word: i for i, word in enumerate(("[UNK]", "<s>", "</s>", "<pad>", "city", "##s"))}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(directory / "tokenizer.json"))
    keys = tokenizer_keys(directory, 4096)
    assert "only this toolkit can read it" in capsys.readouterr().err
    found = through_a_file(keys, "GGUF", tmp_path / "x.gguf")
    assert found("city citys")["input_ids"] == load_original(directory)("city citys")["input_ids"]
    with pytest.raises(GgufError, match="kind 'none', which is not known here: make the file again with pi-convert"):
        through_a_file(without_json(keys), "GGUF", tmp_path / "y.gguf")


def test_more_tokens_than_rows_are_refused(byte_level_directory):
    """An id beyond the embedding, which reads whatever lies there."""
    with pytest.raises(CheckpointError, match="has token 4095 and the model 100 rows"):
        tokenizer_keys(byte_level_directory, 100)


def changed(keys: list[KeyValue], **changes: object) -> list[KeyValue]:
    """*keys* with values replaced, or left out where the change is None; names without their prefix."""
    replaced = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    kept = [item for item in keys if replaced.get(item.name, "") is not None]
    return [KeyValue(item.name, item.type, replaced.get(item.name, item.value), item.item_type) for item in kept]


DAMAGES = {
    "no tokens": (dict(tokens=None), "no key 'tokenizer.ggml.tokens'"),
    "a token twice": (dict(tokens=["a", "a"]), "a token twice"),
    "too few types": (dict(token_type=[1]), "1 token types for"),
    "no merges": (dict(merges=None), "no key 'tokenizer.ggml.merges'"),
    "a merge of three": (dict(merges=["a b c"]), "malformed list of merges"),
    "a merge of unknown tokens": (dict(merges=["nothing here"]), "cannot be used"),
    "an unknown cut": (dict(pre="martian"), "cuts text as 'martian'"),
    "an id past the end": (dict(bos_token_id=99999), "bos_token_id = 99999"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_keys_are_refused(case, byte_level_directory, tmp_path):
    """A crash in the tokenizer library, or another tokenizer than the model's."""
    changes, message = DAMAGES[case]
    with pytest.raises(GgufError, match=message):
        through_a_file(
            changed(without_json(tokenizer_keys(byte_level_directory, 4096)), **changes), "GGUF", tmp_path / "x"
        )


@pytest.mark.parametrize(
    "text", ["", "null", "{}", '{"model": 1}', "<html>", '{"version": "1.0", "model": {"type": "BPE"}}']
)
def test_damaged_json_is_refused(text, byte_level_directory, tmp_path):
    keys = without_json(tokenizer_keys(byte_level_directory, 4096))
    keys.append(KeyValue(HUGGINGFACE_JSON, ValueType.STRING, text))
    with pytest.raises(GgufError, match=r"a tokenizer that cannot be used .* make the file again with pi-convert"):
        through_a_file(keys, "GGUF", tmp_path / "x")
