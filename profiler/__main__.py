"""``python -m pi_toolkit.profiler`` is ``pi-profile``, for launchers that start modules."""

from .cli import main

main()
