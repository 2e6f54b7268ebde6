"""A student that trains as a quantised file: steps against autograd's, saving, resuming, settings, two processes."""

import copy
import json
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from distill_kernels.quantisation.formats import FORMATS, reference_fake_quantise
from distill_kernels.quantisation.number_format import Scales
from safetensors.torch import load_file
from straight_through import fake_quantise
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from two_ranks import run_as_two

from distill.core.errors import RunError
from distill.models.adapters import add_lora, merged
from distill.models.head import unwrap_peft
from distill.models.patch.patching import patch
from distill.models.precision.quantised_adapters import AdaptedMatrix, use_merged
from distill.models.precision.quantised_formats import formats_of, read_saved
from distill.models.precision.quantised_student import quantise_student
from distill.recipe import Lora, parse
from distill.recipe.quantise import Quantise
from distill.run import run

IDS = torch.arange(3, 67).view(2, 32)
RECIPE = """
teacher: {init: random, config: teacher}
student: {init: random, config: student, quantise: {format: q4_0}}
data: {source: synthetic, max_length: 32, max_rows: 200, cache: false, validation: {fraction: 0.1}}
train: {steps: 6, batch_size: 4, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu,
        save_every: 3}
generate: {prompts: []}
"""


def all_formats(model, name, **more):
    return formats_of(model, Quantise(format=name, **more))


def loss_of(model, ids, weights=None):
    call = model if weights is None else lambda **given: functional_call(model, weights, (), given)
    return call(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "int4_g32", "int8", "fp8", "nvfp4"])
def test_steps_are_those_of_rounding_in_the_forward(name):
    """Two micro-batches a step, AdamW, three steps: the bits of masters updated through a straight-through forward."""
    plain, ours = tiny_model(seed=1, hidden=64), tiny_model(seed=1, hidden=64)
    found = all_formats(plain, name)
    formats, weights = found.by_name, quantise_student(ours, found)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, ours)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for ids in IDS.split(1):
            rounded = {
                key: fake_quantise(p, formats[key]) if key in formats else p for key, p in plain.named_parameters()
            }
            expected = loss_of(plain, ids, rounded)
            expected.backward()
            loss = loss_of(ours, ids)
            loss.backward()
            assert torch.equal(loss, expected)
        optimizers[0].step()
        weights.before_step(1e-2)
        optimizers[1].step()
        weights.after_step()
    theirs = dict(plain.named_parameters())
    for key, p in ours.named_parameters():
        if key in formats:
            assert torch.equal(weights.matrices[key].master, theirs[key])
            assert torch.equal(p, reference_fake_quantise(theirs[key], formats[key])) and not torch.equal(
                p, theirs[key]
            )
        else:
            assert torch.equal(p, theirs[key])


@pytest.mark.parametrize("name, hidden", [("q4_0", 64), ("int4_g32", 64), ("nvfp4", 64), ("q4_k", 128)])
def test_learned_scales_get_the_gradients_of_autograd(name, hidden):
    plain, ours = tiny_model(seed=1, hidden=hidden), tiny_model(seed=1, hidden=hidden)
    found = all_formats(plain, name)
    formats, weights = found.by_name, quantise_student(ours, found, learned=True)
    narrow = {key for key, form in formats.items() if FORMATS[form].is_learned}
    assert {key for key, matrix in weights.matrices.items() if matrix.scales is not None} == narrow
    weights.scales.values.mul_(0.8)  # so that some weights are clamped
    weights.round()

    def parts(tensor):
        return {key: [p for p in weights.scales.of(weights.matrices[key], tensor) if p is not None] for key in narrow}

    before = {key: [part.clone() for part in own] for key, own in parts(weights.scales.values).items()}
    scales = {key: Scales(*(part.clone().requires_grad_() for part in own)) for key, own in before.items()}
    for ids in IDS.split(1):
        rounded = {
            key: fake_quantise(p, formats[key], scales.get(key)) if key in formats else p
            for key, p in plain.named_parameters()
        }
        loss_of(plain, ids, rounded).backward()
        loss_of(ours, ids).backward()
    weights.before_step(1e-3)
    theirs, after = dict(plain.named_parameters()), parts(weights.scales.values)
    for key in narrow:
        torch.testing.assert_close(weights.matrices[key].parameter.grad, theirs[key].grad, rtol=1e-5, atol=1e-9)
        assert torch.equal(weights.matrices[key].parameter, weights.matrices[key].master), "the optimizer sees masters"
        # Adam's first step: every scale moves by the rate, against its gradient by log |scale|
        for old, new, own in zip(before[key], after[key], scales[key], strict=False):
            by_log = own.grad * old
            live = by_log.abs() > 1e-8
            assert live.any()
            torch.testing.assert_close((new / old).log()[live], -4e-3 * by_log.sign()[live], rtol=2e-3, atol=1e-6)
    weights.after_step()
    for key in narrow:
        matrix = weights.matrices[key]
        own = Scales(*after[key])
        assert torch.equal(matrix.parameter, reference_fake_quantise(matrix.master, formats[key], own))


def test_large_weights_of_nvfp4_are_trained_and_saved_by_a_global_scale_of_their_own(tmp_path):
    """Blocks above 5.25 were clipped; layers of one module, which servers join, share the scale."""
    model = tiny_model(seed=1, hidden=64)
    model.model.layers[0].mlp.up_proj.weight.data *= 300
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    weights = quantise_student(model, all_formats(model, "nvfp4"), learned=True)
    for key, matrix in weights.matrices.items():
        error = (matrix.parameter - before[key]).norm() / before[key].norm()
        assert error < 0.15, key
    scales = {key: matrix.form.global_scale for key, matrix in weights.matrices.items()}
    large = {key for key, scale in scales.items() if scale != scales["model.layers.1.mlp.up_proj.weight"]}
    assert {key for key in large if "layers.0.mlp" in key} == {key for key in scales if "layers.0.mlp" in key}
    for _ in range(2):
        loss_of(model, IDS).backward()
        weights.before_step(1e-2)
        weights.after_step()
    weights.saved().write(tmp_path)
    saved = read_saved(tmp_path)
    for key, matrix in weights.matrices.items():
        assert saved.scales[key]["global_scale"].tolist() == [scales[key]]
        assert torch.equal(saved.blocks(key, matrix.parameter.detach()).values(), matrix.parameter)


def adapted(seed=1):
    """Return a model with LoRA on its linear layers but the one that goes down, quantised with learned scales."""
    model = add_lora(tiny_model(seed=seed, hidden=64), Lora(r=4, targets=["q_proj", "v_proj", "up_proj"]), seed=3)
    formats = formats_of(unwrap_peft(model), Quantise(format="q4_0"))
    return model, quantise_student(
        model, formats, learned=True, adapters=use_merged(unwrap_peft(model), set(formats.by_name))
    )


def test_adapters_get_the_gradients_of_the_rounded_merged_weights():
    """Those of autograd through W + s B A, rounded straight-through, in two micro-batches of one step."""
    plain, (model, weights) = tiny_model(seed=1, hidden=64), adapted()
    assert weights.formats == all_formats(plain, "q4_0")
    forms = weights.formats.by_name
    matrices = {key: matrix for key, matrix in weights.matrices.items() if isinstance(matrix, AdaptedMatrix)}
    assert len(matrices) == 6 and len(forms) == 15
    with torch.no_grad():
        for matrix in matrices.values():
            matrix.b.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    weights.scales.values.mul_(0.9)
    weights.round()
    leaves = {key: [m.a.detach().clone(), m.b.detach().clone(), m.scales.scale.clone()] for key, m in matrices.items()}
    for parts in leaves.values():
        for part in parts:
            part.requires_grad_()
    theirs = dict(plain.named_parameters())
    for ids in IDS.split(1):
        rounded = {}
        for key, p in theirs.items():
            rounded[key] = p
            if key in leaves:
                a, b, scale = leaves[key]
                rounded[key] = fake_quantise(p + 8.0 * b @ a, forms[key], Scales(scale))
            elif key in forms:
                rounded[key] = weights.matrices[key].parameter.detach()
        expected, loss = loss_of(plain, ids, rounded), loss_of(model, ids)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
    for key, matrix in matrices.items():
        found = (matrix.a.grad, matrix.b.grad, matrix.gradients.scale)
        for ours, right in zip(found, leaves[key], strict=True):
            torch.testing.assert_close(ours, right.grad, rtol=1e-4, atol=1e-7)
            assert right.grad.abs().max() > 0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    before = weights.scales.values.clone()
    weights.before_step(1e-2)
    optimizer.step()
    weights.after_step()
    assert not torch.equal(weights.scales.values, before) and not weights.scales.gradient.any()
    for key, matrix in matrices.items():
        merged_weight = matrix.base + 8.0 * matrix.b @ matrix.a
        torch.testing.assert_close(matrix.master, merged_weight)
        assert torch.equal(matrix.parameter, reference_fake_quantise(matrix.master, forms[key], matrix.scales))
        assert not torch.equal(matrix.parameter, theirs[key])
    whole = merged(model)
    assert {key for key in whole.state_dict() if "lora" in key} == set()
    for key, matrix in matrices.items():
        assert torch.equal(whole.get_parameter(key), matrix.parameter), "merging adds nothing"
    whole.eval(), model.eval()
    torch.testing.assert_close(whole(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("form", ["q4_0", "q8_0", "q4_k", "int4_g32", "int8", "fp8", "nvfp4"])
def test_a_checkpoint_of_an_adapter_has_the_codes_of_all_weights(tmp_path, form):
    """Also where no adapter is on a quantised weight: those of the base model are rounded all the same."""
    model = add_lora(tiny_model(seed=1, hidden=128), Lora(r=4, targets=["o_proj"]), seed=3)
    formats = formats_of(unwrap_peft(model), Quantise(format=form, modules={"o_proj": "keep"}))
    weights = quantise_student(
        model, formats, learned=True, adapters=use_merged(unwrap_peft(model), set(formats.by_name))
    )
    weights.scales.values.mul_(0.9)
    weights.round()
    weights.save(tmp_path)
    again = tiny_model(seed=1, hidden=128)
    read_saved(tmp_path).restore_values(again)
    theirs = dict(again.named_parameters())
    assert all(torch.equal(theirs[key], matrix.parameter) for key, matrix in weights.matrices.items())


def test_kernels_and_copies_read_the_rounded_weights():
    model = tiny_model(seed=1, hidden=64)
    found = all_formats(model, "q4_0")
    formats, rounded = found.by_name, copy.deepcopy(model)
    with torch.no_grad():
        for key, p in rounded.named_parameters():
            p.copy_(reference_fake_quantise(p, formats[key]) if key in formats else p)
    quantise_student(model, found)
    patch(model, "student", attention=None, log_it=False)
    patch(rounded, "student", attention=None, log_it=False)
    assert torch.equal(model(input_ids=IDS).logits, rounded(input_ids=IDS).logits)
    assert torch.equal(copy.deepcopy(model)(input_ids=IDS).logits, rounded(input_ids=IDS).logits)


def test_a_step_without_gradients_changes_nothing():
    """The guard drops the gradients of a step that is not finite."""
    model = tiny_model(seed=1, hidden=64)
    weights = quantise_student(model, all_formats(model, "q4_0"), learned=True)
    before, scales = copy.deepcopy(model.state_dict()), weights.scales.values.clone()
    weights.before_step(1e-2)
    weights.after_step()
    loss_of(model, IDS).backward()
    next(iter(weights.matrices.values())).parameter.grad[0, 0] = torch.nan
    weights.before_step(1e-2)
    weights.after_step()
    assert torch.equal(weights.scales.values, scales)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seed in (("teacher", 1), ("student", 2)):
        tiny_model(seed=seed, hidden=64).config.save_pretrained(tmp_path / name)


def check_student(folder):
    """Every weight of the folder is exactly in its file's format."""
    saved, tensors = read_saved(folder), load_file(folder / "model.safetensors")
    assert set(saved.by_name.values()) == {"q4_0", "q8_0"} and len(saved.by_name) == 15
    for key in saved.by_name:
        blocks = saved.blocks(key, tensors[key])
        assert blocks is not None and torch.equal(blocks.values(), tensors[key]), key
    return tensors


LORA = "student.lora={r: 4, targets: all-linear}"


@pytest.mark.plain("absmax-[]")
@pytest.mark.parametrize("scales, more", [("learned", []), ("learned", [LORA, "data.packing=true"]), ("absmax", [])])
def test_a_run_saves_the_file_it_trained_and_resumes_to_the_bit(workplace, scales, more, capsys):
    settings = [f"student.quantise.scales={scales}", *more]
    whole = run(parse(RECIPE, settings, name="whole"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("quantise"))
    assert "student: 15 matrices of 0.1 M weights in q4_0, q8_0:" in line
    tensors = check_student(whole.folder / "student")
    if not more:
        check_student(whole.folder / "checkpoint-3")  # an export of a checkpoint reads the same values
    again = AutoModelForCausalLM.from_pretrained(whole.folder / "student")
    assert again.dtype == torch.float32 and whole.after.forward_kl < whole.before.forward_kl
    for name in ("checkpoint-6", "student"):
        shutil.rmtree(whole.folder / name)
    (whole.folder / "result.json").unlink()
    resumed = run(parse(RECIPE, settings, name="whole"), resume=True)
    assert resumed.after == whole.after
    for key, tensor in check_student(resumed.folder / "student").items():
        assert torch.equal(tensor, tensors[key])
    state = resumed.folder / "checkpoint-6" / "quantised.safetensors"
    assert (load_file(state)["scales"].numel() > 0) is (scales == "learned")
    assert json.loads((resumed.folder / "student" / "quantised.json").read_text())["tensors"]


def test_a_checkpoint_of_an_unquantised_run_is_refused(tmp_path):
    model = tiny_model(seed=1, hidden=64)
    weights = quantise_student(model, all_formats(model, "q4_0"))
    with pytest.raises(
        RunError, match=r"quantised\.safetensors is missing, which a quantised student's checkpoint has"
    ):
        weights.restore(tmp_path)
    weights.save(tmp_path)
    other = quantise_student(tiny_model(hidden=64), all_formats(model, "q4_0", modules={"down_proj": "keep"}))
    with pytest.raises(RunError, match=r"down_proj\.weight exists in only one of checkpoint and student"):
        other.restore(tmp_path)


def trained_on_ranks(wrapped, model, weights, rate):
    """Return parameters and scales after two steps: under DDP of a row a rank, else of both rows."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    rows = [dist.get_rank()] if isinstance(wrapped, DistributedDataParallel) else range(2)
    for _ in range(2):
        optimizer.zero_grad()
        for row in rows:
            (loss_of(wrapped, IDS[row : row + 1]) / len(rows)).backward()
        weights.before_step(0.01)
        optimizer.step()
        weights.after_step()
    return {key: p.detach().clone() for key, p in model.named_parameters()} | {"scales": weights.scales.values}


def adapters_on_ranks():
    """Return what `weights_on_ranks` does, of a LoRA student."""
    found = {}
    for kind in ("alone", "ddp"):
        model, weights = adapted()
        wrapped = DistributedDataParallel(model) if kind == "ddp" else model
        found[kind] = trained_on_ranks(wrapped, model, weights, 0.5)
    return found


def weights_on_ranks():
    """Return what two ranks with a row each have after two steps under DDP, and one process with both rows."""
    found = {}
    for kind in ("alone", "ddp"):
        model = tiny_model(seed=1, hidden=64)
        if kind == "ddp" and dist.get_rank():  # the first rank's start counts
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
        wrapped = DistributedDataParallel(model) if kind == "ddp" else model
        weights = quantise_student(model, all_formats(model, "q4_0"), learned=True)
        found[kind] = trained_on_ranks(wrapped, model, weights, 0.1)
    return found


@pytest.mark.full
def test_two_ranks_train_as_one_process(tmp_path):
    run_as_two(__file__, tmp_path / "found.pt")
    for found in torch.load(tmp_path / "found.pt"):
        for key, tensor in found["alone"].items():
            torch.testing.assert_close(found["ddp"][key], tensor, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    made = [weights_on_ranks(), adapters_on_ranks()]
    if dist.get_rank() == 0:
        torch.save(made, sys.argv[1])
    dist.destroy_process_group()


def test_a_running_average_is_of_the_rounded_weights(tmp_path, monkeypatch):
    """The teacher follows what the student computes with, not its master weights."""
    monkeypatch.chdir(tmp_path)
    before = save_tiny(tmp_path / "student", tiny_model(tiny_tokenizer(), seed=2))
    rows = [json.dumps({"prompt": f"Say {n}", "completion": f"It is {n}.", "hint": f"{n} is {n}"}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    recipe = parse(
        """
        teacher: {type: student, ema: 0.5, context: {template: 'Know that {hint}'}}
        student: {model: student, quantise: {format: q4_0, start: nearest}}
        data: {source: rows.jsonl, max_length: 96, cache: false, validation: {fraction: 0.2}}
        train: {steps: 1, learning_rate: 1e-2, warmup: 0, device: cpu, save_every: 1}
        generate: {prompts: []}
        """
    )
    folder = run(recipe, name="average").folder / "checkpoint-1"
    average, rounded, first = (
        load_file(path)
        for path in (folder / "teacher.safetensors", folder / "model.safetensors", before / "model.safetensors")
    )
    masters = load_file(folder / "quantised.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(average[name], (first[name] + rounded[name]) / 2)
    assert (masters[f"master.{name}"] - rounded[name]).abs().max() > 1e-3
