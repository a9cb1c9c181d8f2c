"""Rotary position embedding: pairs of a head's values turned by angles that grow with the position."""

from typing import TYPE_CHECKING

from pi_toolkit.profiler.model_families import ModelShape

if TYPE_CHECKING:
    import torch


def rotation_table(
    shape: ModelShape, device: "torch.device", context: int
) -> "tuple[torch.Tensor, torch.Tensor] | None":
    """Cosines and sines float32 [context, head_dim] of the rotary angles, both halves alike; None for other models."""
    import torch

    rotary = shape.rotary
    if rotary is None:
        return None
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(context)[:, None] / rotary.linear_factor * (1.0 / rotary.theta**exponents)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().to(device), both.sin().to(device)


def rotate(heads: "torch.Tensor", cosine: "torch.Tensor", sine: "torch.Tensor") -> "torch.Tensor":
    """*heads* [..., heads, head_dim] turned by the angles of rows of the table, [..., 1, head_dim]."""
    import torch

    low, high = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-high, low), dim=-1) * sine
