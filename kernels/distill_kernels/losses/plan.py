"""Planning of chunks and buffers for the rows of a batch, from sizes alone.

A chunk's logits of both models must exist together; its student's part then becomes the gradient `G`. Chunks whose `G`
lie side by side form a group, and one product per group adds to `dW`: the fewer groups, the less often `dW` is rounded
to 16 bits. While a group fills the buffer, the teacher's logits take rows that later chunks of the group will use, so
chunks shrink towards its end. Before the first product `dW` does not exist, and the memory that it will take serves as
`extra` rows for the teacher: the first group needs no small chunks.

A later group of 4,096 rows in a buffer of 4,480, chunk by chunk (S: the student's logits, which become G; T: the
teacher's logits of the same rows; G: gradients that wait for the group's product):

    rows of the buffer   0                    2048                      4096  4480
    chunk 1, 2048 rows   [S 2048 -> G        ][T 2048                  ][     ]
    chunk 2, 1152 rows   [G                  ][S 1152 -> G ][T 1152   ][     ]
    chunk 3,  640 rows   [G                                ][S 640][T 640    ]
    chunk 4,  256 rows   [G                                       ][S][T]
    then                 dW += G^T x  of 4,096 rows, and the buffer is free for the next group

Where more than `MAX_16_BIT_GROUPS` groups would be needed, `dW` is summed in fp32 and each chunk is its own group.
"""

from __future__ import annotations

from typing import NamedTuple

from distill_kernels.launch import cdiv

MAX_16_BIT_GROUPS = 8  # additions to a 16-bit dW, each of which rounds it
ROW_MULTIPLE = 128
CHUNK_ROWS = 2048
GROUP_ROWS = 4096
EFFICIENT_ROWS = 512  # from which on a chunk's projections take no longer than a large chunk's, by row
SMALL_CHUNK_COST = 1.2  # on an H100 at 128,256 columns, H 2,048 and 4,096: 128 rows cost 0.31 ms more, a group 0.26 ms
LAST_CHUNK_ROWS = 384  # rows of the buffer beyond a group, so that the group's last chunk is not too small
MEMORY_DIVISOR = 24  # the buffer takes at most this part of the device's memory
EXTRA_ROWS_DIVISOR = 512  # extra rows may take this part of the device's memory even where dW is smaller


class ChunkPlan(NamedTuple):
    """Chunks and buffer sizes of one call.

    Attributes:
        groups: the sizes of the chunks of each group.
        buffer_rows: rows of the buffer in which a group's gradients come to lie, the teacher's logits behind them.
        extra_rows: rows beside it for the teacher's logits of the first group; 0 where they lie in the buffer too.
        accumulate_fp32: dW is summed in fp32.
    """

    groups: tuple[tuple[int, ...], ...]
    buffer_rows: int
    extra_rows: int
    accumulate_fp32: bool

    @property
    def chunk_rows(self) -> int:
        return max((max(group) for group in self.groups), default=0)


def plan_chunks(
    rows: int,
    vocab: int,
    *,
    logit_bytes: int,
    models: int,
    weight_bytes: int,
    memory_bytes: int,
    workspace: int | None = None,
    weight_16_bit: bool = True,
) -> ChunkPlan:
    """Return the plan for `rows` tokens.

    Args:
        rows: tokens to compute.
        vocab: columns of the logits.
        logit_bytes: bytes of one kept logit.
        models: 2 with a teacher, 1 without.
        weight_bytes: bytes that dW will take; 0 where it is not required.
        memory_bytes: memory of the device; without a `workspace`, the buffer takes at most a twenty-fourth of it.
        workspace: bytes for the buffer, or None for groups of `GROUP_ROWS` rows.
        weight_16_bit: dW has 16 bits, so that it matters how often it is rounded.
    """
    if rows == 0:
        return ChunkPlan((), 0, 0, False)
    row_bytes = vocab * logit_bytes
    budget = memory_bytes // MEMORY_DIVISOR if workspace is None else workspace
    # At least ROW_MULTIPLE rows of each model, even where the budget holds fewer.
    max_rows = max(budget // row_bytes // ROW_MULTIPLE, models) * ROW_MULTIPLE
    if weight_bytes and weight_16_bit:
        buffer = (
            max_rows if workspace is not None else min(max_rows, GROUP_ROWS + (LAST_CHUNK_ROWS if models == 2 else 0))
        )
        # What may stand beside the buffer until dW is allocated: dW's bytes, or a small share of the device where that
        # is more and the caller set no workspace.
        spare = weight_bytes if workspace is not None else max(weight_bytes, memory_bytes // EXTRA_ROWS_DIVISOR)
        plan = _plan_groups(rows, buffer, models, spare // row_bytes)
        if len(plan.groups) <= MAX_16_BIT_GROUPS or workspace is not None:
            return plan
    # dW is not wanted, or has 32 bits, or took too many groups: equal chunks up to CHUNK_ROWS, each its own group, with
    # the teacher's logits behind the student's.
    size = _even_part_size(rows, min(max_rows // models // ROW_MULTIPLE * ROW_MULTIPLE, CHUNK_ROWS))
    groups = tuple((min(size, rows - start),) for start in range(0, rows, size))
    return ChunkPlan(groups, models * size, 0, bool(weight_bytes) and weight_16_bit)


def _even_part_size(rows: int, max_rows: int) -> int:
    """Return the size of the fewest nearly equal parts of at most `max_rows` rows, a multiple of `ROW_MULTIPLE`."""
    return min(cdiv(cdiv(rows, cdiv(rows, max_rows)), ROW_MULTIPLE) * ROW_MULTIPLE, rows)


def _plan_groups(rows: int, buffer: int, models: int, spare: int) -> ChunkPlan:
    """Return a plan of as few groups as the buffer allows; `spare` rows of logits may lie beside the buffer."""
    # Without a teacher a group may fill the buffer; with one its last chunk still needs room for the teacher.
    full = buffer if models == 1 else min(buffer - min(LAST_CHUNK_ROWS, buffer // 2, ROW_MULTIPLE), buffer)
    # whole GROUP_ROWS where the buffer allows them
    full = full // GROUP_ROWS * GROUP_ROWS or (full if models == 1 else _cheapest_group(buffer))
    extra = models == 2 and spare >= min(CHUNK_ROWS, rows)
    first = min(_even_part_size(rows, full), buffer)
    if extra and full < GROUP_ROWS:  # a small buffer gains most from a first group that fills it
        first = min(buffer, rows)
    sizes = [_chunk_sizes(first, buffer, 1 if extra else models)]
    rest = rows - first
    if rest:
        size = _even_part_size(rest, full)
        sizes += [_chunk_sizes(min(size, rest - start), buffer, models) for start in range(0, rest, size)]
    extra_rows = max(sizes[0]) if extra else 0
    # The buffer's rows in use are highest at some chunk: gradients so far, plus its logits of every model.
    need = sum(sizes[0]) if extra else 0
    for group in sizes[1 if extra else 0 :]:
        used = 0
        for size in group:
            need = max(need, used + models * size)
            used += size
    return ChunkPlan(tuple(sizes), need, extra_rows, False)


def _cheapest_group(buffer: int) -> int:
    """Return the rows of a group for which a small buffer costs least beyond the operations, with two models.

    A group reads and writes dW once, and a chunk of fewer than `EFFICIENT_ROWS` rows waits for the heads' weights; in
    units of the former the latter costs about `SMALL_CHUNK_COST` times the share of the rows that are missing.
    """

    def cost(rows: int) -> float:
        missing = sum(max(1 - size / EFFICIENT_ROWS, 0.0) for size in _chunk_sizes(rows, buffer, 2))
        return (1 + SMALL_CHUNK_COST * missing) / rows

    return min(range(ROW_MULTIPLE, buffer, ROW_MULTIPLE), key=cost)


def _chunk_sizes(rows: int, buffer: int, models: int) -> tuple[int, ...]:
    """Return the chunk sizes of one group: each leaves room in the buffer for its teacher's logits (`models` 2)."""
    sizes: list[int] = []
    left = rows
    while left:
        # `rows - left` rows already hold gradients; the rest is shared by this chunk's models.
        size = min(CHUNK_ROWS, (buffer - (rows - left)) // models, left)
        if size < left:
            size = max(size // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        sizes.append(min(size, left))
        left -= sizes[-1]
    return tuple(sizes)
