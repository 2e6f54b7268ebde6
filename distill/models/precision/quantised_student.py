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

Learned scales (Esser et al., 2020, arXiv 1902.08153) follow from the same gradients: both are linear in them, so the
sum over a step's micro-batches (and the mean over its processes) is all that is needed. Adam (Kingma and Ba, 2015)
updates the logarithm of a scale's magnitude, since what a scale may change by in a step is proportional to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from distill_kernels.quantisation.fake_quantise import fake_quantise_into, learned_gradients
from distill_kernels.quantisation.formats import FORMATS, reference_scale
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from distill.core.errors import RunError
from distill.core.files import write_json
from distill.models.head import bare, find_head
from distill.models.layers import find_layers
from distill.models.load.config_validation import read_json
from distill.models.precision.dtypes import QUANTISED
from distill.recipe.quantise import Quantise

if TYPE_CHECKING:
    from distill.models.precision.gptq import Rounded

FORMAT_FILE = "quantised.json"  # in a folder of weights: the format of each
STATE_FILE = "quantised.safetensors"  # in a checkpoint: master weights, scales and their moments
SCALE_RATE = 4.0  # learning rate of log scales, relative to that of weights
BETAS, EPS = (0.9, 0.999), 1e-12


class Formats(NamedTuple):
    """The format of every quantised parameter of a model.

    Attributes:
        by_name: Format of each parameter that is quantised, by its name in the bare model.
        unfit: Names of layers that stay as they are, since their rows are not whole blocks.
    """

    by_name: dict[str, str]
    unfit: list[str]


def formats_of(model: nn.Module, section: Quantise) -> Formats:
    """Return the formats that a recipe's section gives the parameters of a model.

    Raises:
        ValueError: A key of `modules` that names no linear layer, two formats for one tied weight, or a model without
            linear layers.
    """
    model = bare(model)
    prefix, layers = find_layers(model)
    linears = {name: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    wanted: dict[str, str] = {f"{prefix}.{name}.weight": section.format for name in linears}
    for key, chosen in section.modules.items():
        matched = [name for name in linears if f".{name}.".startswith(f".{key}.") or f".{name}".endswith(f".{key}")]
        if not matched:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ValueError(
                f"student.quantise.modules: {key!r} matches no linear layer; there are layers 0 to {len(layers) - 1}, "
                f"and {known}"
            )
        wanted |= {f"{prefix}.{name}.weight": chosen for name in matched}
    if not linears:
        raise ValueError(f"student.quantise: {type(model).__name__} has no linear layers (torch.nn.Linear) to quantise")
    names: dict[torch.Tensor | nn.Module, str] = {
        p: name for name, p in model.named_parameters()
    }  # one of tied weights
    embedding, head = model.get_input_embeddings().weight, find_head(model).linear.weight  # type: ignore[operator]
    for_embedding, for_head = section.outside
    if embedding is head and section.head != "auto" and for_head != for_embedding:
        raise ValueError(
            f"student.quantise.head: expected that of embeddings ({for_embedding}), which share their weight, "
            f"got {for_head}"
        )
    wanted |= {names[head]: for_head} | {names[embedding]: for_embedding}
    parameters = dict(model.named_parameters())
    by_name = {name: chosen for name, chosen in wanted.items() if chosen != "keep"}
    unfit = [name for name, chosen in by_name.items() if parameters[name].shape[-1] % (FORMATS[chosen].block or 1)]
    return Formats({name: chosen for name, chosen in by_name.items() if name not in unfit}, unfit)


class QuantisedMatrix:
    """One quantised parameter: its format, its master weights and, where they are learned, its scales.

    Attributes:
        scale: fp32 [..., K / block], a view of `QuantisedWeights.scales`; None where the format computes it.
    """

    def __init__(self, name: str, parameter: nn.Parameter, form: str) -> None:
        self.name, self.parameter, self.form = name, parameter, form
        self.master = parameter.detach().clone()
        self.scale: torch.Tensor | None = None

    def round(self) -> None:
        """Write the file's values of the master weights into the parameter."""
        fake_quantise_into(self.parameter.data, self.master, self.form, self.scale)


class QuantisedWeights:
    """The quantised parameters of one model.

    Args:
        model: The student, bare; its parameters hold the file's values from now on.
        formats: Format of each parameter, by name.
        learned: Learn the scales of blocks in 4 bits.

    Attributes:
        matrices: The quantised parameters, by name.
        scales: fp32 [all blocks], the learned scales.
    """

    def __init__(self, model: nn.Module, formats: Mapping[str, str], *, learned: bool) -> None:
        parameters = dict(model.named_parameters())
        if wrong := next((name for name in formats if parameters[name].dtype != torch.float32), None):
            raise ValueError(
                f"student.quantise: expected weights in float32, got {parameters[wrong].dtype} for {wrong}; set "
                "student.dtype to float32"
            )
        self.matrices = {name: QuantisedMatrix(name, parameters[name], form) for name, form in formats.items()}
        own = [m for m in self.matrices.values() if learned and FORMATS[m.form].bits == 4]
        first = [reference_scale(m.master, m.form) for m in own]
        self.scales = torch.cat([scale.flatten() for scale in first]) if own else torch.empty(0)
        self._gradient, self._mean, self._square = (torch.zeros_like(self.scales) for _ in range(3))
        self._steps = 0
        parts = self.scales.split([scale.numel() for scale in first])
        for matrix, part, scale in zip(own, parts, first, strict=True):
            matrix.scale = part.view(scale.shape)
        self._learned = [*zip(own, self._gradient.split([len(part) for part in parts]), strict=True)]
        self.after_start()

    @torch.no_grad()
    def start_from(self, start: Mapping[str, Rounded]) -> None:
        """Take master weights and learned scales from a rounding such as GPTQ's."""
        for name, rounded in start.items():
            matrix = self.matrices[name]
            assert matrix.scale is not None, "a format that computes its scales would replace those of the start"
            matrix.master.copy_(rounded.weight)
            matrix.scale.copy_(rounded.scale)
        self.after_start()

    @torch.no_grad()
    def after_start(self) -> None:
        """Take the first process's weights on every process, and round them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for tensor in (self.scales, *(matrix.master for matrix in self.matrices.values())):
                torch.distributed.broadcast(tensor, 0)
        for matrix in self.matrices.values():
            matrix.round()

    @torch.no_grad()
    def before_step(self, learning_rate: float) -> None:
        """Give the parameters their master weights, and their gradients the form that learned scales want.

        The scales are updated here; `after_step` rounds by them.

        Args:
            learning_rate: Learning rate of the weights in this step.
        """
        if self._learned:
            for matrix, gradient in self._learned:
                given = matrix.parameter.grad
                if given is None:  # a step that the guard skips
                    gradient.zero_()
                    continue
                assert matrix.scale is not None
                of_weight, of_scale = learned_gradients(matrix.master, matrix.scale, given, matrix.form)
                given.copy_(of_weight)
                torch.mul(of_scale.flatten(), matrix.scale.flatten(), out=gradient)  # by log |scale|
            if any(matrix.parameter.grad is not None for matrix, _ in self._learned):
                self._step_scales(SCALE_RATE * learning_rate)
        for matrix in self.matrices.values():
            matrix.parameter.copy_(matrix.master)

    def _step_scales(self, rate: float) -> None:
        """Make one step of Adam; nothing changes where a gradient is not finite."""
        self._steps += 1
        gradient = self._gradient
        finite = gradient.sum().isfinite()
        gradient = torch.where(finite, gradient, 0.0)
        self._mean.lerp_(gradient, 1 - BETAS[0])
        self._square.lerp_(gradient * gradient, 1 - BETAS[1])
        mean = self._mean / (1 - BETAS[0] ** self._steps)
        square = self._square / (1 - BETAS[1] ** self._steps)
        self.scales.mul_(torch.exp(-rate * finite * mean / (square.sqrt() + EPS)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the updated weights as masters, and round them into the parameters."""
        for matrix in self.matrices.values():
            matrix.master.copy_(matrix.parameter)
            matrix.round()

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs to go on with the same bits; the weights' file holds the rounded values."""
        tensors = {f"master.{name}": matrix.master for name, matrix in self.matrices.items()}
        tensors |= {"scales": self.scales, "mean": self._mean, "square": self._square}
        tensors["steps"] = torch.tensor([self._steps])
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / STATE_FILE)
        self.write_formats(folder)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            RunError: It has no quantised weights, or those of another student.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            raise RunError(f"--resume: {path} is missing, which a quantised student's checkpoint has")
        own = {f"master.{name}": matrix.master for name, matrix in self.matrices.items()}
        own |= {"scales": self.scales, "mean": self._mean, "square": self._square}
        with safe_open(str(path), framework="pt") as file:
            if wrong := sorted({*own, "steps"} ^ set(file.keys())):
                raise RunError(f"--resume: {path}: {wrong[0]} exists in only one of checkpoint and student")
            for name, tensor in own.items():
                tensor.copy_(file.get_tensor(name))
            self._steps = int(file.get_tensor("steps"))
        for matrix in self.matrices.values():
            matrix.round()

    def write_formats(self, folder: Path) -> None:
        """Write the format of each weight, by which `distill export` finds the file's blocks again."""
        write_formats(folder, {name: matrix.form for name, matrix in self.matrices.items()})

    def file_bytes(self) -> int:
        """Return the bytes of the quantised weights in the file."""
        pairs = [(FORMATS[matrix.form], matrix.master) for matrix in self.matrices.values()]
        return sum(w.numel() * form.bits // 8 + 2 * (w.numel() // form.columns(w)) for form, w in pairs)

    def __str__(self) -> str:
        count = sum(matrix.master.numel() for matrix in self.matrices.values())
        kinds = sorted({matrix.form for matrix in self.matrices.values()})
        bits = 8 * self.file_bytes() / max(count, 1)
        return (
            f"{len(self.matrices)} matrices of {count / 1e6:,.1f} M weights in {', '.join(kinds)}: {bits:.2f} bits each"
        )


def quantise_student(model: nn.Module, formats: Mapping[str, str], *, learned: bool = False) -> QuantisedWeights:
    """Have a model compute with the weights of a quantised file from now on.

    Args:
        model: A student in float32 on its device, all of whose weights are trained, held whole by this process.
        formats: Format of each quantised parameter, as `formats_of` returns.
        learned: Learn the scales of blocks in 4 bits; otherwise they follow from the largest weight of each block.

    Raises:
        ValueError: A parameter is not in float32.
    """
    weights = QuantisedWeights(bare(model), formats, learned=learned)
    bare(model).__dict__[QUANTISED] = weights
    return weights


def write_formats(folder: Path, formats: Mapping[str, str]) -> None:
    """Write the format of each weight into a folder of weights."""
    write_json(folder / FORMAT_FILE, {"tensors": dict(formats)})


def read_formats(folder: Path) -> dict[str, str]:
    """Return the format of each weight in a folder; empty where they are not quantised.

    Raises:
        ValueError: The file is not one of ours.
    """
    path = folder / FORMAT_FILE
    if not path.is_file():
        return {}
    tensors = read_json(path, FORMAT_FILE).get("tensors")
    if not isinstance(tensors, dict) or not all(form in FORMATS for form in tensors.values()):
        raise ValueError(f"{path}: expected a format ({', '.join(FORMATS)}) for each weight")
    return {str(name): str(form) for name, form in tensors.items()}
