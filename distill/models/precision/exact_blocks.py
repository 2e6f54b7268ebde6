"""Blocks of a file found again from the weights of a student that was trained in them."""

from __future__ import annotations

import torch
from distill_kernels.quantisation.formats import (
    Blocks,
    check_fits,
    divide,
    reciprocal,
    reference_quantise,
    round_half_away,
)


def exact_blocks(values: torch.Tensor, name: str) -> Blocks | None:
    """Find blocks whose values are exactly `values`, whatever chose their scales; None where there are none.

    A block's scale is its number of largest magnitude divided by some integer; integers are tried from the bound down,
    for the blocks that the format's own scale does not give back.

    Args:
        values: fp32 [..., K].
        name: A key of `FORMATS`.
    """
    form = check_fits(values, name)
    found = reference_quantise(values, name)
    columns = form.columns(values)
    blocks = values.float().unflatten(-1, (-1, columns)).reshape(-1, columns)  # [B, block]
    codes, scale = found.codes.reshape(-1, columns).clone(), found.scale.reshape(-1).clone()
    left = (codes.float() * scale.float()[:, None] != blocks).any(-1).nonzero().flatten()  # blocks yet to be found
    for divisor in sorted(range(form.low, form.high + 1), key=abs, reverse=True):
        if not len(left) or divisor == 0:
            break
        part = blocks[left]
        largest = part.gather(-1, part.abs().argmax(-1, keepdim=True)).squeeze(-1)
        tried = divide(largest, divisor).to(form.scale_dtype)
        q = round_half_away(part * reciprocal(tried.float())[:, None]).clamp(form.low, form.high)
        exact = (q * tried.float()[:, None] == part).all(-1)
        codes[left[exact]], scale[left[exact]] = q[exact].to(torch.int8), tried[exact]
        left = left[~exact]
    if len(left):
        return None
    return Blocks(codes.view(values.shape), scale.view(found.scale.shape))
