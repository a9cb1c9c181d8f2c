"""What a command may have changed: every file below a folder."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """The files below *folder* by relative name."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
