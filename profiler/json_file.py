"""Small JSON descriptions (``model.json``, ``profile.json``, predictor ``config.json``): strict reading, atomic writing."""

import json
from pathlib import Path
from typing import Any

from .atomic_write import atomic_file
from .errors import WorkspaceError, shown


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write *content* to *path* atomically; NaN and infinity raise ``ValueError``."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n", "utf-8")


def read_json(path: Path, error: type[WorkspaceError], remedy: str) -> dict[str, Any]:
    """The JSON object in *path*; raises *error*, ending in *remedy*, when it is missing or not an object."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise error(f"{str(path)!r} is missing: {remedy}") from None
    except PermissionError:  # nothing is wrong with the content, and writing it again is no remedy
        raise
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{str(path)!r} cannot be read as JSON ({cause}): {remedy}") from cause
    if not isinstance(content, dict):
        raise error(f"{str(path)!r} does not hold a JSON object: {remedy}")
    return content


def require_format(content: dict[str, Any], path: Path, name: str, version: int, error: type[WorkspaceError]) -> None:
    """Raise *error* unless *content* states the format *name* in a *version* that this release knows."""
    found = content.get("format"), content.get("version")
    if found != (name, version):
        raise error(
            f"{str(path)!r} states format {shown(found[0])} version {shown(found[1])}, and this release reads "
            f"{name!r} version {version}: make the file again with this release"
        )
