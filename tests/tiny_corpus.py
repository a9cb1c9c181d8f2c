"""Text for tests that count: short documents of few words, no two neighbours alike."""

from pathlib import Path

WORDS = "the cat sat on a mat with dogs and birds near rivers while rain fell over old towns".split()


def save_corpus(path: Path, documents: int = 200) -> Path:
    """*documents* paragraphs of about twenty words."""
    path.write_text("\n\n".join(" ".join(WORDS[n % 7 :] + WORDS[: n % 11]) for n in range(documents)))
    return path
