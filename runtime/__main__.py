"""``python -m pi_toolkit.runtime`` is ``pi-run``."""

from .cli import main

main()
