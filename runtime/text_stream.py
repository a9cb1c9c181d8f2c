"""Text out of token ids as they come, in whole characters only."""

from typing import Any

from pi_toolkit.profiler.errors import GenerationError


class TextStream:
    """Continues the text of *prompt_ids*; special tokens are left out."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._tokenizer is None:
            raise GenerationError(
                "the model's tokenizer has no tokenizer.json form: save it with a fast tokenizer first"
            )
        self._stream = DecodeStream(list(prompt_ids), skip_special_tokens=True)
        self._ids, self._prompt = list(prompt_ids), list(prompt_ids)
        self.text = ""

    def push(self, token_id: int) -> str:
        """The characters that *token_id* completes, often none."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id) or ""
        self.text += piece
        return piece

    def finish(self) -> str:
        """What is left of a character that never became whole, as the tokenizer writes it (�)."""
        decode = self._tokenizer.decode
        complete = decode(self._ids, skip_special_tokens=True)
        sent = decode(self._prompt, skip_special_tokens=True) + self.text
        rest = complete[len(sent) :] if complete.startswith(sent) else ""
        self.text += rest
        return rest
