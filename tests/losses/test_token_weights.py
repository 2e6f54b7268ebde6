"""Token weights (`loss.token_weights`): each teacher's loss is the weighted mean of its tokens' losses.

The reference is doctor's: full logits in float64 from there on, plain PyTorch, without weights. It is taken once for
each value that a weight has, over rows whose other labels are masked, and the results are added up here.
"""

import contextlib
import copy
import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from subjects import KINDS
from tiny import save_models, tiny_model
from transformers import TrainingArguments

from distill import cli
from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator
from distill.doctor import reference_loss
from distill.doctor.invariants import packing_changes_nothing, padding_changes_nothing
from distill.doctor.invariants_runs import ranks_change_nothing, resume_is_exact
from distill.objectives.token_weights import TokenWeighting, batch_arrays
from distill.recipe.loss import Loss, TokenWeights
from distill.teachers.objective import DistillationObjective
from distill.training.loss_metrics import TokenWeightMetrics
from distill.training.trainer import DistillationTrainer

EVERY = [subject for subjects in KINDS.values() for subject in subjects]


# ------------------------------------------------------------------ positions, token after token


def trained_runs(row):
    """Yield the answers of a row: lists of the places of their tokens, in plain Python."""
    covered = {place for a, b, _, _ in zip(*[iter(row.get("spans", []))] * 4, strict=True) for place in range(a, b)}
    run = []
    for place, (label, position) in enumerate(zip(row["labels"], row["position_ids"], strict=True)):
        if position and (label != IGNORE_INDEX or place in covered):
            run.append(place)
            continue
        if run:
            yield run
        run = []
    if run:
        yield run


def positions(row):
    """Return position and length of the answer by place."""
    return {place: (n, len(run)) for run in trained_runs(row) for n, place in enumerate(run)}


def only(row, kept):
    """Return a row whose labels outside of these places are masked, and whose spans begin there."""
    labels = [label if place in kept else IGNORE_INDEX for place, label in enumerate(row["labels"])]
    masked = {**row, "labels": labels}
    if "spans" in row:
        spans = list(zip(*[iter(row["spans"])] * 4, strict=True))
        masked["spans"] = [number for span in spans if span[0] in kept for number in span]
    return masked


def weight_of(form, position, length):
    begin, end = form.get("window", [None, None])
    inside = position in range(length)[slice(begin, end)]
    return inside * form.get("gamma", 1.0) ** position


def gradients_of(student):
    found = {name: p.grad.double().clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad(set_to_none=True)
    return found


def weighted_reference(subject, form):
    """Return loss and gradients of the weighted mean, and the number of trained tokens and their weights' sum."""
    places = [positions(row) for row in subject.rows]
    tokens = [(n, at) for n, own in enumerate(places) for at in own]
    tokens = [(n, at) for n, at in tokens if subject.rows[n]["labels"][at] != IGNORE_INDEX]
    by_weight = {}
    for n, at in tokens:
        by_weight.setdefault(weight_of(form, *places[n][at]), []).append((n, at))
    loss = 0.0
    gradients = {}
    total = 0.0
    for weight, group in by_weight.items():
        total += weight * len(group)
        if weight == 0:
            continue
        rows = [only(row, {at for m, at in group if m == n}) for n, row in enumerate(subject.rows)]
        own, own_gradients = replace(subject, rows=rows).reference_loss()
        factor = weight * len(group) / len(tokens)
        loss += factor * own.item()
        for name, gradient in own_gradients.items():
            gradients[name] = gradients.get(name, 0.0) + factor * gradient.double()
    return loss, gradients, len(tokens), total


def stored_reference(subject, form, without):
    """Return what `weighted_reference` does, of a store, which knows documents by their labels: row after row."""
    weights = []
    for row in subject.rows:
        places = positions(row)
        weights += [weight_of(form, *places[at]) for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX]
    mean = reference_loss._mean

    def weighted_mean(soft, z_s, labels, loss):
        each = [mean(soft[n : n + 1], z_s[n : n + 1], labels[n : n + 1], loss) for n in range(len(weights))]
        return sum(weight * own for weight, own in zip(weights, each, strict=True)) / len(labels)

    with without.context() as patch:
        patch.setattr(reference_loss, "_mean", weighted_mean)
        loss, gradients = subject.reference_loss()
    return loss.item(), {name: own.double() for name, own in gradients.items()}, len(weights), sum(weights)


def our_loss(subject, form, **more):
    section = subject.loss.model_copy(update={"token_weights": TokenWeights(**form)})
    objective = replace(subject, loss=section).objective()
    with subject.in_eval_mode():
        output = subject.student(**objective.student_inputs(subject.batch(), **more))
        output["loss"].backward()
    objective.detach()
    return output, gradients_of(subject.student)


FORMS = {"gamma": {"gamma": 0.7}, "window": {"gamma": 0.9, "window": [1, -1], "normalise": "mean"}}


WINDOWED = {"routed", "served", "bucket", "several", "across", "student top k"}  # the others have the other form


@pytest.mark.plain("one", "routed", "served", "hidden", "bucket", "informed")
@pytest.mark.parametrize("name", EVERY)
def test_every_teachers_loss_is_the_weighted_mean(name, subject_of, without):
    subject, form = subject_of(name), FORMS["window" if name in WINDOWED else "gamma"]
    output, gradients = our_loss(subject, form)
    if name in (*KINDS["cache"], *KINDS["keep"]):
        loss, expected, tokens, total = stored_reference(subject, form, without)
    else:
        loss, expected, tokens, total = weighted_reference(subject, form)
    require_weighted_mean(subject, form, output, gradients, (loss, expected, tokens, total))


def require_weighted_mean(subject, form, output, gradients, reference):
    loss, expected, tokens, total = reference
    scale = tokens / total if form.get("normalise") == "mean" else 1.0
    bound = max(subject.tolerance, 1e-5)
    assert output["loss"].item() == pytest.approx(scale * loss, rel=bound)
    assert gradients.keys() == expected.keys()
    largest = max(value.norm() for value in expected.values()) * scale
    for parameter, value in expected.items():
        assert (gradients[parameter] - scale * value).norm() <= bound * largest, parameter
    assert output["token_weights"][:2].tolist() == pytest.approx([tokens, total], rel=1e-5)
    unweighted = subject.reference_loss()[0].item()
    assert abs(unweighted - scale * loss) > 1e-3 * abs(unweighted)  # weights that do nothing would not be seen
    subject.student.zero_grad(set_to_none=True)


POLICY = {"type": "policy_gradient", "discount": 0.5}
TERMS = {
    "discounted policy gradient": ("answering", [POLICY, {"type": "jsd", "weight": 0.3}]),
    "sampled tail": ("answering", [{"type": "top_k_reverse_kl", "k": 8, "tail": "sampled"}]),
    "hidden states": (
        "one",
        [{"type": "forward_kl"}, {"type": "hidden_state", "projection": "learned"}],
    ),
    "attention": ("one", [{"type": "forward_kl"}, {"type": "attention_relation", "weight": 3.0}]),
}


@pytest.mark.plain("discounted policy gradient", "hidden states")
@pytest.mark.parametrize("name", TERMS)
def test_terms_beside_the_fused_ones_are_weighted(name, subject_of, without):
    kind, terms = TERMS[name]
    form = {"gamma": 0.6, "window": [0, 5]}
    subject = replace(subject_of(kind), loss=Loss.model_validate({"terms": terms}))
    output, gradients = our_loss(subject, form)
    # a discounted advantage is of later labels, which must not be masked
    layers = subject.loss.reads_layers
    reference = weighted_reference(subject, form) if layers else stored_reference(subject, form, without)
    require_weighted_mean(subject, form, output, gradients, reference)


MEAN = {"gamma": 0.8, "window": [0, 4], "normalise": "mean"}


def weighted(subject, form=MEAN):
    loss = subject.loss.model_copy(update={"token_weights": TokenWeights(**form)})
    return replace(subject, loss=loss)


@pytest.mark.plain("one-packing_changes_nothing", "across-packing_changes_nothing", "routed-packing_changes_nothing")
@pytest.mark.parametrize("check", [packing_changes_nothing, padding_changes_nothing])
@pytest.mark.parametrize("name", ["one", "across", "routed"])
def test_packing_and_padding_change_no_weight(name, check, subject_of):
    finding = check(weighted(subject_of(name), {"gamma": 0.8, "window": [-4, None]}))
    assert finding.passed, finding


@pytest.mark.plain("mean-one")
@pytest.mark.parametrize("name", ["one", "across", "routed"])
@pytest.mark.parametrize("form", [{"gamma": 0.5, "window": [-3, None]}, MEAN], ids=["none", "mean"])
def test_a_step_does_not_depend_on_its_micro_batches(name, form, subject_of, tmp_path):
    """The divisor is of the whole step, also where it is the sum of the weights."""
    subject = weighted(subject_of(name), form).truncated()
    subject = replace(subject, rows=subject.uneven_rows())
    ends = []
    for batch_size in (len(subject.rows), 1):
        own = replace(subject, student=copy.deepcopy(subject.student))
        trainer = DistillationTrainer(
            own.student,
            own.teacher,
            TrainingArguments(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=len(subject.rows) // batch_size,
                optim="sgd",
                learning_rate=1.0,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                save_strategy="no",
                logging_steps=1,
            ),
            loss=own.loss,
            train_dataset=subject.rows,
        )
        trainer.train()
        log = next(line for line in trainer.state.log_history if "token_weight" in line)
        trainer.objective.detach()
        moved = {name: p.detach() for name, p in own.student.named_parameters()}
        for name, before in subject.student.named_parameters():
            moved[name] = moved[name] - before.detach()
        figures = ["loss", "token_weight", "token_weight_zero", "agreement", "student_entropy"]
        ends.append(moved | {"log": torch.tensor([log[figure] for figure in figures])})
    for name, moved in ends[0].items():
        torch.testing.assert_close(ends[1][name], moved.detach(), rtol=1e-3, atol=1e-5)
    # and it is the step that the gradients of one batch make
    _, gradients = our_loss(subject, form)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ends[0][name].double(), -gradient, rtol=1e-2, atol=1e-4)


@pytest.mark.plain("none")
@pytest.mark.parametrize("form", [{"gamma": 0.5, "window": [-3, None]}, MEAN], ids=["none", "mean"])
def test_a_resumed_run_is_the_same_to_the_bit(form, subject_of):
    finding = resume_is_exact(weighted(subject_of("one"), form))
    assert finding.passed, finding


@pytest.mark.full
def test_two_processes_make_the_step_of_one(subject_of, forked_ranks):
    finding = ranks_change_nothing(weighted(subject_of("one")))
    assert finding.passed, finding


# ------------------------------------------------------------------ statistics


@pytest.mark.plain("one", "hidden")
@pytest.mark.parametrize("name", ["one", "bucket", "hidden", "routed", "across"])
def test_statistics_are_those_of_the_tokens_that_count(name, subject_of):
    """As of a batch without the other labels; the number of tokens in the log is of them too."""
    subject = subject_of(name)
    objective = weighted(subject, {"window": [0, 2]}).objective()
    with torch.no_grad(), subject.in_eval_mode():
        output = subject.student(**objective.student_inputs(subject.batch()))
        arrays = batch_arrays(subject.batch(), subject.batch()["valid_rows"], ())
        counts = arrays["position"] < 2
        objective.weighting = None
        results = []
        objective.watch(Watch(results))
        plain = subject.student(**objective.student_inputs(subject.batch()))
    objective.detach()
    each = torch.stack(tuple(results[0][1]))
    if each.shape[1] != len(counts):
        each = each[:, subject.batch()["valid_rows"]]
    assert 0 < counts.sum() < len(counts)
    torch.testing.assert_close(output["statistics"], each[:, counts].sum(1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output["statistics"], plain["statistics"], rtol=1e-2)
    assert output["token_weights"].tolist() == [len(counts), counts.sum(), (~counts).sum(), 0]


class Watch:
    """Keeps the results of losses."""

    def __init__(self, results):
        self.results = results

    def phase(self, name):
        return contextlib.nullcontext()

    def loss_computed(self, batch, result):
        self.results.append(result)


# ------------------------------------------------------------------ arrays of a function


def chats():
    ids = torch.randint(3, 259, (3, 12), generator=torch.Generator().manual_seed(5)).tolist()
    labels = [[-100, -100, *row[2:6], -100, *row[7:]] for row in ids]
    rows = [
        {"input_ids": row, "labels": own, "position_ids": list(range(12))} for row, own in zip(ids, labels, strict=True)
    ]
    return Collator(2)(rows)


def arrays_of(function, objective, batch):
    """Return what an objective's function is called with."""
    found = {}

    @functools.wraps(function)
    def call(**arrays):
        found.update(arrays)
        return function(**arrays)

    objective.weighting = TokenWeighting(None, call)
    objective.student(**objective.student_inputs(batch))
    return found


def test_a_function_gets_the_arrays_that_it_names():
    student = tiny_model(dtype=torch.float64)
    teacher = tiny_model(dtype=torch.float64, seed=1, hidden=64, kind="gemma2", final_logit_softcapping=5.0)
    batch = chats()
    rewards = torch.arange(36.0).view(3, 12)
    batch |= {"rewards": rewards, "advantages": -rewards, "sampled_log_p": -rewards / 10}

    def everything(
        position,
        length,
        answer,
        route,
        reward,
        advantage,
        sampled_log_p,
        student_log_p,
        student_entropy,
        teacher_log_p,
        teacher_entropy,
        threshold=3.0,
    ):
        return (teacher_entropy > threshold).float()

    found = arrays_of(everything, DistillationObjective(teacher, student), batch)
    at = batch["valid_rows"] + 1
    assert found["position"].tolist() == [*range(4), *range(5)] * 3
    assert found["length"].tolist() == [*[4] * 4, *[5] * 5] * 3
    assert found["answer"].tolist() == [n for n in range(6) for _ in range(4 + n % 2)]
    assert not found["route"].any()
    for name, sign in (("reward", 1.0), ("advantage", -1.0), ("sampled_log_p", -0.1)):
        torch.testing.assert_close(found[name], sign * rewards.flatten()[at])
    with torch.no_grad():
        for name, model in (("student", student), ("teacher", teacher)):
            logits = model(input_ids=batch["input_ids"]).logits.double().flatten(0, 1)
            log_p = logits[batch["valid_rows"]].log_softmax(-1)
            labels = batch["input_ids"].flatten()[at]
            expected = {"log_p": log_p[range(len(at)), labels], "entropy": -(log_p.exp() * log_p).sum(-1)}
            for figure, values in expected.items():
                torch.testing.assert_close(found[f"{name}_{figure}"].double(), values, rtol=1e-5, atol=1e-5)


def test_figures_of_the_student_alone_take_no_teacher():
    """Also for a loss of hard labels, which has no targets."""
    student, teacher = tiny_model(), tiny_model(seed=1, hidden=64)
    objective = DistillationObjective(teacher, student, {"terms": [{"type": "cross_entropy"}]})
    found = arrays_of(lambda student_log_p, student_entropy: student_entropy, objective, chats())
    assert objective.targets(chats()) is None and {*found} == {"student_log_p", "student_entropy"}
    objective.weighting = TokenWeighting(None, lambda teacher_entropy: teacher_entropy)
    assert objective.targets(chats()) is not None


def test_figures_of_spans_are_of_their_texts(subject_of):
    """With another tokenizer: log-probabilities are sums over each span's tokens, positions count the student's."""
    subject = subject_of("across")
    batch = subject.batch()
    shape = batch["input_ids"].shape
    batch["sampled_log_p"] = -torch.arange(float(shape.numel())).view(shape) / 100
    objective = subject.objective()
    with subject.in_eval_mode():
        found = arrays_of(lambda position, sampled_log_p, student_log_p: student_log_p.exp(), objective, batch)
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        log_p = subject.student(**inputs, use_cache=False).logits.double().log_softmax(-1).flatten(0, 1)
    objective.detach()
    ids, sampled = batch["input_ids"].flatten(), batch["sampled_log_p"].flatten()
    spans = batch["spans"][:, :2].tolist()
    assert max(b - a for a, b in spans) > 1
    expected = [sum(log_p[i - 1, ids[i]].item() for i in range(a, b)) for a, b in spans]
    assert found["student_log_p"].tolist() == pytest.approx(expected, rel=1e-4)
    assert found["sampled_log_p"].tolist() == pytest.approx([sampled[a:b].sum().item() for a, b in spans], rel=1e-5)
    places = [positions(row) for row in subject.rows]
    assert found["position"].tolist() == [places[a // shape[1]][a % shape[1]][0] for a, _ in spans]


def test_weights_are_constants_and_the_route_is_the_recipes(subject_of):
    subject = subject_of("routed")
    batch = subject.batch()
    objective = subject.objective()
    with subject.in_eval_mode():
        found = arrays_of(lambda route, teacher_entropy: teacher_entropy * (route == 1), objective, batch)
        expected = batch["routes"].flatten()[batch["valid_rows"]]
        assert found["route"].tolist() == expected.tolist() and {0, 1} <= {*expected.tolist()}
        assert not found["teacher_entropy"].requires_grad
        # a route whose weights are all 0 trains nothing: the same gradient as with its labels masked
        subject.student(**objective.student_inputs(batch, num_items=7))["loss"].backward()
        ours = gradients_of(subject.student)
        fixed = found["teacher_entropy"] * (expected == 1)
        objective.weighting = TokenWeighting(None, lambda position: fixed)
        subject.student(**objective.student_inputs(batch, num_items=7))["loss"].backward()
    objective.detach()
    for name, gradient in gradients_of(subject.student).items():
        assert torch.equal(gradient, ours[name]), name


@pytest.mark.parametrize("function", [lambda position: position / position.max(), lambda teacher_entropy: 1 / 0])
def test_a_batch_of_padding_has_no_weights(function):
    """As a rank has it that is left without rows."""
    student, teacher = tiny_model(), tiny_model(seed=1, hidden=64)
    objective = DistillationObjective(teacher, student, token_weights=function)
    output = student(**objective.student_inputs(Collator(2)([]), num_items=5))
    assert output["loss"] == 0 and output["token_weights"].tolist() == [0, 0, 0, 0]
    output["loss"].backward()


def test_faulty_weights_of_a_gpu_end_the_run_at_its_next_log_line():
    """There they are only counted: to look at them would be to wait."""
    metrics = TokenWeightMetrics(SimpleNamespace(sum_over_ranks=lambda sums: sums))
    assert metrics.metrics() == {}
    for faulty in (0.0, 2.0):
        metrics.forward_done({}, None, {"token_weights": torch.tensor([8.0, 4.0, 2.0, faulty])})
        metrics.forward_done({}, None, {"token_weights": torch.tensor([2.0, 1.0, 2.0, 0.0])})
        if not faulty:
            assert metrics.metrics() == {"token_weight": 0.5, "token_weight_zero": 0.4}
    with pytest.raises(ValueError, match="got others for 2 of 10 tokens"):
        metrics.metrics()


# ------------------------------------------------------------------ settings and faults


@pytest.mark.parametrize(
    "section, message",
    [
        ({}, "expected gamma, window or function"),
        ({"normalise": "mean"}, "expected gamma, window or function"),
        ({"gamma": 1.5}, "less than or equal to 1"),
        ({"gamma": 0.0}, "greater than 0"),
        ({"window": [5, 5]}, "expected the position after the last above the first"),
        ({"window": [3]}, "at least 2"),
        ("mine.txt:f", "pattern"),
    ],
)
def test_settings_that_weigh_nothing_are_refused(section, message):
    with pytest.raises(ValueError, match=message):
        Loss.model_validate({"token_weights": section})


def test_a_function_needs_itself_and_its_sum_beforehand():
    student, teacher = tiny_model(), tiny_model(seed=1, hidden=64)
    with pytest.raises(ValueError, match=r"expected the function mine\.py:f itself"):
        DistillationObjective(teacher, student, {"token_weights": "mine.py:f"})
    section = {"token_weights": {"gamma": 0.9, "normalise": "mean"}}
    with pytest.raises(ValueError, match="expected none with a function that reads student_entropy"):
        DistillationObjective(teacher, student, section, token_weights=lambda student_entropy: student_entropy)
    objective = DistillationObjective(teacher, student, section)
    with pytest.raises(ValueError, match="weight_sum: expected the sum"):
        objective.student_inputs(chats(), num_items=27)
    assert objective.weight_sum(chats()).item() == pytest.approx(3 * sum(0.9**n for n in [*range(4), *range(5)]))


FUNCTIONS = """
import torch

def late(position, length):
    return (position + 1) / length

def raises(position):
    return position / "two"

def short(position):
    return torch.ones(3)

def broken(position):
    return torch.where(position == 1, float("nan"), 1.0)

def negative(student_entropy):
    return -student_entropy

def unknown(position, mood):
    return position

def rewarded(reward, position):
    return reward

def old(sampled_log_p):
    return sampled_log_p
"""
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss: {token_weights: "mine.py:late"}
train: {steps: 2, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 1, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    (tmp_path / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(60)))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def test_a_run_logs_its_weights_and_knows_its_file(workplace, capsys):
    assert cli.run_command(["run", "r.yaml", "--plugin", "mine.py", "--name", "own"]) == 0
    assert "token weights: mine.py:late" in capsys.readouterr().out
    assert cli.run_command(["run", "r.yaml", "loss.token_weights={window: [0, 8]}", "--name", "short"]) == 0
    lines = [json.loads(line) for line in (workplace / "runs/own/metrics.jsonl").read_text().splitlines()]
    (first, *_) = [line for line in lines if "token_weight" in line]
    assert 0.5 < first["token_weight"] < 0.6 and first["token_weight_zero"] == 0
    lines = [json.loads(line) for line in (workplace / "runs/short/metrics.jsonl").read_text().splitlines()]
    (first, *_) = [line for line in lines if "token_weight" in line]
    assert first["token_weight"] == pytest.approx(1 - first["token_weight_zero"]) and first["token_weight"] < 0.5
    # the weights are of training: held-out figures are over all tokens, before and after
    results = [json.loads((workplace / f"runs/{name}/result.json").read_text()) for name in ("own", "short")]
    before = results[0]["before"]
    assert before == results[1]["before"] and results[0]["after"] != results[1]["after"]
    assert first["kl"] == pytest.approx(before["forward_kl"], rel=0.2)  # no mean over tokens that are left out
    assert cli.run_command(["run", "runs/own/recipe.yaml", "--name", "third"]) == 2
    assert "loss.token_weights: mine.py:late runs code; allow it with --plugin mine.py" in capsys.readouterr().err
    (workplace / "mine.py").write_text(FUNCTIONS + "\n# another file\n")
    assert cli.run_command(["run", "r.yaml", "--plugin", "mine.py", "--name", "own", "--resume"]) == 2
    assert " differs from " in capsys.readouterr().err


@pytest.mark.parametrize(
    "function, more, message",
    [
        ("raises", [], "--plugin mine.py, line 8: raises: TypeError"),
        ("short", [], "mine.py:short with 62 tokens: expected a weight a token, a tensor of [62], got [3]"),
        ("broken", [], "expected finite weights of at least 0, got nan for token 1"),
        ("negative", [], "expected finite weights of at least 0, got -"),
        ("unknown", [], "mine.py: unknown: expected parameters named position, length"),
        ("rewarded", [], "reads reward: expected a policy_gradient term of weight above 0 with a reward"),
        ("old", [], "reads sampled_log_p: expected tokens that the student sampled (data.on_policy)"),
        ("absent", [], "expected a function absent in mine.py"),
        ("negative", ["loss.token_weights.normalise=mean"], "normalise: expected none with a function that reads"),
    ],
)
def test_faults_of_a_function_are_one_line(workplace, capsys, function, more, message):
    overrides = [f"loss.token_weights={{function: 'mine.py:{function}'}}", *more]
    assert cli.run_command(["run", "r.yaml", *overrides, "--plugin", "mine.py"]) != 0
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1, error
