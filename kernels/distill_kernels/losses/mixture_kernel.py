"""The mixture of several teachers (mixture.py) over a chunk of relative logits, in the first teacher's buffer.

The first teacher's logits are the running mixture; each further teacher is projected into a second buffer and mixed
in, row by row: with `a` and `b` the log-probabilities of both at temperature T and `u` the newcomer's part,

    z = T log((1 - u) exp(a) + u exp(b))

kept relative to each tile's maximum as any logits are (projection.py), so that the row kernels see no difference. Only
shares matter, so no normaliser is carried along: a running mixture is renormalised by its own tiles' sums.

Bytes a row and further teacher, 16-bit logits: 4 V read, 2 V written.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from distill_kernels.launch import cdiv, tl, triton
from distill_kernels.layers.fast_math import exp, log_of_normal
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.operands import RowCall
from distill_kernels.losses.projection import TILE, ChunkLogits, Transform, project
from distill_kernels.losses.row_functions import load_tiles
from distill_kernels.losses.row_kernel import launch_row_loss, row_normalisers
from distill_kernels.losses.terms import Objective


@triton.jit
def _mix_kernel(
    mixed,
    newcomer,
    made,
    norms_ptr,
    V,
    tiles,
    strides,
    inverse_t,
    temperature,
    log_rest,
    log_share,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mix one row in place; `made` are its tiles' new shifts and totals, `norms_ptr` log sums of exponentials."""
    mixed_ptr, mixed_shift_ptr = mixed
    next_ptr, next_shift_ptr = newcomer
    shift_ptr, total_ptr = made
    mixed_stride, next_stride, norms_stride = strides
    # A program a row, as int64: row times stride may pass 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    mixed_ptr += row * mixed_stride
    next_ptr += row * next_stride
    mixed_shift_ptr += row * tiles
    next_shift_ptr += row * tiles
    lse_a = tl.load(norms_ptr + row)
    lse_b = tl.load(norms_ptr + norms_stride + row)
    within = tl.arange(0, TILE)[None, :]
    for block in range(tl.cdiv(tiles, BLOCK)):
        tile = block * BLOCK + tl.arange(0, BLOCK)
        columns = tile[:, None] * TILE + within  # [BLOCK, TILE]
        # Logarithms of both shares of every token's probability. Columns beyond V load as -inf on both sides.
        a = load_tiles(mixed_ptr, mixed_shift_ptr, tile, columns, V, tiles) * inverse_t - lse_a + log_rest
        b = load_tiles(next_ptr, next_shift_ptr, tile, columns, V, tiles) * inverse_t - lse_b + log_share
        # log(exp(a) + exp(b)) relative to the larger, so that neither overflows. Where both are -inf their difference
        # would be NaN; with 0 in its place the sum stays -inf.
        top = tl.maximum(a, b)
        ratio = exp(tl.where(top == -float("inf"), 0.0, tl.minimum(a, b) - top))
        z = (top + log_of_normal(1.0 + ratio)) * temperature
        # Relative to each tile's maximum again, as the projection leaves logits; a tile of nothing but -inf has shift 0
        # and total 0, by which normalisers know it.
        shift = tl.max(z, 1)
        shift = tl.where(shift == -float("inf"), 0.0, shift)
        z -= shift[:, None]
        # Summed in fp32, before rounding: the next normaliser is that of the mixture as computed, not as stored.
        total = tl.sum(exp(z * inverse_t), 1)
        # The least finite fp16: a token of tiny probability would otherwise be stored as -inf, as if it were excluded.
        z = tl.where(z == -float("inf"), z, tl.maximum(z, -65504.0))
        # Each thread stores over what it has loaded itself, and other rows are other programs': no barrier.
        tl.store(mixed_ptr + columns, z.to(mixed_ptr.dtype.element_ty), mask=columns < V)
        tl.store(shift_ptr + row * tiles + tile, shift, mask=tile < tiles)
        tl.store(total_ptr + row * tiles + tile, total, mask=tile < tiles)


def mix_in_place(mixed: ChunkLogits, other: ChunkLogits, share: float, temperature: float) -> ChunkLogits:
    """Replace the rows of `mixed` by `(1 - share) mixed + share other`, probabilities at `temperature`.

    `total` of both must hold sums at that temperature.

    Args:
        mixed: the running mixture, [n, V].
        other: the next teacher, [n, V].
        share: weight of the next teacher in the new mixture, in (0, 1).
        temperature: T of the probabilities that are mixed.

    Returns:
        The mixture in the memory of `mixed.values`; its `total_hard` is its `total`.
    """
    n, vocab = mixed.values.shape
    tiles = cdiv(vocab, TILE)
    # apart from what is read: programs may still be reading the old ones
    shift = torch.empty_like(mixed.shift)
    total = torch.empty_like(mixed.total)
    if n:
        flags = {"TEMPERED": False, "HARD": False, "HAS_TEACHER": True, "STATS": False}
        # The running mixture takes the student's place among the arguments: planes 1 and 4 are both sides' log sums at
        # T.
        norms = row_normalisers(mixed, other, 1.0 / temperature, **flags)[1::3]
        _mix_kernel[(n,)](
            (mixed.values, mixed.shift),
            (other.values, other.shift),
            (shift, total),
            norms,
            vocab,
            tiles,
            (mixed.values.stride(0), other.values.stride(0), norms.stride(0)),
            1.0 / temperature,
            temperature,
            math.log1p(-share),
            math.log(share),
            TILE=TILE,
            BLOCK=8,
            num_warps=8,
        )
    return ChunkLogits(mixed.values, shift, total, total)


class TeacherMixer:
    """Mixture of the teachers' logits, chunk by chunk, in buffers that all chunks share.

    Args:
        mixture: two teachers or more, their heads cut to the columns and the dtype of the products.
        chunk_rows: rows of the largest chunk.
        vocab: columns that count.
        dtype: dtype of the stored logits.
        temperature: softmax temperature T of the teachers.
        at_temperature_1: also make the mixture at temperature 1, for statistics where T differs.
        descriptors: True to allow the fused projection, see `project`.
    """

    def __init__(
        self,
        mixture: Mixture,
        chunk_rows: int,
        vocab: int,
        dtype: torch.dtype,
        temperature: float,
        *,
        at_temperature_1: bool,
        descriptors: bool,
    ) -> None:
        self.mixture = mixture
        self.temperature = temperature
        self.descriptors = descriptors
        self.at_temperature_1 = at_temperature_1 and temperature != 1.0
        device = mixture.heads[0].hidden.device
        # Rows a multiple of 64 elements apart, so that each starts aligned. The first buffer takes each further
        # teacher, the second, where it exists, the mixture at temperature 1.
        width = cdiv(vocab, 64) * 64
        tiles = cdiv(vocab, TILE)
        self.values = torch.empty(1 + self.at_temperature_1, chunk_rows, width, dtype=dtype, device=device)[..., :vocab]
        self.numbers = torch.empty(3, chunk_rows, tiles, dtype=torch.float32, device=device)

    def __call__(
        self, pick: Callable[[torch.Tensor], torch.Tensor], out: ChunkLogits
    ) -> tuple[ChunkLogits, ChunkLogits | None]:
        """Return the mixture of the rows that `pick` selects from each teacher's hidden states, in the memory of `out`.

        `out.total_hard` must be separate memory where T is not 1 and `at_temperature_1` is set.

        Returns:
            The mixture at the temperature, and a separate one at temperature 1 where it is needed, else None.
        """
        n = out.values.shape[0]
        mixed = out
        hard = None
        seen = 0.0
        for number, (head, share, scale, softcap) in enumerate(zip(*self.mixture, strict=True)):
            transform = Transform(scale, softcap, self.temperature, self.at_temperature_1)
            if number == 0:
                project(head, pick(head.hidden), out, transform, descriptors=self.descriptors)
                if self.at_temperature_1:
                    # Both mixtures start from the first teacher's logits: the values are copied, since each is mixed in
                    # place, and the shifts are shared, since mixing makes new ones. Sums of exponentials are of each
                    # temperature.
                    hard = ChunkLogits(self.values[1, :n], out.shift, out.total_hard, out.total_hard)
                    hard.values.copy_(out.values)
            else:
                other = ChunkLogits(self.values[0, :n], *(part[:n] for part in self.numbers))
                project(head, pick(head.hidden), other, transform, descriptors=self.descriptors)
                # The newcomer's part of the teachers seen so far, so that after the last one every weight is its share.
                part = share / (seen + share)
                mixed = mix_in_place(mixed, other, part, self.temperature)
                if hard is not None:
                    hard = mix_in_place(hard, other._replace(total=other.total_hard), part, 1.0)
            seen += share
        return mixed, hard


def launch_mixture_row_loss(
    student: ChunkLogits,
    teacher: ChunkLogits,
    objective: Objective,
    call: RowCall,
    *,
    at_temperature_1: ChunkLogits | None,
) -> None:
    """Launch the row kernel for a mixture; statistics come from `at_temperature_1` where that is given."""
    if at_temperature_1 is not None and call.stats is not None:
        # Statistics first, without a gradient: the second launch writes the gradient over the logits that the first one
        # reads.
        plain = objective.unclipped._replace(
            temperature=1.0, teacher_temperature=1.0, weights=objective.divergence_weights
        )
        own = student._replace(total=student.total_hard)
        # losses are overwritten below; what caps take is known at the loss's temperature alone
        launch_row_loss(own, at_temperature_1, plain, call._replace(gradient=None, clip=None))
        call = call._replace(stats=None)
    launch_row_loss(student, teacher, objective, call)
