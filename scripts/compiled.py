"""Compilation of every kernel for each GPU family: `python -m scripts.compiled [--all] [FAMILY|PART ...]`.

Needs no GPU. Compiles the grid below by tests/compile_for_gpu.py (some minutes; longer for `--all`, every combination
in place of every pair), and writes a row a kernel, family and case to scripts/compiled.jsonl, from which scripts.docs
makes docs/reference/compiled-kernels.md. tests/ops/test_compiles.py holds the same cases to each family's limits; it
compiles those again whose sources are no longer what scripts/compiled_sources.jsonl says they were compiled from.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "scripts" / "compiled.jsonl"
SOURCES = ROOT / "scripts" / "compiled_sources.jsonl"  # by family and case: its `case_hash` when it was compiled
FAMILIES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")

SETUP = """
def t(*shape, dtype=torch.bfloat16, grad=True): return torch.ones(*shape, dtype=dtype, requires_grad=grad)
"""
FP8_TRAINING = """
from distill_kernels.matmul import fp8_train
if facts.fp8:
    fp8_train._product = lambda a, s, b, t: torch.ones(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    x = t(64, 2048)
    for y in fp8_train.fp8_linears(x, t(2048, 2048), t(512, 2048), t(512, 2048, dtype=torch.float32)):
        y.sum().backward(retain_graph=True)
    fp8_train.fp8_swiglu_mlp(x, t(18944, 2048), t(18944, 2048), t(2048, 18944)).sum().backward()
"""
# kernels' launches by part and case; {axes} are filled in
PARTS = {
    "attention": (
        """
kind = {{"causal": {{}}, "window, cap": {{"window": 700, "softcap": 30.0}},
        "documents": {{"cu_seqlens_q": torch.tensor([0, 900, 2048])}}}}["{kind}"]
q, k = t(1, 8, 2048, {size}), t(1, 2, 2048, {size})
ours.flash_attention(q, k, k, **kind).sum().backward()
""",
        {"size": (64, 128, 256), "kind": ("causal", "window, cap", "documents")},
    ),
    "attention sinks": (
        """
q, k = t(1, 8, 2048, {size}), t(1, 2, 2048, {size})
ours.flash_attention(q, k, k, window=128, sinks=t(8, dtype=torch.{dtype})).sum().backward()
""",
        {"size": (64, 128, 256), "dtype": ("bfloat16", "float32")},
    ),
    "attention in parts": (
        """
q, k = t(1, 1, 2048, 128), t(1, 1, 2048, 128)
ours.flash_attention(q, k, k, causal=False, scale=1).sum().backward()
q, k = t(1, 2, 64, 256, grad=False), t(1, 1, 4096, 256, grad=False)
ours.flash_attention(q, k, k, window=3000, softcap=30.0)
""",
        {},
    ),
    "layers": (
        """
z, weight = t(64, {hidden}, dtype=torch.{dtype}), t({hidden}, dtype=torch.{dtype})
ours.layer_norm(z, weight, weight).sum().backward(), ours.bias_gelu(z, weight).sum().backward()
both = ours.add_rms_norm(z, z, weight, form="gemma")
(both[0] + both[1]).sum().backward(), ours.swiglu(z, z).sum().backward(), ours.geglu(z, z).sum().backward()
ours.softmax(z).sum().backward()
wide = t(64, 16384, dtype=torch.float32)
ours.layer_norm(wide, t(16384), t(16384)).sum().backward()
q, c = t(1, 8, 128, 64, dtype=torch.{dtype}), torch.ones(1, 128, 64)
ours.rope(q, q, c, c)[0].sum().backward()
""",
        {"hidden": (576, 6144, 8192, 16384), "dtype": ("bfloat16", "float32")},
    ),
    "losses": (
        """
x, w, x_t, w_t = t(130, 64), t({vocab}, 64), t(130, 128, grad=False), t({vocab}, 128, grad=False)
y = torch.ones(130, dtype=torch.int64)
if "{teacher}" == "models":
    ours.FusedKLLoss(ce_weight=1.0, skip_ignored_rows=False)(x, w, x_t, w_t, y, return_stats=True)[0].backward()
    ours.FusedJSDLoss()(x, w, x_t, w_t, y).backward()
    caps, warm = ours.Clip(token=1.0, entry=0.1), ours.Temperatures(1.0, 1.1)
    ours.FusedKLLoss(clip=caps, temperature=warm)(x, w, x_t, w_t, y, return_stats=True)[0].backward()
    ours.FusedJSDLoss(clip=caps)(x, w, x_t, w_t, y).backward()
    ours.fused_log_probs(x, w, y).sum().backward()
    known = torch.ones(130)
    ours.fused_policy_gradient_loss(x, w, y, known).backward()
    everything = {{"clip": 0.2, "kl_weight": 0.1, "entropy_weight": 0.1, "temperature": 2.0, "student_softcap": 30.0}}
    ours.fused_policy_gradient_loss(x, w, y, known, known, known, return_stats=True, **everything)[0].backward()
    two = [ours.TeacherHead(x_t, w_t, 0.7), ours.TeacherHead(x.detach(), w.detach(), 0.3, softcap=30.0)]
    ours.FusedDistillationLoss([ours.LossTerm("forward_kl", 1.0)], 2.0)(x, w, teachers=two).backward()
elif "{teacher}" == "logits":
    z = t(4, {vocab})
    ours.kl_div(z, z.detach(), clip=ours.Clip(token=1.0, entry=0.1))
    ours.kl_div(z, z.detach()), ours.jsd(z, z.detach()), ours.cross_entropy(z, torch.ones(4, dtype=torch.int64))
else:
    k = int("{teacher}".split()[1])
    ids, given = torch.ones(130, k, dtype=torch.int32), t(130, k, dtype=torch.float32, grad=False)
    ours.FusedTopKKLLoss(tail="bucket")(x, w, ids, given).backward()
    ours.FusedTopKKLLoss(clip=ours.Clip(token=1.0, entry=0.1))(x, w, ids, given).backward()
    for own in (64, k):
        ours.FusedStudentTopKKLLoss(own)(x, w, x_t, w_t).backward()
""",
        {"vocab": (32000, 262144), "teacher": ("models", "logits", "top 256")},
    ),
    "products": (
        """
from distill_kernels.losses import projection
from distill_kernels.losses.accumulate import WeightGradient, add_transposed_matmul_
from distill_kernels.losses.operands import Head
from distill_kernels.matmul.fp8 import fp8_rms_norm
x, w, n = t(130, 64, grad=False), t(1000, 64, grad=False), torch.ones(130)
add_transposed_matmul_(t(1000, 64, grad=False), t(130, 1000, grad=False), x)
sums = WeightGradient(w, 1000, 5, fp32=False)
for _ in range(5):
    sums.add(t(130, 1000, grad=False), x)
for way in projection.projection_candidates(facts):  # what is timed there is compiled too
    out = projection.ChunkLogits(torch.empty(130, 1024, dtype=torch.float16)[:, :1000],
                            *(torch.empty(130, 4) for _ in range(3)))
    projection._project(Head(x, w), x, out, projection.Transform(1.0, 0.0, 1.0, False), None, way)
    hard = projection.HardLabelRows(n.long(), n, None, n, 1000, 1.0, 0.0, 0.0)
    out = out._replace(values=t(130, 1000))
    if facts.tma:
        projection._project(Head(x, w), x, out, projection.Transform(1.0, 0.0, 1.0, False), hard, way)
for rows, columns in ((128, 128 * 132), (1280, 2560), (640, 1280)):
    ours.triton_linear(t(rows, 64, grad=False), t(columns, 64, grad=False))
ours.split_k_linear(t(40, 2048), t(1000, 2048), t(1000)), ours.split_k_linear(t(1, 2048), t(1000, 2048))
ours.quantize_rows(x)
if facts.fp8:
    ours.Fp8Linear(t(64, 992, grad=False)).forward_gated(t(8, 992, grad=False), t(8, 992, grad=False), "gelu_tanh")
    for hidden in (992, 16384):
        fp8_rms_norm(t(8, hidden), t(hidden)), fp8_rms_norm(t(8, hidden), t(hidden), residual=t(8, hidden))
"""
        + FP8_TRAINING,
        {},
    ),
    "fake quantisation": (
        """
from distill_kernels.quantisation.fake_quantise import fake_quantise_into, learned_gradients
from distill_kernels.quantisation.formats import FORMATS
from distill_kernels.quantisation.number_format import Scales
for dtype in (torch.float32, torch.bfloat16):
    for name, columns in (*((name, 768) for name in FORMATS), ("int8", 18944), ("fp8", 18944)):
        w, form = t(64, columns, dtype=dtype, grad=False), FORMATS[name]
        scale = torch.ones(64, columns // form.columns(w))
        if form.in_kernel:
            fake_quantise_into(torch.empty_like(w), w, name)
        scales = Scales(scale, scale if form.has_minimum else None)
        fake_quantise_into(torch.empty_like(w), w, name, scales)
        if form.is_learned:
            learned_gradients(w, scales, w, name)
""",
        {},
    ),
    "terms of layers": (
        """
from distill_kernels.layers.state_distance import state_distance
rows = torch.ones(64, dtype=torch.int64)
for width in (576, 4096, 5120):
    for metric in ("mse", "cosine"):
        own, other = [t(64, width), t(64, width)], [t(64, width, grad=False)] * 2
        state_distance(own, other, rows, metric).sum().backward()
from distill_kernels.layers.attention_relation import relation_divergence
documents = torch.ones(2, 256, dtype=torch.int64)
for width, packed in ((64, None), (128, documents), (192, documents), (512, documents)):
    relation_divergence(t(2, 3, 256, width), t(2, 3, 256, width, grad=False), packed).sum().backward()
""",
        {},
    ),
    "mixtures of experts": (
        """
from distill_kernels.decoding.experts import decode_experts
from distill_kernels.layers.experts import experts
from distill_kernels.layers.router import route
from distill_kernels.matmul import fp8_experts
for count, k, hidden, inner in ((128, 8, 2048, 768), (32, 4, 2880, 2880)):
    weights, index = torch.ones(64, k), torch.zeros(64, k, dtype=torch.int64)
    held = t(count, 2 * inner, hidden), t(count, hidden, inner)
    for settings in ({{}}, {{"activation": "gelu", "residual": t(64, hidden)}}):
        experts(t(64, hidden), index, weights, *held, **settings).sum().backward()
    held = t(count, hidden, 2 * inner), t(count, inner, hidden), t(count, 2 * inner), t(count, hidden)
    more = {{"interleaved": True, "transposed": True, "alpha": 1.702, "limit": 7.0}}
    experts(t(64, hidden), index, weights, *held, "clamped_silu", **more).sum().backward()
    route(t(64, count), k)[0].sum().backward()
    few = t(8, hidden, grad=False), index[:8], weights[:8], *(each.detach() for each in held)
    decode_experts(*few, "clamped_silu", residual=few[0], **more)
    decode_experts(*few[:3], t(count, 2 * inner, hidden, grad=False), t(count, hidden, inner, grad=False))
    if facts.fp8:
        held8 = [torch.ones(count, *each, dtype=torch.float8_e4m3fn) for each in ((2 * inner, hidden), (hidden, inner))]
        scales = {{"gate_up_scale": torch.ones(count, 2 * inner), "down_scale": torch.ones(count, hidden)}}
        decode_experts(*few[:3], *held8, **scales)
        rows = torch.arange(64 * k, dtype=torch.int32)
        fp8_experts._gather_quantised(t(64, hidden, grad=False), rows, k)
        for bias, more in ((None, ("gelu", 1.0, 0.0)), (t(count, 2 * inner, grad=False), ("clamped_silu", 1.702, 7.0))):
            fp8_experts._activation_quantised(t(64 * k, 2 * inner, grad=False), rows, index, bias, *more)
grouped = {{"score": "sigmoid", "groups": 8, "kept_groups": 4}}
route(t(64, 256), 8, torch.ones(256), **grouped)[0].sum().backward()
route(t(64, 160), 6, normalised=False)[0].sum().backward()
""",
        {},
    ),
    "optimizer": (
        """
from distill_kernels.optim import adamw_kernels
for dtype in (torch.float32, torch.bfloat16):
    for own_count in (adamw_kernels.OWN_COUNT_PROGRAMS, 1):
        adamw_kernels.OWN_COUNT_PROGRAMS = own_count
        parameters = [torch.nn.Parameter(t(4096, 64, dtype=dtype)), torch.nn.Parameter(t(64, dtype=dtype))]
        for parameter in parameters:
            parameter.grad = t(*parameter.shape, dtype=dtype, grad=False)
        ours.FusedAdamW(parameters, max_grad_norm=1.0).step()
        rounded = dtype == torch.bfloat16
        ours.FusedAdamW(parameters, skip_nonfinite=True, state_dtype=dtype, stochastic_rounding=rounded).step()
""",
        {},
    ),
    "extras": (
        """
for rows, columns in ((4, 151936), (256, 24576), (256, 151936)):
    ours.softmax(t(rows, columns)).sum().backward()
for reduction in ("none", "sum"):
    for log_target in (False, True):
        ours.kl_probabilities(t(64, 1000), t(64, 1000), reduction, log_target).sum().backward()
newest = t(2, 2, 1, 128, grad=False)
ours.KVCache(2, 64, 2, 128, device="cpu").append(newest, newest)
""",
        {},
    ),
    "decoding": (
        """
for slots in (4096, 65536):
    q, k = t(1, 8, 1, {size}, grad=False), t(1, 2, slots, {size}, grad=False)
    for sinks in (None, t(8, grad=False)):
        ours.decode_attention(q, k, k, torch.ones(1, dtype=torch.int32), sinks=sinks)
z, n = torch.ones(4, 49152, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)
ours.sample_tokens(z, n, n, 0.7)
""",
        {"size": (64, 128, 256)},
    ),
    "decoding step": (
        """
import transformers
from distill.generation.fused_step import FusedStep
from distill.generation.sampling import Sampling
from distill.generation.sequence_slots import SequenceSlots
from distill.generation.ragged_cache import AttentionCall
config = transformers.Qwen3Config(
    vocab_size=1000, hidden_size={hidden}, intermediate_size=3 * {hidden}, num_hidden_layers=1,
    num_attention_heads={hidden} // 64, num_key_value_heads={hidden} // 64 // 3, head_dim=64
)
model = transformers.Qwen3ForCausalLM(config).to(torch.{dtype}).requires_grad_(False)
slots = SequenceSlots(config, {rows}, 512, 8, torch.device("cpu"))
calls = {{layer.self_attn: AttentionCall(0.125, None, None) for layer in model.model.layers}}
step = FusedStep(model, slots, torch.bfloat16, calls, (torch.ones(1, dtype=torch.int64), 0, None))
step(Sampling(0.7)), step(Sampling(0.0))
""",
        {"rows": (32, 128), "dtype": ("bfloat16", "float32"), "hidden": (576, 1728)},
    ),
}


class Case(NamedTuple):
    """A part of the kernels for one family, at one point of the part's axes."""

    family: str
    part: str
    at: tuple[tuple[str, object], ...]
    paired: bool  # of the pairwise grid

    @property
    def name(self) -> str:
        """Part and values of its axes."""
        return " ".join([self.part, *(str(value) for _, value in self.at)])

    @property
    def snippet(self) -> str:
        """Python source that launches the case's kernels."""
        return SETUP + PARTS[self.part][0].format(**dict(self.at))


def cases() -> Iterator[Case]:
    """Every combination; those marked `paired` are enough for each pair of values, the family among them.

    A part of one axis is paired with fewer: each family and each value occurs.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from grids import covering

    for part, (_, axes) in PARTS.items():
        values = [list(FAMILIES), *(list(axis) for axis in axes.values())]
        sizes = [len(axis) for axis in values]
        paired = set(covering(sizes, 2 if len(axes) > 1 else 1))
        for point in itertools.product(*map(range, sizes)):
            family, *at = (axis[number] for axis, number in zip(values, point, strict=True))
            yield Case(family, part, tuple(zip(axes, at, strict=True)), point in paired)


def statements(path: Path) -> str:
    """A file without its comments and docstrings, which change no code."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@functools.cache
def package_hash(folder: str) -> str:
    """Hash of a package's statements."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return hashlib.sha256("".join(map(statements, paths)).encode()).hexdigest()


def case_hash(case: Case) -> str:
    """Hash of all that decides a case's compiled code: what launches it, every kernel, the compiler.

    Every file counts, since a launch shape may come from any of them: too many cases are compiled again, never too few.
    """
    import triton

    launches = ["kernels/distill_kernels", *(["distill/generation"] if case.part == "decoding step" else [])]
    parts = [triton.__version__, case.snippet, statements(ROOT / "tests" / "compile_for_gpu.py")]
    parts += map(package_hash, launches)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def recorded_hashes() -> dict[tuple[str, str], str]:
    """By family and name of a case, its hash when its rows were compiled."""
    lines = SOURCES.read_text().splitlines() if SOURCES.exists() else []
    return {(row["family"], row["case"]): row["source"] for row in map(json.loads, lines)}


def rows_of(case: Case) -> Iterator[dict[str, object]]:
    """A row a kernel."""
    sys.path.insert(0, str(ROOT / "tests"))
    from compile_for_gpu import compiled

    for kernel in compiled(case.family, case.snippet):
        yield {
            "case": case.name,
            "family": case.family,
            **kernel._asdict(),
            "instructions": sorted(kernel.instructions),
        }


def page() -> str:
    """Return docs/reference/compiled-kernels.md: the maximum over all cases, by kernel and family."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    done = {family: {row["case"] for row in rows if row["family"] == family} for family in FAMILIES}
    lines = [
        "# Compiled kernels",
        "",
        "<!-- written by python -m scripts.docs -->",
        "",
        "Every kernel, compiled without a GPU by Triton's compiler and the assembler of each architecture family "
        "(`python -m scripts.compiled`): registers per thread / spilled bytes / KiB of shared memory per program (the "
        "maximum over all cases), and the instructions for copies and tensor cores. `cp.async` and `tma` are "
        "asynchronous copies; `mma`, `wgmma`, `tcgen05` and `mfma` are tensor-core instructions. Only sm_90 was also "
        "run and measured; for the others this shows that kernels compile and fit, not their speed or their results.",
        "",
        "Tile sizes were tuned on sm_90. On other families, attention's tile sizes, and for the losses the fused "
        "kernel against cuBLAS GEMMs with a reduction kernel, are timed once per shape (5 to 10 candidates) and cached "
        "in `~/.cache/distill/tuned` by GPU, Triton version and source hash; a message says so. `DISTILL_TUNE=0` uses "
        "the first candidate, as do deterministic runs and captured graphs; a run records its choices in "
        "`kernels.json`, which `--resume` uses. `DISTILL_FAMILY=sm_80` selects that family's code on another GPU, for "
        "tests.",
        "",
        "Cases compiled: "
        + ", ".join(f"{family} {len(done[family])}" for family in FAMILIES)
        + f", of {sum(case.paired for case in cases())} that cover every pair of settings.",
        "",
        f"| kernel | {' | '.join(FAMILIES)} |",
        "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for module, kernel in dict.fromkeys((row["module"], row["kernel"]) for row in rows):
        cells = []
        for family in FAMILIES:
            own = [row for row in rows if (row["module"], row["kernel"], row["family"]) == (module, kernel, family)]
            most = [max(row[name] for row in own) for name in ("registers", "spilled", "shared")] if own else []
            moves = " ".join(sorted({each for row in own for each in row["instructions"]}))
            cells.append(f"{most[0]} / {most[1]} / {most[2] / 1024:.0f} {moves}".strip() if own else "")
        lines.append(f"| `{module}.{kernel.strip('_')}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(*arguments: str) -> None:
    """Replaces the rows of the cases that are compiled, and keeps those of other cases that there are. `arguments`: as
    above, parts as well."""
    wanted, parts = (set(arguments) & set(names) or set(names) for names in (FAMILIES, PARTS))
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    known = {case.name for case in cases()}
    rows = [row for row in rows if row["case"] in known]
    for case in cases():
        if case.family in wanted and case.part in parts and (case.paired or "--all" in arguments):
            rows = [row for row in rows if (row["case"], row["family"]) != (case.name, case.family)]
            rows += rows_of(case)
            rows.sort(key=lambda row: (row["module"], row["kernel"], FAMILIES.index(row["family"]), row["case"]))
            ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            sources = recorded_hashes() | {(case.family, case.name): case_hash(case)}
            made = [{"family": family, "case": name, "source": source} for (family, name), source in sources.items()]
            made.sort(key=lambda row: (row["family"], row["case"]))
            SOURCES.write_text("".join(f"{json.dumps(row)}\n" for row in made))
            print(case.family, case.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
