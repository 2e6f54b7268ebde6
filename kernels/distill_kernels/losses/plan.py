"""How the rows of a batch are cut into chunks, from sizes alone.

A chunk's logits of both models must exist together; its student's part then becomes the gradient `G`. Chunks whose `G`
lie side by side form a group, and one product per group adds to `dW`: the fewer groups, the less often `dW` is rounded
to 16 bits. While a group fills the buffer, the teacher's logits take rows that later chunks of the group will use, so
chunks shrink towards its end. Before the first product `dW` does not exist, and the memory that it will take serves as
`extra` rows for the teacher: the first group needs no small chunks.

Where more than `MOST_ROUNDINGS` groups would be needed, `dW` is summed in fp32 and each chunk is its own group.
"""

from __future__ import annotations

from typing import NamedTuple

from distill_kernels.launch import cdiv

MOST_ROUNDINGS = 8
ROW_MULTIPLE = 128
CHUNK_ROWS = 2048
GROUP_ROWS = 4096
LAST_CHUNK_ROWS = 384  # what the buffer holds beyond a group, so that the group's last chunk is not too small
MEMORY_SHARE = 24
SMALL_SHARE = 512  # of the device's memory: extra rows that small are no loss even where dW is smaller
SHARED_MEMORY_BYTES = 24 << 30  # in place of the device's where ranks, perhaps of unequal memory, must cut alike


class Plan(NamedTuple):
    """Attributes:
    groups: the sizes of the chunks of each group.
    buffer_rows: rows of the buffer in which a group's gradients come to lie, the teacher's logits behind them.
    extra_rows: rows beside it for the teacher's logits of the first group; 0 where they lie in the buffer too.
    wide: dW is summed in fp32.
    """

    groups: tuple[tuple[int, ...], ...]
    buffer_rows: int
    extra_rows: int
    wide: bool

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest chunk."""
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
    narrow_weight: bool = True,
) -> Plan:
    """The plan for `rows` tokens.

    Args:
        rows: tokens to compute.
        vocab: columns of the logits.
        logit_bytes: bytes of one kept logit.
        models: 2 with a teacher, 1 without.
        weight_bytes: bytes that dW will take; 0 where it is not wanted.
        memory_bytes: of the device; without a `workspace`, the buffer takes at most a twenty-fourth of it.
        workspace: bytes for the buffer, or None for groups of `GROUP_ROWS` rows.
        narrow_weight: dW has 16 bits, so that it matters how often it is rounded.
    """
    if rows == 0:
        return Plan((), 0, 0, False)
    row_bytes = vocab * logit_bytes
    budget = memory_bytes // MEMORY_SHARE if workspace is None else workspace
    most = max(budget // row_bytes // ROW_MULTIPLE, models) * ROW_MULTIPLE
    if weight_bytes and narrow_weight:
        buffer = most if workspace is not None else min(most, GROUP_ROWS + (LAST_CHUNK_ROWS if models == 2 else 0))
        spare = weight_bytes if workspace is not None else max(weight_bytes, memory_bytes // SMALL_SHARE)
        plan = _grouped(rows, buffer, models, spare // row_bytes)
        if len(plan.groups) <= MOST_ROUNDINGS or workspace is not None:
            return plan
    size = _even(rows, min(most // models // ROW_MULTIPLE * ROW_MULTIPLE, CHUNK_ROWS))
    groups = tuple((min(size, rows - start),) for start in range(0, rows, size))
    return Plan(groups, models * size, 0, bool(weight_bytes) and narrow_weight)


def _even(rows: int, most: int) -> int:
    """Size of the fewest nearly equal parts of at most `most` rows, a multiple of `ROW_MULTIPLE` unless it is all."""
    return min(cdiv(cdiv(rows, cdiv(rows, most)), ROW_MULTIPLE) * ROW_MULTIPLE, rows)


def _grouped(rows: int, buffer: int, models: int, spare: int) -> Plan:
    """As few groups as the buffer allows; `spare` rows of logits may lie beside the buffer."""
    full = buffer if models == 1 else min(buffer - min(LAST_CHUNK_ROWS, buffer // 2, ROW_MULTIPLE), buffer)
    full = full // GROUP_ROWS * GROUP_ROWS or full  # whole GROUP_ROWS where the buffer allows them
    extra = models == 2 and spare >= min(CHUNK_ROWS, rows)
    first = min(_even(rows, full), buffer)
    if extra and full < GROUP_ROWS:  # a small buffer gains the most from a first group that fills it
        first = min(buffer, rows)
    sizes = [_chunks(first, buffer, 1 if extra else models)]
    rest = rows - first
    if rest:
        size = _even(rest, full)
        sizes += [_chunks(min(size, rest - start), buffer, models) for start in range(0, rest, size)]
    extra_rows = max(sizes[0]) if extra else 0
    need = sum(sizes[0]) if extra else 0
    for group in sizes[1 if extra else 0 :]:
        used = 0
        for size in group:
            need = max(need, used + models * size)
            used += size
    return Plan(tuple(sizes), need, extra_rows, False)


def _chunks(rows: int, buffer: int, models: int) -> tuple[int, ...]:
    """Chunks of one group: each leaves room in the buffer for its teacher's logits (`models` 2) behind its own."""
    sizes: list[int] = []
    left = rows
    while left:
        size = min(CHUNK_ROWS, (buffer - (rows - left)) // models, left)
        if size < left:
            size = max(size // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        sizes.append(min(size, left))
        left -= sizes[-1]
    return tuple(sizes)
