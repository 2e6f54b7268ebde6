"""Launch shapes of the kernels of a decoding step, by model shape, number of rows and GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.decoding.attention import AttentionConfig, AttentionSpec
from distill_kernels.decoding.fused_linear import DecodeTile, Product
from distill_kernels.launch import INTERPRETER, DeviceFacts, cdiv, device_facts, next_power_of_2

# families on which a step of these kernels is faster than a model's own layers on our other kernels, by the benchmark
# rows `decode_step`: on an H200 1.6 x for 32 rows of SmolLM2-135M, 1.2 x for 64 of Llama-3.2-1B
FASTER_ON = frozenset({INTERPRETER, "sm_90"})
MAX_CHUNKS = 32
# q k v, o, gate and up, down of 65 to 128 rows of a model of 1.2 B parameters, as searched on the families above
TILES_OVER_64_ROWS = (
    DecodeTile(32, 128, 1, 4, 4),
    DecodeTile(16, 128, 1, 4, 5),
    DecodeTile(64, 64, 1, 4, 5),
    DecodeTile(64, 128, 4, 8, 4),
)


class DecodePlan(NamedTuple):
    """Launch shapes of a layer's GEMMs, of the LM head and of the attention."""

    qkv: DecodeTile
    out: DecodeTile
    gate_up: DecodeTile
    down: DecodeTile
    attention: AttentionConfig
    head: DecodeTile


def fit_shared_memory(tile: DecodeTile, rows: int, weight_bytes: int, gated: bool, facts: DeviceFacts) -> DecodeTile:
    """Return `tile` with as many stages, and columns of x at a time, as fit into shared memory."""
    columns = max(16, next_power_of_2(rows))
    outputs, inputs, splits, warps, stages = tile

    def needed(inputs: int, stages: int) -> int:  # weights that are cast take room twice
        weights = outputs * (1 + gated) * (weight_bytes * stages + (2 if weight_bytes == 4 else 0))
        return inputs * (columns * 2 * stages + weights)

    # Loads in flight are given up first, down to two; only then are steps made shorter.
    while stages > 2 and needed(inputs, stages) > facts.shared_bytes:
        stages -= 1
    while inputs > 16 and needed(inputs, stages) > facts.shared_bytes:
        inputs //= 2
    return DecodeTile(outputs, inputs, splits, warps, stages)


def choose_decode_tile(rows: int, product: Product, facts: DeviceFacts) -> DecodeTile:
    """Return the fastest tile of the H200's benchmark rows `decode_step`, for 1 to 64 rows, 0.1 to 1.2 B parameters.

    Narrow tiles with many loads in flight, since latency bounds a step. Few programs that each go through a
    long inner dimension are worse than parts of it; a gated product of many rows is best in one program a
    multiprocessor.
    """
    outputs = product.outputs
    inputs = product.weights[0].shape[1]
    gated = product.up is not None
    many_outputs = outputs > 12 * facts.multiprocessors
    many_rows = rows > 32
    warps = 4 if rows <= 64 else 8
    if gated and many_rows:
        tile = DecodeTile(64, 64, 1, warps, 6) if many_outputs else DecodeTile(32, 128, 1, warps, 4)
    elif gated:
        tile = DecodeTile(32, 128, 1, warps, 4) if many_outputs else DecodeTile(32, 64, 1, warps, 6)
    elif inputs > outputs:
        splits = 4 if 4 * cdiv(outputs, 32) <= facts.multiprocessors * 3 // 4 else 2
        tile = DecodeTile(32, 128, splits, warps, 4 if splits == 4 else 6)
    elif inputs >= 1024 and product.adds:
        tile = DecodeTile(32, 128, 2, warps, 6)
    elif inputs >= 768 and not product.adds and (many_rows or many_outputs):
        tile = DecodeTile(32, 128, 1, warps, 6)
    else:
        tile = DecodeTile(32, 64, 1, warps, 8) if many_outputs else DecodeTile(16, 64, 1, warps, 6)
    return tile


def choose_plan(
    rows: int,
    products: tuple[Product, Product, Product, Product],
    heads: AttentionSpec,
    slots: int,
    device: torch.device,
) -> DecodePlan:
    """Return the launch shapes for `rows` sequences of up to `slots` tokens and a layer's qkv, o, gate-up and down."""
    facts = device_facts(device)
    size = products[0].weights[0].element_size()
    # Shapes searched for many rows of one size of model, for its like alone; elsewhere `choose_decode_tile` decides.
    over_64 = facts.family in FASTER_ON and rows > 64 and products[2].outputs > 12 * facts.multiprocessors
    tiles = list(TILES_OVER_64_ROWS) if over_64 else [choose_decode_tile(rows, product, facts) for product in products]
    tiles = [
        fit_shared_memory(tile, rows, size, p.up is not None, facts) for tile, p in zip(tiles, products, strict=True)
    ]
    qkv, out, gate_up, down = tiles
    seen = slots if heads.window is None else min(slots, heads.window)
    pairs = rows * heads.kv_heads
    small = heads.size <= 64
    chunks = max(1, min(3 * facts.multiprocessors // pairs, seen // 512, MAX_CHUNKS))
    crowded = small and pairs > 3 * facts.multiprocessors  # fewer threads each, more of them on a multiprocessor
    ahead = 128 if chunks == 1 and not crowded else 0
    keys = 32 if not small or (crowded and rows > 64) else 64
    config = AttentionConfig(keys, chunks, 2 if crowded else 4, 4 if crowded else 3, ahead)
    if chunks > 1 and out.splits > 1:  # beside many programs of attention, small ones start sooner
        out = fit_shared_memory(DecodeTile(32, 64, 1, out.warps, 8), rows, size, False, facts)
    elif rows <= 32 and pairs > 64 and qkv.inputs == 128:  # beside about one a multiprocessor, smaller parts
        qkv = fit_shared_memory(DecodeTile(32, 128, 2, qkv.warps, 4), rows, size, False, facts)
    head_warps = 8 if facts.warp_size == 32 or rows > 32 else 4  # eight wavefronts of CDNA 3 spill
    head = DecodeTile(128 if rows <= 64 else 64, 64, 1, head_warps, 4)
    head = fit_shared_memory(head, rows, size, False, facts)
    return DecodePlan(qkv, out, gate_up, down, config, head)
