"""Mixtures of experts: layers of Qwen3-30B-A3B and of gpt-oss-20b, ours beside transformers, compiled, and Liger.

    python -m scripts.bench experts --only qwen3

A few layers with random weights of the usual scale and no head, 2 x 4,096 tokens, bf16: forward without a graph, and
forward with backward. The gate is one layer's experts with a given routing against fp64, values and every gradient at
most `SLACK` times the error of transformers' grouped_mm, the worst token included; of whole layers, rounding decides
which experts a token gets. Then the kernels of our forward and backward by what they do, and each kernel around the
experts beside the bytes that it has to move. "ours, fp8" is a teacher's forward, its error the deviation from the same
layers in bf16. Liger's patches change the modelling file for a whole process, so that it has its own.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from distill_kernels.layers import experts as kernels
from distill_kernels.layers.router import route
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from distill.models.fp8_teacher import quantise_teacher
from distill.models.patch.experts import EXPERTS
from distill.models.patch.patching import patch
from distill.models.trial import Mismatch
from scripts.bench.harness import Row, copy_bandwidth, graphed, peak_above_inputs, time_in_turn
from scripts.bench.small import candidate, tell
from scripts.bench.step_variants import apply_liger

ROWS, LENGTH = 2, 4096
FORWARD, BOTH = "forward", "forward + backward"
EAGER, FP8, LIGER, GRAPH = "transformers, eager experts", "ours, fp8", "Liger Kernel", "ours, in a graph"
SLACK, FLOOR = 1.25, 1e-3
MODELS: dict[str, tuple[Callable[[], AutoConfig], str]] = {  # configuration, attention of plain transformers
    "qwen3-30b-a3b, 4 layers": (
        lambda: Qwen3MoeConfig(
            vocab_size=1024,
            hidden_size=2048,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=40960,
        ),
        "sdpa",
    ),
    "gpt-oss-20b, 2 layers": (
        lambda: GptOssConfig(
            vocab_size=1024,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=32,
            num_experts_per_tok=4,
            pad_token_id=0,
        ),
        "eager",
    ),
}
COMPILED = {"layers compiled": None, "layers compiled, max-autotune": "max-autotune-no-cudagraphs"}
CLASSES = {  # of kernels, by name; the first that matches
    "attention": r"cudnn|fmha|flash|sdpa|_attention_kernel|_key_gradient|_query_gradient|_row_terms|_ranges",
    "routing": r"_route|_histogram_kernel|_place_kernel|radix|topk|sort",
    "gather": r"_gather_kernel|_gather_quantise",
    "sum over a token's experts": r"_sum_kernel",
    "activation": r"_activation",
    "grouped GEMMs": r"grouped|GroupProblemShape|prepare_grouped",
    "dense GEMMs": r"nvjet|gemm|cutlass|xmma|splitk",
    "norms, rotary, the rest": r"",
}


def make(name: str) -> Any:
    """Return a model with random weights of the usual deviation, norms near 1; its body is what is measured."""
    config, attention = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16, attn_implementation=attention)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            nn.init.normal_(parameter, 1.0, 0.1)
        elif "sinks" in parameter_name:
            nn.init.normal_(parameter, 0.0, 1.0)
        else:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model.eval()


def error(given: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative error in norm."""
    return float((given.double() - right).norm() / right.norm())


def worst(given: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest error of a row, relative to the mean row."""
    rows = (given.double() - right).flatten(0, -2).norm(dim=-1)
    return float(rows.max() / right.flatten(0, -2).norm(dim=-1).mean())


def gate(model: Any, tokens: int) -> dict[str, dict[str, float]]:
    """Return errors against fp64 of one layer's experts, ours and transformers' grouped_mm; one expert gets nothing."""
    module = copy.deepcopy(model.model.layers[0].mlp.experts)
    top_k = model.config.num_experts_per_tok
    count = module.num_experts
    generator = torch.Generator("cuda").manual_seed(1)
    width = model.config.hidden_size
    x = torch.randn(tokens, width, generator=generator, device="cuda").bfloat16()
    upstream = torch.randn(tokens, width, generator=generator, device="cuda").bfloat16()
    logits = torch.randn(tokens, count, generator=generator, device="cuda")
    logits[:, count - 1] = -torch.inf
    weights, index = logits.softmax(-1).topk(top_k, -1)
    weights = weights.bfloat16()
    form = EXPERTS.form(module, gradients=True)  # type: ignore[misc]
    assert not isinstance(form, Mismatch), form
    ours = EXPERTS.forward(module, form)

    def results(dtype: torch.dtype, run: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        given = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in (x, weights)]
        held = module.to(dtype)
        held.zero_grad()
        y = run(held, given[0], index, given[1])
        y.backward(upstream.to(dtype))
        found = {"y": y.detach(), "dx": given[0].grad, "dweights": given[1].grad}
        found |= {f"d{name}": parameter.grad for name, parameter in held.named_parameters()}
        return {key: value for key, value in found.items() if value is not None}

    def plain(held: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = type(held).forward(held, x, index, weights)
        return y

    given = {name: results(torch.bfloat16, run) for name, run in (("ours", ours), ("grouped_mm", plain))}
    module.config = copy.copy(module.config)
    module.config._experts_implementation = "eager"
    right = results(torch.float64, plain)
    found: dict[str, dict[str, float]] = {}
    for name, values in given.items():
        assert values.keys() == right.keys()
        found[name] = {key: error(values[key], right[key]) for key in right}
        found[name] |= {f"worst {key}": worst(values[key], right[key]) for key in ("y", "dx")}
    return found


def passes(given: dict[str, float], plain: dict[str, float]) -> bool:
    """Return whether no error exceeds that of transformers by more than the slack; NaN does."""
    return all(value <= SLACK * plain[key] + FLOOR for key, value in given.items())


def candidates(plain: Any, quick: bool) -> dict[str, Any]:
    """Return models of the same weights: transformers' and ours, as they are, with compiled layers, and in fp8."""
    ours = copy.deepcopy(plain)
    report = patch(ours)
    print(report, flush=True)
    found = {"transformers, grouped_mm": plain, "ours": ours}
    for label, mode in list(COMPILED.items())[: 1 if quick else None]:
        for name in ("transformers, grouped_mm", "ours"):
            if name == "ours" and (mode is not None or quick):
                continue
            compiled = copy.deepcopy(plain)
            if name == "ours":
                patch(compiled, attention=report.attention, log_it=False)
            for layer in compiled.model.layers:
                layer.compile(mode=mode)
            found[f"{name}, {label}"] = compiled
    eager = copy.deepcopy(plain)
    for module in eager.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    fp8 = copy.deepcopy(plain).requires_grad_(False)
    patch(fp8, "teacher", attention=report.attention, log_it=False)
    quantise_teacher(fp8)
    return found | {EAGER: eager, FP8: fp8}


def inputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and the upstream gradient of hidden states."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (ROWS, LENGTH), generator=generator).cuda()
    return ids, torch.randn(ROWS, LENGTH, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)


def parts_of(ids: torch.Tensor, upstream: torch.Tensor) -> dict[str, Callable[[Any], object]]:
    """Return what is timed, by name: functions of a model."""

    def forward(model: Any) -> torch.Tensor:
        y: torch.Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return y

    def both(model: Any) -> None:
        forward(model).backward(upstream)
        model.zero_grad()  # so that a peak above the inputs has the gradients in it

    return {FORWARD: torch.no_grad()(forward), BOTH: both}


def liger(name: str) -> dict[str, Any]:
    """Return milliseconds and peak MiB of each part with Liger's patches."""
    model = make(name)
    apply_liger(model)
    found = {}
    for part, call in parts_of(*inputs(model)).items():
        run = functools.partial(call, model)
        found[part] = (time_in_turn({LIGER: run}, rounds=3, calls=3)[LIGER], peak_above_inputs(run))
    return found


def breakdown(run: Callable[[], object], steps: int = 3) -> tuple[dict[str, float], list[str]]:
    """Return milliseconds a call by class, and lines on the heaviest kernels."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    events: Any = profiler.events()
    by_class: dict[str, float] = collections.defaultdict(float)
    by_name: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            ms = event.time_range.elapsed_us() / 1e3 / steps
            by_class[next(c for c, p in CLASSES.items() if re.search(p, event.name, re.IGNORECASE))] += ms
            by_name[event.name] += ms
    heaviest = sorted(by_name.items(), key=lambda pair: -pair[1])[:14]
    return dict(by_class), [f"{ms:8.3f} ms  {name[:110]}" for name, ms in heaviest]


def steps(model: Any, tokens: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield each kernel around the experts of a layer: its name, a call, and the bytes that it has to move."""
    module = model.model.layers[0].mlp.experts
    k, count = model.config.num_experts_per_tok, module.num_experts
    width = model.config.hidden_size
    form = EXPERTS.form(module, gradients=False)  # type: ignore[misc]
    assert not isinstance(form, Mismatch)
    inner = module.down_proj.shape[1 if form.transposed else 2]
    logits = torch.randn(tokens, count, device="cuda", dtype=torch.bfloat16)
    weights, index = route(logits, k)
    row, slot, ends = kernels.permutation(index, count)
    slots = tokens * k
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(slots, width, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(slots, 2 * inner, device="cuda", dtype=torch.bfloat16)
    da = torch.randn(slots, inner, device="cuda", dtype=torch.bfloat16)
    bias = getattr(module, "gate_up_proj_bias", None)
    gate = kernels.GateForm(
        form.activation, form.interleaved, getattr(module, "alpha", 1.0), getattr(module, "limit", 0.0)
    )
    yield "route", lambda: route(logits, k), 2 * tokens * count + 12 * slots
    yield "permutation", lambda: kernels.permutation(index, count), 8 * 2 * slots + 8 * slots
    yield "gather", lambda: kernels._gather(x, row, k), 2 * (tokens + slots) * width
    yield "sum", lambda: kernels.sum_slots(wide, row, k, weights, index), 2 * (tokens + slots) * width
    yield "activation", lambda: kernels._activation(hidden, slot, index, bias, gate), 6 * slots * inner
    yield (
        "activation backward",
        lambda: kernels._activation_backward(hidden, slot, index, bias, weights, da, gate, True),
        12 * slots * inner,
    )
    for name, a, weight in (("gate-up", wide, module.gate_up_proj), ("down", da, module.down_proj)):
        b = weight if form.transposed else weight.transpose(1, 2)
        yield f"grouped_mm {name}", lambda a=a, b=b: kernels.grouped_mm(a, b, ends), 0


def run(quick: bool, only: str) -> Iterator[Row]:
    """Measure the models whose name contains `only`; `quick` leaves out Liger and what compiles longest."""
    tokens = ROWS * LENGTH
    for name in MODELS:
        if only not in name:
            continue
        plain = make(name)
        shape = f"{name}, {ROWS} x {LENGTH} tokens, bf16"
        errors = gate(plain, tokens)
        torch.cuda.empty_cache()
        if not passes(errors["ours"], errors["grouped_mm"]):
            yield Row("experts", shape, "ours", float("nan"), error=errors["ours"], note="wrong, not timed")
            continue
        bandwidth = copy_bandwidth(2.0)
        with torch.no_grad():
            for label, call, moved in steps(plain, tokens):
                ms = time_in_turn({label: graphed(call)}, rounds=5, calls=1)[label] / 10
                rate = moved / ms / 1e9 if moved else None
                yield Row(
                    "experts",
                    f"{shape}, one layer's kernels, copies at {bandwidth:.2f} TB/s",
                    label,
                    ms,
                    tb_per_s=rate,
                )
        torch.cuda.empty_cache()
        models = candidates(plain, quick)
        ids, upstream = inputs(plain)
        limit = float(os.environ.get("BENCH_LIMIT", 60))
        apart = {} if quick else candidate("scripts.bench.experts", name, limit=limit)
        for part, call in parts_of(ids, upstream).items():
            runs = {}
            for label, model in models.items():
                if label == FP8 and part == BOTH:
                    continue
                try:
                    call(model)
                    torch.cuda.synchronize()
                    runs[label] = functools.partial(call, model)
                except (RuntimeError, torch.OutOfMemoryError) as failure:
                    note = str(failure).splitlines()[0][:100]
                    yield Row("experts", f"{shape}, {part}", label, float("nan"), note=note)
            if not quick:
                ms, peak = apart.get(part, (float("nan"), None))
                yield Row("experts", f"{shape}, {part}", LIGER, ms, peak_mib=peak, note=apart.get("note", ""))
            # a call takes most of a second: once is enough
            slow = {label: runs.pop(label) for label in (EAGER,) if label in runs}
            for label, run in slow.items():
                ms = time_in_turn({label: run}, rounds=1, calls=1, settle=0)[label]
                yield Row("experts", f"{shape}, {part}", label, ms, tokens_per_s=tokens / ms * 1e3)
            if part == FORWARD and FP8 in runs:
                exact = call(models["ours"])
                errors["fp8"] = {"hidden states": error(call(models[FP8]), exact.double())}  # type: ignore[arg-type,attr-defined]
                del exact
            for label, ms in time_in_turn(runs, rounds=5, calls=3).items():
                peak = peak_above_inputs(runs[label])
                yield Row(
                    "experts",
                    f"{shape}, {part}",
                    label,
                    ms,
                    peak_mib=peak,
                    error=errors["fp8" if label == FP8 else "ours" if label.startswith("ours") else "grouped_mm"],
                    tokens_per_s=tokens / ms * 1e3,
                )
            for candidate_name in ("ours", FP8):
                if candidate_name in runs:
                    classes, heaviest = breakdown(runs[candidate_name])
                    print("\n".join(heaviest), flush=True)
                    for label, ms in classes.items():
                        yield Row("experts", f"{shape}, {part}, {candidate_name} by kernels", label, ms)
        # last, since a process in which a capture has failed may capture nothing more
        for part, call in parts_of(ids, upstream).items():
            try:
                replay = graphed(functools.partial(call, models["ours"]), calls=1)
                ms = time_in_turn({GRAPH: replay}, rounds=5, calls=3)[GRAPH]
                yield Row("experts", f"{shape}, {part}", GRAPH, ms, tokens_per_s=tokens / ms * 1e3)
                del replay
            except RuntimeError as failure:
                note = str(failure).splitlines()[0][:100]
                yield Row("experts", f"{shape}, {part}", GRAPH, float("nan"), note=note)
        del models, plain
        torch.cuda.empty_cache()


if __name__ == "__main__":
    tell(liger(sys.argv[1]))
