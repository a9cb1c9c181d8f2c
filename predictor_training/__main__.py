"""``python -m pi_toolkit.predictor_training``, the same as ``pi-train-predictor``."""

from .cli import main

main()
