"""``python -m pi_toolkit.solver`` is ``pi-place``, for launchers that start modules."""

from .cli import main

main()
