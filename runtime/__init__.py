"""Runs a model with its FFN neurons placed on two tiers and those skipped that will not fire."""
