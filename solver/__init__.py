"""Decides which FFN neurons, attention blocks and predictors live on the GPU, and writes that down as a ``.gpuidx``."""
