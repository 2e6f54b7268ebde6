"""One quantised parameter, and the scales of many that are learned together.

Learned scales (Esser et al., 2020, arXiv 1902.08153) follow from the gradients of the rounded weights: both are linear
in them, so the sum over a step's micro-batches (and the mean over its processes) is all that is needed. Adam (Kingma
and Ba, 2015) updates the logarithm of a scale's magnitude, since what a scale may change by in a step is proportional
to it.

Blocks lie in rows, and FSDP2 cuts parameters by rows: of a sharded parameter each process keeps master weights, scales
and moments of its own rows, and rounds these.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from distill_kernels.quantisation.fake_quantise import fake_quantise_into, learned_gradients
from distill_kernels.quantisation.number_format import NumberFormat, Scales

from distill.models.sharding import gather_rows, local_rows

BETAS = (0.9, 0.999)
EPS = 1e-12
TENSORS_OF_SCALES = 5  # values, stored values, gradient and two moments


def state_bytes(form: NumberFormat, weight: torch.Tensor, *, learned: bool) -> int:
    """Return the bytes that training keeps for a matrix beside its parameter: master weights, and learned scales.

    Args:
        form: Format of the matrix.
        weight: The parameter, which may lie on the meta device.
        learned: Scales are learned where the format has some that can be.
    """
    scales = weight.numel() // form.columns(weight) * (1 + form.has_minimum) if learned and form.is_learned else 0
    return 4 * (weight.numel() + TENSORS_OF_SCALES * scales)


class QuantisedMatrix:
    """One quantised parameter: its format, its master weights and, where they are learned, its scales.

    Args:
        name: Name of the parameter, without PEFT's parts.
        parameter: The parameter, held whole.
        form: Its format.
        rows: Rows that this process keeps, once the parameter is sharded.

    Attributes:
        base: fp32 weights before rounding; those that the optimizer updates where no adapter is added to them.
        scales: views of `LearnedScales.stored`; None where the format computes them.
        gradients: views of `LearnedScales.gradient`, likewise.
    """

    def __init__(self, name: str, parameter: torch.Tensor, form: NumberFormat, rows: slice = slice(None)) -> None:
        self.name = name
        self.parameter = parameter
        self.form = form
        self.rows = rows
        self.base = parameter.detach()[rows].clone()
        self.scales: Scales | None = None
        self.gradients: Scales | None = None

    @property
    def master(self) -> torch.Tensor:
        """The weights before rounding, fp32."""
        return self.base

    def round(self) -> None:
        """Write the file's values of the master weights into the parameter."""
        fake_quantise_into(local_rows(self.parameter), self.master, self.form, self.scales)

    def fields(self) -> dict[str, torch.Tensor]:
        own = self.form.first(self.master) if self.scales is None else self.scales
        return self.form.store(own.map(lambda rows: gather_rows(rows, self.parameter)))

    def codes(self) -> torch.Tensor:
        """Return the codes that the parameter's values stand for, [N, K] in one byte each."""
        codes = self.form.encode(self.parameter, self.form.load(self.fields()))
        return codes.to(torch.float8_e4m3fn if self.form.codes.mantissa else torch.int8)

    def gradient_of(
        self, upstream: torch.Tensor, out: tuple[torch.Tensor, Scales] | None = None
    ) -> tuple[torch.Tensor, Scales]:
        """Return the gradients of weights and scales, in `out` if given, from that of rounded weights, fp32 [N, K]."""
        assert self.scales is not None
        return learned_gradients(self.master, self.scales, upstream, self.form, out)

    def take_gradient(self) -> bool:
        """Turn the parameter's gradient into that of weights and scales; returns whether there is one in this step."""
        if self.parameter.grad is None:
            return False
        if self.gradients is not None:
            gradient = local_rows(self.parameter.grad)
            self.gradient_of(gradient, out=(gradient, self.gradients))
        return True


class LearnedScales:
    """Learned scales of many matrices in one tensor, so that a step updates and rounds them together.

    Args:
        matrices: Quantised parameters whose scales are learned, which are 0 until they are set.

    Attributes:
        values: fp32 [all blocks], what Adam updates: by format all scales, then all minima.
        stored: fp32 [all blocks], the values rounded to those of a file.
        gradient: fp32 [all blocks], by the stored values.
        following: fp32 [all blocks], 1 where the scale was 0 at the start, as that of a zero-initialised or pruned
            block is, or the minimum, as that of a block without negative weights; None without such blocks. Those
            cannot be learned: they have no logarithm, and once they have left 0 their steps, which are relative to
            them, are too small for weights that grow from 0. They follow from the block's weights, as a plain converter
            chooses them.
    """

    def __init__(self, matrices: list[QuantisedMatrix]) -> None:
        self.forms: list[tuple[NumberFormat, list[slice]]] = []
        self._places: list[tuple[QuantisedMatrix, slice]] = []
        end = 0
        for form in dict.fromkeys(matrix.form for matrix in matrices):
            own = [matrix for matrix in matrices if matrix.form == form]
            slices = []
            for _ in range(1 + form.has_minimum):
                begin = end
                for matrix in own:
                    self._places.append((matrix, slice(end, end + matrix.base.numel() // form.columns(matrix.base))))
                    end = self._places[-1][1].stop
                slices.append(slice(begin, end))
            self.forms.append((form, slices))
        device = matrices[0].base.device if matrices else None
        self.values, self.stored, self.gradient, self.mean, self.square = (
            torch.zeros(end, device=device) for _ in range(5)
        )
        self.steps = 0
        self.matrices = matrices
        self.following: torch.Tensor | None = None
        self._followed: list[QuantisedMatrix] = []  # with such blocks among those of this process
        for matrix in matrices:
            matrix.scales = self.of(matrix, self.stored)
            matrix.gradients = self.of(matrix, self.gradient)

    def of(self, matrix: QuantisedMatrix, tensor: torch.Tensor) -> Scales:
        """Return the part of one of the tensors that belongs to a matrix."""
        return Scales(*(_in_rows(tensor[place], matrix) for own, place in self._places if own is matrix))

    def start(self, matrix: QuantisedMatrix, scales: Scales) -> None:
        """Set the scales of a matrix, of which those of all rows are given."""
        for own, part in zip(self.of(matrix, self.values), scales, strict=True):
            if own is not None and part is not None:
                own.copy_(part[matrix.rows])

    def find_following(self) -> None:
        """Find the blocks whose scale or minimum is 0; every process calls it, and waits for the device."""
        found = torch.zeros_like(self.values)
        for matrix in self.matrices:
            assert matrix.scales is not None
            scale_is_zero = matrix.scales.scale == 0
            for own, part in zip(self.of(matrix, found), matrix.scales, strict=True):
                if own is not None and part is not None:
                    own.copy_(scale_is_zero | (part == 0))
        any_block = found.any().float()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(any_block, dist.ReduceOp.MAX)
        self.use_following(found if bool(any_block) else None)

    def use_following(self, following: torch.Tensor | None) -> None:
        """Set the blocks whose scales follow from their weights; None for none in any process."""
        self.following = following
        self._followed = []
        if following is None:
            return
        for matrix in self.matrices:
            if any(bool(part.any()) for part in self.of(matrix, following) if part is not None):
                self._followed.append(matrix)

    def follow(self) -> None:
        """Compute the scales that are not learned from the present weights of their blocks."""
        for matrix in self._followed:
            assert self.following is not None
            first = matrix.form.first(matrix.master)
            marked = self.of(matrix, self.following)
            for own, part, mark in zip(self.of(matrix, self.values), first, marked, strict=True):
                if own is not None and part is not None and mark is not None:
                    own.copy_(torch.where(mark > 0, part, own))

    def store(self) -> None:
        for form, slices in self.forms:
            snapped = form.snap(Scales(*(self.values[place] for place in slices)))
            for place, part in zip(slices, snapped, strict=False):
                if part is not None:
                    self.stored[place] = part

    def step(self, rate: float) -> None:
        """Make one step of Adam; nothing changes where a gradient of any process is not finite."""
        self.steps += 1
        gradient = self.gradient * self.values  # by log |scale|
        finite = gradient.sum().isfinite().float()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        gradient = torch.where(finite > 0, gradient, 0.0)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.lerp_(gradient * gradient, 1 - BETAS[1])
        mean = self.mean / (1 - BETAS[0] ** self.steps)
        square = self.square / (1 - BETAS[1] ** self.steps)
        self.values.mul_(torch.exp(-rate * finite * mean / (square.sqrt() + EPS)))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs, by name: the part of this process."""
        return {"scales": self.values, "mean": self.mean, "square": self.square}

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the tensors with the blocks of all rows; every process calls it."""
        parts = [gather_rows(_in_rows(tensor[place], m), m.parameter).flatten() for m, place in self._places]
        return torch.cat(parts) if parts else tensor

    def take(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy this process's blocks of what `gathered` returns into one of the tensors."""
        sizes = [matrix.parameter.numel() // matrix.form.columns(matrix.base) for matrix, _ in self._places]
        for (matrix, place), part in zip(self._places, gathered.split(sizes), strict=True):
            tensor[place] = part.view(len(matrix.parameter), -1)[matrix.rows].flatten()


def _in_rows(blocks: torch.Tensor, matrix: QuantisedMatrix) -> torch.Tensor:
    """Return a value for each of a matrix's blocks as [rows, K / block]."""
    *rows, columns = matrix.base.shape
    return blocks.view(*rows, columns // matrix.form.columns(matrix.base))
