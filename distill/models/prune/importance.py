"""Choice of the parts of a teacher that a student keeps: activations and losses on rows of the training data.

Widths (Muralidharan et al., 2024, arXiv 2407.14679; Sreenivas et al., 2024, arXiv 2408.11796): a unit's score is its
activation, aggregated over tokens by `metric` (`scores.py`):

    hidden channel      |output of a norm|, summed over all norms of hidden states
    head                Euclidean norm of its output, as the output projection reads it
    MLP column          |product of gate and up|, as the down projection reads it

On SmolLM2-135M-Instruct (GSM8K, KL before training by `l2`, `mean`): 468 of 576 channels 1.64, 1.68; 2 of 3 key and
value heads 1.02, 1.37; 1024 of 1536 columns 0.47, 0.43. Scores times the norms of the weights that read them (columns
0.44, heads 1.41 by `l2`) are no better overall. Experts and their columns are scored by the tokens that are routed to
them (`experts.py`).

Key and value heads count by the sum over the heads that share them. Layers: the forward KL from the full teacher
without each layer, on the calibration rows; the layer without which it is smallest goes, and the rest is measured
again. The harm of removing a layer mostly grows as others go: a layer whose last measurement is larger than a new one
is not measured again in that round. Layers go first, and widths are chosen by what the remaining ones compute.

Everything is measured row by row, in the teacher's dtype, without gradients; full logits are never held.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn
from transformers import PreTrainedConfig

from distill.core.eval_mode import eval_mode
from distill.core.labels import IGNORE_INDEX
from distill.models.head import LogitTransform, decoder_of, find_head, probe_logits, read_head, unwrap_peft
from distill.models.layers import find_layers, layer_indices
from distill.models.prune.experts import expert_statistics, largest_experts
from distill.models.prune.narrow import Selection
from distill.models.prune.pruning import trial_ids
from distill.models.prune.scores import ImportanceScore
from distill.models.prune.width_layout import WidthLayout
from distill.models.prune.width_trial import axes_of, verified_layout
from distill.models.prune.widths import Widths, target_widths, widths_of
from distill.models.routing import routing_of
from distill.recipe import FromTeacher, Importance
from distill.recipe.from_teacher import COLUMN_AXES

log = logging.getLogger(__name__)
CalibrationRow = Mapping[str, Sequence[int]]  # `input_ids`, `labels` and `position_ids`, of one length
# hidden states [1, S, hidden], and what else the layer before returned: some families hand it on from layer to layer
LayerInput = tuple[torch.Tensor, tuple[object, ...]]


class PruneShape(NamedTuple):
    """Shape that a teacher is cut to.

    Attributes:
        layers: number of layers.
        widths: Widths of every layer.
        layout: Layout of the teacher's parameters for the axes that are cut; None where none is.
    """

    layers: int
    widths: Widths | None
    layout: WidthLayout | None


def shape_for(cut: FromTeacher, config: PreTrainedConfig) -> PruneShape:
    """Return the shape that `student.from_teacher` gives a teacher of a configuration.

    Raises:
        ValueError: a shape that the teacher cannot be cut to.
    """
    layers = len(layer_indices(cut, config.get_text_config().num_hidden_layers))
    widths = target_widths(cut, config)
    if widths is None:
        return PruneShape(layers, None, None)
    axes = axes_of(widths_of(config), widths)
    return PruneShape(layers, widths, verified_layout(config, axes) if axes else None)


def select_parts(model: nn.Module, cut: FromTeacher, rows: Sequence[CalibrationRow]) -> Selection:
    """Choose the parts of a teacher that `student.from_teacher` keeps.

    Deterministic: ties go to the lower index.

    Args:
        model: The teacher, not patched, not sharded; not changed.
        cut: Number of parts to keep on each axis, with `importance` or its defaults.
        rows: Rows of the training data; the first `importance.rows` are read.

    Raises:
        ValueError: no rows, or a shape that the teacher cannot be cut to.
    """
    model = unwrap_peft(model)
    settings = cut.chosen_by
    config = model.config
    assert isinstance(config, PreTrainedConfig)
    shape = shape_for(cut, config)
    rows = [row for row in rows if row["input_ids"]][: settings.rows]
    if not rows:
        raise ValueError("student.from_teacher: expected rows of training data, by which parts are chosen, got none")
    layers = layer_indices(cut, config.get_text_config().num_hidden_layers)
    text = config.get_text_config()
    shared = getattr(text, "num_kv_shared_layers", None) or "shared" in (getattr(text, "indexer_types", None) or ())
    if cut.keep is None and cut.layers is not None and shared:
        raise ValueError(
            f"student.from_teacher.layers: {type(config).__name__} has layers that take keys and values or selected "
            "tokens of others, so that the loss without each of them cannot be measured; name the layers by keep"
        )
    with eval_mode(model), torch.no_grad(), LayerTrial(model) as trial:
        if cut.keep is None and cut.layers is not None:
            layers = _choose_layers(trial, rows[: settings.layer_rows], shape.layers)
        if shape.widths is None or shape.layout is None:
            return Selection(layers, None, {}, {}, {})
        trial.dropped = set(range(trial.total)) - set(layers)
        scores = _measure(model, trial, shape.layout, rows, settings)
    routing = routing_of(config.get_text_config())
    groups = 1 if routing is None else routing.groups
    return _by_scores(layers, scores, shape.widths, shape.layout, groups)


class LayerTrial:
    """A model whose layers can be left out of its forward, and whose forward may start at any layer.

    A context manager: inside it the layers' forwards are replaced.

    Attributes:
        total: number of layers.
        dropped: numbers of layers whose output is their input.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.decoder = decoder_of(model)
        self.layers = find_layers(model)[1]
        self.total = len(self.layers)
        self.dropped: set[int] = set()
        self._others = [0] * self.total  # by layer, outputs beside hidden states; -1 where there is no tuple
        self._given: LayerInput | None = None  # the last layer's output
        self._start: tuple[int, LayerInput] | None = None
        self._inputs: dict[int, LayerInput] | None = None
        self._head = read_head(find_head(model))
        transform: LogitTransform = probe_logits(model, "teacher")
        scale, softcap = transform
        self._loss = FusedDistillationLoss(
            [LossTerm("forward_kl", 1.0)],
            student_logit_scale=scale,
            teacher_logit_scale=scale,
            student_softcap=softcap,
            teacher_softcap=softcap,
        )

    def __enter__(self) -> LayerTrial:
        ids = trial_ids(self.model.config, 2)[0].tolist()
        self._own = [layer.__dict__.get("forward") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            layer.__dict__["forward"] = self._forward_of(number, layer.forward)
        self.hidden({"input_ids": ids})  # whether layers return tuples
        return self

    def __exit__(self, *unused: object) -> None:
        for layer, own in zip(self.layers, self._own, strict=True):
            del layer.__dict__["forward"]
            if own is not None:
                layer.__dict__["forward"] = own

    def _forward_of(self, number: int, forward: Callable[..., object]) -> Callable[..., object]:
        def patched(hidden_states: torch.Tensor, *arguments: object, **named: object) -> object:
            if self._start is not None and number <= self._start[0]:
                hidden_states, before = self._start[1]
            else:
                before = () if self._given is None else self._given[1]
            if self._inputs is not None:
                self._inputs[number] = hidden_states, before
            if number in self.dropped or (self._start is not None and number < self._start[0]):
                self._given = hidden_states, before
                count = self._others[number]
                return hidden_states if count < 0 else (hidden_states, *(before or (None,) * count))
            output = forward(hidden_states, *arguments, **named)
            self._others[number] = len(output) - 1 if isinstance(output, tuple) else -1
            states, *others = output if isinstance(output, tuple) else (output,)
            self._given = states, tuple(others)
            return output

        return patched

    def hidden(
        self,
        row: CalibrationRow,
        start: tuple[int, LayerInput] | None = None,
        inputs: dict[int, LayerInput] | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states of a row, [1, S, hidden].

        Args:
            start: a layer and its input; layers before it are not computed.
            inputs: filled with every layer's input.
        """
        self._start = start
        self._inputs = inputs
        device = self._head.weight.device
        ids = torch.tensor(row["input_ids"], device=device)[None]
        given = (
            {"position_ids": torch.tensor(row["position_ids"], device=device)[None]} if "position_ids" in row else {}
        )
        try:
            return self.decoder(input_ids=ids, use_cache=False, **given).last_hidden_state
        finally:
            self._start = self._inputs = self._given = None

    def divergence(self, hidden: torch.Tensor, full: torch.Tensor, row: CalibrationRow) -> torch.Tensor:
        """Return the sum of KL(full || hidden) over a row's trained positions, float64 [], in nats."""
        where = positions_of(row)
        index = torch.tensor(where, device=hidden.device)
        both = [states[0].index_select(0, index) for states in (hidden, full)]
        weight, bias, _ = self._head
        loss = self._loss(both[0], weight, both[1], weight, student_bias=bias, teacher_bias=bias)
        return loss.double() * len(where)


def positions_of(row: CalibrationRow) -> list[int]:
    """Return the positions of a row whose next token is trained on; where none is, those with one in their document."""
    labels = row.get("labels")
    length = len(row["input_ids"])
    trained = [] if labels is None else [at for at in range(length - 1) if labels[at + 1] != IGNORE_INDEX]
    places = row.get("position_ids", range(length))
    return trained or [at for at in range(length - 1) if places[at + 1] != 0] or [length - 1]


def _choose_layers(trial: LayerTrial, rows: Sequence[CalibrationRow], count: int) -> list[int]:
    """Return the layers that stay when all but `count` are removed one after another."""
    tokens = sum(len(positions_of(row)) for row in rows)
    trial.dropped = set()
    entering: list[dict[int, LayerInput]] = [{} for _ in rows]
    full = [trial.hidden(row, inputs=inputs) for row, inputs in zip(rows, entering, strict=True)]
    kept = list(range(trial.total))
    loss = 0.0
    harm = [-math.inf] * trial.total

    def without(number: int) -> float:
        trial.dropped.add(number)
        sums = [
            trial.divergence(trial.hidden(row, (number, inputs[number])), states, row)
            for row, inputs, states in zip(rows, entering, full, strict=True)
        ]
        trial.dropped.discard(number)
        return float(torch.stack(sums).sum()) / tokens

    while len(kept) > count:
        fresh: set[int] = set()
        while (best := min(kept, key=lambda number: (harm[number], number))) not in fresh:
            harm[best] = without(best) - loss
            fresh.add(best)
        loss += harm[best]
        kept.remove(best)
        trial.dropped.add(best)
        if len(kept) > count:
            for row, inputs in zip(rows, entering, strict=True):
                later: dict[int, LayerInput] = {}
                trial.hidden(row, (best, inputs[best]), later)
                inputs.update({number: states for number, states in later.items() if number > best})
    return kept


class Scores(NamedTuple):
    """Scores of a teacher's parts on the calibration rows, float64, on the CPU.

    Attributes:
        hidden: Scores of hidden channels, [hidden]; None where they are not cut.
        heads: Scores of heads, by layer.
        columns: Scores of columns, [experts, columns] by module, [1, columns] of a dense or shared MLP.
        experts: Scores of experts, by layer.
        shares: Shares by the name of a norm over a cut axis: `ImportanceScore.share`, divided by the tokens.
    """

    hidden: torch.Tensor | None
    heads: dict[int, torch.Tensor]
    columns: dict[str, torch.Tensor]
    experts: dict[int, torch.Tensor]
    shares: dict[str, torch.Tensor]


def _measure(
    model: nn.Module, trial: LayerTrial, layout: WidthLayout, rows: Sequence[CalibrationRow], settings: Importance
) -> Scores:
    metric = settings.metric
    norms = {name: (module, block.axis) for name, module, block in layout.norms(model)}
    heads = layout.readers(model, "heads")
    columns = {place: name for axis in COLUMN_AXES for place, name in layout.readers(model, axis).items()}
    found = {name: ImportanceScore() for name in (*norms, *heads.values(), *columns.values())}
    with contextlib.ExitStack() as hooks:
        for name, (module, _) in norms.items():
            hooks.enter_context(_hooked(module, _norm_hook(found[name], metric)))
        for name in heads.values():
            unit = layout.dims[f"{name}.weight"][-1][0].unit
            hooks.enter_context(_hooked(model.get_submodule(name), _reader_hook(found[name], unit, metric)))
        for name in columns.values():
            hooks.enter_context(_hooked(model.get_submodule(name), _reader_hook(found[name], None, metric)))
        routed = hooks.enter_context(expert_statistics(model, layout, metric))
        for row in rows:
            trial.hidden(row)
    values = {name: score.value(metric) for name, score in found.items() if score.rows}  # of layers that stay
    hidden = [values[name] for name, (_, axis) in norms.items() if axis == "hidden" and name in values]
    of_mlps = {place: values[name][None] for place, name in columns.items() if name in values}
    experts: dict[int, torch.Tensor] = {}
    for name, each in routed.items():
        layer = layout.layer_of(name + ".")
        assert layer is not None
        experts[layer] = each.scores(settings.experts)
        if name in layout.mlps:
            none = torch.zeros(layout.mlps[name].total, dtype=torch.float64)
            of_mlps[name] = torch.stack([score.value(metric) if score.rows else none for score in each.columns])
    shares = {name: found[name].share for name in norms}
    return Scores(
        torch.stack(hidden).sum(0) if hidden else None,
        {int(place.removeprefix(layout.prefix)): values[name] for place, name in heads.items() if name in values},
        of_mlps,
        experts,
        {name: share.cpu() / found[name].tokens for name, share in shares.items() if share is not None},
    )


@contextlib.contextmanager
def _hooked(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _norm_hook(score: ImportanceScore, metric: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        score.add(output.flatten(0, -2), metric)
        score.add_share(arguments[0].flatten(0, -2))

    return hook


def _reader_hook(score: ImportanceScore, unit: int | None, metric: str) -> Callable[..., None]:
    """Return a hook that adds the inputs of a linear layer, or the norms of every `unit` of them."""

    def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        read = arguments[0].flatten(0, -2)
        if unit is not None:
            read = torch.linalg.vector_norm(read.unflatten(-1, (-1, unit)), dim=-1, dtype=torch.float32)
        score.add(read, metric)

    return hook


def _by_scores(layers: Sequence[int], scores: Scores, widths: Widths, layout: WidthLayout, groups: int) -> Selection:
    """Return the parts with the largest scores; of experts as many in each of `groups`."""
    full = layout.full
    hidden = None if widths.hidden == full.hidden else _largest(scores.hidden, widths.hidden)
    parts: dict[str, dict[int, Sequence[int]]] = {}
    if widths.experts != full.experts:
        found = {n: scores.experts[n] for n in layers if n in scores.experts}
        parts["experts"] = {n: largest_experts(score, widths.experts, groups) for n, score in found.items()}
    if (widths.heads, widths.kv_heads) != (full.heads, full.kv_heads):
        parts |= {"heads": {}, "kv_heads": {}}
        for number in layers:
            if number in scores.heads:
                heads, kv_heads = _largest_heads(scores.heads[number], full, widths)
                parts["heads"][number] = heads
                parts["kv_heads"][number] = kv_heads
    columns: dict[str, list[list[int]]] = {}
    stays = parts.get("experts", {})
    unreached = 0
    for name, each in scores.columns.items():
        axis, total, experts = layout.mlps[name]
        kept = total * getattr(widths, axis) // getattr(full, axis)
        columns[name] = [_largest(row, kept) for row in each]
        layer = layout.layer_of(name + ".")
        assert layer is not None
        unreached += sum(not bool(each[n].any()) for n in stays.get(layer, range(experts))) if experts else 0
    if unreached:
        log.warning(
            "no token of the calibration rows reaches %d of the experts, which keep their first columns; raise "
            "student.from_teacher.importance.rows",
            unreached,
        )
    selection = Selection(list(layers), hidden, parts, columns, {})
    return selection._replace(norms=_norm_factors(scores, selection, layout))


def _largest(scores: torch.Tensor | None, count: int) -> list[int]:
    """Return the indices of the largest scores, ascending; of equal ones the lower."""
    assert scores is not None
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _largest_heads(scores: torch.Tensor, full: Widths, widths: Widths) -> tuple[list[int], list[int]]:
    """Return heads, and key and value heads, of one layer; each of these with its best heads."""
    squares = scores.square().view(full.kv_heads, full.group)
    best = squares.sort(dim=1, descending=True, stable=True)
    totals = best.values[:, : widths.group].sum(1)
    kv_heads = _largest(totals, widths.kv_heads)
    heads = [kv * full.group + n for kv in kv_heads for n in sorted(best.indices[kv, : widths.group].tolist())]
    return heads, kv_heads


def _norm_factors(scores: Scores, selection: Selection, layout: WidthLayout) -> dict[str, float]:
    """Return for each norm over cut channels the ratio of the root mean squares over the kept and over all."""
    factors = {}
    for name, share in scores.shares.items():
        (axis,) = {block.axis for blocks in layout.dims[f"{name}.weight"] for block in blocks}
        kept = selection.kept(f"{name}.weight", layout).get(axis)
        if kept is not None:
            units = share.view(getattr(layout.full, axis), -1)
            factors[name] = math.sqrt(float(units[list(kept)].mean()))
    return factors
