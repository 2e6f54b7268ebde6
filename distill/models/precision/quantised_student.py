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
from distill_kernels.quantisation.formats import FORMATS, Blocks, fitting_format
from distill_kernels.quantisation.number_format import Format, Scales
from safetensors import safe_open
from safetensors.torch import load_file, save_file
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
SCALES_FILE = "quantised_scales.safetensors"  # in a folder of weights: the scales of each, as the file holds them
STATE_FILE = "quantised.safetensors"  # in a checkpoint: master weights, scales and their moments
SCALE_RATE = 4.0  # learning rate of log scales, relative to that of weights
BETAS, EPS = (0.9, 0.999), 1e-12


class Formats(NamedTuple):
    """The format of every quantised parameter of a model.

    Attributes:
        main: Format of the recipe.
        by_name: Format of each parameter that is quantised, by its name in the bare model.
        unfit: Names of layers that stay as they are, since their rows are not whole blocks.
    """

    main: str
    by_name: dict[str, str]
    unfit: list[str]


class SavedBlocks(NamedTuple):
    """Formats and scales of a folder's weights, from which a file is written without rounding anything again.

    Attributes:
        main: Format of the recipe.
        by_name: Format of each quantised weight.
        scales: Scales of each as the file holds them, by field.
    """

    main: str
    by_name: dict[str, str]
    scales: dict[str, dict[str, torch.Tensor]]

    def blocks(self, name: str, values: torch.Tensor) -> Blocks | None:
        """Return the blocks of a weight; None where its values are not exactly those of its scales."""
        form, stored = FORMATS[self.by_name[name]], self.scales[name]
        found = Blocks(form, form.encode(values, form.load(stored)), stored)
        return found if torch.equal(found.values(), values.float()) else None

    def write(self, folder: Path) -> None:
        """Write formats and scales into a folder of weights."""
        write_json(folder / FORMAT_FILE, {"format": self.main, "tensors": self.by_name})
        flat = {f"{name}:{field}": part for name, fields in self.scales.items() for field, part in fields.items()}
        save_file({key: part.cpu().contiguous() for key, part in flat.items()}, folder / SCALES_FILE)


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp's `q4_k_m` holds values and down projections of a layer in 6 bits."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


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
    if section.format == "q4_k":
        wider = [name for name in linears if name.endswith(("v_proj", "down_proj"))]
        wider = [name for name in wider if has_more_bits(int(name.partition(".")[0]), len(layers))]
        wanted |= {f"{prefix}.{name}.weight": "q6_k" for name in wider}
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
    kept = {name: form for name, form in wanted.items() if form != "keep"}
    fitting = {name: fitting_format(form, parameters[name].shape[-1]) for name, form in kept.items()}
    by_name = {name: form for name, form in fitting.items() if form is not None}
    return Formats(section.format, by_name, [name for name in kept if name not in by_name])


class QuantisedMatrix:
    """One quantised parameter: its format, its master weights and, where they are learned, its scales.

    Attributes:
        scales: Views of `QuantisedWeights.stored`; None where the format computes them.
    """

    def __init__(self, name: str, parameter: nn.Parameter, form: Format) -> None:
        self.name, self.parameter, self.form = name, parameter, form
        self.master = parameter.detach().clone()
        self.scales: Scales | None = None

    def round(self) -> None:
        """Write the file's values of the master weights into the parameter."""
        fake_quantise_into(self.parameter.data, self.master, self.form.name, self.scales)

    def fields(self) -> dict[str, torch.Tensor]:
        """Return the scales as the file holds them."""
        return self.form.store(self.form.first(self.master) if self.scales is None else self.scales)


class LearnedScales:
    """Learned scales of many matrices in one tensor, so that a step updates and rounds them together.

    Args:
        matrices: Quantised parameters whose scales are learned.

    Attributes:
        values: fp32 [all blocks], what Adam updates: by format all scales, then all minima.
        stored: fp32 [all blocks], the values rounded to those of a file.
        gradient: fp32 [all blocks], by the stored values.
    """

    def __init__(self, matrices: list[QuantisedMatrix]) -> None:
        first = {id(matrix): matrix.form.first(matrix.master) for matrix in matrices}
        self.forms: list[tuple[Format, list[slice]]] = []
        self._places: list[tuple[QuantisedMatrix, int, slice]] = []
        parts: list[torch.Tensor] = []
        for form in dict.fromkeys(matrix.form for matrix in matrices):
            own = [matrix for matrix in matrices if matrix.form is form]
            slices = []
            for part in range(1 + form.has_minimum):
                begin = end = sum(map(len, parts))
                for matrix in own:
                    scales = first[id(matrix)][part]
                    assert scales is not None
                    parts.append(scales.flatten())
                    self._places.append((matrix, part, slice(end, end + len(parts[-1]))))
                    end += len(parts[-1])
                slices.append(slice(begin, end))
            self.forms.append((form, slices))
        self.values = torch.cat(parts) if parts else torch.empty(0)
        self.stored, self.gradient, self.mean, self.square = (torch.zeros_like(self.values) for _ in range(4))
        self.steps = 0
        for matrix in matrices:
            matrix.scales = self.of(matrix, self.stored)
        self.matrices = [(matrix, self.of(matrix, self.gradient), self.of(matrix, self.stored)) for matrix in matrices]

    def of(self, matrix: QuantisedMatrix, tensor: torch.Tensor) -> Scales:
        """Return the part of one of the tensors that belongs to a matrix."""
        shape = (*matrix.master.shape[:-1], -1)
        return Scales(*(tensor[place].view(shape) for own, _, place in self._places if own is matrix))

    def store(self) -> None:
        """Round the values to those of a file."""
        for form, slices in self.forms:
            snapped = form.snap(Scales(*(self.values[place] for place in slices)))
            for place, part in zip(slices, snapped, strict=False):
                if part is not None:
                    self.stored[place] = part

    def step(self, rate: float) -> None:
        """Make one step of Adam; nothing changes where a gradient is not finite."""
        self.steps += 1
        gradient = self.gradient * self.values  # by log |scale|
        finite = gradient.sum().isfinite()
        gradient = torch.where(finite, gradient, 0.0)
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.lerp_(gradient * gradient, 1 - BETAS[1])
        mean = self.mean / (1 - BETAS[0] ** self.steps)
        square = self.square / (1 - BETAS[1] ** self.steps)
        self.values.mul_(torch.exp(-rate * finite * mean / (square.sqrt() + EPS)))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs, by name."""
        return {"scales": self.values, "mean": self.mean, "square": self.square}


class QuantisedWeights:
    """The quantised parameters of one model.

    Args:
        model: The student, bare; its parameters hold the file's values from now on.
        formats: Format of each parameter.
        learned: Learn the scales of blocks in less than 8 bits.

    Attributes:
        matrices: The quantised parameters, by name.
        scales: The learned scales.
    """

    def __init__(self, model: nn.Module, formats: Formats, *, learned: bool) -> None:
        parameters = dict(model.named_parameters())
        if wrong := next((name for name in formats.by_name if parameters[name].dtype != torch.float32), None):
            raise ValueError(
                f"student.quantise: expected weights in float32, got {parameters[wrong].dtype} for {wrong}; set "
                "student.dtype to float32"
            )
        self.formats = formats
        self.matrices = {
            name: QuantisedMatrix(name, parameters[name], FORMATS[form]) for name, form in formats.by_name.items()
        }
        self._parameters: list[torch.Tensor] = [matrix.parameter for matrix in self.matrices.values()]
        self._masters = [matrix.master for matrix in self.matrices.values()]
        self.scales = LearnedScales([m for m in self.matrices.values() if learned and m.form.is_learned])
        self.after_start()

    @torch.no_grad()
    def start_from(self, start: Mapping[str, Rounded]) -> None:
        """Take master weights and learned scales from a rounding such as GPTQ's."""
        for name, rounded in start.items():
            matrix = self.matrices[name]
            assert matrix.scales is not None, "a format that computes its scales would replace those of the start"
            matrix.master.copy_(rounded.weight)
            for own, part in zip(self.scales.of(matrix, self.scales.values), rounded.scales, strict=True):
                if own is not None and part is not None:
                    own.copy_(part)
        self.after_start()

    @torch.no_grad()
    def after_start(self) -> None:
        """Take the first process's weights on every process, and round them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for tensor in (self.scales.values, *(matrix.master for matrix in self.matrices.values())):
                torch.distributed.broadcast(tensor, 0)
        self._round()

    def _round(self) -> None:
        self.scales.store()
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
        given = [entry for entry in scales.matrices if entry[0].parameter.grad is not None]
        if len(given) < len(scales.matrices):
            scales.gradient.zero_()  # of a step that the guard skips
        for matrix, gradients, stored in given:
            gradient = matrix.parameter.grad
            assert gradient is not None and gradient.is_contiguous()
            learned_gradients(matrix.master, stored, gradient, matrix.form.name, out=(gradient, gradients))
        if given:
            scales.step(SCALE_RATE * learning_rate)
        torch._foreach_copy_(self._parameters, self._masters)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the updated weights as masters, and round them into the parameters."""
        torch._foreach_copy_(self._masters, self._parameters)
        self._round()

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs to go on with the same bits; the weights' file holds the rounded values."""
        tensors = {f"master.{name}": matrix.master for name, matrix in self.matrices.items()} | self.scales.state()
        tensors["steps"] = torch.tensor([self.scales.steps])
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / STATE_FILE)
        self.saved().write(folder)

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            RunError: It has no quantised weights, or those of another student.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            raise RunError(f"--resume: {path} is missing, which a quantised student's checkpoint has")
        own = {f"master.{name}": matrix.master for name, matrix in self.matrices.items()} | self.scales.state()
        with safe_open(str(path), framework="pt") as file:
            if wrong := sorted({*own, "steps"} ^ set(file.keys())):
                raise RunError(f"--resume: {path}: {wrong[0]} exists in only one of checkpoint and student")
            for name, tensor in own.items():
                tensor.copy_(file.get_tensor(name))
            self.scales.steps = int(file.get_tensor("steps"))
        self._round()

    def saved(self) -> SavedBlocks:
        """Return formats and scales, by which `distill export` finds the file's blocks again."""
        fields = {name: matrix.fields() for name, matrix in self.matrices.items()}
        return SavedBlocks(self.formats.main, dict(self.formats.by_name), fields)

    def __str__(self) -> str:
        count = sum(matrix.master.numel() for matrix in self.matrices.values())
        kinds = sorted(set(self.formats.by_name.values()))
        bits = 8 * sum(m.form.bytes_of(m.master) for m in self.matrices.values()) / max(count, 1)
        return (
            f"{len(self.matrices)} matrices of {count / 1e6:,.1f} M weights in {', '.join(kinds)}: {bits:.2f} bits each"
        )


def quantise_student(model: nn.Module, formats: Formats, *, learned: bool = False) -> QuantisedWeights:
    """Have a model compute with the weights of a quantised file from now on.

    Args:
        model: A student in float32 on its device, all of whose weights are trained, held whole by this process.
        formats: Format of each quantised parameter, as `formats_of` returns.
        learned: Learn the scales of blocks in less than 8 bits; otherwise they follow from the weights of each block.

    Raises:
        ValueError: A parameter is not in float32.
    """
    weights = QuantisedWeights(bare(model), formats, learned=learned)
    bare(model).__dict__[QUANTISED] = weights
    return weights


def read_saved(folder: Path) -> SavedBlocks | None:
    """Return formats and scales of a folder's weights; None where they are not quantised.

    Raises:
        ValueError: The files are not ours.
    """
    path = folder / FORMAT_FILE
    if not path.is_file():
        return None
    found = read_json(path, FORMAT_FILE)
    tensors, main = found.get("tensors"), found.get("format")
    if not isinstance(tensors, dict) or not all(form in FORMATS for form in (main, *tensors.values())):
        raise ValueError(f"{path}: expected a format ({', '.join(FORMATS)}), and one for each weight")
    if not (folder / SCALES_FILE).is_file():
        raise ValueError(f"{folder / SCALES_FILE}: expected the scales of the weights; the file is missing")
    scales: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tensors}
    for key, part in load_file(folder / SCALES_FILE).items():
        name, _, field = key.rpartition(":")
        scales[name][field] = part
    return SavedBlocks(str(main), tensors, scales)
