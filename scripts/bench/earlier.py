"""The figures that an earlier project reported for its kernels, on the same configurations, here.

Each configuration is timed twice: as launched from Python (CUDA events around calls, as that report did: host cost
included), and as device time in a CUDA graph. A PyTorch form's note holds the speed-up reported over such a form and
ours of both kinds. Inputs rotate over more memory than the L2 cache holds where a form is bound by bytes; there the
note also says how many times our bytes that form moves, and the speed-up if our bytes went at a copy's rate: nothing
that reads its inputs and writes its outputs can be faster. Naive attention at these sizes stays in the L2 cache and
occupies few multiprocessors, so bytes say nothing about it.

The report's attention is taken as not causal, its layouts as a model's ([B, T, H, D] seen as [B, H, T, D]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from distill_kernels.attention.flash import flash_attention
from distill_kernels.attention.operands import ScoreSettings
from distill_kernels.attention.reference import reference_attention
from distill_kernels.primitives.decode import decode_attention, reference_decode_attention
from torch.nn.attention.flex_attention import flex_attention

from scripts.bench import adamw, attention, decode, layers
from scripts.bench.harness import Row, copy_bandwidth, graphed, host_microseconds, time_in_turn

OURS, FLEX = "ours", "FlexAttention"
ROTATE_BYTES = 200 << 20
LARGEST_ERROR = 1e-2
Shape = tuple[int, ...]
ATTENTION: dict[Shape, float] = dict(zip(attention.NAIVE_SHAPES, (1.35, 1.70, 2.52, 2.71), strict=True))
DECODE: dict[Shape, float] = dict(zip(decode.EARLIER, (2.13, 1.94, 1.94, 3.94), strict=True))
BIAS_GELU: dict[Shape, float] = {
    (2, 256, 4096): 6.21,
    (2, 512, 4096): 10.55,
    (2, 1024, 4096): 14.36,
    (2, 1024, 16_384): 14.65,
}
ADAMW = {10**6: 1.41, 10 * 10**6: 3.36, 50 * 10**6: 3.45}


class Form(NamedTuple):
    """One way to compute it: a call, the bytes that it moves where nothing stays in a cache, its errors to fp64."""

    run: Callable[[], object]
    moved: int
    errors: dict[str, float]
    in_graph: Callable[[], object] | None = None  # where a graph cannot hold `run`


class Comparison(NamedTuple):
    """One line of the earlier report, built. `forms`: ours, then PyTorch's."""

    forms: dict[str, Form]
    graph_calls: int = 20
    work: float = 0.0  # operations, where they are counted
    by_bytes: bool = True


class Line(NamedTuple):
    """One configuration of the earlier report, and how to build it here."""

    name: str
    reported: float | None
    build: Callable[[], Comparison]


def _relative(made: torch.Tensor, exact: torch.Tensor) -> float:
    return float((made.detach().double() - exact.detach()).norm() / exact.detach().norm())


def _attention(shape: Shape, backward: bool) -> Comparison:
    batch, heads, _, positions, size = shape
    q, k, v, dout = attention.draw(shape, torch.float16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact, _ = reference_attention(wide[0], wide[1], wide[2], ScoreSettings(False, size**-0.5))
    exact_gradients = torch.autograd.grad(exact, wide, dout.double())
    functions = {OURS: lambda q, k, v: flash_attention(q, k, v, causal=False), "naive": decode._naive}
    if q.is_cuda:
        functions[FLEX] = torch.compile(flex_attention, dynamic=False)
    forms = {}
    for label, function in functions.items():
        made = function(*leaves)
        errors = {"out": _relative(made, exact)}
        if backward:
            gradients = torch.autograd.grad(made, leaves, dout)
            pairs = zip(("dq", "dk", "dv"), gradients, exact_gradients, strict=True)
            errors = {name: _relative(one, other) for name, one, other in pairs}

        def forward(f: Callable[..., torch.Tensor] = function) -> torch.Tensor:
            return f(q, k, v)

        def both(f: Callable[..., torch.Tensor] = function) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(f(*leaves), leaves, dout)

        forms[label] = Form(both if backward else forward, q.nbytes * (8 if backward else 4), errors)
    work = 4.0 * batch * heads * positions**2 * size * (3.5 if backward else 1.0)
    return Comparison(forms, work=work, by_bytes=False)


def _bias_gelu(shape: Shape) -> Comparison:
    batch, positions, columns = shape
    layer = layers.layers()["bias_gelu"]
    sets, size = layers._make_sets(layer, (batch * positions, columns))
    functions = {
        OURS: (layer.ours, 2),
        "add, F.gelu": (layer.eager["eager"], 4),
        # x + b, 0.5 x, x / sqrt(2), erf, 1 + : two passes each; the last product three
        "spelled out": (layer.eager["eager, spelled out"], 13),
    }
    forms = {}
    for label, (function, passes) in functions.items():
        errors = {"y": layers._errors(function, layer, *sets[0])["y"]}
        forms[label] = Form(layers._step(function, False, sets, layer.differentiate), passes * size, errors)
    return Comparison(forms, graph_calls=len(sets))


def _update_error(step: Callable[[], object], exact: torch.optim.Optimizer, start: torch.Tensor) -> float:
    """Relative error to fp64 of the first update that `step`, a bound method of an optimizer, makes."""
    step()
    made, right = (opt.param_groups[0]["params"][0].detach() for opt in (step.__self__, exact))  # type: ignore[attr-defined]
    return _relative(made.double() - start, right - start)


def _adamw(elements: int) -> Comparison:
    def build(make: adamw.Make) -> Callable[[], object]:
        torch.manual_seed(0)
        return adamw.build([(elements,)], torch.float32, make)

    loop = adamw.torch_form(foreach=False)
    exact: list[torch.optim.Optimizer] = []

    def in_double(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        wide = [torch.nn.Parameter(p.detach().double()) for p in params]
        for p, narrow in zip(wide, params, strict=True):
            assert narrow.grad is not None
            p.grad = narrow.grad.double()
        exact.append(loop(wide))
        return exact[0]

    step = build(in_double)
    start = exact[0].param_groups[0]["params"][0].detach().clone()
    step()
    steps = {OURS: build(adamw.ours()), "for-loop": build(loop)}
    errors = {label: {"update": _update_error(step, exact[0], start)} for label, step in steps.items()}
    size = 4 * elements
    # p *= decay 2 passes; m.lerp_ 3; v *= beta2 2; v.addcmul_ 3; sqrt, /, + 2 each; p.addcdiv_ 4
    forms = {
        OURS: Form(steps[OURS], 7 * size, errors[OURS]),
        "for-loop": Form(
            steps["for-loop"], 20 * size, errors["for-loop"], build(adamw.torch_form(foreach=False, capturable=True))
        ),
    }
    return Comparison(forms)


def _decode(shape: Shape) -> Comparison:
    batch, heads, kv_heads, slots, size = shape
    cached = 2 * batch * kv_heads * slots * size * 2
    sets = max(2, math.ceil(ROTATE_BYTES / cached))
    q = torch.randn(batch, 1, heads, size, device="cuda", dtype=torch.float16).transpose(1, 2)
    caches = torch.randn(sets, 2, batch, slots, kv_heads, size, device="cuda", dtype=torch.float16).transpose(3, 4)
    lengths = torch.full((batch,), slots, device="cuda", dtype=torch.int32)
    exact = reference_decode_attention(
        q.double(), caches[0, 0].double(), caches[0, 1].double(), lengths, ScoreSettings(True, size**-0.5)
    )
    functions = {OURS: lambda q, k, v: decode_attention(q, k, v, lengths), "naive": decode._naive}
    forms = {}
    for label, function in functions.items():
        turn = itertools.cycle([tuple(pair) for pair in caches])

        def run(f: Callable[..., torch.Tensor] = function, turn: itertools.cycle = turn) -> torch.Tensor:
            return f(q, *next(turn))

        # torch.matmul copies keys and values of several sequences to merge batch and heads: read, written, read
        copies = 3 if label == "naive" and batch > 1 else 1
        forms[label] = Form(run, copies * cached, {"out": _relative(function(q, *caches[0]), exact)})
    return Comparison(forms, graph_calls=sets)


def _note(
    reported: float | None, comparison: Comparison, label: str, times: dict[str, dict[str, float]], copy: float
) -> str:
    """Return the note on a PyTorch row that compares ours; `times`: launch mode, candidate, ms; `copy`: TB/s."""
    ratios = {way: found[label] / found[OURS] for way, found in times.items() if {label, OURS} <= set(found)}
    parts = [] if reported is None else [f"reported {reported:.2f} x"]
    parts += [f"ours {ratio:.2f} x {way}" for way, ratio in ratios.items()]
    way, moved = "in a graph", comparison.forms[OURS].moved
    if comparison.by_bytes and way in ratios:
        rate = moved / times[way][OURS] / 1e9
        most = times[way][label] / (moved / copy / 1e9)
        parts.append(f"ours at {rate:.2f} TB/s, {100 * rate / copy:.0f} % of a copy")
        parts.append(f"this form moves {comparison.forms[label].moved / moved:.2f} x our bytes")
        parts.append(f"our bytes at a copy's rate: {most:.2f} x")
    return "; ".join(parts)


def measure(line: Line, copy: float) -> list[Row]:
    """Rows of one line, launched and in a graph; a form that is wrong is not timed. `copy`: TB/s."""
    comparison = line.build()
    right = {n: f for n, f in comparison.forms.items() if all(e < LARGEST_ERROR for e in f.errors.values())}
    calls = comparison.graph_calls
    times = {"launched": time_in_turn({n: f.run for n, f in right.items()}, rounds=9, calls=10)}
    replays, refusals = {}, {}
    for label, form in right.items():
        try:
            replays[label] = graphed(form.in_graph or form.run, calls=calls)
        except RuntimeError as refusal:
            refusals[label] = f"no graph holds it: {str(refusal).splitlines()[0][:100]}"
    times["in a graph"] = {n: ms / calls for n, ms in time_in_turn(replays, rounds=5, calls=2, settle=1).items()}
    rows = []
    for way, found in times.items():
        for label, form in comparison.forms.items():
            shape = f"{line.name}, {way}"
            if label not in right:
                rows.append(Row("earlier", shape, label, math.nan, error=form.errors, note="wrong, not timed"))
                continue
            if label not in found:
                rows.append(Row("earlier", shape, label, math.nan, error=form.errors, note=refusals[label]))
                continue
            ms, launched = found[label], way == "launched"
            reported = None if label == FLEX else line.reported  # named as a next step, not measured
            note = "" if label == OURS else _note(reported, comparison, label, times, copy)
            if form.in_graph is not None and not launched:
                note += "; capturable=True, as a graph asks"
            rows.append(
                Row(
                    "earlier",
                    shape,
                    label,
                    ms,
                    floor_ratio=ms * copy * 1e9 / comparison.forms[OURS].moved if comparison.by_bytes else None,
                    error=form.errors,
                    tb_per_s=form.moved / ms / 1e9 if comparison.by_bytes else None,
                    tflop_per_s=comparison.work / ms / 1e9 if comparison.work else None,
                    host_us=host_microseconds(form.run, 50) if launched else None,
                    note=note,
                )
            )
    return rows


def lines(quick: bool = False) -> list[Line]:
    """The report; attention's backward, of which it said nothing, is left out where `quick`."""
    found = []
    for shape, reported in ATTENTION.items():
        name = "attention B={} H={} T={} D={} fp16".format(*shape[:2], *shape[3:])
        found.append(Line(f"{name}, forward", reported, partial(_attention, shape, False)))
        if not quick:
            found.append(Line(f"{name}, forward + backward", None, partial(_attention, shape, True)))
    for shape, reported in BIAS_GELU.items():
        name = "bias + GELU B={} T={} O={} fp16, forward".format(*shape)
        found.append(Line(name, reported, partial(_bias_gelu, shape)))
    for elements, reported in ADAMW.items():
        found.append(Line(f"AdamW {elements // 10**6} M fp32, one tensor", reported, partial(_adamw, elements)))
    for shape, reported in DECODE.items():
        name = "decode attention B={} H={} T={} D={} fp16".format(*shape[:2], *shape[3:])
        found.append(Line(name, reported, partial(_decode, shape)))
    return found


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Rows of every line whose name contains `only`."""
    copy = copy_bandwidth(2.0)
    print(f"copy bandwidth {copy:.2f} TB/s")
    for line in lines(quick):
        if only in line.name:
            yield from measure(line, copy)
            torch.cuda.empty_cache()
