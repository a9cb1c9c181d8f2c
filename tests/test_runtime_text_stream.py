"""Streamed text: whole characters only, and in sum exactly what the tokenizer makes of all tokens at once."""

import pytest
import transformers

from pi_toolkit.profiler.errors import GenerationError
from pi_toolkit.runtime.text_stream import TextStream
from tiny_models import DEMO_MODELS

TEXTS = ["plain words", "emoji 🦜 and 中文 text", "e\u0301 combined, ½ €", "\n\n  spaces   and\ttabs ", "🇫🇷👩‍👩‍👧"]


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODELS / "relu-llama-5m")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> None:
    """Half a character on the terminal (�), or characters lost at the seams."""
    prompt = tokenizer("The prompt:")["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(token) for token in ids]
    assert not any("�" in piece for piece in pieces)
    rest = stream.finish()
    want = tokenizer.decode(prompt + ids, skip_special_tokens=True)[
        len(tokenizer.decode(prompt, skip_special_tokens=True)) :
    ]
    assert "".join(pieces) + rest == stream.text == want


def test_a_character_cut_by_the_last_token_is_not_lost(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Text that silently ends before the last token."""
    ids = tokenizer("🦜", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(tokenizer, tokenizer("a")["input_ids"])
    assert [stream.push(token) for token in ids] == [""] * len(ids)
    assert set(stream.finish()) == {"�"}


def test_special_tokens_are_left_out(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """</s> in the answer."""
    stream = TextStream(tokenizer, tokenizer("a")["input_ids"])
    assert tokenizer.eos_token_id is not None
    assert stream.push(tokenizer.eos_token_id) + stream.finish() == ""


def test_a_tokenizer_without_fast_form_is_named() -> None:
    """An attribute error from deep inside for a tokenizer that cannot stream."""
    with pytest.raises(GenerationError, match=r"no tokenizer\.json form: save it"):
        TextStream(object(), [])
