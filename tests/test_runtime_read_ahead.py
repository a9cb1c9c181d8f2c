"""Reading ahead helps or does nothing; it never speaks up."""

from pathlib import Path

import pytest

from pi_toolkit.runtime import read_ahead as module
from pi_toolkit.runtime.read_ahead import read_ahead


@pytest.mark.parametrize("sends", [True, False])
def test_files_are_read_to_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: bool) -> None:
    """A thread that never ends; an error in place of the sentence of whoever opens the file."""
    monkeypatch.setattr(module, "SENT_BYTES" if sends else "PIECE_BYTES", 7)
    monkeypatch.setattr(module, "_send_nowhere", module._send_nowhere if sends else lambda _: False)
    file = tmp_path / "a"
    file.write_bytes(bytes(100))
    thread = read_ahead([file, file])
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert read_ahead([file, tmp_path / "gone"]) is None


@pytest.mark.parametrize("available", [None, 199])
def test_nothing_is_read_that_would_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int | None
) -> None:
    """Everything read twice, on machines that the model just fits into."""
    monkeypatch.setattr(module, "_available_bytes", lambda: available)
    (tmp_path / "a").write_bytes(bytes(100))
    assert read_ahead([tmp_path / "a"]) is None
