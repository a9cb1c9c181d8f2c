"""A model directory's tokenizer as GGUF keys: llama.cpp's own, and the whole fast tokenizer beside them.

The keys are those :mod:`.gguf_tokenizer` describes. Ids of begin and end of text come from the tokenizer, others, as in
PowerInfer's converter, from ``config.json``. ``add_bos_token`` and ``add_eos_token`` are written
where they differ from what the engines assume. Rows of the embedding that no token has are named ``[PAD{id}]``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import read_config
from .command_line import note
from .errors import CheckpointError
from .gguf_container import KeyValue, ValueType
from .gguf_tokenizer import HUGGINGFACE_JSON, KEYS, SPACE_MARK, TokenType
from .model_gguf_layout import OURS
from .token_windows import load_tokenizer, read_end_ids

_ADDED_SCORE = -1000.0
_ID_KEYS = {
    "bos_token_id": "bos",
    "eos_token_id": "eos",
    "unk_token_id": "unknown",
    "sep_token_id": "seperator",  # spelt so in the format
    "pad_token_id": "padding",
}


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id with their scores (SentencePiece) or merges (byte level); ``pre`` names the cut for llama.cpp."""

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    pre: str | None = None


def tokenizer_keys(directory: Path, vocabulary_size: int) -> list[KeyValue]:
    """All keys about the tokenizer of a Hugging Face *directory*.

    Raises ``CheckpointError`` when there is no usable tokenizer or it has more tokens than the embedding has rows.
    """
    tokenizer, config = load_tokenizer(directory), read_config(directory)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    keys = []
    vocabulary = _vocabulary(directory, tokenizer, content, vocabulary_size)
    keys += _vocabulary_keys(vocabulary)
    keys += _id_keys(tokenizer, config, directory, vocabulary.model)
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        keys.append(KeyValue("tokenizer.chat_template", ValueType.STRING, template))
    if content:
        keys.append(KeyValue(HUGGINGFACE_JSON, ValueType.STRING, json.dumps(content, ensure_ascii=False)))
    return keys


def _vocabulary(directory: Path, tokenizer: Any, content: dict[str, Any], size: int) -> _Vocabulary:
    model = content.get("model", {})
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    if by_id and max(by_id) >= size:
        raise CheckpointError(
            f"the tokenizer of {str(directory)!r} has token {max(by_id)} and the model {size} rows: use files of one model"
        )
    special = {entry["id"]: bool(entry["special"]) for entry in content.get("added_tokens", [])}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [_type_of(i, by_id, special) for i in range(size)]
    if (directory / "tokenizer.model").exists():
        return _from_sentencepiece(directory / "tokenizer.model", tokens, types)
    if model.get("type") != "BPE":
        note(f"a {model.get('type', 'slow')} tokenizer has no place in llama.cpp's keys: only this toolkit can read it")
        return _Vocabulary("none", tokens, types)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if model.get("byte_fallback"):
        return _Vocabulary("llama", tokens, _with_bytes(tokens, types), scores=_scores(tokens, merges))
    return _Vocabulary("gpt2", tokens, types, merges=merges, pre=_cut_name(content.get("pre_tokenizer")))


def _type_of(token_id: int, by_id: dict[int, str], special: dict[int, bool]) -> int:
    if token_id not in by_id:
        return TokenType.UNUSED
    if token_id not in special:
        return TokenType.NORMAL
    return TokenType.CONTROL if special[token_id] else TokenType.USER_DEFINED


def _from_sentencepiece(path: Path, tokens: list[str], types: list[int]) -> _Vocabulary:
    """Pieces, scores and types as ``tokenizer.model`` has them; what was added to it later keeps *tokens* and *types*."""
    import sentencepiece

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"{str(path)!r} is no SentencePiece model: download it again") from error
    count = pieces.vocab_size()
    if count > len(tokens):
        raise CheckpointError(
            f"{str(path)!r} has {count} pieces and the model {len(tokens)} rows: use one model's files"
        )
    scores = [pieces.get_score(i) for i in range(count)] + [_ADDED_SCORE] * (len(tokens) - count)
    return _Vocabulary(
        "llama",
        [pieces.id_to_piece(i) for i in range(count)] + tokens[count:],
        [_piece_type(pieces, i) for i in range(count)] + types[count:],
        scores=scores,
    )


def _piece_type(pieces: Any, token_id: int) -> int:
    for is_it, kind in (
        (pieces.is_unknown, TokenType.UNKNOWN),
        (pieces.is_control, TokenType.CONTROL),
        (pieces.is_unused, TokenType.UNUSED),
        (pieces.is_byte, TokenType.BYTE),
    ):
        if is_it(token_id):
            return kind
    return TokenType.NORMAL


def _with_bytes(tokens: list[str], types: list[int]) -> list[int]:
    """*types* with the tokens ``<0x00>`` … ``<0xFF>`` marked, and ``<unk>``."""
    names = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)} | {"<unk>": TokenType.UNKNOWN}
    return [names.get(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece scores that order pairs as *merges* does: minus the rank at which a token first appears."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", "", 1), rank)
    return [
        -float(ranks.get(token, len(merges))) if token in ranks or token[:1] == SPACE_MARK else 0.0 for token in tokens
    ]


def _cut_name(pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name for how text is cut; "default" with a note where none is known to be the same."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Punctuation", "ByteLevel", "Digits", "Split"]:
        return "falcon"
    if kinds == ["Split", "ByteLevel"]:
        expression = str(steps[0].get("pattern", {}).get("Regex", ""))
        if r"\p{N}{1,3}" in expression:
            return "llama-bpe"
        if r"\p{N}|" in expression:
            return "qwen2"
    note("llama.cpp has no name for how this tokenizer cuts text: it may cut otherwise than this toolkit does")
    return "default"


def _vocabulary_keys(vocabulary: _Vocabulary) -> list[KeyValue]:
    keys = [KeyValue(f"{KEYS}model", ValueType.STRING, vocabulary.model)]
    if vocabulary.pre:
        keys.append(KeyValue(f"{KEYS}pre", ValueType.STRING, vocabulary.pre))
    keys.append(KeyValue(f"{KEYS}tokens", ValueType.ARRAY, vocabulary.tokens, ValueType.STRING))
    if vocabulary.scores is not None:
        keys.append(KeyValue(f"{KEYS}scores", ValueType.ARRAY, vocabulary.scores, ValueType.F32))
    keys.append(KeyValue(f"{KEYS}token_type", ValueType.ARRAY, list(map(int, vocabulary.types)), ValueType.I32))
    if vocabulary.merges is not None:
        keys.append(KeyValue(f"{KEYS}merges", ValueType.ARRAY, vocabulary.merges, ValueType.STRING))
    return keys


def _id_keys(tokenizer: Any, config: dict[str, Any], directory: Path, model: str) -> list[KeyValue]:
    keys = []
    for name, key in _ID_KEYS.items():
        found = config.get(name)
        found = found[0] if isinstance(found, list) and found else found
        if name in ("bos_token_id", "eos_token_id") and getattr(tokenizer, name, None) is not None:
            found = getattr(tokenizer, name)  # a config written by default has ids of another vocabulary
        if isinstance(found, int) and found >= 0:
            keys.append(KeyValue(f"{KEYS}{key}_token_id", ValueType.U32, found))
    for name, added in _added_marks(tokenizer).items():
        if added != (model == "llama" and name == "bos"):
            keys.append(KeyValue(f"{KEYS}add_{name}_token", ValueType.BOOL, added))
    ends = sorted(read_end_ids(directory))
    if ends:
        keys.append(KeyValue(f"{OURS}end_token_ids", ValueType.ARRAY, ends, ValueType.U32))
    return keys


def _added_marks(tokenizer: Any) -> dict[str, bool]:
    """Whether a text is given a begin and an end mark, asked of the tokenizer itself."""
    ids = tokenizer("a")["input_ids"]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {"bos": bos is not None and first == bos, "eos": eos is not None and len(ids) > 1 and last == eos}
