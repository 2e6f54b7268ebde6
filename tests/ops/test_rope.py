"""Rotary embedding against fp64 and transformers' own functions."""

import pytest
import torch
from distill_kernels.layers.rope import reference_rope, rope
from grids import pairwise
from layer_checks import DTYPES, check_compiles, check_layer, draw, poisoned_memory


def angles(device, batch, tokens, width, dtype, *, equal_halves=True):
    angle = draw(batch, tokens, width // 2 if equal_halves else width, dtype=torch.float32, device=device, seed=3) * 4
    if equal_halves:
        angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def make(device, shape, dtype, *, rotary=None, shared=False, projected=True, equal_halves=True):
    batch, q_heads, k_heads, tokens, dim = shape

    def heads(count, seed):
        if projected:  # as q_proj(x).view(B, T, H, D).transpose(1, 2)
            return draw(batch, tokens, count, dim, dtype=dtype, device=device, seed=seed).transpose(1, 2)
        return draw(batch, count, tokens, dim, dtype=dtype, device=device, seed=seed)

    cos, sin = angles(device, 1 if shared else batch, tokens, rotary or dim, dtype, equal_halves=equal_halves)
    return heads(q_heads, 0), heads(k_heads, 1), cos, sin


GRADIENTS = (True, True, False, False)
SHAPES = [(1, 1, 1, 1, 2), (2, 4, 2, 5, 64), (1, 9, 3, 7, 80), (2, 3, 1, 4, 6), (1, 33, 5, 2, 128)]


@pytest.mark.plain(
    "torch.float32-(1, 1, 1, 1, 2)-True",
    "torch.float32-(2, 3, 1, 4, 6)-False",
    "torch.bfloat16-(2, 4, 2, 5, 64)-False",
    "torch.bfloat16-(1, 33, 5, 2, 128)-True",
    "torch.float16-(1, 9, 3, 7, 80)-True",
)
@pytest.mark.parametrize(*pairwise({"dtype": DTYPES, "shape": SHAPES, "shared": [True, False]}))
def test_rope_equals_its_reference(kernel_device, shape, shared, dtype):
    inputs = make(kernel_device, shape, dtype, shared=shared)
    check_layer(rope, reference_rope, inputs, dtype, differentiate=GRADIENTS)


@pytest.mark.plain("2-True", "16-True", "20-True")
@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("rotary", [2, 16, 20])
def test_partial_rotary_equals_its_reference(kernel_device, rotary, projected):
    inputs = make(kernel_device, (2, 4, 2, 5, 24), torch.bfloat16, rotary=rotary, projected=projected)
    check_layer(rope, reference_rope, inputs, torch.bfloat16, differentiate=GRADIENTS)


def test_halves_that_differ_have_the_transposed_gradient(kernel_device):
    inputs = make(kernel_device, (2, 4, 2, 5, 16), torch.float32, equal_halves=False)
    check_layer(rope, reference_rope, inputs, torch.float32, differentiate=GRADIENTS)


def test_backward_is_the_inverse_rotation(kernel_device):
    q, k, cos, sin = make(kernel_device, (2, 4, 2, 5, 16), torch.float32)
    q.requires_grad_()
    rotated, _ = rope(q, k, cos, sin)
    (back,) = torch.autograd.grad(rotated, q, rotated.detach())
    torch.testing.assert_close(back, q.detach())


def test_fp32_angles_for_bf16_heads(kernel_device):
    q, k, _, _ = make(kernel_device, (2, 4, 2, 5, 16), torch.bfloat16)
    cos, sin = angles(kernel_device, 2, 5, 16, torch.float32)
    check_layer(rope, reference_rope, (q, k, cos, sin), torch.bfloat16, differentiate=GRADIENTS)


@pytest.mark.parametrize("partial", [False, True])
def test_rope_equals_that_of_transformers(kernel_device, partial):
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as partial_rope
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope

    inputs = make(kernel_device, (2, 6, 2, 9, 32), torch.float32, rotary=8 if partial else None)
    for ours, theirs in zip(rope(*inputs), (partial_rope if partial else llama_rope)(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rope_keeps_the_layout_of_its_inputs(kernel_device):
    q, k, cos, sin = make(kernel_device, (2, 4, 2, 5, 16), torch.float32)
    rotated, _ = rope(q, k, cos, sin)
    assert rotated.stride() == q.stride(), "a transposed projection keeps its layout"
    packed = draw(2, 5, 8, 16, dtype=torch.float32, device=kernel_device).transpose(1, 2)  # q, k, v of one matrix
    check_layer(rope, reference_rope, (packed[:, :4], packed[:, 4:6], cos, sin), torch.float32, differentiate=GRADIENTS)
    backwards = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    check_layer(
        rope, reference_rope, (backwards, k, cos[:1].expand(2, 5, 16), sin), torch.float32, differentiate=GRADIENTS
    )


@pytest.mark.parametrize("rotary", [16, 8])
def test_rope_in_place_equals_rope(kernel_device, rotary):
    q, k, cos, sin = make(kernel_device, (2, 4, 2, 5, 16), torch.float32, rotary=rotary)
    expected = rope(q, k, cos, sin)
    with poisoned_memory():
        actual = rope(q, k, cos, sin, in_place=True)
    assert actual[0] is q and actual[1] is k
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="in_place: expected False where q or k needs a gradient"):
        rope(q.requires_grad_(), k, cos, sin, in_place=True)


def test_in_place_on_the_cpu(device):
    q, k, cos, sin = make(torch.device("cpu"), (2, 4, 2, 5, 16), torch.float32)
    expected = reference_rope(q, k, cos, sin)
    rope(q, k, cos, sin, in_place=True)
    torch.testing.assert_close((q, k), expected)


@pytest.mark.full
def test_op_passes_opcheck_and_compiles_without_a_graph_break(kernel_device):
    q, k, cos, sin = make(kernel_device, (2, 4, 2, 5, 16), torch.float32)
    torch.library.opcheck(torch.ops.distill.rope.default, (q.requires_grad_(), k.requires_grad_(), cos, sin, False))
    torch.library.opcheck(torch.ops.distill.rope_in_place.default, (q.detach(), k.detach(), cos, sin))
    check_compiles(rope, (q, k, cos, sin), GRADIENTS)


def test_rope_accepts_no_tokens(kernel_device):
    q, k, cos, sin = make(kernel_device, (2, 4, 2, 0, 16), torch.float32)
    assert rope(q, k, cos, sin)[0].shape == (2, 4, 0, 16)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda q, k, c, s: (q[0], k, c, s), r"q, k: expected \[B, Hq, T, D\]"),
        (lambda q, k, c, s: (q, k[..., :8], c, s), r"q, k: expected .* got shapes \(2, 4, 5, 16\) and \(2, 2, 5, 8\)"),
        (
            lambda q, k, c, s: (q, k, c[:, :3], s[:, :3]),
            r"cos, sin: expected \[2 or 1, 5, R\], got .*\(2, 3, 16\)",
        ),
        (lambda q, k, c, s: (q, k, c[..., :7], s[..., :7]), "cos: expected an even last dimension of 2 to 16"),
        (lambda q, k, c, s: (q.double(), k, c, s), "q: expected dtype .* got torch.float64"),
    ],
)
def test_errors_name_the_invalid_argument(kernel_device, change, match):
    with pytest.raises(ValueError, match=match):
        rope(*change(*make(kernel_device, (2, 4, 2, 5, 16), torch.float32)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 32, 8, 4096, 64), (2, 32, 8, 1024, 128), (1, 14, 2, 1000, 80)], ids=str)
def test_kernel_equals_the_reference_on_shapes_of_real_models(device, shape, dtype):
    check_layer(rope, reference_rope, make(device, shape, dtype), dtype, differentiate=GRADIENTS)
