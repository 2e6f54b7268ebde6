"""The fused path: chunks of rows through projection, row kernel and back-projection, in a workspace planned beforehand.

For every chunk of rows: both models' relative logits (projection.py) into two slots of the workspace, the row kernel
(rows.py), which turns the student's slot into its gradient `G`, then `dx = G W` and `dW += G^T x` by cuBLAS.

The student's slots of the first two chunks lie side by side, and one product makes `dW` of both: until then `dW` does
not exist, and the memory that it will take holds the teacher's logits. So `dW` is rounded to bf16 once less, where its
error grows fastest, at no cost in time or peak memory. Where more than `MOST_ROUNDINGS` products would add to it, it is
summed in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill_kernels.launch import cdiv, device_facts
from distill_kernels.losses.linear import Batch, Head, Outcome, Wanted
from distill_kernels.losses.projection import TILE, Logits, Transform, product_fp32, project
from distill_kernels.losses.rows import run_rows
from distill_kernels.losses.terms import Objective, TokenStats

MOST_ROUNDINGS = 8
ROW_MULTIPLE = 128
CHUNK_ROWS = 2048
GROUP_ROWS = 4096


class Plan(NamedTuple):
    """How rows are cut.

    Attributes:
        rows: rows of a chunk (the last one may be shorter).
        group: chunks whose gradients the first product for dW takes together, 1 or 2.
        wide: dW is summed in fp32.
    """

    rows: int
    group: int
    wide: bool


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
    """Chunk size and grouping from sizes alone.

    Args:
        rows: tokens to compute.
        vocab: columns of the logits.
        logit_bytes: bytes of one kept logit.
        models: slots of logits that a chunk takes, 2 with a teacher.
        weight_bytes: bytes that dW will take; 0 where it is not wanted.
        memory_bytes: of the device; without a `workspace`, a chunk's slots take at most a twenty-fourth of it.
        workspace: bytes for a chunk's slots, or None for chunks of `CHUNK_ROWS` rows.
        narrow_weight: dW has 16 bits, so that summing it needs thought.
    """
    row_bytes = models * vocab * logit_bytes
    budget = min(CHUNK_ROWS * row_bytes, memory_bytes // 24) if workspace is None else workspace
    most = max(budget // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE, ROW_MULTIPLE)
    chunks = cdiv(max(rows, 1), most)
    size = min(cdiv(cdiv(rows, chunks), ROW_MULTIPLE) * ROW_MULTIPLE, max(rows, 1))
    chunks = cdiv(max(rows, 1), size)
    group = 2 if models == 2 and chunks >= 2 and weight_bytes >= size * vocab * logit_bytes else 1
    products = 1 + chunks - group
    return Plan(size, group, narrow_weight and weight_bytes > 0 and products > MOST_ROUNDINGS and workspace is None)


class _Workspace:
    """Slots of `plan.rows` rows of relative logits, and the numbers beside them.

    Two slots for student and teacher, one without a teacher. While the first two chunks are made, both hold the
    student's and `extra` the teacher's.
    """

    def __init__(self, plan: Plan, vocab: int, dtype: torch.dtype, device: torch.device, *, both: bool, models: int):
        self.plan, self.vocab = plan, vocab
        width = cdiv(vocab, 64) * 64  # rows aligned to 128 bytes
        self.kept = torch.empty(models * plan.rows, width, dtype=dtype, device=device)
        self.extra = torch.empty(plan.rows, width, dtype=dtype, device=device) if plan.group > 1 else None
        parts = 3 if both else 2
        numbers = torch.empty(models, parts, plan.rows, cdiv(vocab, TILE), dtype=torch.float32, device=device)
        self.numbers = [(part[0], part[1], part[parts - 1]) for part in numbers]

    def student(self, slot: int) -> Logits:
        values = self.kept[slot * self.plan.rows : (slot + 1) * self.plan.rows, : self.vocab]
        return Logits(values, *self.numbers[0])

    def teacher(self) -> Logits:
        """The extra slot while it exists, else the one behind the student's."""
        values = self.kept[self.plan.rows : 2 * self.plan.rows] if self.extra is None else self.extra
        return Logits(values[:, : self.vocab], *self.numbers[1])

    def gradients(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `count` rows, [count, V], as the gradients that now lie there."""
        return self.kept.view(dtype)[:count, : self.vocab]


def fused_linear_divergence(
    student: Head,
    teacher: Head | None,
    batch: Batch,
    objective: Objective,
    wanted: Wanted,
    *,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None = None,
    descriptors: bool = True,
) -> Outcome:
    """`linear_divergence` by Triton kernels and cuBLAS; see linear.py for the arguments. No host sync.

    `descriptors=False` keeps to products by cuBLAS and the fold kernel, as devices without TMA do.
    """
    narrow, o = student, objective
    hidden, n = narrow.hidden, narrow.hidden.shape[0]
    device = hidden.device
    student = student.cut(vocab, dtype)
    teacher = None if teacher is None else teacher.cut(vocab, dtype)
    count = n if batch.rows is None else batch.rows.numel()
    logit_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    models = 1 if teacher is None else 2
    narrow_weight = narrow.weight.dtype != torch.float32
    plan = plan_chunks(
        count,
        vocab,
        logit_bytes=logit_dtype.itemsize,
        models=models,
        weight_bytes=narrow.weight.numel() * narrow.weight.element_size() if wanted.weight else 0,
        memory_bytes=device_facts(device).memory_bytes,
        workspace=workspace,
        narrow_weight=narrow_weight,
    )
    both = o.temperature != 1.0 and (o.hard_weight != 0.0 or wanted.stats)
    transforms = (
        Transform(o.student_scale, o.student_softcap, o.temperature, both),
        Transform(o.teacher_scale, o.teacher_softcap, o.temperature, both and wanted.stats),
    )

    all_rows = batch.rows is None
    make = torch.empty if all_rows else torch.zeros
    loss = make(n, dtype=torch.float32, device=device)
    stats = make((len(TokenStats._fields), n), dtype=torch.float32, device=device) if wanted.stats else None
    d_hidden = make(hidden.shape, dtype=hidden.dtype, device=device) if wanted.hidden else None
    d_bias = torch.zeros(vocab, dtype=torch.float32, device=device) if wanted.bias else None
    d_a = torch.zeros_like(narrow.lora_a, dtype=torch.float32) if wanted.lora_a and narrow.lora_a is not None else None
    d_b = torch.zeros_like(narrow.lora_b, dtype=torch.float32) if wanted.lora_b and narrow.lora_b is not None else None
    d_weight = None
    space = _Workspace(plan, vocab, logit_dtype, device, both=both, models=models)

    def pick(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = tensor[start:stop] if batch.rows is None else tensor[batch.rows[start:stop]]
        return rows.to(dtype)

    first = plan.group * plan.rows
    starts = [0, *range(first, count, plan.rows)]
    for group_start, group_stop in zip(starts, [*starts[1:], count], strict=True):
        for slot, start in enumerate(range(group_start, group_stop, plan.rows)):
            stop = min(start + plan.rows, group_stop)
            x = pick(hidden, start, stop)
            s = space.student(slot).rows(stop - start)
            t = None
            if teacher is not None:
                t = space.teacher().rows(stop - start)
                project(teacher, pick(teacher.hidden, start, stop), t, transforms[1], descriptors=descriptors)
            project(student, x, s, transforms[0], descriptors=descriptors)
            here = slice(start, stop) if all_rows else slice(None)
            g = s.values.view(dtype) if wanted.gradient else None
            run_rows(
                s,
                t,
                o,
                labels=None if batch.labels is None else batch.labels[here],
                row_scale=batch.row_scale[here],
                rows=None if batch.rows is None else batch.rows[start:stop],
                loss=loss[here],
                stats=None if stats is None else stats[:, here],
                gradient=g,
            )
            if g is None:
                continue
            g_low = _lora_gradients(student, x, g, d_a, None if d_b is None else d_b[:vocab])
            if d_bias is not None:
                d_bias += g.sum(0, dtype=torch.float32)
            if d_hidden is not None:
                target = d_hidden[start:stop] if all_rows and d_hidden.dtype == dtype else None
                d_x = torch.mm(g, student.weight, out=target)
                if g_low is not None and student.lora_a is not None:
                    d_x.addmm_(g_low, student.lora_a)
                if batch.rows is not None:
                    d_hidden.index_copy_(0, batch.rows[start:stop], d_x.to(d_hidden.dtype))
                elif target is None:
                    d_hidden[start:stop] = d_x
        if wanted.weight:
            gradients = space.gradients(group_stop - group_start, dtype)
            space.extra = None  # its memory is what dW takes
            d_weight = _add_weight_gradient(
                d_weight, gradients, pick(hidden, group_start, group_stop), narrow.weight, vocab, plan.wide
            )

    def narrowed(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or like is None:
            return None
        if gradient.shape != like.shape:
            gradient = torch.cat([gradient, gradient.new_zeros(like.shape[0] - gradient.shape[0])])
        return gradient.to(like.dtype)

    del space
    return Outcome(
        loss,
        None if stats is None else TokenStats(*stats.unbind(0)),
        d_hidden,
        narrowed(d_weight, narrow.weight),
        narrowed(d_bias, narrow.bias),
        narrowed(d_a, narrow.lora_a),
        narrowed(d_b, narrow.lora_b),
    )


def _add_weight_gradient(
    d_weight: torch.Tensor | None,
    gradients: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    vocab: int,
    wide: bool,
) -> torch.Tensor:
    """`dW + gradients^T hidden`, in place where dW exists; fp32 if `wide` or the weight is fp32."""
    fp32 = wide or weight.dtype == torch.float32
    if d_weight is None:
        d_weight = torch.empty(weight.shape, dtype=torch.float32 if fp32 else weight.dtype, device=weight.device)
        d_weight[vocab:].zero_()
        if fp32:
            product_fp32(gradients.t(), hidden, d_weight[:vocab])
        else:
            torch.mm(gradients.t(), hidden, out=d_weight[:vocab])
    elif not fp32 or hidden.dtype == torch.float32:
        d_weight[:vocab].addmm_(gradients.t(), hidden)
    elif hidden.is_cuda:
        inner = d_weight[:vocab]
        torch.addmm(inner, gradients.t(), hidden, out_dtype=torch.float32, out=inner)
    else:
        d_weight[:vocab].addmm_(gradients.t().float(), hidden.float())
    return d_weight


def _lora_gradients(
    student: Head, x: torch.Tensor, g: torch.Tensor, d_a: torch.Tensor | None, d_b: torch.Tensor | None
) -> torch.Tensor | None:
    """Adds to the gradients of A and B (fp32); returns `scale * G B`, from which dx takes its part."""
    if student.lora_a is None or student.lora_b is None:
        return None
    g_low = torch.mm(g, student.lora_b).mul_(student.lora_scale)
    if d_a is not None:
        d_a += torch.mm(g_low.t(), x)
    if d_b is not None:
        d_b.add_(torch.mm(g.t(), torch.mm(x, student.lora_a.t())), alpha=student.lora_scale)
    return g_low
