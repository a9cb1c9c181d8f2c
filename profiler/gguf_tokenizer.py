"""The tokenizer inside a GGUF file, as a ``transformers`` fast tokenizer.

``tokenizer.huggingface.json`` is used when present: it holds everything. Files by others have llama.cpp's keys only,
``tokenizer.ggml.`` + ``model`` ("llama": SentencePiece's byte pairs by score; "gpt2": byte-level pairs by rank), ``pre``
(how text is cut before pairs are joined), ``tokens``, ``scores``, ``token_type``, ``merges``, ids of special tokens and
``add_bos_token``, ``add_eos_token``, ``add_space_prefix``. A cut that is not known here is refused by its name.
"""

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .errors import GgufError
from .gguf_container import GgufFile, ValueType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenizers import Tokenizer

KEYS = "tokenizer.ggml."
HUGGINGFACE_JSON = "tokenizer.huggingface.json"
_REMEDY = "make the file again with pi-convert, which puts the whole tokenizer into it"
SPACE_MARK = "▁"
# The cuts that published files ask for by name, as Oniguruma expressions.
_LLAMA_3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2_CUT = _LLAMA_3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenType(IntEnum):
    """What a token is, in llama.cpp's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_tokenizer(file: GgufFile, source: str) -> Any:
    """The tokenizer of an open file; *source* names the file in errors.

    Raises ``GgufError`` when there is none, when it is damaged, and when it cuts text in a way that is not known here.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        backend = _from_json(file) if HUGGINGFACE_JSON in file.key_values else _from_keys(file)
        tokens = file.value(f"{KEYS}tokens", ValueType.ARRAY, ValueType.STRING)
        special = {name: tokens[i] for name, i in special_ids(file).items()}
    except GgufError as error:
        raise GgufError(f"{source!r}: {error.message}") from None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    template = file.key_values.get("tokenizer.chat_template")
    if template is not None and template.type == ValueType.STRING:
        tokenizer.chat_template = template.value
    return tokenizer


def special_ids(file: GgufFile) -> dict[str, int]:
    """``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token`` → id, those that the file names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    count = len(file.value(f"{KEYS}tokens", ValueType.ARRAY, ValueType.STRING))
    found = {}
    for name, key in keys.items():
        full = f"{KEYS}{key}_token_id"
        if full in file.key_values:
            found[name] = file.value(full, ValueType.U32)
            if found[name] >= count:
                raise GgufError(f"states {full} = {found[name]} and has {count} tokens: {_REMEDY}")
    return found


def _from_json(file: GgufFile) -> "Tokenizer":
    from tokenizers import Tokenizer

    text = file.value(HUGGINGFACE_JSON, ValueType.STRING)
    return _guarded(lambda: Tokenizer.from_str(text))


def _guarded(build: "Callable[[], Tokenizer]") -> "Tokenizer":
    """Run *build*, turning what the Rust library throws, panics included, into ``GgufError``."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, GgufError):
        raise
    except BaseException as error:  # a panic derives from BaseException alone
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        raise GgufError(f"holds a tokenizer that cannot be used ({reason}): {_REMEDY}") from error


def _from_keys(file: GgufFile) -> "Tokenizer":
    model = file.value(f"{KEYS}model", ValueType.STRING)
    tokens = file.value(f"{KEYS}tokens", ValueType.ARRAY, ValueType.STRING)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise GgufError(f"holds a tokenizer with a token twice: {_REMEDY}")
    builders = {"llama": _sentencepiece, "gpt2": _byte_level}
    if model not in builders:
        raise GgufError(f"holds a tokenizer of kind {model!r}, which is not known here: {_REMEDY}")
    types = _token_types(file, len(tokens))
    backend = _guarded(lambda: builders[model](file, vocabulary, types))
    _add_special(file, backend, tokens, types, starts=model == "llama")
    return backend


def _token_types(file: GgufFile, count: int) -> list[int]:
    if f"{KEYS}token_type" not in file.key_values:
        return [TokenType.NORMAL] * count
    types = file.value(f"{KEYS}token_type", ValueType.ARRAY, ValueType.I32)
    if len(types) != count:
        raise GgufError(f"holds {len(types)} token types for {count} tokens: {_REMEDY}")
    return types.tolist()


def _add_special(file: GgufFile, backend: "Tokenizer", tokens: list[str], types: list[int], starts: bool) -> None:
    """Tokens that text is searched for as a whole, and the marks around a text."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    whole = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    for token, kind in zip(tokens, types, strict=True):
        if kind in whole and token:
            added = AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
            (backend.add_tokens if kind == TokenType.USER_DEFINED else backend.add_special_tokens)([added])
    ids, template, marks = special_ids(file), ["$A"], []
    for name, default in (("bos", starts), ("eos", False)):
        key = f"{KEYS}add_{name}_token"
        wanted = file.value(key, ValueType.BOOL) if key in file.key_values else default
        if wanted and f"{name}_token" in ids:
            token = tokens[ids[f"{name}_token"]]
            template.insert(0 if name == "bos" else len(template), token)
            marks.append((token, ids[f"{name}_token"]))
    if marks:
        backend.post_processor = TemplateProcessing(single=template, special_tokens=marks)


def _sentencepiece(file: GgufFile, vocabulary: "Mapping[str, int]", types: list[int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    scores = file.value(f"{KEYS}scores", ValueType.ARRAY, ValueType.F32).tolist()
    if len(scores) != len(vocabulary):
        raise GgufError(f"holds {len(scores)} scores for {len(vocabulary)} tokens: {_REMEDY}")
    joined = (TokenType.NORMAL, TokenType.USER_DEFINED)
    pieces = {token: i for token, i in vocabulary.items() if types[i] in joined}
    merges = [
        (-scores[i], i, len(token) - cut, token[:cut], token[cut:])
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=pairs, fuse_unk=True, byte_fallback=True))
    prefixed = f"{KEYS}add_space_prefix"
    prefix = file.value(prefixed, ValueType.BOOL) if prefixed in file.key_values else True
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _byte_level(file: GgufFile, vocabulary: "Mapping[str, int]", types: list[int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models

    merges = [tuple(line.split(" ")) for line in file.value(f"{KEYS}merges", ValueType.ARRAY, ValueType.STRING)]
    if any(len(pair) != 2 for pair in merges):
        raise GgufError(f"holds a tokenizer with a malformed list of merges: {_REMEDY}")
    pre = file.value(f"{KEYS}pre", ValueType.STRING) if f"{KEYS}pre" in file.key_values else "gpt-2"
    whole_words = pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = _cut(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(pre: str) -> Any:
    """The pre-tokenizer that goes by the name *pre* in llama.cpp."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

    gpt_2 = ByteLevel(add_prefix_space=False, use_regex=True)
    bare = ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "gpt-2":
        return gpt_2
    if pre in ("smollm", "starcoder", "refact", "command-r", "codeshell"):
        return Sequence([Digits(individual_digits=True), gpt_2])
    if pre in ("falcon", "default"):
        return Sequence([Punctuation("contiguous"), gpt_2, Digits(False), Split(Regex("[0-9][0-9][0-9]"), "isolated")])
    expressions = dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3_CUT) | {"qwen2": _QWEN_2_CUT}
    if pre in expressions:
        return Sequence([Split(Regex(expressions[pre]), "isolated"), bare])
    raise GgufError(f"holds a tokenizer that cuts text as {pre!r}, which is not known here: {_REMEDY}")
