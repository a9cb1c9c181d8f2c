"""Learns, per layer, which FFN neurons will fire on a token before the FFN is computed."""
