"""Fused linear divergence on Triton and cuBLAS: projection, row kernel and gradients, chunk by chunk of rows.

For every chunk of rows: the relative logits of both models (projection.py), then the row kernel (row_kernel.py), which
overwrites the student's logits by their gradient `G`; with `RowBatch.lse` the projection writes `G` itself. For every
group of chunks, whose `G` are adjacent in one buffer (plan.py): `dx = G W`, `dW += G^T x` and the gradients of bias and
LoRA matrices, by cuBLAS. The buffer's size is planned beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from distill_kernels.launch import cdiv, device_facts
from distill_kernels.losses.accumulate import WeightGradient
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.mixture_kernel import TeacherMixer, launch_mixture_row_loss
from distill_kernels.losses.operands import Head, LossOutput, RequiredGrads, RowBatch, RowCall
from distill_kernels.losses.plan import CHUNK_ROWS, ChunkPlan, plan_chunks
from distill_kernels.losses.policy_kernel import launch_policy_row_loss
from distill_kernels.losses.policy_reference import Policy
from distill_kernels.losses.projection import TILE, ChunkLogits, HardLabelRows, Transform, project
from distill_kernels.losses.row_kernel import launch_row_loss
from distill_kernels.losses.terms import Objective, TokenStats
from distill_kernels.losses.topk_kernel import launch_top_k_row_loss
from distill_kernels.losses.topk_reference import StudentTopK, TopK
from distill_kernels.losses.topk_select import select_student_top_k


class _Workspace:
    """Buffers of one call: relative logits, extra rows for the first group's teacher, and the tiles' shifts and sums.

    Args:
        plan: Plan that gives the rows of the buffers.
        vocab: Columns of the logits, V.
        dtype: Dtype of the relative logits.
        device: Device of the buffers.
        both_temperatures: Keep sums at temperature 1 separately from those at T, of the student and of the teacher.
        models: 2 with a teacher, 1 without.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        both_temperatures: tuple[bool, bool],
        models: int,
    ):
        self.vocab = vocab
        width = cdiv(vocab, 64) * 64  # rows aligned to 128 bytes
        # fp16 logits and gradients of the compute dtype have the same size: `gradients` views the same memory.
        self.buffer = torch.empty(plan.buffer_rows, width, dtype=dtype, device=device)
        self.extra = torch.empty(plan.extra_rows, width, dtype=dtype, device=device) if plan.extra_rows else None
        if device.type == "cpu":  # CPU GEMMs may read padding columns and multiply them by 0, which NaN would survive
            self.buffer[:, vocab:] = 0
        sums = 3 if any(both_temperatures) else 2  # shift, total and, if separate, total at temperature 1
        tile_sums = torch.empty(models, sums, plan.chunk_rows, cdiv(vocab, TILE), dtype=torch.float32, device=device)
        # without sums at T = 1 of their own, the last plane is the total itself
        self.tile_sums = [
            (model[0], model[1], model[2 if both else 1])
            for model, both in zip(tile_sums, both_temperatures, strict=False)
        ]

    def student(self, first: int, rows: int) -> ChunkLogits:
        """Return `rows` rows of the buffer from row `first` on, which the gradients will overwrite."""
        return ChunkLogits(
            self.buffer[first : first + rows, : self.vocab], *(each[:rows] for each in self.tile_sums[0])
        )

    def teacher(self, first: int, rows: int) -> ChunkLogits:
        """Return the extra rows while they exist, else those after the student's, which begin at row `first`."""
        values = self.buffer[first + rows : first + 2 * rows] if self.extra is None else self.extra[:rows]
        return ChunkLogits(values[:, : self.vocab], *(each[:rows] for each in self.tile_sums[1]))

    def gradients(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradients that the row kernels have written to the first rows of the buffer, [rows, V]."""
        return self.buffer.view(dtype)[:rows, : self.vocab]


def fused_linear_divergence(
    student: Head,
    teacher: Head | Mixture | None,
    batch: RowBatch,
    objective: Objective,
    required: RequiredGrads,
    *,
    vocab: int,
    dtype: torch.dtype,
    workspace: int | None = None,
    descriptors: bool = True,
) -> LossOutput:
    """Compute `linear_divergence` by Triton kernels and cuBLAS, without a host sync; arguments as there (linear.py).

    `descriptors=False` uses cuBLAS GEMMs and the reduction kernel, as devices without TMA do.
    """
    # as the caller holds them; `student` becomes cut and cast
    head = student
    batch = batch.contiguous()
    hidden = head.hidden
    n = head.hidden.shape[0]
    temperature = objective.temperature
    teacher_temperature = objective.teacher_temperature
    device = hidden.device
    student = student.cut(vocab, dtype)
    teacher = None if teacher is None else teacher.cut(vocab, dtype)
    count = n if batch.rows is None else batch.rows.numel()
    logit_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    models = 1 if teacher is None else 2
    weight_16_bit = torch.float32 not in (head.weight.dtype, dtype)
    if workspace is not None and isinstance(teacher, Mixture):  # the mixer allocates one or two more buffers of a chunk
        workspace //= 3 if required.stats and teacher_temperature != 1.0 else 2
    plan = plan_chunks(
        count,
        vocab,
        logit_bytes=logit_dtype.itemsize,
        models=models,
        weight_bytes=head.weight.numel() * head.weight.element_size() if required.weight else 0,
        memory_bytes=device_facts(device).memory_bytes,
        workspace=workspace,
        weight_16_bit=weight_16_bit,
    )
    needs_both = objective.hard_weight != 0.0 or required.stats
    # statistics of a policy gradient are at the loss's temperature alone
    policy = batch.chosen if isinstance(batch.chosen, Policy) else None
    both_temperatures = temperature != 1.0 and needs_both and policy is None
    teacher_both = teacher_temperature != 1.0 and required.stats and policy is None
    transforms = (
        Transform(objective.student_scale, objective.student_softcap, temperature, both_temperatures),
        Transform(objective.teacher_scale, objective.teacher_softcap, teacher_temperature, teacher_both),
    )

    allocate = torch.empty if batch.rows is None and batch.lse is None else torch.zeros  # skipped rows stay 0
    # the statistics of caps are written by rows that count, where there are caps
    allocate_stats = torch.zeros if required.stats else allocate
    loss_and_stats = allocate_stats(
        (1 + (len(TokenStats._fields) if required.stats else 0), n), dtype=torch.float32, device=device
    )
    loss = loss_and_stats[0]
    stats = loss_and_stats[1:] if required.stats else None
    d_hidden = allocate(hidden.shape, dtype=hidden.dtype, device=device) if required.hidden else None
    d_bias = torch.zeros(vocab, dtype=torch.float32, device=device) if required.bias else None
    d_a, d_b = (
        torch.zeros_like(matrix, dtype=torch.float32) if wanted and matrix is not None else None
        for matrix, wanted in ((head.lora_a, required.lora_a), (head.lora_b, required.lora_b))
    )
    fp32_sum = plan.accumulate_fp32 or dtype == torch.float32
    weight_sum = WeightGradient(head.weight, vocab, len(plan.groups), fp32=fp32_sum)
    row_lse: list[torch.Tensor] = []
    both = both_temperatures, teacher_both
    buffers = _Workspace(plan, vocab, logit_dtype, device, both_temperatures=both, models=models)
    selected = None
    if isinstance(batch.chosen, StudentTopK):  # relative logits in 16 bits are no better than what the K lack of 1
        with_rest = logit_dtype == torch.float32 and batch.chosen.tail == "bucket"
        selected = batch.chosen.allocate(n, device, with_rest=with_rest)
    mixer = None
    if isinstance(teacher, Mixture):
        mixer = TeacherMixer(
            teacher,
            plan.chunk_rows,
            vocab,
            logit_dtype,
            teacher_temperature,
            at_temperature_1=teacher_both,
            descriptors=descriptors,
        )

    def select_rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the rows to compute from `start` to `stop`, in the compute dtype."""
        rows = tensor[start:stop] if batch.rows is None else tensor[batch.rows[start:stop]]
        return rows.to(dtype)

    def masked_hidden(start: int, stop: int) -> torch.Tensor:
        """Return the student's hidden states with ignored rows zeroed, for products with the gradients."""
        return batch.mask_ignored(
            select_rows(hidden, start, stop), slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        )

    def compute_chunk(buffer_row: int, start: int, stop: int) -> None:
        """Compute losses, statistics and gradients of rows `start` to `stop`, the gradients from `buffer_row` on."""
        student_logits = buffers.student(buffer_row, stop - start)
        # per-token arguments: the chunk's rows, or all of them where the kernel looks up `rows`
        argument_rows = slice(start, stop) if batch.rows is None else slice(None)
        rows = None if batch.rows is None else batch.rows[start:stop]
        if batch.lse is not None and batch.labels is not None:
            hard_rows = HardLabelRows(
                batch.labels[argument_rows],
                batch.row_scale[argument_rows],
                rows,
                batch.lse[start:stop],
                vocab,
                objective.hard_weight,
                objective.label_smoothing,
                objective.z_loss,
            )
            # The normalisers are known from an earlier pass: the projection writes gradients at once, no logits.
            student_logits = student_logits._replace(values=student_logits.values.view(dtype))
            project(
                student,
                select_rows(hidden, start, stop),
                student_logits,
                transforms[0],
                hard_rows,
                descriptors=descriptors,
            )
            return
        teacher_logits = at_temperature_1 = None
        if mixer is not None:
            teacher_logits, at_temperature_1 = mixer(
                lambda tensor: select_rows(tensor, start, stop), buffers.teacher(buffer_row, stop - start)
            )
        elif isinstance(teacher, Head):
            teacher_logits = buffers.teacher(buffer_row, stop - start)
            project(
                teacher,
                select_rows(teacher.hidden, start, stop),
                teacher_logits,
                transforms[1],
                descriptors=descriptors,
            )
        project(student, select_rows(hidden, start, stop), student_logits, transforms[0], descriptors=descriptors)
        row_loss: Callable[..., torch.Tensor | None] = launch_row_loss
        if isinstance(batch.chosen, TopK):
            row_loss = functools.partial(launch_top_k_row_loss, top=batch.chosen.rows(argument_rows))
        elif selected is not None and teacher_logits is not None:
            top = selected.rows(argument_rows)
            select_student_top_k(
                student_logits,
                teacher_logits,
                top,
                row_scale=batch.row_scale[argument_rows],
                rows=rows,
                temperature=teacher_temperature,
            )
            # the teacher's K log-probabilities are picked out: what follows is a top-K loss
            teacher_logits = None
            row_loss = functools.partial(launch_top_k_row_loss, top=top)
        elif policy is not None:
            chunk_head = student._replace(hidden=select_rows(hidden, start, stop))
            row_loss = functools.partial(launch_policy_row_loss, policy=policy.rows(argument_rows), head=chunk_head)
        elif mixer is not None:
            row_loss = functools.partial(launch_mixture_row_loss, at_temperature_1=at_temperature_1)
        call = RowCall(
            None if batch.labels is None else batch.labels[argument_rows],
            batch.row_scale[argument_rows],
            rows,
            loss[argument_rows],
            None if stats is None else stats[:, argument_rows],
            student_logits.values.view(dtype) if required.gradient else None,
            stats[-2:, argument_rows] if stats is not None and objective.clips else None,
        )
        lse = row_loss(student_logits, teacher_logits, objective, call)
        if lse is not None and teacher is None and not required.gradient:
            row_lse.append(lse)

    def backpropagate_rows(g: torch.Tensor, start: int, stop: int) -> None:
        """Add what the logit gradients `g` of rows `start` to `stop` contribute to all gradients but dW."""
        if d_bias is not None:
            # rows are added in fp32: a column's sum over thousands of 16-bit gradients would lose the small ones
            d_bias.add_(g.sum(0, dtype=torch.float32))
        g_lora = None
        if student.lora_a is not None:
            x = masked_hidden(start, stop)
            g_lora = _lora_gradients(student, x, g, d_a, None if d_b is None else d_b[:vocab])
        if d_hidden is None:
            return
        hidden_rows = slice(start, stop) if batch.rows is None else batch.rows[start:stop]
        # Straight into d_hidden where rows and dtype are its own; else one product, rounded and scattered.
        target = d_hidden[start:stop] if batch.rows is None and d_hidden.dtype == dtype else None
        d_x = torch.mm(g, student.weight, out=target)
        if g_lora is not None and student.lora_a is not None:
            d_x.addmm_(g_lora, student.lora_a)
        if target is None:
            _store_rows(d_hidden, hidden_rows, d_x)

    group_start = 0
    # A group fills the buffer from its first row on. Each chunk's logits become gradients where they lie, and the next
    # chunk's begin behind them: where the teacher's logits lay in the buffer, over those, which nobody reads any more.
    for sizes in plan.groups:
        start = group_start
        for size in sizes:
            compute_chunk(start - group_start, start, start + size)
            start += size
        if required.gradient:
            # From here on the group's rows hold gradients; the next group may overwrite them after these products,
            # since all kernels run in order on one stream.
            g = buffers.gradients(start - group_start, dtype)
            for offset in range(0, start - group_start, CHUNK_ROWS):
                block = g[offset : offset + CHUNK_ROWS]
                backpropagate_rows(block, group_start + offset, group_start + offset + block.shape[0])
            if required.weight:
                buffers.extra = None  # frees the memory that dW is planned to take
                x = masked_hidden(group_start, start)
                weight_sum.add(g, x)
        group_start = start
    if stats is not None and objective.clips:
        stats[-1] *= stats[0]  # from the share of the token's value to nats: `TokenStats.clipped_value`
    d_weight = weight_sum.total
    if required.weight and d_weight is None:
        d_weight = torch.zeros_like(head.weight)

    def in_parameter_dtype(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
        """Return `gradient` in the shape and dtype of its parameter `like`, with zeros for columns beyond V."""
        if gradient is None or like is None:
            return None
        if gradient.shape != like.shape:
            gradient = torch.cat([gradient, gradient.new_zeros(like.shape[0] - gradient.shape[0])])
        return gradient.to(like.dtype)

    return LossOutput(
        loss,
        None if stats is None else TokenStats(*stats.unbind(0)),
        d_hidden,
        in_parameter_dtype(d_weight, head.weight),
        in_parameter_dtype(d_bias, head.bias),
        in_parameter_dtype(d_a, head.lora_a),
        in_parameter_dtype(d_b, head.lora_b),
        torch.cat(row_lse) if row_lse else None,
    )


def _store_rows(d_hidden: torch.Tensor, hidden_rows: slice | torch.Tensor, d_x: torch.Tensor) -> None:
    """Write `d_x` [n, H] to the rows `hidden_rows` of `d_hidden`."""
    if isinstance(hidden_rows, slice):
        d_hidden[hidden_rows] = d_x
    else:
        d_hidden.index_copy_(0, hidden_rows, d_x.to(d_hidden.dtype))


def _lora_gradients(
    student: Head, x: torch.Tensor, g: torch.Tensor, d_a: torch.Tensor | None, d_b: torch.Tensor | None
) -> torch.Tensor | None:
    """Add to the gradients of A and B (fp32); return `scale * G B`, whose product with A is added to dx."""
    if student.lora_a is None or student.lora_b is None:
        return None
    # z has scale (x A^T) B^T: dA = (scale G B)^T x and dB = scale G^T (x A^T), never a [V, H] product.
    g_lora = torch.mm(g, student.lora_b).mul_(student.lora_scale)
    if d_a is not None:
        d_a += torch.mm(g_lora.t(), x)
    if d_b is not None:
        d_b.add_(torch.mm(g.t(), torch.mm(x, student.lora_a.t())), alpha=student.lora_scale)
    return g_lora
