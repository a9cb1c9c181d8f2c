"""Which windows a perplexity is measured over, and that every prediction counts once and with the context asked for."""

from pathlib import Path

import pytest

from pi_toolkit.profiler.errors import CheckpointError, CorpusError
from pi_toolkit.profiler.token_windows import load_tokenizer
from pi_toolkit.runtime.eval_windows import WindowOptions, batches, bos_id_of, cut_windows, read_tokens
from tiny_models import DEMO_MODELS

BOS = 999


def counted(tokens: int, options: WindowOptions) -> list[tuple[int, int]]:
    """(token that is predicted, tokens before it in the window that predicts it), one by one."""
    found: list[tuple[int, int]] = []
    start = 0
    while start + options.length <= tokens:
        for position in range(options.length - 1):
            target = start + position + 1
            if position >= options.score_from and all(target != earlier for earlier, _ in found):
                found.append((target, position + 1))
        start += options.stride
    return found


@pytest.mark.parametrize("tokens", [8, 20, 41])
@pytest.mark.parametrize(
    ("length", "stride", "score_from"), [(8, 8, 0), (8, 8, 4), (8, 3, 0), (8, 3, 4), (8, 1, 6), (8, 5, 2)]
)
def test_every_prediction_counts_once(tokens: int, length: int, stride: int, score_from: int) -> None:
    """A token scored twice where windows overlap, or with less context than was asked for."""
    options = WindowOptions(length, stride, score_from)
    windows = cut_windows(range(tokens), options, None)
    got = []
    for window in windows:
        assert len(window.token_ids) == length
        pairs = [(window.token_ids[p + 1], p + 1) for p in range(window.first_scored, length - 1)]
        assert len(pairs) == window.scored
        got += pairs
    assert got == counted(tokens, options)


def test_bos_stands_in_front_of_every_window() -> None:
    """A model that never sees how its texts begin, or a BOS that shifts the tokens."""
    windows = cut_windows(range(8), WindowOptions(4, 4, bos="window"), BOS)
    assert [window.token_ids for window in windows] == [(BOS, 1, 2, 3), (BOS, 5, 6, 7)]
    windows = cut_windows(range(8), WindowOptions(4, 4, bos="document"), BOS)
    assert windows[1].token_ids == (4, 5, 6, 7)


def test_bos_is_what_the_tokenizer_adds() -> None:
    """A BOS that the model's texts never begin with."""
    tokenizer = load_tokenizer(DEMO_MODELS / "relu-llama-5m")
    assert bos_id_of(tokenizer) == tokenizer.bos_token_id == 0

    def adds_nothing(_text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [7, 8]}

    assert bos_id_of(adds_nothing) is None


def test_a_text_shorter_than_a_window() -> None:
    """A perplexity over nothing."""
    with pytest.raises(CorpusError, match="less than one window of 16: give more of it"):
        cut_windows(range(15), WindowOptions(16, 16), None)


def test_held_out_documents_alone(tmp_path: Path) -> None:
    """Quality measured on text that predictors were fitted to."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(f"document {number}" for number in range(81)))
    tokenizer = load_tokenizer(DEMO_MODELS / "relu-llama-5m")
    held_out = tokenizer.decode(read_tokens(str(corpus), False, tokenizer, 10_000), skip_special_tokens=True)
    assert [part.strip() for part in held_out.split("document")[1:]] == ["0", "40", "80"]
    assert len(read_tokens(str(corpus), True, tokenizer, 10_000)) > 20 * len(
        read_tokens(str(corpus), False, tokenizer, 10_000)
    )
    assert len(read_tokens(str(corpus), True, tokenizer, 5)) == 5


def test_tokens_beyond_the_vocabulary() -> None:
    """A tokenizer of another model, told by a crash in the embedding."""
    windows = cut_windows(range(16), WindowOptions(4, 4), None)
    with pytest.raises(CheckpointError, match="use tokenizer and weights of the same model"):
        list(batches(windows, 2, 10))
