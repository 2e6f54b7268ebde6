"""A student whose weights are those of a quantised file while it trains; names, shapes and saving stay as they are.

    weights = quantise_student(student, formats_of(student, section), learned=True)
    ...                        # forward, backward, as often as a step has micro-batches
    weights.before_step(learning_rate)
    optimizer.step()
    weights.after_step()

Parameters hold the file's values whenever the model computes: in training, evaluation, rollouts and saved folders, and
in every kernel that reads a parameter. Once per optimizer step the float32 master weights take their place, are
updated, and are rounded again; that is the straight-through estimator, whose gradient by a master weight is the one by
its rounded value. Parameters keep their memory, so CUDA graphs and joined projections stay valid.

A student that FSDP2 will shard is rounded whole, before; each process keeps the masters and scales of its own rows,
and `use_shards` has it go on with those of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from distill_kernels.quantisation.fake_quantise import fake_quantise_into
from distill_kernels.torch_internals import foreach_copy_
from safetensors import safe_open
from torch import nn

from distill.core.errors import RunError
from distill.core.tensor_files import write_tensors
from distill.models.dtypes import QUANTISED
from distill.models.head import unwrap_peft
from distill.models.precision.quantised_formats import Formats, SavedBlocks, formats_of, plain_name, plain_parameters
from distill.models.precision.quantised_matrix import LearnedScales, QuantisedMatrix, state_bytes
from distill.models.sharding import gather_rows, local_rows, own_rows
from distill.recipe.quantise import Quantise

if TYPE_CHECKING:
    from distill.models.precision.gptq import Rounded
    from distill.models.precision.quantised_adapters import Adapter

STATE_FILE = "quantised.safetensors"  # in a checkpoint: master weights, scales and their moments
FOLLOWING = "following"  # in that file: the blocks whose scales follow from their weights; empty without any
SCALE_RATE = 4.0  # learning rate of log scales, relative to that of weights


class QuantisedWeights:
    """The quantised parameters of one model.

    Args:
        model: The student, bare; its parameters hold the file's values from now on.
        formats: Format of each parameter.
        learned: Learn the scales of blocks in less than 8 bits.
        adapters: Adapters by the name of the weight they are added to.
        sharded: FSDP2 will shard the model: keep the masters and scales of this process's rows.

    Attributes:
        matrices: The quantised parameters, by name.
        scales: The learned scales.
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Formats,
        *,
        learned: bool,
        adapters: Mapping[str, Adapter] | None = None,
        sharded: bool = False,
    ) -> None:
        parameters = plain_parameters(model)
        wrong = next((name for name in formats.by_name if parameters[name].dtype != torch.float32), None)
        if wrong:
            raise ValueError(
                f"student.quantise: expected weights in float32, got {parameters[wrong].dtype} for {wrong}; set "
                "student.dtype to float32"
            )
        self.formats = formats
        self.matrices: dict[str, QuantisedMatrix] = {}
        self.adapted = adapters is not None
        for name, form in formats.forms.items():
            if adapters and name in adapters:
                from distill.models.precision.quantised_adapters import AdaptedMatrix

                self.matrices[name] = AdaptedMatrix(name, adapters[name], form)
            else:
                rows = own_rows(len(parameters[name])) if sharded else slice(None)
                self.matrices[name] = QuantisedMatrix(name, parameters[name], form, rows)
        self.scales = LearnedScales([m for m in self.matrices.values() if learned and m.form.is_learned])

    @torch.no_grad()
    def start(self, start: Mapping[str, Rounded]) -> None:
        """Round the parameters, still whole, from the first process's weights, or from a rounding such as GPTQ's."""
        for name, matrix in self.matrices.items():
            parameter = matrix.parameter.data
            rounded = start.get(name)
            scales = None
            copied = functools.partial(_copy_of_first, device=parameter.device)
            weight = copied(parameter if rounded is None else rounded.weight)
            if matrix.scales is not None:
                scales = (matrix.form.first(weight) if rounded is None else rounded.scales).map(copied)
                self.scales.start(matrix, scales)
                scales = matrix.form.snap(scales)
            assert scales is not None or rounded is None, "scales that are computed would replace those of the start"
            matrix.base.copy_(weight[matrix.rows])
            fake_quantise_into(parameter, weight, matrix.form, scales)
        self.scales.store()
        self.scales.find_following()

    def use_shards(self, model: nn.Module) -> None:
        """Go on with this process's rows of the parameters of a model that FSDP2 may have sharded since the start."""
        parameters = plain_parameters(unwrap_peft(model))
        for name, matrix in self.matrices.items():
            matrix.parameter = parameters[name]
            assert local_rows(matrix.parameter).shape == matrix.base.shape, f"{name} is cut otherwise than by rows"

    @torch.no_grad()
    def round(self) -> None:
        self.scales.follow()
        self.scales.store()
        self._write_rounded()

    def _write_rounded(self) -> None:
        for matrix in self.matrices.values():
            matrix.round()

    @torch.no_grad()
    def before_step(self, learning_rate: float) -> None:
        """Give the parameters their master weights, and their gradients the form that learned scales want.

        The scales are updated here; `after_step` rounds by them.

        Args:
            learning_rate: Learning rate of the weights in this step.
        """
        scales = self.scales
        if sum(matrix.take_gradient() for matrix in scales.matrices):
            if self.adapted and dist.is_available() and dist.is_initialized():
                dist.all_reduce(scales.gradient)  # PyTorch's wrappers do not know these
                scales.gradient /= dist.get_world_size()
            scales.step(SCALE_RATE * learning_rate)
        scales.gradient.zero_()
        self._copy_trained(to_masters=False)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the updated weights as masters, and round them into the parameters."""
        self._copy_trained(to_masters=True)
        self.round()

    def _copy_trained(self, *, to_masters: bool) -> None:
        trained = [matrix for matrix in self.matrices.values() if matrix.parameter.requires_grad]
        masters = [m.base for m in trained]
        parameters = [local_rows(m.parameter) for m in trained]
        if trained:
            foreach_copy_(*((masters, parameters) if to_masters else (parameters, masters)))

    @torch.no_grad()
    def save(self, folder: Path | None) -> None:
        """Write what a resumed run needs to go on with the same bits.

        The file of weights beside it holds the rounded values; an adapter does not, and their codes are written here.

        Args:
            folder: Folder of the checkpoint; None for a process that only hands in its rows.
        """
        tensors = {"steps": torch.tensor([self.scales.steps])}
        for name, tensor in self._gathered():
            if folder is not None:
                tensors[name] = tensor.cpu().contiguous()
        saved = self.saved()
        if folder is not None:
            write_tensors(folder / STATE_FILE, tensors)
            codes = {name: matrix.codes() for name, matrix in self.matrices.items()} if self.adapted else None
            saved._replace(codes=codes).write(folder)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the state of all rows, one tensor at a time."""
        for name, matrix in self.matrices.items():
            yield f"master.{name}", gather_rows(matrix.base, matrix.parameter)
        for name, tensor in self.scales.state().items():
            yield name, self.scales.gathered(tensor)
        following = self.scales.following
        yield FOLLOWING, torch.zeros(0) if following is None else self.scales.gathered(following)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            RunError: It has no quantised weights, or those of another student.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            raise RunError(f"--resume: {path} is missing, which a quantised student's checkpoint has")
        masters = {f"master.{name}": matrix for name, matrix in self.matrices.items()}
        state = self.scales.state()
        with safe_open(str(path), framework="pt") as file:
            there = set(file.keys())
            wrong = sorted({*masters, *state, "steps", FOLLOWING} ^ there)
            if wrong:
                raise RunError(f"--resume: {path}: {wrong[0]} exists in only one of checkpoint and student")
            for name, matrix in masters.items():
                matrix.base.copy_(file.get_slice(name)[matrix.rows])
            for name, tensor in state.items():
                self.scales.take(tensor, file.get_tensor(name))
            self.scales.steps = int(file.get_tensor("steps"))
            following = file.get_tensor(FOLLOWING)
        self.scales.store()
        own = None
        if len(following):
            own = torch.zeros_like(self.scales.values)
            self.scales.take(own, following)
        self.scales.use_following(own)
        self._write_rounded()

    @torch.no_grad()
    def saved(self) -> SavedBlocks:
        """Return formats and scales, by which `distill export` finds the blocks again; every process calls it."""
        fields = {name: matrix.fields() for name, matrix in self.matrices.items()}
        return SavedBlocks(self.formats.main, dict(self.formats.by_name), fields)

    def __str__(self) -> str:
        count = sum(matrix.parameter.numel() for matrix in self.matrices.values())
        kinds = sorted(set(self.formats.by_name.values()))
        bits = 8 * sum(m.form.bytes_of(m.parameter) for m in self.matrices.values()) / max(count, 1)
        return (
            f"{len(self.matrices)} matrices of {count / 1e6:,.1f} M weights in {', '.join(kinds)}: {bits:.2f} bits each"
        )


class QuantisedBytes(NamedTuple):
    """Memory of a quantised student beside its parameters.

    Attributes:
        states: Master weights and learned scales.
        temporary: Gradient of the largest matrix with an adapter, its merged weights, and their gradient.
    """

    states: int
    temporary: int


def quantised_bytes(model: nn.Module, section: Quantise) -> QuantisedBytes:
    """Return the memory that a recipe's section takes in training.

    Args:
        model: The student with its adapters, which may lie on the meta device.
        section: The recipe's `student.quantise`.
    """
    forms = formats_of(model, section).forms
    parameters = plain_parameters(unwrap_peft(model))
    learned = section.scales == "learned"
    adapted = {plain_name(path) for path, module in unwrap_peft(model).named_modules() if hasattr(module, "lora_A")}
    sizes = [parameters[name].numel() for name in forms if name.removesuffix(".weight") in adapted]
    states = sum(state_bytes(form, parameters[name], learned=learned) for name, form in forms.items())
    return QuantisedBytes(states, 3 * 4 * max(sizes, default=0))


def quantise_student(
    model: nn.Module,
    formats: Formats,
    *,
    learned: bool = False,
    adapters: Mapping[str, Adapter] | None = None,
    start: Mapping[str, Rounded] | None = None,
    sharded: bool = False,
) -> QuantisedWeights:
    """Have a model compute with the weights of a quantised file from now on.

    Args:
        model: student in float32 on its device, held whole by this process.
        formats: format of each quantised parameter, as `formats_of` returns.
        learned: learn the scales of blocks in less than 8 bits; otherwise they follow from the weights of each block.
        adapters: adapters by the name of the weight they are added to, as `quantised_adapters.use_merged` returns.
        start: weights before rounding and scales of some parameters, such as GPTQ's; others start from their own.
        sharded: FSDP2 will shard the student; `QuantisedWeights.use_shards` follows then.

    Raises:
        ValueError: A parameter is not in float32.
    """
    weights = QuantisedWeights(unwrap_peft(model), formats, learned=learned, adapters=adapters, sharded=sharded)
    weights.start(start or {})
    unwrap_peft(model).__dict__[QUANTISED] = weights
    return weights


def _copy_of_first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of the first process's tensor."""
    tensor = tensor.to(device, copy=True)
    if dist.is_available() and dist.is_initialized():
        dist.broadcast(tensor, 0)
    return tensor
