"""Kernels compile for every family of GPUs, which the interpreter cannot tell, fit into it and keep their registers."""

import ast
import itertools
import json
from pathlib import Path

import pytest
from compile_for_gpu import Compiled, compiled
from distill_kernels import launch

from scripts import compiled as compiled_rows

KERNELS = Path(launch.__file__).parent
CASES = list(compiled_rows.cases())
MOST_SPILLED = 64  # bytes a thread
MOST_COLUMNS = 512  # of tensor memory: a kernel that wants more compiles to a trap
SETUP = """
def t(*shape, dtype=torch.bfloat16, grad=True): return torch.ones(*shape, dtype=dtype, requires_grad=grad)
x, w, x_t, w_t = t(130, 64), t(1000, 64), t(130, 128, grad=False), t(1000, 128, grad=False)
y = torch.ones(130, dtype=torch.int64)
"""
SNIPPETS = {
    "linear losses": (
        """
from distill_kernels.losses import DIVERGENCES
all_terms = ours.FusedDistillationLoss([ours.LossTerm(kind, 1.0) for kind in DIVERGENCES])
for loss in (ours.FusedKLLoss(ce_weight=1.0, skip_ignored_rows=False), ours.FusedJSDLoss(), all_terms):
    loss(x, w, x_t, w_t, y, return_stats=True)[0].backward()
ours.FusedKLLoss(skip_ignored_rows=False)(x.float(), w.float(), x_t.float(), w_t.float(), student_bias=w[:, 0].float())
own = {"bias": t(1000), "softcap": 30.0, "logit_scale": 0.5, "valid_rows": torch.arange(130)}
ours.fused_log_probs(x, w, y, **own).sum().backward()
ours.fused_log_probs(x.float().detach().requires_grad_(), w.float(), y).sum().backward()
""",
        {"_project_kernel", "_row_normalisers_kernel", "_row_kernel", "_reduce_tiles_kernel", "_scale_kernel"},
    ),
    "policy gradient": (
        """
known = torch.ones(130)
settings = {"clip": 0.2, "kl_weight": 0.1, "valid_rows": torch.arange(130)}
for estimator in ("k2", "k3", "reward"):
    ours.fused_policy_gradient_loss(x, w, y, known, known, known, kl_estimator=estimator, **settings).backward()
more = {"entropy_weight": 0.1, "temperature": 2.0, "student_softcap": 30.0, "student_logit_scale": 0.5}
for extra in ({}, more):
    ours.fused_policy_gradient_loss(x, w, y, known, return_stats=True, **extra)[0].backward()
""",
        {"_project_kernel", "_row_normalisers_kernel", "_log_p_kernel", "_policy_kernel"},
    ),
    "linear layer of tiles": (
        """
from distill_kernels.extras import tiled_linear
for tile in tiled_linear.TILES:
    tiled_linear._launch(x.detach(), w.detach(), w[:, 0].detach(), tile)
""",
        {"_tiled_kernel"},
    ),
    "mixture of teachers": (
        """
two = [ours.TeacherHead(x_t, w_t, 0.7), ours.TeacherHead(x.detach(), w.detach(), 0.3, softcap=30.0)]
ours.FusedDistillationLoss([ours.LossTerm("forward_kl", 1.0)], 2.0)(x, w, teachers=two, return_stats=True)[0].backward()
""",
        {"_row_normalisers_kernel", "_mix_kernel", "_row_kernel"},
    ),
    "top-k losses": (
        """
ids, given = torch.ones(130, 64, dtype=torch.int32), t(130, 64, dtype=torch.float32, grad=False)
for tail in ("bucket", "renormalize", "sampled"):
    ours.FusedTopKKLLoss(tail=tail)(x, w, ids, given).backward()
everything = ours.FusedTopKKLLoss(
    ce_weight=1.0, temperature=2.0, label_smoothing=0.1, z_loss=1e-4, student_softcap=30.0
)
everything(x, w, ids.long(), given, y, valid_rows=torch.arange(130), return_stats=True)[0].backward()
""",
        {"_top_k_normalisers_kernel", "_top_k_kernel"},
    ),
    "top k of the student": (
        """
wide, wide_t = t(40000, 64), t(40000, 128, grad=False)
for k in (1, 64, 200):
    ours.FusedStudentTopKKLLoss(k)(x, wide, x_t, wide_t).backward()
ours.FusedStudentTopKKLLoss(8, "forward", "renormalize", 2.0)(x, w, x_t, w_t, valid_rows=torch.arange(130)).backward()
""",
        {"_select_kernel", "_top_k_normalisers_kernel", "_top_k_kernel"},
    ),
    "norms, and sums that start early": (
        """
from distill_kernels.layers import layer_norm, rms_norm
from distill_kernels.layers.row_layout import RowConfig
for hidden in (128, 5120):
    z, weight = t(64, hidden), t(hidden)
    ours.layer_norm(z, weight, weight).sum().backward(), ours.rms_norm(z, weight).sum().backward()
turns = RowConfig(1, 16, programs=1, stages=3, twice=True)
layer_norm.affine_forward_rows = layer_norm.two_sums_rows = rms_norm.one_sum_rows = lambda *_: turns
for hidden in (5120, 8192):
    z, weight, one = t(64, hidden, grad=False), t(hidden, grad=False), torch.ones(64)
    layer_norm._launch_forward(z, weight, weight, 1e-5, False)
    layer_norm._launch_backward(z, z, weight, one, one, True, weight.dtype)
    rms_norm._launch_backward(z, None, z, weight, one, "llama", True)
wide = t(64, 8192, dtype=torch.float32)
sum(part.sum() for part in rms_norm.add_rms_norm(t(64, 8192), wide, weight, dtype=torch.bfloat16)).backward()
sum(part.sum() for part in rms_norm.rms_norm_and_input(wide * 1, weight, dtype=torch.bfloat16)).backward()
ours.bias_gelu(z, t(8192)).sum().backward()
q, k = t(1, 8, 1, 64, grad=False), t(1, 2, 4096, 64, grad=False)
ours.decode_attention(q, k, k, torch.ones(1, dtype=torch.int32))
""",
        {"_forward_kernel", "_backward_kernel", "_column_sums_kernel", "_chunk_kernel", "_combine_kernel"},
    ),
    "layers that train in fp8": (
        compiled_rows.FP8_TRAINING,
        {"_quantize_kernel", "_transpose_kernel", "_column_maxima_kernel"},
    ),
    "fake quantisation": (
        compiled_rows.PARTS["fake quantisation"][0].format(),
        {"_forward_kernel", "_backward_kernel"},
    ),
    "terms of layers": (
        compiled_rows.PARTS["terms of layers"][0].format(),
        {"_distance_kernel", "_forward_kernel", "_backward_kernel"},
    ),
    "optimizer": (
        compiled_rows.PARTS["optimizer"][0].format(),
        {"adamw_kernel", "count_kernel", "sum_of_squares_kernel"},
    ),
    "attention in parts": (
        compiled_rows.PARTS["attention in parts"][0].format(),
        {"_forward_kernel", "_merge_kernel", "_key_gradient_kernel", "_query_gradient_kernel", "_add_kernel"},
    ),
    "decoding step": (
        compiled_rows.PARTS["decoding step"][0].format(rows=64, dtype="bfloat16", hidden=1728),
        {"_embed_kernel", "_product_kernel", "_attention_kernel", "_scores_kernel", "_finish_kernel"},
    ),
    "decoding step, heads of less than a line": (
        compiled_rows.PARTS["decoding step"][0].format(rows=3, dtype="bfloat16", hidden=576).replace("=64", "=16"),
        {"_attention_kernel"},
    ),
    "losses over logits": (
        """
for columns in (8192, 128256):
    z = t(4, columns)
    ours.kl_div(z, z.detach()), ours.jsd(z, z.detach()), ours.cross_entropy(z, torch.ones(4, dtype=torch.int64))
""",
        {"_logits_kernel"},
    ),
}


def that_fit(family, snippet):
    """The snippet's kernels, which keep to the family's shared memory and to their registers."""
    kernels = compiled(family, SETUP + snippet)
    assert all(kernel.spilled <= MOST_SPILLED for kernel in within_memory(family, kernels)), kernels
    return kernels


def within_memory(family, kernels):
    """The kernels, none of which wants more shared or tensor memory than the family has."""
    limit = launch.FAMILIES[family].shared_bytes
    assert kernels
    assert all(kernel.shared <= limit and kernel.tensor <= MOST_COLUMNS for kernel in kernels), kernels
    return kernels


@pytest.mark.plain("linear losses")
@pytest.mark.parametrize("name", SNIPPETS)
def test_kernels_compile_for_sm_90(name):
    snippet, kernels = SNIPPETS[name]
    assert kernels <= {kernel.kernel for kernel in that_fit("sm_90", snippet)}


WHOLE_STEPS = """
import test_fused_decode as steps
from distill.generation import support_check
from distill.generation.support_check import FusedSupport, RaggedCache, decoder_of, prefill
def calls_of(model, dtype, rows):
    cache = RaggedCache(model.config, rows, 16, model.device)
    cache.calls = {}
    prefill(decoder_of(model), [[1, 2]] * rows, range(rows), cache)
    return FusedSupport(None, cache.calls)
support_check.try_fused_layers = calls_of  # without the numbers, which are garbage here
for kind in steps.KINDS:
    step = steps.step_of(steps.lively(torch.device("cpu"), kind, torch.bfloat16))
    step.slots.cache.lengths.fill_(1)
    step(steps.Sampling(1.0))
    print("step", kind, flush=True)
"""


@pytest.mark.full
def test_whole_steps_of_the_models_that_tests_run_on_a_gpu_compile():
    """Heads of 8 and 16 numbers, windows, norms of heads: once nothing but a GPU told that these did not."""
    kernels = within_memory("sm_90", compiled("sm_90", WHOLE_STEPS))
    assert {"_product_kernel", "_attention_kernel", "_scores_kernel"} <= {kernel.kernel for kernel in kernels}
    assert len([kernel for kernel in kernels if kernel.kernel == "_attention_kernel"]) >= 4


# where a kernel spills more than it may, and that is not mended: on sm_90 tables are changed with a GPU at hand only;
# rows of 16,384 in float32 give RMSNorm's backward pass 128 registers a thread; attention relations hold two tiles
# of [64, 64] scores, which on gfx942 spill 1,460 bytes; windows and caps at heads of 256 spill 176 bytes on sm_100
SPILLS = {
    ("sm_90", "attention.key_gradient", "_key_gradient_kernel"),
    ("sm_100", "attention.flash", "_forward_kernel"),
    ("sm_120", "layers.attention_relation", "_backward_kernel"),
    ("gfx942", "layers.attention_relation", "_backward_kernel"),
    *(
        (family, "layers.rms_norm_kernels", "_backward_kernel")
        for family in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
    ),
}
# kernels that multiply matrices
PRODUCTS = {
    ("attention.flash", "_forward_kernel"),
    ("attention.flash_backward", "_query_gradient_kernel"),
    ("attention.key_gradient", "_key_gradient_kernel"),
    ("decoding.attention", "_attention_kernel"),
    ("decoding.fused_linear", "_product_kernel"),
    ("decoding.tokens", "_scores_kernel"),
    ("layers.attention_relation", "_backward_kernel"),
    ("layers.attention_relation", "_forward_kernel"),
    ("losses.accumulate", "_accumulate_kernel"),
    ("losses.accumulate", "_scaled_accumulate_kernel"),
    ("losses.projection_kernels", "_project_kernel"),
    ("decoding.cached_attention", "_chunk_kernel"),
    ("extras.split_k", "split_k_kernel"),
    ("extras.tiled_linear", "_tiled_kernel"),
}


def recorded(case):
    """What was made of the case's kernels when they were last compiled."""
    rows = [row for row in map(json.loads, compiled_rows.ROWS.read_text().splitlines()) if row["case"] == case.name]
    own = [row for row in rows if row["family"] == case.family]
    return [
        Compiled(
            **{name: row[name] for name in Compiled._fields if name != "instructions"},
            instructions=set(row["instructions"]),
        )
        for row in own
    ]


def by_name(kernels):
    return sorted(kernel._replace(instructions=sorted(kernel.instructions)) for kernel in kernels)


def kernels_of(case):
    """Those recorded, where nothing that they are compiled from has changed since, and else those compiled now."""
    if compiled_rows.recorded_hashes().get((case.family, case.name)) == compiled_rows.case_hash(case):
        return recorded(case)
    return compiled(case.family, case.snippet)


@pytest.mark.full
@pytest.mark.parametrize("family", compiled_rows.FAMILIES)
def test_what_is_recorded_is_what_is_compiled(family):
    (case,) = [case for case in CASES if case.family == family and case.part == "optimizer"]
    if compiled_rows.recorded_hashes().get((family, case.name)) != compiled_rows.case_hash(case):
        pytest.skip("recorded of other sources; test_kernels_fit_every_family compiles every case")
    assert by_name(compiled(family, case.snippet)) == by_name(recorded(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case.paired], ids=lambda case: f"{case.family} {case.name}")
def test_kernels_fit_every_family(case):
    """Within its memories, without spills, tiles loaded ahead and multiplied on tensor cores."""
    kernels = within_memory(case.family, kernels_of(case))
    amd = case.family.startswith("gfx")
    for kernel in kernels:
        if (kernel.module, kernel.kernel) in PRODUCTS:
            assert kernel.instructions & ({"mfma"} if amd else {"mma", "wgmma", "tcgen05"}), kernel
            assert amd or kernel.instructions & {"cp.async", "tma"}, kernel
    spilling = [kernel for kernel in kernels if kernel.spilled > MOST_SPILLED]
    assert {(case.family, kernel.module, kernel.kernel) for kernel in spilling} <= SPILLS, spilling


def test_committed_rows_keep_to_every_limit():
    """The rows are those of scripts/compiled.jsonl, the source of docs/compiled.md."""
    rows = [json.loads(line) for line in compiled_rows.ROWS.read_text().splitlines()]
    assert {row["family"] for row in rows} == set(compiled_rows.FAMILIES)
    for row in rows:
        assert row["shared"] <= launch.FAMILIES[row["family"]].shared_bytes and row["tensor"] <= MOST_COLUMNS, row
        assert row["spilled"] <= MOST_SPILLED or (row["family"], row["module"], row["kernel"]) in SPILLS, row


# kernels that only families with tensor maps, or with matrix instructions for e4m3, launch
NEEDS_TMA = {"_accumulate_kernel", "_scaled_accumulate_kernel"}
NEEDS_FP8 = {
    "quantize_rows_kernel",
    "_quantize_kernel",
    "_transpose_kernel",
    "_column_maxima_kernel",
    "_gather_quantise_kernel",
    "_activation_quantise_kernel",
}


def entry_points():
    """Module and name of every kernel: functions for Triton that read their program's number and no other calls."""
    kernels, called = set(), set()
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                called.update(each.id for each in calls if isinstance(each, ast.Name))
                if any(isinstance(each, ast.Attribute) and each.attr == "program_id" for each in calls):
                    kernels.add((".".join(path.relative_to(KERNELS).with_suffix("").parts), node.name))
    return {(module, name) for module, name in kernels if name not in called}


def test_every_kernel_has_a_row_of_every_family_that_launches_it():
    rows = [json.loads(line) for line in compiled_rows.ROWS.read_text().splitlines()]
    found = {(row["module"], row["kernel"], row["family"]) for row in rows}
    kernels = entry_points()
    assert len(kernels) > 50 and {(module, kernel) for module, kernel, _ in found} <= kernels
    for family in compiled_rows.FAMILIES:
        facts = launch.FAMILIES[family]
        absent = (set() if facts.tma else NEEDS_TMA) | (set() if facts.fp8 else NEEDS_FP8)
        missing = {each for each in kernels if (*each, family) not in found and each[1] not in absent}
        assert not missing, (family, missing)


def test_the_grid_meets_every_family():
    assert set(compiled_rows.FAMILIES) == set(launch.FAMILIES) - {launch.INTERPRETER}
    assert {(case.family, case.part) for case in CASES if case.paired} == set(
        itertools.product(compiled_rows.FAMILIES, compiled_rows.PARTS)
    )
