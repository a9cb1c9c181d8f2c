"""Ctrl-C and SIGTERM as ``KeyboardInterrupt``, which comes again when something on its way swallows it.

Python drops an exception that is raised in a destructor or a callback, and libraries clear or replace it while they are
imported; then a command would go on as if nobody had asked it to end.
"""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SECONDS_BEFORE_ANOTHER = 1.0


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block SIGTERM is Ctrl-C, so that what ``kill``, a scheduler or a container ends is cleaned up as well.

    Once one of them came, the block ends with ``KeyboardInterrupt`` or, if it was at its end, without an exception. Outside
    the main thread, where no handler can be set, and for a SIGINT that is ignored or handled by another, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interruption, numbers = _Interruption(), [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, interruption.arrived) for number in numbers}
    unraisable, sys.unraisablehook = sys.unraisablehook, interruption.ignored
    try:
        yield
    except Exception as error:
        if interruption.came:  # what the interrupted library made of it
            raise KeyboardInterrupt from error
        raise
    finally:
        interruption.end()
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Interruption:
    def __init__(self) -> None:
        self.came = False
        self._reminds, self._ended = False, False
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._other_hook = sys.unraisablehook

    def arrived(self, number: int, _frame: FrameType | None) -> None:
        """The handler of the signals and, once a second, of the reminders."""
        reminder, self._reminds = self._reminds, False
        if self._ended:
            return
        self.came = True
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(SECONDS_BEFORE_ANOTHER, self._remind, (number,))
        self._timer.daemon = True
        self._timer.start()
        if not (reminder and _is_on_its_way()):
            raise KeyboardInterrupt

    def ignored(self, unraisable: Any) -> None:
        """Python's hook for exceptions that it drops: an interruption is no reason to print, because it comes again."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._other_hook(unraisable)

    def end(self) -> None:
        with self._lock:
            self._ended = True
        if self._timer:
            self._timer.cancel()

    def _remind(self, number: int) -> None:
        with self._lock:
            if self._ended:
                return
            self._reminds = True
            _thread.interrupt_main(signal.Signals(number))


def _is_on_its_way() -> bool:
    """Whether the main thread is cleaning up on account of an interruption, or of what became of it."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
