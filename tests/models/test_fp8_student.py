"""A student's products in fp8: kernels against their references, gradients against the formula in fp64, training."""

import copy
import itertools
import os
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from distill_kernels.matmul import fp8_train
from distill_kernels.matmul.fp8_train import fp8_linears, fp8_swiglu_mlp
from helpers import ops_called, relative_error
from test_fp8 import _interpreter_rounds_to_fp8  # noqa: F401
from tiny import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from two_ranks import run_as_two

from distill.models.adapters import add_lora
from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of
from distill.models.patch.patching import patch, unpatch
from distill.models.precision import fp8_student
from distill.models.precision.fp8_student import compute_in_fp8
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import RecipeError, parse
from distill.recipe.models import Lora
from distill.run import run

WIDTHS = {"plain": (48, 16, 32), "swiglu": (80, 80), "swiglu_backward": (80, 80, 80)}


def draw(*shape, device, dtype=torch.bfloat16):
    """Rows and columns of very different sizes."""
    x = torch.randn(*shape, device=device) * 10 ** (2 * torch.randn(shape[0], 1, device=device))
    return (x * 10 ** torch.randn(shape[1], device=device)).to(dtype)


def same_bytes(ours, theirs, least=0.99):
    """Equal but for few numbers on the edge between two."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert (ours.view(torch.uint8) == theirs.view(torch.uint8)).double().mean() >= least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, with_factor", [("plain", True), ("plain", False), ("swiglu", False), ("swiglu_backward", True)]
)
def test_rows_are_quantised_as_the_reference_does(kernel_device, kind, with_factor, dtype):
    sources = [draw(9, width, device=kernel_device, dtype=dtype) for width in WIDTHS[kind]]
    sources[0][3] = 0
    sources[-1][3] = 0
    values = fp8_train.reference_values(sources, kind)
    factor = 2.0 ** torch.randint(-9, 9, (values.shape[1],), device=kernel_device) if with_factor else None
    x8, scale = fp8_train.quantize(sources, kind, factor)
    expected, expected_scale = fp8_train.reference_quantize(values, factor)
    assert torch.equal(scale, expected_scale) and torch.equal(scale.log2(), scale.log2().round())
    same_bytes(x8, expected)
    back = x8.double() * scale
    exact = values.double() * (1 if factor is None else factor)
    assert ((back - exact).abs() <= exact.abs() / 16 * (1 + 1e-6) + scale * 2.0**-10).all()
    assert scale[3] == 1 or kind == "plain"


@pytest.mark.parametrize("rows", [1, 16, 150])
def test_transposed_quantisation_of_the_backward(kernel_device, rows):
    x8, c = fp8_train.quantize([draw(rows, 80, device=kernel_device)])
    padded = fp8_train.transpose_bytes(x8)
    assert padded.shape == (80, -(-rows // 16) * 16)
    assert torch.equal(padded.view(torch.uint8)[:, :rows], x8.view(torch.uint8).t())
    assert not padded.view(torch.uint8)[:, rows:].any()

    weights = [draw(size, 64, device=kernel_device) for size in (32, 16)]
    w8, sw = fp8_train.quantize([torch.cat(weights)])
    assert torch.equal(fp8_train.transpose_weights(weights, sw.view(-1)).view(torch.uint8), w8.view(torch.uint8).t())

    token, sw = (
        c * 2.0 ** torch.randint(-3, 3, c.shape, device=c.device),
        2.0 ** torch.randint(-9, 9, (80,), device=c.device),
    )
    t8, d = fp8_train.by_columns(x8, token, sw)
    expected, expected_d = fp8_train.reference_by_columns(x8, token, sw)
    assert torch.equal(d, expected_d)
    assert torch.equal(t8.view(torch.uint8)[:, :rows], expected.view(torch.uint8)), "powers of two round nothing again"
    assert not t8.view(torch.uint8)[:, rows:].any()


def e4m3(*shape, device):
    """Numbers that quantising leaves as they are."""
    return torch.randint(-8, 9, shape, device=device).to(torch.bfloat16)


def test_gradients_are_those_of_the_formula(device):
    """Only the GEMMs remain where x, w and dy are exactly representable in e4m3."""
    torch.manual_seed(0)
    x, *weights = (e4m3(*shape, device=device).requires_grad_() for shape in ((33, 64), (48, 64), (16, 64)))
    upstream = [e4m3(33, size, device=device) for size in (48, 16)]
    made = fp8_linears(x, *weights)
    exact = [x.double() @ w.double().t() for w in weights]
    for y, right in zip(made, exact, strict=True):
        assert y.dtype == torch.bfloat16 and relative_error(y, right) < 3e-3
    expected = torch.autograd.grad(exact, [x, *weights], [u.double() for u in upstream])
    for gradient, right in zip(torch.autograd.grad(made, [x, *weights], upstream), expected, strict=True):
        assert gradient.dtype == torch.bfloat16 and relative_error(gradient, right) < 3e-3


def both_mlps(device, tokens, hidden, inner, dtype=torch.bfloat16):
    """Output and gradients of an MLP in fp8, and of the same in fp64."""
    torch.manual_seed(0)
    x = torch.randn(2, tokens, hidden, device=device, dtype=dtype).requires_grad_()
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    weights = [torch.randn(*s, device=device, dtype=dtype).div_(s[1] ** 0.5).requires_grad_() for s in shapes]
    upstream = torch.randn(2, tokens, hidden, device=device, dtype=dtype)
    y = fp8_swiglu_mlp(x, *weights)
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    exact = F.linear(F.silu(F.linear(wide[0], wide[1])) * F.linear(wide[0], wide[2]), wide[3])
    made = [y, *torch.autograd.grad(y, [x, *weights], upstream)]
    return made, [exact, *torch.autograd.grad(exact, wide, upstream.double())]


def test_mlp_error_is_that_of_its_e4m3_gemms(device):
    made, exact = both_mlps(device, 21, 64, 160)
    for ours, right in zip(made, exact, strict=True):
        assert 0.02 < relative_error(ours, right) < 0.09  # nearer means that it was not quantised


def test_frozen_weights_need_no_gradient_gemm(device):
    x = torch.randn(4, 64, device=device, requires_grad=True)
    weight = torch.randn(32, 64, device=device)
    with ops_called("aten::mm", "aten::_scaled_mm") as frozen:
        (y,) = fp8_linears(x, weight)
        y.sum().backward()
    with ops_called("aten::mm", "aten::_scaled_mm") as trained:
        fp8_linears(x.detach().requires_grad_(), weight.clone().requires_grad_())[0].sum().backward()
    assert y.dtype == torch.float32 and len(frozen) == 2 and len(trained) == 3
    assert relative_error(x.grad, weight.sum(0).expand(4, 64)) < 0.06
    with pytest.raises(ValueError, match=r"weight: expected \[N, K\], both divisible by 16, got \(30, 64\)"):
        fp8_linears(x, torch.randn(30, 64, device=device))


def gradients_of(model, ids, checkpointed=False):
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=ids, labels=ids).loss
    return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def student(adapters=False, hidden=64):
    model = tiny_model(seed=1, hidden=hidden)
    if adapters:
        model = add_lora(model, Lora(r=4), seed=0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn_like(p) / 8) if "lora_B" in name else None
    return model


def in_fp8(calls):
    """Return how many tensors were converted to FP8."""
    return sum(call.result.dtype == torch.float8_e4m3fn for call in calls)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_trains_in_fp8_and_is_evaluated_as_it_is(adapters):
    ids = torch.arange(3, 35)[None]
    model = student(adapters)
    patch(model, "student", attention=None, log_it=False)
    plain_loss, plain = gradients_of(model, ids)
    model.eval()
    before, names = model(input_ids=ids).logits, list(model.state_dict())
    assert compute_in_fp8(model) == 14
    with ops_called("aten::_to_copy") as evaluated:
        assert torch.equal(model(input_ids=ids).logits, before) and list(model.state_dict()) == names
    with ops_called("aten::_to_copy") as trained:
        loss, gradients = gradients_of(model, ids)
    assert in_fp8(evaluated) == 0
    assert in_fp8(trained) == 2 * (20 if adapters else 26), "siblings are quantised once"
    assert 0 < abs(loss.item() - plain_loss.item()) < 0.02
    ours, theirs = (torch.cat([gradient.flatten() for gradient in each]) for each in (gradients, plain))
    assert 0.05 < relative_error(ours, theirs) < 0.5
    again = gradients_of(model, ids, checkpointed=True)
    assert torch.equal(again[0], loss) and all(map(torch.equal, again[1], gradients))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(copied.eval()(input_ids=ids).logits, before), "a copy reads the weights of what it was made of"
    assert all(map(torch.equal, gradients_of(copied, ids)[1], gradients))
    unpatch(model)
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    with pytest.raises(ValueError, match=r"student\.compute: fp8 expected linear layers with sizes divisible by 16"):
        compute_in_fp8(tiny_model(hidden=40, intermediate=72))


RECIPE = """
teacher: {init: random, config: teacher}
student: {init: random, config: student, compute: fp8}
data: {source: synthetic, max_length: 32, max_rows: 200, cache: false, validation: {fraction: 0.1}}
train: {steps: 12, batch_size: 4, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("teacher", 1), ("student", 2)):
        tiny_model(seed=seed, hidden=64).config.save_pretrained(tmp_path / name)


@pytest.mark.full
def test_an_fp8_run_trains_alike_reports_its_cost_and_resumes(workplace, capsys):
    plain = run(parse(RECIPE, ["student.compute=auto"], name="plain"))
    capsys.readouterr()
    whole = run(parse(RECIPE, ["train.save_every=6"], name="whole"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fp8"))
    found = re.search(r"student: 14 linear layers .* loss (\S+), before (\S+), gradient off by (\S+)%", line)
    assert found and 0 < abs(float(found[1]) - float(found[2])) < 0.05 and 1 < float(found[3]) < 60
    fallen, of_plain = (r.before.forward_kl - r.after.forward_kl for r in (whole, plain))
    assert whole.before.forward_kl == plain.before.forward_kl, "an evaluation is not in fp8"
    assert fallen > 0 and fallen == pytest.approx(of_plain, rel=0.1) and whole.after != plain.after
    shutil.rmtree(whole.folder / "checkpoint-12")
    shutil.rmtree(whole.folder / "student")
    (whole.folder / "result.json").unlink()
    resumed = run(parse(RECIPE, ["train.save_every=6"], name="whole"), resume=True)
    assert resumed.after == whole.after


def test_fp8_settings_of_a_recipe(workplace):
    with pytest.raises(RecipeError, match="may compute in fp8"):
        parse(RECIPE, ["student.dtype=fp8"])
    for gpu, can in (("H100", True), ("A100", False)):
        report = check_run(parse(RECIPE), find_device(gpu))
        problems = [problem for problem in report.problems if problem.startswith("student.compute: fp8 needs a GPU")]
        assert bool(problems) != can and any("student.compute: fp8" in note for note in report.notes)
    shapes = ["teacher.config=llama-3.1-8b", "student.config=llama-3.2-1b", "data.max_length=4096"]
    plans = ([*shapes, "train.tokens_per_step=null", *more] for more in ([], ["student.compute=auto"]))
    narrow, plain = (check_run(parse(RECIPE, overrides), find_device("H200")) for overrides in plans)
    assert 0.85 < narrow.seconds_per_step / plain.seconds_per_step < 0.95
    assert narrow.memory.parts["weight copies"] == 0
    assert 0.85 < narrow.memory.parts["activations"] / plain.memory.parts["activations"] < 0.92


def gradients_on_ranks():
    """Return the gradients of two ranks with a row each, under DDP and sharded, also from checkpoints."""
    rank, ids, found = dist.get_rank(), torch.arange(3, 67).view(2, 32), {}
    for kind, checkpointed in itertools.product(("alone", "ddp", "fsdp"), (False, True)):
        model = student()
        patch(model, "student", attention=None, log_it=False)
        compute_in_fp8(model)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped = model.train()
        if kind == "ddp":
            wrapped = DistributedDataParallel(model)
        if kind == "fsdp":
            for unit in (*model.model.layers, model):
                fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        rows = range(2) if kind == "alone" else [rank]
        for row in rows:
            loss = wrapped(input_ids=ids[row : row + 1], labels=ids[row : row + 1], use_cache=False).loss
            (loss / len(rows)).backward()
        gradients = [p.grad for p in model.parameters()]
        found[kind, checkpointed] = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return found


@pytest.mark.full
def test_two_ranks_train_as_one_process(tmp_path):
    run_as_two(__file__, tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt")
    for kind, checkpointed in found:
        assert all(map(torch.equal, found[kind, checkpointed], found["alone", False])), (kind, checkpointed)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, hidden, inner", [(4096, 2048, 8192), (1001, 1536, 8960)])
def test_shapes_of_real_models_agree(device, tokens, hidden, inner):
    made, exact = both_mlps(device, tokens, hidden, inner)
    for ours, right in zip(made, exact, strict=True):
        assert 0.02 < relative_error(ours, right) < 0.09


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [False, True])
def test_a_captured_step_has_the_bits_of_a_launched_one(device, adapters):
    ids = torch.randint(0, 250, (2, 128), device=device)
    model = student(adapters, hidden=128).to(device, torch.bfloat16)
    patch(model, "student", log_it=False)
    fp8_student.GAINS_FROM, before = 0, fp8_student.GAINS_FROM
    try:
        compute_in_fp8(model)
    finally:
        fp8_student.GAINS_FROM = before
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    graphs = DecoderGraphs()
    graphs.add("student", decoder_of(model), trains=True)

    def step():
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        (hidden.float() ** 2).mean().backward()
        gradients = [p.grad.clone() for p in weights if p.grad is not None]
        for p in weights:
            p.grad = None
        return hidden.detach().clone(), gradients

    launched = step()
    graphs.enabled = True
    for _ in range(3):
        hidden, gradients = step()
    assert graphs.replays == 2 and not graphs.refused, graphs.refused
    assert torch.equal(hidden, launched[0]) and all(map(torch.equal, gradients, launched[1]))
    graphs.release()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    gradients = gradients_on_ranks()
    if dist.get_rank() == 0:
        torch.save(gradients, sys.argv[1])
    dist.barrier()
    os._exit(0)
