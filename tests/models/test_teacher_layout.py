"""A frozen teacher's gate and up interleaved in memory: the same model to whoever looks, one product where it pays."""

import copy

import pytest
import torch
from distill_kernels.launch import interpreted
from distill_kernels.matmul import gated
from distill_kernels.matmul.fp8 import swap_linears_for_fp8
from helpers import ops_called
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from distill.models.adapters import add_lora
from distill.models.load.fingerprint import fingerprint
from distill.models.patch import teacher_layout
from distill.models.patch.patching import patch, unpatch
from distill.models.patch.teacher_layout import interleave
from distill.models.precision import offload
from distill.recipe.models import Lora

ROWS, WIDTH = 32, 64
MIN_SIZES = gated.MinSize(WIDTH, ROWS)


def model(dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        **changes,
    )
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


@pytest.fixture
def products():
    """Interprets kernels and counts the product's calls."""
    with interpreted(), ops_called("distill::gated_linear") as calls:
        yield calls


def tokens(rows):
    return torch.randint(0, 100, (1, rows), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def logits(model, rows=ROWS):
    return model(tokens(rows), use_cache=False).logits.double()


def test_the_same_numbers_by_one_product_a_layer(products):
    teacher = model()
    exact = logits(copy.deepcopy(teacher).double())
    before = fingerprint(teacher), {name: t.clone() for name, t in teacher.state_dict().items()}
    report = patch(teacher, "teacher", attention=None)
    apart = logits(teacher)
    assert not products
    report.swapped.update(interleave(teacher, MIN_SIZES))
    assert report.swapped["interleaved"] == 2 and "2 interleaved" in str(report)
    ours = logits(teacher)
    assert len(products) == 2
    assert (ours - exact).norm() <= 1.2 * (apart - exact).norm()
    after = teacher.state_dict()
    assert fingerprint(teacher) == before[0]
    assert list(after) == list(before[1]) and all(torch.equal(after[name], t) for name, t in before[1].items())


def test_no_second_copy_is_left(products):
    teacher = model()
    patch(teacher, "teacher", attention=None)
    interleave(teacher, MIN_SIZES)
    for layer in teacher.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        assert gate.untyped_storage().nbytes() == 2 * 2 * gate.numel()


def test_few_rows_gradients_and_other_dtypes_take_the_usual_path(products):
    teacher = model()
    patch(teacher, "teacher", attention=None)
    few, many = logits(teacher, 8), logits(teacher)
    interleave(teacher, MIN_SIZES)
    assert torch.equal(logits(teacher, 8), few)  # no other product, so no other rounding
    mlp, x = teacher.model.layers[0].mlp, torch.randn(1, ROWS, WIDTH, dtype=torch.bfloat16)
    mlp(x.requires_grad_(True)).float().sum().backward()
    assert x.grad.norm() > 0
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        mlp(x)
    assert not products
    assert (logits(teacher) - many).norm() < 0.02 * many.norm() and len(products) == 2


@pytest.mark.plain("fp8", "adapter", "hook")
@pytest.mark.parametrize("change", ["hook", "moved", "copied", "fp8", "adapter", "replaced"])
def test_what_happens_to_a_layer_later_is_heard(products, change):
    """One product would pass it over."""
    teacher = model()
    patch(teacher, "teacher", attention=None)
    interleave(teacher, MIN_SIZES)
    asked, mlp = teacher, teacher.model.layers[0].mlp
    if change == "hook":
        mlp.gate_proj.register_forward_hook(lambda module, inputs, output: output * 0)
    elif change == "moved":
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight.data = layer.weight.data.float().to(torch.bfloat16)
    elif change == "copied":
        asked = copy.deepcopy(teacher)
        with torch.no_grad():
            teacher.model.layers[0].mlp.gate_proj.weight.zero_()
    elif change == "fp8":
        swap_linears_for_fp8(teacher)
    elif change == "adapter":
        asked = add_lora(teacher, Lora(r=4, targets=["gate_proj"]), seed=0)
    else:
        mlp.gate_proj.weight.data = torch.zeros_like(mlp.gate_proj.weight)
    logits(asked)
    expected = {"hook": 1, "moved": 1, "copied": 0, "fp8": 0, "adapter": 0, "replaced": 1}
    assert len(products) == expected[change]


def test_what_is_copied_into_a_weight_is_used(products):
    """A running average writes into the teacher's weights."""
    teacher, other = model(), model(initializer_range=0.1)
    patch(teacher, "teacher", attention=None)
    interleave(teacher, MIN_SIZES)
    with torch.no_grad():
        for own, new in zip(teacher.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    expected = logits(other)
    assert (logits(teacher) - expected).norm() < 0.02 * expected.norm() and len(products) == 2
    assert teacher.model.layers[0].mlp.gate_proj.weight.float().is_contiguous()  # as an average is saved


def test_unpatch_gives_weights_their_own_memory(products, tmp_path):
    teacher = model()
    before = fingerprint(teacher)
    patch(teacher, "teacher", attention=None)
    interleave(teacher, MIN_SIZES)
    unpatch(teacher)
    save_file({name: p.detach() for name, p in teacher.model.layers.named_parameters()}, tmp_path / "weights")
    teacher.save_pretrained(tmp_path)
    assert fingerprint(teacher) == before == fingerprint(LlamaForCausalLM.from_pretrained(tmp_path))
    patch(teacher, "teacher", attention=None)
    logits(teacher)
    assert not products


def trained(model):
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)


def hooked(model):
    model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda module, inputs: None)


@pytest.mark.parametrize(
    "change, count, reason",
    [
        (lambda model: None, 2, None),
        (trained, 1, "plain frozen layers"),
        (hooked, 1, "plain frozen layers"),
        (lambda model: model.float(), 0, "16 bits"),
        (swap_linears_for_fp8, 0, "plain frozen layers"),
        (lambda model: vars(model).update({offload.STREAMER: "a conveyor"}), 0, "offloaded"),
    ],
)
def test_a_log_line_gives_the_reason_where_interleaving_is_off(products, caplog, change, count, reason):
    teacher = model()
    patch(teacher, "teacher", attention=None)
    change(teacher)
    with caplog.at_level("DEBUG", logger=teacher_layout.__name__):
        assert interleave(teacher, MIN_SIZES)["interleaved"] == count
    assert (reason or "") in caplog.text and bool(caplog.text) == (reason is not None)


def test_biases_leave_it_off(products):
    teacher = model(mlp_bias=True)
    patch(teacher, "teacher", attention=None)
    assert not interleave(teacher, MIN_SIZES)


def test_off_unless_the_table_names_the_gpu(products, monkeypatch, caplog):
    teacher = model()
    patch(teacher, "teacher", attention=None)
    with caplog.at_level("DEBUG", logger=teacher_layout.__name__):
        assert list(gated.MIN_SIZES) == ["sm_90"] and not interleave(teacher) and "not measured" in caplog.text
    assert teacher.model.layers[0].mlp.gate_proj.weight.is_contiguous()
    monkeypatch.setitem(gated.MIN_SIZES, "interpreter", gated.MinSize(WIDTH + 1, ROWS))
    assert not interleave(teacher)
    monkeypatch.setitem(gated.MIN_SIZES, "interpreter", MIN_SIZES)
    assert interleave(teacher)["interleaved"] == 2
    logits(teacher, ROWS - 1)
    assert not products
    logits(teacher, ROWS)
    assert len(products) == 2


def test_a_model_that_is_not_patched_stays_as_it_is(products):
    teacher = model()
    assert not interleave(teacher, MIN_SIZES) and teacher.model.layers[0].mlp.gate_proj.weight.is_contiguous()


@pytest.mark.gpu
def test_teacher_layout_keeps_outputs_on_a_gpu():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    with torch.device("cuda"):
        teacher = LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)
        ids = torch.randint(0, 1000, (2, 1024))
    patch(teacher, "teacher")
    with torch.no_grad():
        apart, before = teacher(ids).logits.double(), torch.cuda.memory_allocated()
        assert interleave(teacher, gated.MinSize(2048, 1024))["interleaved"] == 2
        assert torch.cuda.memory_allocated() == before
        ours = teacher(ids).logits.double()
        compiled = torch.compile(teacher.model.layers[0].mlp)
        x = torch.randn(1, 1024, 2048, device="cuda", dtype=torch.bfloat16)
        assert (compiled(x) - teacher.model.layers[0].mlp(x)).norm() < 0.02 * compiled(x).norm()
    assert (ours - apart).norm() < 0.01 * apart.norm()
