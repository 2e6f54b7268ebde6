"""Cached lists of a model's modules: `Trainer` does the same every step without a walk over all of them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from distill.training.module_cache import cache_modules, cached_parameters, clear_module_cache
from distill.training.trainer import DistillationTrainer


@pytest.fixture
def model():
    made = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5))
    cache_modules(made)
    return made


def test_modes_are_those_of_all_modules(model):
    for layer in (model, model.base_model.model.lm_head, model.base_model.model.model.layers[0].mlp):
        layer.eval()
        assert model.train() is model and all(module.training for module in model.modules())
    assert not any(module.training for module in model.eval().modules())


def test_gradients_are_dropped_or_set_to_zero(model):
    model(torch.arange(3, 9)[None]).logits.sum().backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    assert trained
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in trained)
    model.zero_grad()
    assert not any(p.grad is not None for p in model.parameters())


def test_copies_and_pickles_have_no_lists(model):
    """A copy is merged, its modules are others then, and their modes still change."""
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        merged = other.merge_and_unload()
        merged.eval()
        other.eval()
        other.train()
        assert all(module.training for module in other.modules()) and model.training
        assert {id(p) for p in cached_parameters(other)}.isdisjoint(map(id, cached_parameters(model)))


def test_clearing_the_module_cache_leaves_nothing(model):
    clear_module_cache(model)
    assert not {"train", "zero_grad"} & {*model.__dict__}
    clear_module_cache(model)
    added = nn.Linear(2, 2)
    model.added = added.eval()
    model.train()
    assert added.training and any(p is added.weight for p in cached_parameters(model))


def test_methods_patched_by_others_are_left():
    made = tiny_model().eval()
    made.train = lambda mode=True: made
    cache_modules(made)
    assert not made.train().training
    clear_module_cache(made)
    del made.train
    assert made.train().training


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_walks_over_no_model(tmp_path, monkeypatch, lora):
    walks = []
    student = tiny_model(seed=1)
    student = get_peft_model(student, LoraConfig(r=2, target_modules="all-linear")) if lora else student
    inner = nn.Module.named_modules

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            walks.append(0)

    def counted(self, memo=None, *args, **kwargs):
        if memo is None and walks and self in (student, student.base_model):
            walks[-1] += 1
        return inner(self, memo, *args, **kwargs)

    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        max_grad_norm=1.0,
        logging_steps=100,
    )
    rows = [{"input_ids": list(range(start, start + 9))} for start in range(3, 15)]
    trainer = DistillationTrainer(student, tiny_model(), arguments, train_dataset=rows, callbacks=[Count()])
    monkeypatch.setattr(nn.Module, "named_modules", counted)
    trainer.train()
    assert walks[1:3] == [0, 0] and "train" not in student.__dict__


def test_lists_do_not_keep_a_model_alive():
    model = tiny_model()
    cache_modules(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
