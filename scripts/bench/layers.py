"""Memory-bound layers: forward, and forward + backward, device time in CUDA graphs, against the bytes they must move.

Each candidate runs on rotating input sets that together exceed the L2 cache. Bytes are the fewest possible: every
input read once, every output and gradient written once, and for backward what was saved read once more. `floor_ratio`
is the time over those bytes at the copy bandwidth measured in the same process; `host_us` is the time the CPU takes to
enqueue one call, measured on small shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from scripts.bench.harness import Row, copy_bandwidth, graphed, host_microseconds, time_in_turn

ROTATE_BYTES = 192 << 20
COPY = "a copy of as many bytes"
Tensors = list[torch.Tensor]
Function = Callable[..., Any]


class Layer(NamedTuple):
    """A layer and its rivals. `passes`: how often the largest tensor moves, forward and forward + backward.

    `draw(*shape, dtype)` makes one set of inputs and says how many bytes the largest has; the first `differentiate`
    of them get gradients. The first of `eager` is the specification; `compiled` names the one given to torch.compile.
    """

    ours: Function
    eager: dict[str, Function]
    compiled: str
    passes: tuple[int, int]
    differentiate: int
    draw: Callable[..., tuple[Tensors, int]]
    shapes: list[tuple[int, ...]]
    more_shapes: list[tuple[int, ...]]
    liger: Function | None = None
    dtype: torch.dtype = torch.bfloat16


def _normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _rows(wide: int, vectors: int) -> Callable[..., tuple[Tensors, int]]:
    def draw(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensors, int]:
        inputs = [_normal(rows, columns, dtype=dtype) for _ in range(wide)]
        return inputs + [_normal(columns, dtype=dtype) for _ in range(vectors)], rows * columns * dtype.itemsize

    return draw


def _heads(batch: int, q_heads: int, k_heads: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    q, k = (_normal(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2) for heads in (q_heads, k_heads))
    angle = torch.rand(1, tokens, dim // 2, device="cuda") * 6
    angle = torch.cat((angle, angle), -1)
    size = batch * tokens * (q_heads + k_heads) * dim * dtype.itemsize
    return [q, k, angle.cos().to(dtype), angle.sin().to(dtype)], size


def _distributions(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensors, int]:
    student, teacher = (_normal(rows, columns, dtype=torch.float32) for _ in range(2))
    inputs = [student.log_softmax(-1).to(dtype), teacher.softmax(-1).to(dtype)]
    return inputs, rows * columns * dtype.itemsize


def _hf_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _torch_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _after_addition(norm: Function) -> Function:
    def run(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + r
        return norm(total, weight), total

    return run


def _torch_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _hf_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q), rotate(k)


def _spelled_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x = x + bias
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _liger(name: str, *extra: object, **options: object) -> Function | None:
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        return None
    return lambda *inputs: getattr(functional, name)(*inputs, *extra, **options)


def layers() -> dict[str, Layer]:
    """Every layer by name."""
    import distill_kernels as ours

    norm_shapes = [(256, 2048), (2048, 2048), (8192, 2048), (8192, 4096)]
    more_norm_shapes = [(512, 1024), (262_144, 128), (8192, 5120), (8192, 8192), (4096, 16_384)]
    glu_shapes, more_glu_shapes = [(64, 8192), (1024, 8192), (8192, 8192)], [(512, 5632), (4096, 14_336)]
    softmax_shapes = [(4, 131_072), (256, 2048), (8192, 4096), (512, 128_256)]
    more_softmax_shapes = [(16_384, 512), (2048, 16_384), (1024, 32_768), (512, 65_536), (256, 262_144), (133, 8192)]
    in_place = {"in_place": False}  # backward in place would change the input sets; it moves the same bytes
    return {
        "rms_norm": Layer(
            ours.rms_norm,
            {"F.rms_norm": _torch_rms_norm, "as transformers": _hf_rms_norm},
            "as transformers",
            (2, 5),
            2,
            _rows(1, 1),
            norm_shapes,
            more_norm_shapes,
            _liger("liger_rms_norm", 1e-6, **in_place),
        ),
        "add_rms_norm": Layer(
            ours.add_rms_norm,
            {"add, F.rms_norm": _after_addition(_torch_rms_norm), "as transformers": _after_addition(_hf_rms_norm)},
            "as transformers",
            (4, 8),
            3,
            _rows(2, 1),
            norm_shapes,
            more_norm_shapes,
            _liger("liger_fused_add_rms_norm", 1e-6, **in_place),
        ),
        "layer_norm": Layer(
            ours.layer_norm,
            {"F.layer_norm": _torch_layer_norm},
            "F.layer_norm",
            (2, 5),
            3,
            _rows(1, 2),
            norm_shapes,
            more_norm_shapes,
            _liger("liger_layer_norm", 1e-5),
        ),
        "swiglu": Layer(
            ours.swiglu,
            {"eager": lambda gate, up: F.silu(gate) * up},
            "eager",
            (3, 8),
            2,
            _rows(2, 0),
            glu_shapes,
            more_glu_shapes,
            _liger("liger_swiglu"),
        ),
        "geglu_exact": Layer(
            ours.geglu,
            {"eager": lambda gate, up: F.gelu(gate) * up},
            "eager",
            (3, 8),
            2,
            _rows(2, 0),
            glu_shapes,
            more_glu_shapes,
        ),
        "geglu_tanh": Layer(
            lambda gate, up: ours.geglu(gate, up, "tanh"),
            {"eager": lambda gate, up: F.gelu(gate, approximate="tanh") * up},
            "eager",
            (3, 8),
            2,
            _rows(2, 0),
            glu_shapes,
            more_glu_shapes,
            _liger("liger_geglu"),
        ),
        "bias_gelu": Layer(
            ours.bias_gelu,
            {"eager": lambda x, b: F.gelu(x + b), "eager, spelled out": _spelled_bias_gelu},
            "eager",
            (2, 5),
            2,
            _rows(1, 1),
            [(512, 4096), (2048, 4096), (2048, 16_384)],
            [(1024, 4096), (8192, 8192)],
            dtype=torch.float16,
        ),
        "softmax": Layer(
            ours.softmax,
            {"torch.softmax": lambda x: torch.softmax(x, -1)},
            "torch.softmax",
            (2, 5),
            1,
            _rows(1, 0),
            softmax_shapes,
            more_softmax_shapes,
            _liger("liger_softmax"),
        ),
        "rope": Layer(
            ours.rope,
            {"as transformers": _hf_rope},
            "as transformers",
            (2, 4),
            2,
            _heads,
            [(1, 32, 8, 128, 64), (1, 32, 8, 2048, 64), (2, 32, 8, 4096, 128)],
            [(4, 14, 2, 2048, 64)],
            _liger("liger_rope"),
        ),
        "kl_probabilities": Layer(
            lambda x, t: ours.kl_probabilities(x, t, "batchmean"),
            {"F.kl_div": lambda x, t: F.kl_div(x, t, reduction="batchmean")},
            "F.kl_div",
            (2, 4),
            1,
            _distributions,
            [(16, 32_768), (1024, 32_768), (512, 128_256)],
            [(8192, 8192)],
            # no Liger: its backward compares a tensor on the host, which no CUDA graph can capture
        ),
    }


def _outputs(function: Function, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    outputs = function(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _step(function: Function, backward: bool, sets: list[tuple[Tensors, Tensors]], differentiate: int) -> Function:
    """A call of `function` on the next input set, with the gradients of its first inputs where asked for."""
    turn = itertools.cycle(sets)

    def forward_only() -> None:
        with torch.no_grad():
            function(*next(turn)[0])

    def both() -> None:
        inputs, upstream = next(turn)
        torch.autograd.grad(_outputs(function, inputs), inputs[:differentiate], upstream)

    return both if backward else forward_only


def _copies(sets: list[tuple[Tensors, Tensors]]) -> list[tuple[Tensors, Tensors]]:
    return [
        ([x.detach().clone().requires_grad_(x.requires_grad) for x in inputs], [grad.clone() for grad in upstream])
        for inputs, upstream in sets
    ]


def _make_sets(layer: Layer, shape: tuple[int, ...], most: int = 48) -> tuple[list[tuple[Tensors, Tensors]], int]:
    sets: list[tuple[Tensors, Tensors]] = []
    wanted = 1
    while len(sets) < wanted:
        inputs, size = layer.draw(*shape, dtype=layer.dtype)
        wanted = min(max(math.ceil(ROTATE_BYTES / (size * layer.passes[0])), 2), most)
        for tensor in inputs[: layer.differentiate]:
            tensor.requires_grad_()
        outputs = _outputs(next(iter(layer.eager.values())), inputs)
        sets.append((inputs, [torch.randn_like(out) for out in outputs]))
    return sets, size


def _copy_step(size: int, count: int) -> Callable[[], object]:
    """A plain copy that moves as many bytes: what launch and ramp-up leave of the bandwidth at this size."""
    sources = [torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    turn = itertools.cycle(sources)
    return lambda: next(turn).clone()


def _errors(function: Function, layer: Layer, inputs: Tensors, upstream: Tensors) -> dict[str, float]:
    """Relative errors against fp64 of the first output and the first gradient."""

    def results(call: Function, tensors: Tensors, grads: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = _outputs(call, tensors)
        return outputs[0].detach(), torch.autograd.grad(outputs, tensors[0], grads)[0]

    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    exact = results(next(iter(layer.eager.values())), wide, [grad.double() for grad in upstream])
    actual = results(function, *_copies([(inputs, upstream)])[0])
    errors = [((one.double() - other).norm() / other.norm()).item() for one, other in zip(actual, exact, strict=True)]
    return {"y": errors[0], "dx": errors[1]}


def _candidates(layer: Layer) -> dict[str, Function]:
    torch._dynamo.reset()
    compiled = torch.compile(layer.eager[layer.compiled], dynamic=False)
    candidates = {"ours": layer.ours, **layer.eager, "torch.compile": compiled}
    if layer.liger is not None:
        candidates["liger"] = layer.liger
    return candidates


def measure(name: str, layer: Layer, shape: tuple[int, ...], bandwidth: float) -> Iterator[Row]:
    """Both directions of one layer on one shape, all candidates in turn."""
    sets, size = _make_sets(layer, shape)
    calls = len(sets)
    label = f"{'x'.join(map(str, shape))} {str(layer.dtype)[6:]}, {size / 2**20:.0f} MiB"
    candidates = _candidates(layer)
    errors: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for key, function in candidates.items():
        try:
            errors[key] = _errors(function, layer, *sets[0])
        except RuntimeError as refusal:  # Liger's softmax refuses rows beyond 65,536
            if key != "liger":
                raise
            notes[key] = f"refused: {str(refusal).splitlines()[0][:80]}"
        else:
            if not max(errors[key].values()) < 0.05:
                notes[key] = "wrong: not timed"
    # Liger's GLU writes its gradients over its inputs: it gets sets of its own
    own = _copies(sets)
    for backward in (False, True):
        steps = {
            key: _step(function, backward, own if key == "liger" else sets, layer.differentiate)
            for key, function in candidates.items()
            if key not in notes
        }
        small = size <= 8 << 20
        host = {key: host_microseconds(step) for key, step in steps.items()} if small else {}
        moved = size * layer.passes[backward]
        replays = {key: graphed(step, calls=calls) for key, step in steps.items()}
        replays[COPY] = graphed(_copy_step(moved // 2, calls), calls=calls)
        times = time_in_turn(replays, rounds=5, calls=2, settle=1)
        for key in (*candidates, COPY):
            ms = times[key] / calls if key in times else math.nan
            yield Row(
                f"{name} {'forward + backward' if backward else 'forward'}",
                label,
                key,
                ms,
                floor_ratio=ms * bandwidth * 1e9 / moved,
                tb_per_s=moved / ms / 1e9,
                error=errors.get(key, {}),
                host_us=host.get(key),
                note=notes.get(key, ""),
            )


def run(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Rows of every layer whose name contains `only`."""
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth:.2f} TB/s")
    for name, layer in layers().items():
        if only not in name:
            continue
        for shape in layer.shapes + ([] if quick else layer.more_shapes):
            yield from measure(name, layer, shape, bandwidth)
            torch.cuda.empty_cache()
