"""Several teachers as one mixture: the fused pass against fp64, then recipes, the trainer and a whole run."""

import json

import pytest
import torch
from dense_loss import ALL_TERMS, dense_rows, softcap
from distill_kernels import FusedDistillationLoss, LossTerm, TeacherHead
from helpers import assert_as_good_as_torch, assert_as_promised, realistic_heads
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.data.collator import Collator
from distill.data.load import load_data
from distill.models.patch import attention_choice
from distill.recipe import load as load_recipe
from distill.recipe import parse
from distill.run import run
from distill.teachers.combination.mixture import MixtureModel, MixtureTeacher
from distill.teachers.objective import DistillationObjective

SHARES = (0.5, 0.3, 0.2)
ROWS, VOCAB = 37, 600
KL = [LossTerm("forward_kl", 1.0)]
SOME = [LossTerm("reverse_kl", 0.7), LossTerm("jsd", 0.5, beta=0.3), LossTerm("cross_entropy", 0.3)]


def tensors(device, dtype, *, count=3, vocab=VOCAB, seed=0, rows=ROWS):
    """The student's hidden states and head, `count` teachers of different widths and twists, labels."""
    x, w, xt, wt = realistic_heads(rows, vocab, 32, 48, dtype=dtype, device=device, seed=seed)
    teachers = [TeacherHead(xt, wt, SHARES[0])]
    for number in range(1, count):
        _, _, xt, wt = realistic_heads(
            rows, vocab, 32, 16 + 24 * number, dtype=dtype, device=device, seed=seed + number
        )
        bias = torch.randn(vocab, generator=torch.Generator().manual_seed(number)).to(device, dtype)
        teachers.append(TeacherHead(xt, wt, SHARES[number], bias, logit_scale=0.5 + number / 2, softcap=20.0))
    labels = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    labels[[3, rows - 1]] = -100
    return x.requires_grad_(), w.requires_grad_(), teachers, labels


def mixture(teachers, temperature, dtype):
    """Log-probabilities of the mixture at the temperature, from full logits."""
    total = sum(teacher.share for teacher in teachers)
    parts = []
    for teacher in teachers:
        bias = None if teacher.bias is None else teacher.bias.to(dtype)
        z = torch.nn.functional.linear(teacher.hidden.to(dtype), teacher.weight.to(dtype), bias)
        z = softcap(z, teacher.logit_scale, teacher.softcap)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        parts.append(teacher.share / total * (z.to(wide) / temperature).softmax(-1))
    return sum(parts).log()


def dense(x, w, teachers, labels, terms, temperature, dtype):
    """Loss and gradients from full logits in `dtype`."""
    x, w = (t.detach().to(dtype).requires_grad_() for t in (x, w))
    log_t = mixture(teachers, temperature, dtype)
    rows = dense_rows(x @ w.T, log_t * temperature, terms, labels.clamp_min(0), temperature=temperature)
    loss = rows[labels != -100].mean()
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def ours(x, w, teachers, labels, terms, temperature=1.0, **more):
    loss = FusedDistillationLoss(terms, temperature)(x, w, labels=labels, teachers=teachers, **more)
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def check(device, dtype, terms, temperature, *, exact_dtype=torch.float64):
    x, w, teachers, labels = tensors(device, dtype)
    exact = dense(x, w, teachers, labels, terms, temperature, exact_dtype)
    eager = dense(x, w, teachers, labels, terms, temperature, dtype)
    for name, mine, theirs, right in zip(
        ("loss", "dx", "dW"), ours(x, w, teachers, labels, terms, temperature), eager, exact, strict=True
    ):
        assert_as_good_as_torch(mine, theirs, right, dtype, name)
        if dtype == torch.bfloat16:
            assert_as_promised(name, mine, right)


@pytest.mark.plain("torch.float32-1.0", "torch.bfloat16-1.0", "torch.float64-2.5")
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equals_the_dense_mixture(dtype, temperature):
    check(torch.device("cpu"), dtype, SOME, temperature)


@pytest.mark.plain("torch.float32", "torch.float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_equals_the_dense_mixture(kernel_device, dtype):
    check(kernel_device, dtype, SOME, 2.0)


@pytest.mark.plain("forward_kl", "cross_entropy")
@pytest.mark.parametrize("term", ALL_TERMS, ids=lambda term: term.type)
def test_every_divergence_of_a_mixture_equals_its_reference(term, kernel_device):
    check(kernel_device, torch.float32, [term], 1.5)


@pytest.mark.gpu
@pytest.mark.heavy_gpu
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_at_full_vocabulary(device, dtype, temperature):
    """Three teachers over Qwen's vocabulary, several chunks."""
    x, w, xt, wt = realistic_heads(2500, 151_936, 64, 96, dtype=dtype, device=device)
    x, w = x.requires_grad_(), w.requires_grad_()
    _, _, yt, vt = realistic_heads(2500, 151_936, 64, 64, dtype=dtype, device=device, seed=1)
    teachers = [TeacherHead(xt, wt, 0.6), TeacherHead(yt, vt, 0.4)]
    labels = torch.randint(0, 151_936, (2500,), device=device)
    exact = dense(x, w, teachers, labels, KL, temperature, torch.float64)
    eager = dense(x, w, teachers, labels, KL, temperature, dtype)
    for mine, theirs, right in zip(ours(x, w, teachers, labels, KL, temperature), eager, exact, strict=True):
        assert_as_good_as_torch(mine, theirs, right, dtype)


@pytest.mark.plain("reference-1.0")
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernel"])
def test_statistics_are_the_mixture_at_temperature_1(kernels, temperature, request):
    device = request.getfixturevalue("kernel_device" if kernels else "device")
    x, w, teachers, labels = tensors(device, torch.float32)
    with torch.no_grad():
        _, stats = FusedDistillationLoss(KL, temperature)(x, w, labels=labels, teachers=teachers, return_stats=True)
    log_s, log_t = (x.double() @ w.double().T).log_softmax(-1), mixture(teachers, 1.0, torch.float64)
    eager_s, eager_t = (x @ w.T).log_softmax(-1), mixture(teachers, 1.0, torch.float32)
    kept = labels != -100
    at = labels.clamp_min(0)[:, None]

    def figures(log_s, log_t):
        yield "divergence", (log_t.exp() * (log_t - log_s)).sum(-1)
        yield "teacher_entropy", -(log_t.exp() * log_t).sum(-1)
        yield "teacher_label_logprob", log_t.gather(-1, at)[:, 0]
        yield "student_label_logprob", log_s.gather(-1, at)[:, 0]
        yield "agreement", (log_s.argmax(-1) == log_t.argmax(-1)).to(log_s.dtype)

    for (name, right), (_, eager) in zip(figures(log_s, log_t), figures(eager_s, eager_t), strict=True):
        assert_as_good_as_torch(getattr(stats, name), eager * kept, right * kept, torch.float32, name)


@pytest.mark.plain("reference")
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernel"])
def test_a_share_of_0_leaves_one_teacher(kernels, request):
    device = request.getfixturevalue("kernel_device" if kernels else "device")
    x, w, teachers, labels = tensors(device, torch.float32, count=2)
    plain = FusedDistillationLoss(SOME, 2.0)(x, w, teachers[0].hidden, teachers[0].weight, labels)
    expected = plain.detach(), *torch.autograd.grad(plain, (x, w))
    alone = [teachers[0]._replace(share=1.0), teachers[1]._replace(share=0.0)]
    for mine, right in zip(ours(x, w, alone, labels, SOME, 2.0), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)
    # one whose logits carry a scale and a cap, and the same teacher twice
    capped = FusedDistillationLoss(SOME, 2.0, teacher_logit_scale=1.0, teacher_softcap=20.0)
    plain = capped(x, w, teachers[1].hidden, teachers[1].weight, labels, teacher_bias=teachers[1].bias)
    expected = plain.detach(), *torch.autograd.grad(plain, (x, w))
    for same in ([alone[0]._replace(share=0.0), teachers[1]], [teachers[1], teachers[1]]):
        for mine, right in zip(ours(x, w, same, labels, SOME, 2.0), expected, strict=True):
            assert_as_good_as_torch(mine, right, right, torch.float32)


@pytest.mark.full
def test_order_plays_no_part(kernel_device):
    x, w, teachers, labels = tensors(kernel_device, torch.float32)
    forwards, backwards = (ours(x, w, order, labels, SOME, 2.0) for order in (teachers, teachers[::-1]))
    for one, other in zip(forwards, backwards, strict=True):
        assert_as_good_as_torch(one, other, other, torch.float32)


@pytest.mark.full
def test_chunks_and_chosen_rows(kernel_device):
    """A workspace of a few rows, rows given beforehand, per-token losses: the same figures."""
    x, w, teachers, labels = tensors(kernel_device, torch.float32)
    whole = ours(x, w, teachers, labels, SOME, 2.0)
    rows = (labels != -100).nonzero().squeeze(1)
    tight = FusedDistillationLoss(SOME, 2.0, max_workspace_mib=0.5)
    loss, _ = tight(x, w, labels=labels, teachers=teachers, valid_rows=rows, return_stats=True)
    per_token = FusedDistillationLoss(SOME, 2.0, reduction="none")(x, w, labels=labels, teachers=teachers)
    for other in (loss, per_token.sum() / len(rows)):
        mine = other.detach(), *torch.autograd.grad(other, (x, w))
        for one, right in zip(mine, whole, strict=True):
            assert_as_good_as_torch(one, right, right, torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernel"])
def test_one_graph_of_several_teachers(kernels, reduction, request):
    """`torch.compile(fullgraph=True)`: three teachers, and one that is left with a scale and a cap of its own."""
    device = request.getfixturevalue("kernel_device" if kernels else "device")
    x, w, teachers, labels = tensors(device, torch.float32, rows=7)
    module = FusedDistillationLoss(SOME, 2.0, reduction=reduction)

    def step(x, w, teachers):
        loss, stats = module(x, w, labels=labels, teachers=teachers, return_stats=True)
        return loss.sum() * 2, stats.teacher_entropy

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for given in (teachers, [teachers[0]._replace(share=0.0), teachers[1]]):
        for mine, right in zip(compiled(x, w, given), step(x, w, given), strict=True):
            assert torch.equal(mine, right)
        mine, right = (torch.autograd.grad(call(x, w, given)[0], (x, w)) for call in (compiled, step))
        for one, other in zip(mine, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.full
def test_tokens_of_zero_probability_follow_the_mixture(kernel_device):
    """A token that one teacher rules out keeps the others' probability; one that all rule out has none."""
    x, w, teachers, labels = tensors(kernel_device, torch.float32)
    never = torch.zeros(VOCAB, device=kernel_device)
    never[7] = -torch.inf
    some = [teachers[0]._replace(bias=never), *teachers[1:]]
    loss, *gradients = ours(x, w, some, labels, KL)
    right, *_ = dense(x, w, some, labels, KL, 1.0, torch.float64)
    eager, *_ = dense(x, w, some, labels, KL, 1.0, torch.float32)
    assert_as_good_as_torch(loss, eager, right, torch.float32)
    every = [teacher._replace(bias=never, softcap=None) for teacher in teachers]
    loss, *gradients = ours(x, w, every, labels, KL)
    assert torch.isfinite(loss) and all(torch.isfinite(gradient).all() for gradient in gradients)


def test_errors_name_the_invalid_argument():
    x, w, teachers, labels = tensors(torch.device("cpu"), torch.float32)
    for wrong, told in (
        ([], "teachers: expected at least one"),
        ([teachers[0]._replace(share=-1.0)], r"teachers\[0\].share: expected a finite number at least 0"),
        ([teachers[0]._replace(share=0.0)], "teachers: expected one of share above 0"),
        ([teachers[0], teachers[1]._replace(weight=w[:, :3])], r"teachers\[1\]: teacher_weight: expected"),
        ([teachers[0]._replace(softcap=0.0)], r"teachers\[0\].softcap"),
    ):
        with pytest.raises(ValueError, match=told):
            ours(x, w, wrong, labels, KL)
    with pytest.raises(ValueError, match="expected either teachers or teacher_hidden"):
        FusedDistillationLoss(KL)(x, w, teachers[0].hidden, teachers[0].weight, labels, teachers=teachers)


# ---------------------------------------------------------------- models, trainer, a whole run

RECIPE = """
teachers:
  - {{model: {first}, weight: 3}}
  - {{model: {second}, weight: 1}}
student: {{model: {student}}}
data: {{source: {data}, max_length: 48, validation: {{fraction: 0.25}}}}
loss: {{temperature: {temperature}, terms: [{{type: forward_kl, weight: 1.0}}, {{type: cross_entropy, weight: 0.1}}]}}
train: {{steps: 12, batch_size: 2, learning_rate: 0.01, device: cpu, log_every: 4, eval_every: 6}}
generate: {{prompts: [The teacher], max_new_tokens: 4}}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(300)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Two teachers of different shapes, a student and text, saved."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"first": (2, 32, 1), "second": (1, 64, 2), "student": (1, 32, 3)}
    for name, (layers, hidden, seed) in sizes.items():
        save_tiny(root / name, tiny_model(tokenizer, layers, hidden, seed), tokenizer)
    rows = [
        {"text": f"The teacher number {n} explains {n * n} and the student listens to {n} words."} for n in range(60)
    ]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {path.stem: path for path in root.iterdir()}


def objective_of(tokenizer, shares=(3, 1), loss="forward_kl"):
    models = [tiny_model(tokenizer, seed=1), tiny_model(tokenizer, 1, 64, seed=2, kind="gemma2")]
    student = tiny_model(tokenizer, 1, seed=3)
    return DistillationObjective(MixtureTeacher(models, shares), student, loss), student


def batch_of(lengths=(30, 21)):
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        labels = [-100] * 4 + ids[4:]
        rows.append({"input_ids": ids, "labels": labels, "position_ids": list(range(length))})
    return rows


@torch.no_grad()
def test_objective_equals_the_models_own_logits(tokenizer):
    """Scale and soft cap of each teacher are its own (Gemma-2 caps its logits)."""
    objective, student = objective_of(tokenizer)
    batch = Collator(0)(batch_of())
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    loss = student(**objective.student_inputs(batch))["loss"]
    parts = [
        share * model(**inputs, use_cache=False).logits.double().softmax(-1)
        for share, model in zip((0.75, 0.25), objective.teacher.models.values(), strict=True)
    ]
    log_t, log_s = sum(parts).log(), student(**inputs, use_cache=False).logits.double().log_softmax(-1)
    learned = batch["labels"][:, 1:] != -100
    exact = (log_t.exp() * (log_t - log_s)).sum(-1)[:, :-1][learned].mean()
    assert_as_good_as_torch(loss, exact, exact, torch.float32)


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_zero_for_equals_and_padding_changes_nothing(tokenizer, loss):
    objective, student = objective_of(tokenizer, loss=loss)
    twins = MixtureTeacher([student, student], [1, 2])
    objective.detach()
    equal = DistillationObjective(twins, student, loss)
    student.requires_grad_()
    batch = Collator(0)(batch_of())
    output = student(**equal.student_inputs(batch))
    output["loss"].backward()
    assert output["loss"] < 1e-6
    assert max(p.grad.abs().max() for p in student.parameters()) < 1e-6
    equal.detach()
    objective.attach(student)

    def gradients(collator):
        student.zero_grad()
        loss = student(**objective.student_inputs(collator(batch_of())))["loss"]
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in student.parameters())]

    short, long = gradients(Collator(0)), gradients(Collator(0, pad_to_multiple_of=64, padding_side="left"))
    for one, other in zip(short, long, strict=True):
        assert_as_good_as_torch(one, other, other, torch.float32)


def test_accumulation_over_a_mixture_changes_nothing(tokenizer):
    """8 micro-batches of 1 equal 1 of 8."""
    objective, student = objective_of(tokenizer, loss="reverse_kl")
    student.requires_grad_()
    rows = batch_of((30, 21, 8, 12, 25, 9, 40, 6))
    items = sum(len(row["labels"]) - 4 for row in rows)
    made = []
    for size in (8, 1):
        student.zero_grad()
        for start in range(0, 8, size):
            batch = Collator(0)(rows[start : start + size])
            student(**objective.student_inputs(batch, num_items=items))["loss"].backward()
        made.append([p.grad.clone() for p in student.parameters()])
    for one, other in zip(*made, strict=True):
        assert_as_good_as_torch(one, other, other, torch.float32)


def run_recipe(folders, tmp_path, monkeypatch, *overrides, temperature=1.0, text=RECIPE):
    paths = {name: str(path) for name, path in folders.items()}
    monkeypatch.chdir(tmp_path)
    return run(parse(text.format(**paths, temperature=temperature), overrides))


def test_a_run_learns_the_mixture(folders, tmp_path, monkeypatch, capsys):
    result = run_recipe(folders, tmp_path, monkeypatch, temperature=2.0)
    assert result.after.forward_kl < 0.9 * result.before.forward_kl
    said = capsys.readouterr().out
    assert f"0.75 x {folders['first']} + 0.25 x {folders['second']}" in said
    # the held-out figures are against the mixture, made here from the models' own logits
    load = AutoModelForCausalLM.from_pretrained
    teachers, student = [load(folders[name]) for name in ("first", "second")], load(result.folder / "student")
    tokenizer = AutoTokenizer.from_pretrained(folders["first"])
    recipe = load_recipe(result.folder / "recipe.yaml")
    rows = load_data(recipe.data, tokenizer, seed=recipe.train.seed).validation
    total = count = 0.0
    with torch.no_grad():
        for row in rows:
            labels = torch.tensor(row["labels"])[1:] != -100
            inputs = {
                "input_ids": torch.tensor([row["input_ids"]]),
                "position_ids": torch.tensor([row["position_ids"]]),
            }
            parts = [model(**inputs, use_cache=False).logits[0].double().softmax(-1) for model in teachers]
            log_t = (0.75 * parts[0] + 0.25 * parts[1]).log()
            log_s = student(**inputs, use_cache=False).logits[0].double().log_softmax(-1)
            total += (log_t.exp() * (log_t - log_s)).sum(-1)[:-1][labels].sum().item()
            count += labels.sum().item()
    assert result.after.tokens == count
    exact = torch.tensor(total / count)
    assert_as_good_as_torch(torch.tensor(result.after.forward_kl), exact, exact, torch.float32)


@pytest.mark.full
def test_a_weight_of_0_trains_as_one_teacher(folders, tmp_path, monkeypatch):
    quick = ("train.steps=3", "generate.prompts=[]", "train.eval_every=null")
    both = run_recipe(folders, tmp_path, monkeypatch, "teachers.1.weight=0", *quick)
    alone = RECIPE.replace(
        "teachers:\n  - {{model: {first}, weight: 3}}\n  - {{model: {second}, weight: 1}}",
        "teacher: {{model: {first}}}",
    )
    one = run_recipe(folders, tmp_path, monkeypatch, *quick, text=alone)
    assert one.after == both.after and one.before == both.before


def test_samples_come_from_the_mixture(tokenizer):
    objective, _ = objective_of(tokenizer)
    group = MixtureModel(list(objective.teacher.models.values()), objective.teacher.weights)
    ids = torch.tensor([[5, 9, 40, 7]])
    made = group.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(5):
        with torch.no_grad():
            parts = [
                s * m(input_ids=ids).logits[0, -1].softmax(-1) for s, m in zip((0.75, 0.25), group.members, strict=True)
            ]
        ids = torch.cat([ids, sum(parts).argmax()[None, None]], 1)
    assert torch.equal(made, ids)


def test_another_vocabulary_is_refused(folders, tmp_path, monkeypatch):
    other = tiny_tokenizer(301)
    save_tiny(tmp_path / "other", tiny_model(other), other)
    with pytest.raises(
        ValueError, match=r"teachers.1.model: teacher and student|teachers.1.model: .*cannot be compared"
    ):
        run_recipe(folders, tmp_path, monkeypatch, f"teachers.1.model={tmp_path / 'other'}")


def test_each_teacher_has_its_own_attention(hardware):
    """Back ends are chosen by a model's heads, so one teacher's choice is not the next one's."""
    text = "teachers: [{model: a}, {model: b, attention: sdpa}, {model: c}]\nstudent: {model: s}\n"
    recipe = parse(text + "data: {source: x.jsonl}\ntrain: {steps: 3}\n")
    names = iter(("first", "third", "student"))
    hardware.setattr(attention_choice.attention, "choose_attention", lambda *_, **__: (next(names), {}))
    choices = attention_choice.AttentionChoices(recipe)
    found = [choices.of(None, "teacher", number) for number in (0, 1, 2, 0, 2)]
    assert [*found, choices.of(None, "student")] == ["first", None, "third", "first", "third", "student"]
