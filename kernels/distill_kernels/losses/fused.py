"""The fused path: chunks of rows through projection, row kernel and back-projection, in a workspace planned beforehand.

For every chunk of rows: both models' relative logits (projection.py), then the row kernel (rows.py), which turns the
student's logits into its gradient `G` in place; with `Batch.lse` the projection writes `G` itself. For every group of
chunks, whose `G` lie side by side (plan.py): `dx = G W`, `dW += G^T x`, what biases and LoRA matrices get, by cuBLAS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from distill_kernels.launch import cdiv, device_facts
from distill_kernels.losses.accumulate import add_matmul_, add_transposed_matmul_
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.mixture_kernel import TeacherMixer, launch_mixture_row_loss
from distill_kernels.losses.operands import Batch, Head, LossOutput, RequiredGrads
from distill_kernels.losses.plan import CHUNK_ROWS, SHARED_MEMORY_BYTES, Plan, plan_chunks
from distill_kernels.losses.projection import TILE, HardLabelRows, Logits, Transform, matmul_fp32, project
from distill_kernels.losses.rows import launch_row_loss
from distill_kernels.losses.shards import Ranks, VocabShard
from distill_kernels.losses.terms import Objective, TokenStats
from distill_kernels.losses.topk_kernel import launch_top_k_row_loss


class _Workspace:
    """The buffer of relative logits, the extra rows of the first group, and the numbers beside the logits."""

    def __init__(self, plan: Plan, vocab: int, dtype: torch.dtype, device: torch.device, *, both: bool, models: int):
        self.vocab = vocab
        width = cdiv(vocab, 64) * 64  # rows aligned to 128 bytes
        self.buffer = torch.empty(plan.buffer_rows, width, dtype=dtype, device=device)
        self.extra = torch.empty(plan.extra_rows, width, dtype=dtype, device=device) if plan.extra_rows else None
        if device.type == "cpu":  # whose products may read on beyond a row's end, and multiply by 0 what they find
            self.buffer[:, vocab:] = 0
        parts = 3 if both else 2
        numbers = torch.empty(models, parts, plan.chunk_rows, cdiv(vocab, TILE), dtype=torch.float32, device=device)
        self.numbers = [(part[0], part[1], part[parts - 1]) for part in numbers]

    def student(self, at: int, rows: int) -> Logits:
        """Rows `at` on of the buffer, where the group's gradients come to lie."""
        return Logits(self.buffer[at : at + rows, : self.vocab], *(part[:rows] for part in self.numbers[0]))

    def teacher(self, at: int, rows: int) -> Logits:
        """The extra rows while they exist, else those of the buffer behind the student's that start at `at`."""
        values = self.buffer[at + rows : at + 2 * rows] if self.extra is None else self.extra[:rows]
        return Logits(values[:, : self.vocab], *(part[:rows] for part in self.numbers[1]))

    def gradients(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `rows` rows, [rows, V], as the gradients that lie there once their row kernels have run."""
        return self.buffer.view(dtype)[:rows, : self.vocab]


def fused_linear_divergence(
    student: Head,
    teacher: Head | Mixture | None,
    batch: Batch,
    objective: Objective,
    required: RequiredGrads,
    *,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None = None,
    shard: VocabShard | None = None,
    descriptors: bool = True,
) -> LossOutput:
    """`linear_divergence` by Triton kernels and cuBLAS; see linear.py for the arguments. No host sync.

    `descriptors=False` keeps to products by cuBLAS and the fold kernel, as devices without TMA do.
    """
    original, o, batch = student, objective, batch.contiguous()
    hidden, n = original.hidden, original.hidden.shape[0]
    device = hidden.device
    student = student.cut(vocab, dtype)
    teacher = None if teacher is None else teacher.cut(vocab, dtype)
    count = n if batch.rows is None else batch.rows.numel()
    logit_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    models = 1 if teacher is None else 2
    weight_16_bit = original.weight.dtype != torch.float32
    if workspace is not None and isinstance(teacher, Mixture):  # a chunk takes these buffers too
        workspace //= 3 if required.stats and o.temperature != 1.0 else 2
    parts = None if shard is None else _AsyncRankSums(shard.ranks)
    columns = original.weight.shape[0] if shard is None else shard.max_columns
    memory_bytes = device_facts(device).memory_bytes if shard is None else SHARED_MEMORY_BYTES
    shard = shard or VocabShard.whole(vocab)
    plan = plan_chunks(
        count,
        shard.max_columns,
        logit_bytes=logit_dtype.itemsize,
        models=models,
        weight_bytes=columns * original.weight.shape[1] * original.weight.element_size() if required.weight else 0,
        memory_bytes=memory_bytes,
        workspace=workspace,
        weight_16_bit=weight_16_bit,
    )
    both = o.temperature != 1.0 and (o.hard_weight != 0.0 or required.stats)
    transforms = (
        Transform(o.student_scale, o.student_softcap, o.temperature, both),
        Transform(o.teacher_scale, o.teacher_softcap, o.temperature, both and required.stats),
    )

    make = torch.empty if batch.rows is None and vocab and batch.lse is None else torch.zeros  # rows left out are 0
    loss_and_stats = make(
        (1 + (len(TokenStats._fields) if required.stats else 0), n), dtype=torch.float32, device=device
    )
    loss, stats = loss_and_stats[0], loss_and_stats[1:] if required.stats else None
    d_hidden = make(hidden.shape, dtype=hidden.dtype, device=device) if required.hidden else None
    d_bias = torch.zeros(vocab, dtype=torch.float32, device=device) if required.bias else None
    d_a = (
        torch.zeros_like(original.lora_a, dtype=torch.float32)
        if required.lora_a and original.lora_a is not None
        else None
    )
    d_b = (
        torch.zeros_like(original.lora_b, dtype=torch.float32)
        if required.lora_b and original.lora_b is not None
        else None
    )
    d_weight = None
    all_lse: list[torch.Tensor] = []
    space = _Workspace(plan, vocab, logit_dtype, device, both=both, models=models)
    mixer = None
    if isinstance(teacher, Mixture):
        at_temperature_1 = both and required.stats
        mixer = TeacherMixer(
            teacher,
            plan.chunk_rows,
            vocab,
            logit_dtype,
            o.temperature,
            at_temperature_1=at_temperature_1,
            descriptors=descriptors,
            shard=shard,
        )

    def pick(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = tensor[start:stop] if batch.rows is None else tensor[batch.rows[start:stop]]
        return rows.to(dtype)

    def gradient_hidden(start: int, stop: int) -> torch.Tensor:
        """Hidden states that gradients are multiplied with."""
        return batch.mask_ignored(
            pick(hidden, start, stop), slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        )

    def compute_chunk(at: int, start: int, stop: int) -> None:
        """Losses, statistics and, at row `at` of the buffer, the gradients of the rows of one chunk."""
        s = space.student(at, stop - start)
        here = slice(start, stop) if batch.rows is None else slice(None)
        rows = None if batch.rows is None else batch.rows[start:stop]
        if batch.lse is not None and batch.labels is not None:
            hard = HardLabelRows(
                batch.labels[here],
                batch.row_scale[here],
                rows,
                batch.lse[start:stop],
                shard.vocab,
                o.hard_weight,
                o.label_smoothing,
                o.z_loss,
            )
            s = s._replace(values=s.values.view(dtype))
            project(student, pick(hidden, start, stop), s, transforms[0], hard, descriptors=descriptors)
            return
        t = at_temperature_1 = None
        if mixer is not None:
            t, at_temperature_1 = mixer(lambda tensor: pick(tensor, start, stop), space.teacher(at, stop - start))
        elif isinstance(teacher, Head):
            t = space.teacher(at, stop - start)
            project(teacher, pick(teacher.hidden, start, stop), t, transforms[1], descriptors=descriptors)
        project(student, pick(hidden, start, stop), s, transforms[0], descriptors=descriptors)
        row_loss: Callable[..., torch.Tensor | None] = launch_row_loss
        if batch.top is not None:
            row_loss = functools.partial(launch_top_k_row_loss, top=batch.top.rows(here))
        elif mixer is not None:
            row_loss = functools.partial(launch_mixture_row_loss, at_temperature_1=at_temperature_1)
        lse = row_loss(
            s,
            t,
            o,
            labels=None if batch.labels is None else batch.labels[here],
            row_scale=batch.row_scale[here],
            rows=rows,
            loss=loss[here],
            stats=None if stats is None else stats[:, here],
            gradient=s.values.view(dtype) if required.gradient else None,
            shard=shard,
        )
        if lse is not None and teacher is None and not required.gradient:
            all_lse.append(lse)

    def backpropagate_rows(g: torch.Tensor, start: int, stop: int) -> None:
        """All gradients but dW from those of the rows `start` to `stop`."""
        if d_bias is not None:
            d_bias.add_(g.sum(0, dtype=torch.float32))
        g_low = None
        if student.lora_a is not None:
            x = gradient_hidden(start, stop)
            g_low = _lora_gradients(student, x, g, d_a, None if d_b is None else d_b[:vocab])
        if d_hidden is None:
            return
        where = slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        if parts is not None:
            d_x = matmul_fp32(g, student.weight, g.new_empty(g.shape[0], hidden.shape[1], dtype=torch.float32))
            if g_low is not None and student.lora_a is not None:
                d_x += matmul_fp32(g_low, student.lora_a, torch.empty_like(d_x))
            parts.add(d_x, functools.partial(_store_rows, d_hidden, where))
            return
        target = d_hidden[start:stop] if batch.rows is None and d_hidden.dtype == dtype else None
        d_x = torch.mm(g, student.weight, out=target)
        if g_low is not None and student.lora_a is not None:
            d_x.addmm_(g_low, student.lora_a)
        if target is None:
            _store_rows(d_hidden, where, d_x)

    group_start = 0
    for sizes in plan.groups:
        start = group_start
        for size in sizes:
            compute_chunk(start - group_start, start, start + size)
            start += size
        if required.gradient:
            g = space.gradients(start - group_start, dtype)
            for at in range(0, start - group_start, CHUNK_ROWS):
                part = g[at : at + CHUNK_ROWS]
                backpropagate_rows(part, group_start + at, group_start + at + part.shape[0])
            if required.weight and vocab:
                space.extra = None  # its memory is what dW takes
                x = gradient_hidden(group_start, start)
                d_weight = _add_weight_gradient(d_weight, g, x, original.weight, vocab, plan.accumulate_fp32)
        group_start = start
    if required.weight and d_weight is None:
        d_weight = torch.zeros_like(original.weight)
    if parts is not None:
        parts.finish()
        parts.ranks.all_reduce_(loss_and_stats)
        if stats is not None:
            stats[TokenStats._fields.index("agreement")].eq_(1.0)  # from counts: see row_functions.agreement_part
        if d_a is not None:
            parts.ranks.all_reduce_(d_a)

    def in_parameter_dtype(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or like is None:
            return None
        if gradient.shape != like.shape:
            gradient = torch.cat([gradient, gradient.new_zeros(like.shape[0] - gradient.shape[0])])
        return gradient.to(like.dtype)

    return LossOutput(
        loss,
        None if stats is None else TokenStats(*stats.unbind(0)),
        d_hidden,
        in_parameter_dtype(d_weight, original.weight),
        in_parameter_dtype(d_bias, original.bias),
        in_parameter_dtype(d_a, original.lora_a),
        in_parameter_dtype(d_b, original.lora_b),
        torch.cat(all_lse) if all_lse else None,
    )


class _AsyncRankSums:
    """Sums of dx over the ranks, in fp32; one is under way while the next part is computed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.pending: Callable[[], object] = lambda: None

    def add(self, d_x: torch.Tensor, put: Callable[[torch.Tensor], object]) -> None:
        """Start to sum `d_x`; `put` gets the sum later."""
        wait = self.ranks.all_reduce_async(d_x)
        self.finish()
        self.pending = lambda: (wait(), put(d_x))

    def finish(self) -> None:
        """Put what was started last."""
        self.pending()
        self.pending = lambda: None


def _store_rows(d_hidden: torch.Tensor, where: slice | torch.Tensor, d_x: torch.Tensor) -> None:
    if isinstance(where, slice):
        d_hidden[where] = d_x
    else:
        d_hidden.index_copy_(0, where, d_x.to(d_hidden.dtype))


def _add_weight_gradient(
    d_weight: torch.Tensor | None,
    gradients: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    vocab: int,
    accumulate_fp32: bool,
) -> torch.Tensor:
    """`dW + gradients^T hidden`, in place where dW exists; fp32 if `accumulate_fp32` or the weight is fp32."""
    fp32 = accumulate_fp32 or weight.dtype == torch.float32
    if d_weight is None:
        d_weight = torch.empty(weight.shape, dtype=torch.float32 if fp32 else weight.dtype, device=weight.device)
        d_weight[vocab:].zero_()
        if fp32:
            matmul_fp32(gradients.t(), hidden, d_weight[:vocab])
        else:
            torch.mm(gradients.t(), hidden, out=d_weight[:vocab])
    elif not fp32:
        add_transposed_matmul_(d_weight[:vocab], gradients, hidden)
    else:
        add_matmul_(d_weight[:vocab], gradients.t(), hidden)
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
