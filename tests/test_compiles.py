"""Kernels compile for every family of GPUs, which the interpreter cannot tell, fit into it and keep their registers."""

import pytest
from compile_for_gpu import compiled
from distill_kernels import launch

MOST_SPILLED = 64  # bytes a thread
SETUP = """
def t(*shape, dtype=torch.bfloat16, grad=True): return torch.ones(*shape, dtype=dtype, requires_grad=grad)
x, w, x_t, w_t = t(130, 64), t(1000, 64), t(130, 128, grad=False), t(1000, 128, grad=False)
y = torch.ones(130, dtype=torch.int64)
"""
CUT_VOCABULARY = """
from distill_kernels.losses import linear, operands, terms
from distill_kernels.losses.shards import VocabShard
class One:  # of two ranks, whose collectives do nothing
    index, size = 1, 2
    def gather(self, tensor): return torch.stack([tensor, tensor])
    def add_(self, tensor): return tensor
    def add_later(self, tensor): return lambda: None
def cut(objective, teacher, top, stats=True):
    batch, wanted = operands.Batch(y, torch.ones(130), None, top), operands.Wanted(True, True, stats=stats)
    with torch.no_grad():
        linear.linear_divergence(
            operands.Head(x, w), teacher, batch, objective, wanted, vocab=1000, dtype=torch.bfloat16,
            shard=VocabShard(One(), ((0, 1000), (1000, 2000))),
        )
"""
SNIPPETS = {
    "linear losses": (
        """
for loss in (ours.FusedKLLoss(ce_weight=1.0, skip_ignored_rows=False), ours.FusedJSDLoss()):
    loss(x, w, x_t, w_t, y, return_stats=True)[0].backward()
ours.FusedKLLoss(skip_ignored_rows=False)(x.float(), w.float(), x_t.float(), w_t.float(), student_bias=w[:, 0].float())
""",
        {"_project_kernel", "_row_kernel", "_fold_kernel", "_scale_kernel"},
    ),
    "losses of a cut vocabulary": (
        CUT_VOCABULARY
        + """
for kinds, temperature in (["forward_kl"], 1.0), (["jsd", "cross_entropy"], 2.0):
    objective = terms.make_objective([ours.LossTerm(kind, 1.0) for kind in kinds], temperature=temperature)
    cut(objective, operands.Head(x_t, w_t), None)
""",
        {"_fold_rows_kernel", "_row_kernel"},
    ),
    "other teachers of a cut vocabulary": (
        CUT_VOCABULARY
        + """
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.topk_rows import TopK
heads = operands.Head(x_t, w_t), operands.Head(x.detach(), w.detach())
ids, given = torch.ones(130, 64, dtype=torch.int32), torch.ones(130, 64)
hard = ours.LossTerm("cross_entropy", 0.5)
plain = terms.make_objective([ours.LossTerm("forward_kl", 1.0)])
everything = terms.make_objective(
    [ours.LossTerm("forward_kl", 1.0), hard], temperature=2.0, label_smoothing=0.1, z_loss=1e-4, student_softcap=30.0
)
for objective in (plain, everything):
    cut(objective, Mixture(heads, (0.7, 0.3), (1.0, 1.0), (0.0, 30.0)), None)
    for tail in ("bucket", "renormalize", "sampled"):
        cut(objective, None, TopK(ids, given, tail), stats=objective is everything)
""",
        {"_fold_top_k_kernel", "_top_k_kernel", "_mix_kernel", "_row_kernel"},
    ),
    "linear layer of tiles": (
        """
for tile in ours.matmul.tiled.TILES:
    ours.matmul.tiled._launch(x.detach(), w.detach(), w[:, 0].detach(), tile)
""",
        {"_tiled_kernel"},
    ),
    "mixture of teachers": (
        """
two = [ours.TeacherHead(x_t, w_t, 0.7), ours.TeacherHead(x.detach(), w.detach(), 0.3, softcap=30.0)]
ours.FusedDistillationLoss([ours.LossTerm("forward_kl", 1.0)], 2.0)(x, w, teachers=two, return_stats=True)[0].backward()
""",
        {"_mix_kernel", "_row_kernel"},
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
        {"_top_k_kernel"},
    ),
    "norms, and sums that start early": (
        """
from distill_kernels.layers import layer_norm, rms_norm
from distill_kernels.layers.rows import RowConfig
for hidden in (128, 5120):
    z, weight = t(64, hidden), t(hidden)
    ours.layer_norm(z, weight, weight).sum().backward(), ours.rms_norm(z, weight).sum().backward()
turns = RowConfig(1, 16, programs=1, stages=3, twice=True)
layer_norm.affine_forward_rows = layer_norm.two_sums_rows = rms_norm.one_sum_rows = lambda *_: turns
for hidden in (5120, 8192):
    z, weight, one = t(64, hidden, grad=False), t(hidden, grad=False), torch.ones(64)
    layer_norm._launch_forward(z, weight, weight, 1e-5, False)
    layer_norm._launch_backward(z, z, weight, one, one, True)
    rms_norm._launch_backward(z, None, z, weight, one, "llama", True)
ours.bias_gelu(z, t(8192)).sum().backward()
ours.decode_attention(t(1, 8, 1, 64), t(1, 2, 4096, 64), t(1, 2, 4096, 64), torch.ones(1, dtype=torch.int32))
""",
        {"_forward_kernel", "_backward_kernel", "_column_sums_kernel", "_chunk_kernel", "_combine_kernel"},
    ),
    "attention in parts": (
        """
q, k = t(1, 1, 2048, 128), t(1, 1, 2048, 128)
ours.flash_attention(q, k, k, causal=False).sum().backward()
q, k = t(1, 2, 64, 256, grad=False), t(1, 1, 4096, 256, grad=False)
ours.flash_attention(q, k, k, window=3000, softcap=30.0)
""",
        {"_forward_kernel", "_merge_kernel", "_key_gradient_kernel", "_query_gradient_kernel", "_add_kernel"},
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


FAMILIES = [family for family in launch.FAMILIES if family.startswith("sm_")]
ATTENTION = """
for kind in ({}, {"window": 700, "softcap": 30.0}, {"cu_seqlens_q": torch.tensor([0, 900, 2048])}):
    q, k = t(1, 8, 2048, SIZE), t(1, 2, 2048, SIZE)
    ours.flash_attention(q, k, k, **kind).sum().backward()
"""
ROWS = """
for hidden in (576, 6144, 8192):
    for dtype in (torch.bfloat16, torch.float32):
        z, weight = t(64, hidden, dtype=dtype), t(hidden, dtype=dtype)
        ours.layer_norm(z, weight, weight).sum().backward(), ours.bias_gelu(z, weight).sum().backward()
        both = ours.add_rms_norm(z, z, weight, form="gemma")
        (both[0] + both[1]).sum().backward(), ours.swiglu(z, z).sum().backward(), ours.softmax(z).sum().backward()
"""
PRODUCTS = """
from distill_kernels.losses.accumulate import add_product_
ours.FusedKLLoss(ce_weight=1.0, skip_ignored_rows=False)(x, w, x_t, w_t, y).backward()
add_product_(t(1000, 64, grad=False), t(130, 1000, grad=False), t(130, 64, grad=False))
if facts.tma:
    for rows, columns in ((128, 128 * 132), (1280, 2560), (640, 1280)):
        ours.triton_linear(t(rows, 64, grad=False), t(columns, 64, grad=False))
ours.split_k_linear(t(40, 2048), t(1000, 2048), t(1000))
for size in (64, 128, 256):
    for slots in (4096, 65536):
        k = t(1, 2, slots, size)
        ours.decode_attention(t(1, 8, 1, size), k, k, torch.ones(1, dtype=torch.int32))
"""
OF_FAMILIES = {
    **{f"attention of {size}": ATTENTION.replace("SIZE", str(size)) for size in (64, 128, 256)},
    "layers": ROWS, "products": PRODUCTS,
}  # fmt: skip
TILED = {"_forward_kernel", "_key_gradient_kernel", "_query_gradient_kernel", "_project_kernel", "_accumulate_kernel",
         "_tiled_kernel"}  # fmt: skip


def that_fit(family, snippet):
    """The snippet's kernels, which keep to the family's shared memory and to their registers."""
    kernels = compiled(family, SETUP + snippet)
    assert all(kernel.spilled <= MOST_SPILLED for kernel in within_shared(family, kernels)), kernels
    return kernels


def within_shared(family, kernels):
    """The kernels, none of which wants more shared memory than the family has."""
    limit = launch.FAMILIES[family].shared_bytes
    assert all(kernel.shared <= limit for kernel in kernels), kernels
    return kernels


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SNIPPETS)
def test_kernels_compile_for_sm_90(name):
    snippet, kernels = SNIPPETS[name]
    assert kernels <= {kernel.kernel for kernel in that_fit("sm_90", snippet)}


TOO_LARGE = {("attention of 256", "sm_100")}  # a fault: a kernel that cannot be launched there
# where a kernel spills more than it may, for instance the gradient of attention's keys at D = 64 on sm_90 (956 bytes in
# one of its forms) and a decoding kernel among the products (68 to 72 bytes)
SPILLS = {
    "attention of 64": ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100"),
    "attention of 128": ("sm_80", "sm_90", "sm_100"),
    "attention of 256": ("sm_80", "sm_90", "sm_100"),
    "products": ("sm_80", "sm_90", "sm_100", "sm_120"),
}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_kernels_fit_every_family(name, family):
    """Within its shared memory, without spills, tiles loaded ahead and multiplied on tensor cores."""
    kernels = compiled(family, SETUP + OF_FAMILIES[name])
    if (name, family) in TOO_LARGE:
        with pytest.raises(AssertionError):
            within_shared(family, kernels)
        pytest.xfail("a kernel wants more shared memory than the family has: it cannot be launched there")
    within_shared(family, kernels)
    products = [kernel for kernel in kernels if kernel.kernel in TILED]
    if name != "layers":
        assert products or not launch.FAMILIES[family].tma
    for kernel in products if name != "layers" else []:
        assert kernel.instructions & {"mma", "wgmma", "tcgen05"}, kernel
        assert kernel.instructions & {"cp.async", "tma"}, kernel
    spilling = sorted({kernel.kernel for kernel in kernels if kernel.spilled > MOST_SPILLED})
    assert bool(spilling) == (family in SPILLS.get(name, ())), spilling
    if spilling:
        pytest.xfail(f"spills: {', '.join(spilling)}")
