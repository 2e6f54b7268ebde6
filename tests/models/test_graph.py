"""Steps that are replayed from CUDA graphs: the bits of launched ones, whatever else a run does meanwhile."""

import contextlib
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from distill.models import trial
from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of
from distill.models.patch import packed, shared_input
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch
from distill.models.precision import fp8_student
from distill.models.precision.nf4 import quantise_nf4
from distill.recipe.loss import Loss
from distill.teachers.combination.mixture import MixtureTeacher
from distill.training.cuda_graphs import CudaGraphCallback
from distill.training.trainer import DistillationTrainer

VOCABULARY, LENGTH = 259, 64
shared = shared_input.shared_linear


def rows(count=48, *, packed=False, labelled=0.6):
    draw = torch.Generator().manual_seed(3)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=draw)
        learned = torch.rand(LENGTH, generator=draw) < labelled
        row = {"input_ids": ids.tolist(), "labels": torch.where(learned, ids, -100).tolist()}
        if packed:
            cut = 10 + number % 40
            row["position_ids"] = [*range(cut), *range(LENGTH - cut)]
        made.append(row)
    return made


def models(*, dtype=torch.bfloat16, dropout=0.0, lora=False, nf4=False, layers=3):
    torch.manual_seed(0)
    teacher = tiny_model(hidden=128, layers=layers, dtype=torch.bfloat16).cuda()
    student = tiny_model(hidden=128, layers=2, dtype=dtype, seed=4, attention_dropout=dropout).cuda()
    if nf4:
        pytest.importorskip("bitsandbytes")
        teacher = quantise_nf4(teacher, teacher.device, "teacher")
        student = quantise_nf4(student, student.device, "student")
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        student = get_peft_model(student, LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]))
    return teacher, student


class Steps(TrainerCallback):
    """Losses of every step, and calls of `then` at the end of step 12."""

    def __init__(self, then=None):
        self.then, self.losses = then, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_end(self, args, state, control, **kwargs):
        if self.then is not None and state.global_step == 12:
            self.then()


def train(folder, graphed, *, data=None, then=None, autocast=False, steps=16, change=None, mixture=False, **more):
    accumulation = more.pop("accumulation", 1)
    checkpointing = more.pop("checkpointing", False)
    joined, fp8 = more.pop("joined", False), more.pop("fp8", False)
    loss = Loss.model_validate({"terms": [{"type": "forward_kl"}, *more.pop("terms", [])]})
    teacher, student = models(dtype=torch.float32 if autocast else torch.bfloat16, **more)
    if checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        bf16=autocast,
        max_grad_norm=1.0,
        seed=5,
    )
    for model, role in ((teacher, "teacher"), (student, "student")):
        patch(model, role, attention="triton")
        assert not joined or join_projections(model, trains=True)
    if fp8:
        fp8_student.compute_in_fp8(student)
    taught = teacher
    if mixture:
        from distill.teachers.backends.local import LoadedTeacher

        other = tiny_model(hidden=128, layers=2, dtype=torch.bfloat16, seed=9).cuda()
        patch(other, "teacher", attention="triton")
        taught = MixtureTeacher(
            [LoadedTeacher(teacher, field="teachers.0"), LoadedTeacher(other, field="teachers.1")], [1.0, 2.0]
        )
    watch, said = Steps(then), []
    trainer = DistillationTrainer(student, taught, args, loss=loss, train_dataset=data or rows(), callbacks=[watch])
    if change is not None:
        change(trainer)
    steps_of = None
    if graphed:
        named = [*trainer.objective.teacher.models.items(), ("student", student)]
        steps_of = CudaGraphCallback(named, always=True, say=said.append)
        trainer.add_callback(steps_of)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in student.named_parameters() if p.requires_grad}
    return watch.losses, weights, steps_of, said, trainer


LAYER_TERMS = [
    {"type": "hidden_state", "weight": 0.1},
    {"type": "hidden_state", "weight": 0.1, "metric": "cosine", "projection": "learned", "layers": [[1, 1]]},
    {"type": "attention_relation", "weight": 0.1},
]


def same(folder, **more):
    losses, weights, *_ = train(folder / "launched", False, **copy.copy(more))
    others, replayed, steps, said, trainer = train(folder / "graphed", True, **more)
    assert said and "runs from CUDA graphs" in said[0], said
    assert steps.graphs.replays > 0
    assert losses == others
    for name, weight in weights.items():
        assert torch.equal(weight, replayed[name]), name
    return steps, said, trainer


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"autocast": True},
        {"accumulation": 3},
        {"lora": True},
        {"lora": True, "nf4": True},
        {"lora": True, "nf4": True, "checkpointing": True},
        {"checkpointing": True},
        {"mixture": True},
        {"data": rows(packed=True)},
        {"autocast": True, "accumulation": 2, "data": rows(packed=True)},
        {"joined": True},
        {"joined": True, "autocast": True, "accumulation": 2, "data": rows(packed=True)},
        {"joined": True, "checkpointing": True},
        {"dropout": 0.1},
        {"fp8": True},
        {"fp8": True, "autocast": True},
    ],
    ids=[
        "plain",
        "autocast",
        "accumulation",
        "lora",
        "lora over nf4",
        "lora over nf4, checkpointed",
        "checkpointing",
        "mixture",
        "packed",
        "autocast-packed",
        "joined",
        "joined-autocast-packed",
        "joined-checkpointing",
        "dropout",
        "fp8",
        "fp8-autocast",
    ],
)
def test_the_bits_of_launched_steps(tmp_path, more, limit, watch):
    calls, trials, perturbed, problem = [], [], trial.perturbed, packed.packing_problem

    def noted(*args):
        if torch.is_grad_enabled() and not trials:  # not a joined teacher's
            calls.append(args[0].dtype)
        return shared(*args)

    @contextlib.contextmanager
    def within(module):
        trials.append(module)
        with perturbed(module):
            yield
        trials.pop()

    def asked(*args, **options):
        trials.append(args[0])
        found = problem(*args, **options)
        trials.pop()
        return found

    watch.setattr(trial, "perturbed", within)
    watch.setattr(packed, "packing_problem", asked)
    watch.setattr(shared_input, "shared_linear", noted)
    limit.setattr(fp8_student, "GAINS_FROM", 1)  # so small are these
    _, said, _ = same(tmp_path, **more)
    assert "launched:" not in said[0]
    assert set(calls) == (
        set() if {"lora", "fp8"} & {*more} else {torch.bfloat16}
    )  # as norms write it, under autocast too


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        *({"terms": [term]} for term in LAYER_TERMS),
        {"terms": LAYER_TERMS, "autocast": True, "accumulation": 2, "data": rows(packed=True)},
        {"terms": LAYER_TERMS, "lora": True},
        {"terms": LAYER_TERMS, "checkpointing": True},
    ],
    ids=["hidden_state", "projected", "relation", "autocast-packed", "lora", "checkpointing"],
)
def test_terms_that_compare_layers_have_the_bits_of_launched_steps(tmp_path, more):
    """The states of both models are outputs of the graphs, and their gradients reach the student's weights."""
    _, said, trainer = same(tmp_path, **more)
    assert "runs eagerly" not in said[0]
    logged = trainer.state.log_history
    for term in more["terms"]:
        assert any(row.get(term["type"], 0) > 0 for row in logged), term


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bucket", "hidden"])
def test_a_teacher_out_of_a_cache(tmp_path, caches, kind):
    ends = []
    for graphed in (False, True):
        subject, said, watch = caches.subject(kind), [], Steps()
        student = subject.student.cuda()
        patch(student, "student", attention="triton")
        args = TrainingArguments(
            str(tmp_path),
            max_steps=16,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            seed=5,
        )
        trainer = DistillationTrainer(
            student,
            subject.teacher,
            args,
            loss=subject.loss,
            vocab_size=subject.vocab_size,
            train_dataset=Dataset.from_list(subject.rows[:2]),
            callbacks=[watch],
        )
        if graphed:
            trainer.add_callback(CudaGraphCallback([("student", student)], always=True, say=said.append))
        trainer.train()
        ends.append((watch.losses, [p.detach() for p in student.parameters()]))
    assert said == ["the step runs from CUDA graphs"]
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(*pair) for pair in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.gpu
def test_a_smaller_last_batch_and_an_evaluation_in_between(tmp_path):
    def hold_out(trainer):
        trainer.add_callback(Steps(then=lambda: trainer.evaluate(rows(6))))

    same(tmp_path, data=rows(17), steps=24, change=hold_out)


@pytest.mark.gpu
def test_a_step_that_is_not_finite_is_skipped_alike(tmp_path):
    """Step 13's gradient overflows: weights stay, and what follows is as without graphs."""

    def break_a_step(trainer):
        weight = trainer.model.get_input_embeddings().weight
        weight.register_hook(lambda grad: grad * float("inf") if trainer.state.global_step == 12 else grad)

    _, _, trainer = same(tmp_path, change=break_a_step)
    assert max(row.get("skipped_steps", 0) for row in trainer.state.log_history) == 1


@pytest.mark.gpu
def test_uncapturable_steps_run_eagerly_with_the_reason_logged(tmp_path):
    class Hooked(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                model.model.layers[0].register_forward_hook(lambda *_: None)

    def hook(trainer):
        trainer.add_callback(Hooked())

    _, _, steps, said, _ = train(tmp_path, True, change=hook)
    assert "the student runs eagerly: a hook of" in said[0]
    assert steps.graphs.replays > 0  # the teacher's


@pytest.mark.gpu
def test_a_forward_that_waits_for_the_device_is_found_before_capturing():
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8).cuda()

        def forward(self, input_ids, use_cache=False):
            from transformers.modeling_outputs import BaseModelOutputWithPast

            hidden = self.linear(input_ids.float())
            assert hidden.sum().item() < 1e9
            return BaseModelOutputWithPast(last_hidden_state=hidden)

    graphs, decoder = DecoderGraphs(), Waits()
    graphs.add("student", decoder, trains=True)
    graphs.enabled = True
    ids = torch.ones(2, 8, dtype=torch.int64, device="cuda")
    for _ in range(3):
        decoder(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    assert "synchroniz" in graphs.refused["student"] and graphs.replays == 0
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_gradient_in_use_is_copied_and_a_second_backward_refused():
    _, student = models()
    decoder = decoder_of(student.train())
    patch(student, "student", attention="triton")
    graphs = DecoderGraphs()
    graphs.add("student", decoder, trains=True)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), device="cuda")
    weight = decoder.layers[0].mlp.down_proj.weight

    def gradient(scale):
        (decoder(input_ids=ids, use_cache=False).last_hidden_state.float() * scale).sum().backward()
        return weight.grad

    gradient(1.0)
    launched = gradient(2.0).clone()  # of both calls
    weight.grad = None
    graphs.enabled = True
    for _ in range(3):
        student.zero_grad()
        gradient(1.0)
        torch.testing.assert_close(gradient(2.0), launched, rtol=0, atol=0)
    assert graphs.replays >= 4
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    assert graphs.awaits_backward
    between = decoder(input_ids=ids, use_cache=False).last_hidden_state  # launched
    assert torch.equal(hidden, between)
    hidden.float().sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward a forward"):
        hidden.float().sum().backward()
    graphs.release()
    assert "forward" not in vars(decoder) or decoder.forward.__name__ != "graphed"


AFTER_OTHERS = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of
from distill.models.patch.patching import patch

config = AutoConfig.from_pretrained("recipes/architectures/llama-3.2-1b", num_hidden_layers=2)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
patch(model, "student", attention="triton")  # whose gradients are the same bits every time
decoder, graphs = decoder_of(model), DecoderGraphs()
graphs.add("student", decoder, trains=True)
graphs.enabled = True
ids = torch.arange(2048, device="cuda").view(4, 512)
def gradients():
    model.zero_grad()
    decoder(input_ids=ids, use_cache=False).last_hidden_state.float().square().sum().backward()
    return [p.grad.clone() for p in decoder.layers.parameters()]
for _ in range(2):
    right = gradients()
assert graphs.replays == 1
torch._C._cuda_clearCublasWorkspaces()  # as the decode loop does before it captures
torch.cuda.empty_cache()
taken = torch.full((1 << 28,), 3.0, device="cuda")
assert all(map(torch.equal, gradients(), right)) and graphs.replays == 2
assert taken.min() == taken.max() == 3
"""


@pytest.mark.gpu
def test_replays_outlive_the_workspaces_of_others():
    """The test runs in a process of its own, which a graph writing to freed memory would crash."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", AFTER_OTHERS], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
