"""One line in any training script: the loss without logits, padding, generate, and what wraps a model."""

import copy
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_patching import assert_same, make
from tiny import save_tiny, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import distill
from distill.models.load.read_weights import UnfitWeightsError
from distill.models.patch.fused_loss import LazyLogits

TWISTS = {
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 8},  # a soft cap
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},  # a router's loss
}


def batch(rows=2, length=13):
    ids = torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, original, **inputs):
    loss, gradients = loss_and_gradients(model, **inputs)
    expected, wanted = loss_and_gradients(original, **inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert_same(gradient, wanted[name], 2e-4)


@pytest.fixture
def head_outputs():
    """`head_outputs(model)`: a list that gets the width of all that the model's head gives out."""

    def of(model):
        widths = []
        model.get_output_embeddings().register_forward_hook(lambda *a: widths.append(a[2].shape[-1]))
        return widths

    return of


@pytest.mark.plain("llama", "granite", "gpt2")
@pytest.mark.parametrize("kind", TWISTS)
def test_the_loss_is_the_models_own_and_no_logits_are_made(kind, head_outputs):
    model = tiny_model(kind=kind, **TWISTS[kind])
    original = copy.deepcopy(model)
    report = distill.patch(model)
    assert report.loss, report
    widths = head_outputs(model)
    inputs = batch()
    assert_same_step(model, original, **inputs)
    for items in (37, torch.tensor(37)):
        assert_same_step(model, original, **inputs, num_items_in_batch=items)
    # already shifted: read as they are
    assert_same_step(model, original, **inputs, shift_labels=inputs["labels"].roll(1, 1))
    odd = inputs | {"labels": inputs["labels"].masked_fill(inputs["labels"] == -100, -1)}
    assert_same_step(model, original, **odd, ignore_index=-1)
    assert set(widths) == {0}
    _, logits, *_ = model(**inputs, return_dict=False)
    assert isinstance(logits, LazyLogits) and set(widths) == {0}
    ids = inputs["input_ids"]
    assert_same(model(input_ids=ids).logits, original(input_ids=ids).logits)  # without labels: as ever
    distill.unpatch(model)
    assert torch.equal(model(**inputs).logits, original(**inputs).logits)
    assert not [m for m in model.modules() if "forward" in m.__dict__] and "_loss_function" not in model.__dict__


def test_labels_are_shifted_once():
    model = tiny_model()
    with torch.no_grad():
        logits = model(input_ids=batch()["input_ids"]).logits
    assert distill.patch(model).loss
    labels = batch()["labels"]
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert model(**batch()).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_logits_are_computed_when_they_are_used(caplog):
    model = tiny_model(kind="gemma2", query_pre_attn_scalar=8)
    original = copy.deepcopy(model)
    distill.patch(model)
    inputs = batch()
    output, expected = model(**inputs), original(**inputs)
    caplog.clear()
    # what a trainer does to outputs that it does not use
    logits = output["logits"].detach().float()
    assert output.logits.shape == logits.shape == expected.logits.shape and logits.dtype == torch.float32
    assert "LazyLogits" in repr(output.logits) and torch.is_floating_point(output.logits) and not caplog.records
    assert output.logits.bfloat16().dtype == torch.bfloat16 and not caplog.records
    assert not (logits + 0).requires_grad
    assert len(caplog.records) == 1 and "outputs.logits are used" in caplog.text
    assert_same(output.logits[:, 1:], expected.logits[:, 1:])
    assert len(caplog.records) == 1
    # in the graph of the forward: a loss of one's own over them has its gradient, too
    for one, out in ((model, output), (original, expected)):
        one.zero_grad()
        (out.loss + out.logits.square().mean()).backward()
    for (name, p), q in zip(model.named_parameters(), original.parameters(), strict=True):
        assert_same(p.grad, q.grad, 2e-4), name


def test_logits_of_an_older_head_are_refused():
    model = tiny_model()
    distill.patch(model)
    output = model(**batch())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="head's weight has changed"):
        output.logits.argmax(-1)


def test_logits_of_a_sharded_head_are_refused():
    model = tiny_model(tie=False)
    distill.patch(model)
    output = model(**batch())
    weight = model.lm_head.weight
    whole = weight.data
    weight.data = whole[:100]  # as FSDP leaves it
    with pytest.raises(RuntimeError, match=r"sharded \(FSDP\).*keep_logits=True"):
        output.logits.sum()
    weight.data = whole
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"sharded \(FSDP\)"):
        output.logits.sum()


def test_keep_logits_leaves_loss_and_logits(head_outputs):
    model = tiny_model()
    report = distill.patch(model, keep_logits=True)
    widths = head_outputs(model)
    output = model(**batch())
    assert not report.loss and type(output.logits) is torch.Tensor and widths == [259]


def test_models_that_keep_their_own_loss_are_logged(caplog):
    model = tiny_model()
    distill.patch(model)
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 7
    for _ in range(2):
        assert model(**batch()).loss.item() == 7
    assert caplog.text.count("the loss is computed by the model itself") == 1
    del model._loss_function
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1))
    adapted.eval()
    caplog.clear()
    assert type(adapted(**batch()).logits) is torch.Tensor and "student.lora.dropout" in caplog.text


@pytest.mark.parametrize("first", ["patch", "lora"])
@pytest.mark.parametrize("target", ["all-linear", "lm_head"])
def test_adapters_before_or_after(first, target, head_outputs):
    config = LoraConfig(
        r=4, target_modules="all-linear" if target != "lm_head" else ["lm_head"], init_lora_weights=False
    )
    base = tiny_model(tie=False)

    def adapted(model):
        torch.manual_seed(5)
        return get_peft_model(model, config)

    original = adapted(copy.deepcopy(base))
    if first == "patch":
        distill.patch(base)
        model = adapted(base)
    else:
        model = adapted(base)
        distill.patch(model)
    widths = head_outputs(model.get_base_model())
    assert_same_step(model, original, **batch())
    assert set(widths) == {0}
    output = model(**batch())
    assert_same(output.logits + 0, original(**batch()).logits)


def test_checkpointing_compiling_and_evaluation(head_outputs):
    model = make("llama")
    original = copy.deepcopy(model)
    distill.patch(model)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(model, original, **batch(), attention_mask=torch.ones(2, 13, dtype=torch.long))
    model.gradient_checkpointing_disable()
    widths = head_outputs(model)
    with torch.no_grad():
        output = model.eval()(**batch())
    assert not output.loss.requires_grad and output.past_key_values is None and widths == [0]
    with torch.inference_mode():
        output = model(**batch())
        assert_same(output.logits + 0, original(**batch()).logits)


@pytest.mark.full
def test_the_compiled_model_learns_the_same():
    model = make("llama")
    original = copy.deepcopy(model)
    distill.patch(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    mask = torch.tensor([[1] * 13, [1] * 8 + [0] * 5])
    labels = batch()["labels"].masked_fill(mask == 0, -100)
    for rows in (slice(None), [1, 0]):
        inputs = {"input_ids": batch()["input_ids"][rows], "labels": labels[rows], "attention_mask": mask[rows]}
        assert_same_step(compiled._orig_mod, original, **inputs)
        loss = compiled(**inputs).loss
        assert loss.item() == pytest.approx(original(**inputs).loss.item(), rel=1e-5)
        compiled.zero_grad()
        loss.backward()
        _, wanted = loss_and_gradients(original, **inputs)
        for name, p in model.named_parameters():
            assert_same(p.grad, wanted[name], 2e-4)


def test_under_autocast_as_the_model_itself():
    model = make("llama", hidden=64)
    original = copy.deepcopy(model)
    distill.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = loss_and_gradients(model, **batch())
        expected, wanted = loss_and_gradients(original, **batch())
        logits = model(**batch()).logits
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert logits.dtype == torch.bfloat16 and (logits + 0).dtype == torch.bfloat16
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() < 0.05 * wanted[name].norm(), name


def test_accelerates_conversion_of_outputs_uses_no_logits(head_outputs):
    model = tiny_model()
    distill.patch(model)
    widths = head_outputs(model)
    AcceleratorState._reset_state(True)  # one a process: another test's may be there, and this one's must not stay
    output = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)(**batch())
    AcceleratorState._reset_state(True)
    assert isinstance(output.logits, LazyLogits) and output.logits.dtype == torch.float32 and widths == [0]
    output.loss.backward()
    assert (output.logits + 0).dtype == torch.float32 and widths == [0, 259]


def test_saved_and_loaded_again(tmp_path, caplog):
    caplog.set_level(logging.INFO, "distill")
    save_tiny(tmp_path / "model")
    model = distill.AutoFusedModelForCausalLM.from_pretrained(tmp_path / "model")
    assert caplog.text.count("patched llama") == 1 and ", loss" in caplog.text
    model.save_pretrained(tmp_path / "again")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert_same_step(model, plain, **batch())
    teacher = distill.AutoFusedModelForCausalLM.from_pretrained(tmp_path / "model", role="teacher")
    assert type(teacher(**batch()).logits) is torch.Tensor


def test_files_that_lack_a_weight_are_refused(tmp_path):
    save_tiny(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(UnfitWeightsError, match=f"its files lack {name}, which would be drawn at random"):
        distill.AutoFusedModelForCausalLM.from_pretrained(tmp_path / "model")


def test_loading_info_is_returned_with_the_model(tmp_path):
    save_tiny(tmp_path / "model")
    model, info = distill.AutoFusedModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and model.get_output_embeddings() is not None


@pytest.mark.plain("1")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_trainer_learns_and_evaluates_the_same(tmp_path, accumulate, head_outputs):
    rows = [
        {"input_ids": ids, "labels": [-100] * 3 + ids[3:], "attention_mask": [1] * 12}
        for ids in torch.randint(3, 259, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    ]
    losses, widths = {}, []
    for patched in (False, True):
        model = tiny_model()
        if patched:
            distill.patch(model)
            widths = head_outputs(model)
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4 // accumulate,
            gradient_accumulation_steps=accumulate,
            max_steps=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            learning_rate=1e-2,
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
            prediction_loss_only=True,
        )
        data = Dataset.from_list(rows)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses[patched] = [*logged, trainer.evaluate()["eval_loss"]]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4) and losses[True][-1] < losses[True][0]
    assert set(widths) == {0}
    predicted = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")).predict(data)
    assert predicted.predictions.shape == (8, 12, 259)  # asked for, they are computed
