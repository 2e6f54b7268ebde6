"""Rounding of weights without training: to nearest, by importance, error-compensated (GPTQ).

A linear layer with inputs `x` computes `W x`; rounding `W` to `Q` costs `tr((W - Q) H (W - Q)^T)` with `H = sum x x^T`
over calibration tokens. `nearest` ignores `H`; `importance` chooses each block's scale by its diagonal; `gptq` (Frantar
et al., 2022, arXiv 2210.17323) rounds one column after another and moves the others so that they make up for its error:

    q_j = round(w_j),   w_k -= (w_j - q_j) U[j, k] / U[j, j] for the columns k after j,   U = cholesky(H^-1)^T

Columns are taken by falling `H[j, j]`, with scales chosen beforehand. Decoder layers follow each other: each sees what
the rounded layers before it compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from distill_kernels.quantisation.formats import FORMATS, reference_fake_quantise
from distill_kernels.quantisation.number_format import NumberFormat, Scales
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.models.head import decoder_of, unwrap_peft
from distill.models.layers import find_layers
from distill.models.precision.quantised_formats import plain_name

Method = Literal["nearest", "importance", "gptq"]
DAMPING = 0.01  # added to the diagonal of H, relative to its mean
MOST_DAMPINGS = 20  # tenfold steps of the damping until a matrix counts as one that has no inverse
COLUMNS = 128  # rounded before the rest of the matrix is moved


class Group:
    """Linear layers that read the same input, and the sum of its outer products over calibration rows."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.linears: dict[str, nn.Linear] = {}
        self.hessian = torch.zeros(size, size, device=device)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Add the outer products of an input [..., K]."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        with torch.autocast(rows.device.type, enabled=False):
            self.hessian.addmm_(rows.t(), rows)
        self.tokens += len(rows)


class Rounded(NamedTuple):
    """A matrix before rounding, and the scales to round it by.

    Attributes:
        weight: fp32 [N, K]; its nearest values are the result.
        scales: fp32 [N, K / block].
        form: Format, with the range of the matrices that were rounded together.
    """

    weight: torch.Tensor
    scales: Scales
    form: NumberFormat

    def on_host(self) -> Rounded:
        """Return a copy in host memory, where those of a whole model leave the device to what follows."""
        return self._replace(weight=self.weight.cpu(), scales=self.scales.map(torch.Tensor.cpu))

    def values(self) -> torch.Tensor:
        return reference_fake_quantise(self.weight, self.form, self.scales)


def compensate(weight: torch.Tensor, hessian: torch.Tensor, form: NumberFormat, scales: Scales) -> torch.Tensor:
    """Return a matrix whose nearest values are GPTQ's rounding of `weight`.

    Args:
        weight: weight of the layer, [N, K].
        hessian: fp32 [K, K].
        form: Format to round to.
        scales: fp32 [N, K / block].
    """
    importance = hessian.diagonal().clone()
    order = importance.argsort(descending=True, stable=True)
    w = weight.float()[:, order].clone()  # [N, K], columns by importance
    steps, minima = (
        None if part is None else part.repeat_interleave(form.columns(weight), -1)[:, order]
        for part in form.snap(scales)
    )
    assert steps is not None
    # formats with minima store `code * step - minimum`: with the minimum added, rounding is to multiples of the step
    if minima is not None:
        w += minima
    inverse = torch.where(steps == 0, 0.0, 1.0 / steps)
    upper = _inverse_factor(hessian[order][:, order])
    # A column's error moves the rest of its block at once. What follows the block is moved once for all its columns, by
    # one product: column by column each would read and write the whole matrix.
    for start in range(0, w.shape[1], COLUMNS):
        end = min(start + COLUMNS, w.shape[1])
        errors = torch.empty_like(w[:, start:end])
        for j in range(start, end):
            column = w[:, j]
            q = form.codes.clamped(column * inverse[:, j]) * steps[:, j]
            errors[:, j - start] = (column - q) / upper[j, j]
            if j + 1 < end:
                w[:, j + 1 : end] -= errors[:, j - start, None] * upper[j, j + 1 : end]
        w[:, end:] -= errors @ upper[start:end, end:]
    # columns as they were; they are not rounded yet: `w` stopped moving at each column just before it was rounded
    back = torch.empty_like(w)
    back[:, order] = w if minima is None else w - minima
    return back


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped inverse, with more damping where it is singular."""
    damping = DAMPING * hessian.diagonal().mean().clamp_min(1e-12)
    eye = torch.eye(len(hessian), device=hessian.device)
    # a sum of outer products of finite inputs needs a few tenfold steps; after all of them damping alone is left
    for _ in range(MOST_DAMPINGS):
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * eye)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
        damping *= 10
    raise ValueError("its matrix of inputs has no inverse")


def _require_finite(group: Group) -> None:
    if not bool(group.hessian.isfinite().all()):
        name = next(iter(group.linears))
        raise ValueError(
            f"student.quantise.start: expected finite inputs of {name}, got NaN or infinity: a weight before it is "
            "damaged or too large"
        )


def _round_group(group: Group, formats: Mapping[str, str], method: Method) -> dict[str, Rounded]:
    found = {}
    _require_finite(group)
    importance = group.hessian.diagonal() / max(group.tokens, 1)
    for kind in {formats[name] for name in group.linears}:
        names = [name for name in group.linears if formats[name] == kind]
        weights = [group.linears[name].weight.detach().float() for name in names]
        weight = torch.cat(weights)  # rows are independent: siblings are rounded as one matrix
        form = FORMATS[kind].fitted(weights)
        scales = form.search(weight, importance.clamp_min(1e-12))
        try:
            moved = compensate(weight, group.hessian, form, scales) if method == "gptq" else weight
        except ValueError as error:
            raise ValueError(f"student.quantise.start: gptq cannot round {names[0]}: {error}") from None
        sizes = [len(part) for part in weights]
        parts = (() if part is None else part.split(sizes) for part in scales)
        for name, part, *own in itertools.zip_longest(names, moved.split(sizes), *parts):
            found[name] = Rounded(part.contiguous(), Scales(*own), form)
    return found


class _Calls:
    """Inputs of every decoder layer, recorded on the way through the model."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self.hidden: list[torch.Tensor] = []
        self.arguments: list[list[dict[str, object]]] = []  # by batch, then layer
        self._outputs: torch.Tensor | None = None
        handles = [layer.register_forward_pre_hook(self._before(n), with_kwargs=True) for n, layer in enumerate(layers)]
        handles += [layer.register_forward_hook(self._after) for layer in layers]
        try:
            for batch in batches:
                decoder_of(model)(**batch, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> None:
            kwargs = dict(kwargs)
            given = args[0] if args else kwargs.pop("hidden_states")
            assert isinstance(given, torch.Tensor)
            if number == 0:
                self.hidden.append(given)
                self.arguments.append([])
            elif not bool(given.isfinite().all()):
                raise ValueError(
                    f"student.quantise.start: expected finite hidden states of calibration rows, got NaN or infinity "
                    f"from decoder layer {number - 1}: the model is damaged, or its weights are too large"
                )
            # layers are run one after another below, so that each must get exactly what the one before returned
            elif self._outputs is None or not torch.equal(given, self._outputs) or len(args) > 1:
                raise ValueError(
                    "student.quantise.start: gptq needs decoder layers that hand hidden states from one to the next; "
                    f"those of {type(layer).__name__} do not; set start: nearest"
                )
            self.arguments[-1].append(kwargs)

        return hook

    def _after(self, layer: nn.Module, args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        self._outputs = _first(output)


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def round_weights(
    model: nn.Module, formats: Mapping[str, str], batches: Iterable[Mapping[str, torch.Tensor]], method: Method = "gptq"
) -> dict[str, Rounded]:
    """Round the linear layers of a model's decoder layers that `formats` names; the model gets the rounded weights.

    Args:
        model: A causal language model of transformers, on its device.
        formats: Format of each parameter, by name in the bare model; others than those of linear layers are left.
        batches: `input_ids` (and `position_ids`) of calibration rows, int64 [B, S] on the model's device.
        method: `importance` or `gptq`.

    Returns:
        The matrices before rounding and their scales, by name, in host memory.

    Raises:
        ValueError: The decoder's layers do not form a plain sequence, or there are no rows.
    """
    model = unwrap_peft(model)
    prefix, layers = find_layers(model)
    found: dict[str, Rounded] = {}
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"student.quantise.start: expected finite weights, got NaN or infinity in {name}")
    with eval_mode(model):
        calls = _Calls(model, layers, batches)
        if not calls.hidden:
            raise ValueError("student.quantise.start: gptq needs rows of training data to calibrate on, got none")
        for number, layer in enumerate(layers):
            wanted = {
                name: module
                for part, module in layer.named_modules()
                if (name := f"{prefix}.{number}.{plain_name(part)}.weight") in formats and isinstance(module, nn.Linear)
            }
            for group in _groups_of(layer, wanted, calls, number):
                with torch.autocast(group.hessian.device.type, enabled=False):
                    found |= _round_group(group, formats, method)
                for name in group.linears:
                    wanted[name].weight.copy_(found[name].values())
                    found[name] = found[name].on_host()
            # once more, with the rounded weights: these are the inputs of the next layer
            for row, hidden in enumerate(calls.hidden):
                calls.hidden[row] = _first(layer(hidden, **calls.arguments[row][number]))
    return found


def _groups_of(layer: nn.Module, wanted: Mapping[str, nn.Linear], calls: _Calls, number: int) -> list[Group]:
    """Run a layer on all calibration rows; returns its linear layers by their inputs."""
    groups: dict[str, Group] = {}  # by the first name of a group
    leader: dict[str, str] = {}  # the first of the layers with this input, set by the first row
    last: list[tuple[torch.Tensor, str]] = []  # input of the call before, and the first layer that read it

    def hook(name: str) -> Callable[..., None]:
        def see(linear: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            assert isinstance(linear, nn.Linear)
            # siblings (queries, keys, values) are called with one and the same tensor; the first one adds its products
            # for all
            if not last or args[0] is not last[0][0]:
                last[:] = [(args[0], name)]
            if name not in leader:
                leader[name] = last[0][1]
                if leader[name] == name:
                    groups[name] = Group(linear.in_features, linear.weight.device)
                groups[leader[name]].linears[name] = linear
            if leader[name] == name:
                groups[name].add(args[0])

        return see

    handles = [linear.register_forward_pre_hook(hook(name)) for name, linear in wanted.items()]
    try:
        for row, hidden in enumerate(calls.hidden):
            layer(hidden, **calls.arguments[row][number])
    finally:
        for handle in handles:
            handle.remove()
    return list(groups.values())


def calibration_batches(
    rows: Sequence[Mapping[str, Sequence[int]]], tokens: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return evenly spaced rows of a data set with at least so many tokens, each as a batch on `device`.

    Args:
        rows: Data set of `input_ids` and, where documents share a row, `position_ids`.
        tokens: Number of tokens; all rows where there are fewer.
        device: Device of the model.
    """
    if not len(rows):
        return []
    step = max(len(rows) * len(rows[0]["input_ids"]) // tokens, 1)
    batches: list[dict[str, torch.Tensor]] = []
    seen = 0
    for number in (number for offset in range(step) for number in range(offset, len(rows), step)):
        if seen >= tokens:
            break
        row = rows[number]
        named = {name: row[name] for name in ("input_ids", "position_ids") if name in row}
        batches.append(
            {name: torch.as_tensor(ids, dtype=torch.int64, device=device)[None] for name, ids in named.items()}
        )
        seen += len(row["input_ids"])
    return batches
