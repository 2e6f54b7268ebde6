"""Routed teachers: each teaches its own rows and sees no others; one loss, and figures for each."""

import json

import pytest
import torch
from distill_kernels import TokenStats
from subjects import SUBJECTS, routed, routed_answering
from tiny import save_models, tiny_model

from distill.data.collator import Collator
from distill.doctor.invariants import fused_equals_reference, models_read_the_same_tokens
from distill.doctor.rows import split_row
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.documents import as_row, documents_of
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import Sampling
from distill.recipe import dump, parse
from distill.run import run
from distill.teachers.combination import route_data as routed_data
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.objective import DistillationObjective
from distill.training.progress import read_metrics

STATISTICS = len(TokenStats._fields)  # of a batch; three of each route follow

BASE = (
    "teachers: [{model: math, route: math}, {model: talk, route: talk}]\nstudent: {model: student}\n"
    "data: {source: rows.jsonl, max_length: 96, cache: false, fields: {teacher: domain}}\ntrain: {steps: 2}\n"
)


def rows_of(count, domains=("math", "talk", "talk")):
    return [
        {
            "prompt": f"Say {number}?",
            "completion": f"It is {'so ' * (number % 5)}{number}.",
            "domain": domains[number % len(domains)],
        }
        for number in range(count)
    ]


def place(tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    save_models(
        tmp_path, **{name: {"seed": n, "hidden": 32 + 16 * n} for n, name in enumerate(("student", "math", "talk"))}
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_each_teacher_reads_its_own_documents_only():
    """Every token of theirs, each once, in the order of the rows; none of another's."""
    subject = routed()
    seen = {}
    for name, model in subject.teacher.models.items():
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, name=name: seen.setdefault(name, []).append(kwargs), with_kwargs=True
        )
    subject.teacher.targets(subject.batch())
    expected = {"teachers.0": 0, "teachers.1": 1, "teachers.2": 1}
    for name, route in expected.items():
        (call,) = seen[name]
        read = [
            token
            for row, at in zip(call["input_ids"].tolist(), lengths(subject, route), strict=True)
            for token in row[:at]
        ]
        assert read == [t for part in subject.documents() if part["route"] == [route] for t in part["input_ids"]]


def lengths(subject, route):
    """Tokens of a route in each row that has some."""
    sums = [sum(len(part["input_ids"]) for part in split_row(row) if part["route"] == [route]) for row in subject.rows]
    return [length for length in sums if length]


def test_the_loss_is_the_sum_over_the_routes():
    """Each route has an objective over its own documents, divided by the tokens of all routes."""
    subject = routed({"terms": [{"type": "forward_kl"}, {"type": "cross_entropy", "weight": 0.3}]})
    batch = subject.batch()
    items = len(batch["valid_rows"])
    together = subject.objective()
    output = subject.student(**together.student_inputs(batch))
    output["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in subject.student.named_parameters() if p.grad is not None}
    subject.student.zero_grad()
    total = 0
    statistics = torch.zeros(STATISTICS)
    for route, member in enumerate(subject.teacher.members):
        objective = DistillationObjective(member, subject.student, subject.loss, vocab_size=together.columns)
        own = [part for part in subject.documents() if part["route"] == [route]]
        alone = subject.student(**objective.student_inputs(Collator(0)(own), num_items=items))
        alone["loss"].backward()
        total = total + alone["loss"].detach()
        statistics += alone["statistics"].detach()
        begin = STATISTICS + 3 * route
        tokens, divergence, agreement = output["statistics"][begin : begin + 3].tolist()
        assert tokens == sum(label != -100 for part in own for label in part["labels"][1:])
        assert divergence == pytest.approx(alone["statistics"][0].item(), rel=1e-4)
        assert agreement == alone["statistics"][4]
    torch.testing.assert_close(output["loss"].detach(), total, rtol=1e-5, atol=0)
    torch.testing.assert_close(output["statistics"][:STATISTICS], statistics, rtol=1e-4, atol=1e-4)
    for name, p in subject.student.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-3, atol=1e-6)


def test_a_batch_of_one_route_and_a_batch_of_none():
    subject = routed()
    only = [part for part in subject.documents() if part["route"] == [1]]
    objective = subject.objective()
    for rows in (only, []):
        batch = Collator(0, columns=subject.teacher.columns)(rows)
        output = subject.student(**objective.student_inputs(batch, num_items=10))
        output["loss"].backward()
        assert output["statistics"].shape == (STATISTICS + 6,) and output["statistics"][STATISTICS] == 0
        assert (output["loss"] > 0) == bool(rows)
        assert all(p.grad is not None for p in subject.student.parameters())


def test_rows_need_a_route():
    subject = routed()
    with pytest.raises(ValueError, match="expected route"):
        subject.batch([{"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]}])
    with pytest.raises(ValueError, match="expected routes too"):
        subject.objective().student_inputs(Collator(0)(subject.rows))
    with pytest.raises(ValueError, match="a route of its own"):
        RoutedTeacher([tiny_model(), tiny_model()], ["same", "same"])


def test_documents_keep_their_teacher():
    subject = routed()
    documents = documents_of(subject.batch())
    assert [[d.route] for d in documents] == [part["route"] for part in subject.documents()]
    answered = [d.with_response(d.prompt, [5, 6]) for d in documents]
    assert as_row(answered)["route"] == [d.route for d in documents]


@pytest.mark.plain("routed")
@pytest.mark.parametrize("subject", [routed, routed_answering])
def test_rows_at_the_wrong_teacher_are_found(subject, monkeypatch):
    """Routes exchanged between the collator and the teachers."""
    subject = subject()
    targets = RoutedTeacher.targets

    def exchanged(self, batch):
        other = {
            n.replace("route0_", "route_").replace("route1_", "route0_").replace("route_", "route1_"): v
            for n, v in batch.items()
        }
        return targets(self, other)

    monkeypatch.setattr(RoutedTeacher, "targets", exchanged)
    assert not models_read_the_same_tokens(subject).passed
    assert not fused_equals_reference(subject).passed


def test_a_route_that_is_off_by_one_document_is_found(monkeypatch):
    subject = routed()
    bounds = routed_data.document_bounds

    def early(positions):
        first = bounds(positions)[0][1] - 1
        return [(0, first), (first, len(positions))]

    monkeypatch.setattr(routed_data, "document_bounds", early)
    assert not models_read_the_same_tokens(subject).passed


# ------------------------------------------------------------------ data and recipes


def test_rows_go_to_the_teacher_they_name(tmp_path, monkeypatch):
    rows = [*rows_of(24), {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "domain": "cooking"}]
    place(tmp_path, monkeypatch, rows)
    from distill.teachers.registry import source_of

    source = source_of(parse(BASE))
    vocabulary = source.vocabulary()
    splits = vocabulary.read(source.recipe.data, 0)
    assert splits.report.dropped == {"no teacher of this name": 2} and splits.report.rows_read == 26
    by_text = {row["prompt"]: row["domain"] for row in rows[:24]}
    counted = 0
    for row in [*splits.train, *splits.validation]:
        for document, route in zip(documents_of(Collator(0)([row])), row["route"], strict=True):
            text = vocabulary.tokenizer.decode(document.prompt)
            (domain,) = [d for prompt, d in by_text.items() if f"{prompt}<" in text]
            assert ("math", "talk")[route] == domain
            counted += 1
    assert counted == 24


def test_routes_are_read_back_as_they_are_dumped():
    recipe = parse(BASE)
    assert parse(dump(recipe)) == recipe


@pytest.mark.plain("False")
@pytest.mark.parametrize("own", [False, True])
def test_a_run_logs_figures_of_each_teacher(tmp_path, monkeypatch, own):
    place(tmp_path, monkeypatch, rows_of(30))
    recipe = parse(
        BASE,
        [
            "train={steps: 4, batch_size: 2, tokens_per_step: 384, learning_rate: 3e-3, device: cpu, log_every: 1, "
            "eval_every: 2}",
            "loss.terms=[{type: reverse_kl}]",
            "generate.prompts=[]",
            *["data.on_policy={max_new_tokens: 8}"] * own,
        ],
    )
    result = run(recipe)
    assert result.after.reverse_kl < result.before.reverse_kl
    logged = read_metrics(result.folder / "metrics.jsonl")
    for row in logged:
        prefix = "eval_" if any(name.startswith("eval_") for name in row) else ""
        if f"{prefix}kl" not in row:
            continue
        parts = [(row[f"{prefix}tokens_{r}"], row.get(f"{prefix}kl_{r}", 0)) for r in ("math", "talk")]
        mean = sum(tokens * kl for tokens, kl in parts) / sum(tokens for tokens, _ in parts)
        assert mean == pytest.approx(row[f"{prefix}kl"], rel=1e-4)
    assert any("kl_math" in row and "agreement_talk" in row for row in logged)


@pytest.mark.parametrize("kind", ["informed", "routed", "routed informed"])
def test_responses_in_one_row_have_the_same_teachers(kind):
    """Each after what its teacher reads before it; loss and gradients as of several rows."""
    subject = SUBJECTS[kind]()
    student = subject.student.double()
    for model in subject.teacher.models.values():
        model.double()
    objective = DistillationObjective(subject.teacher, student, subject.loss)
    collate = Collator(2, columns=objective.teacher.columns)
    batches, found = [collate(list(subject.rows[:3]))], []
    longest = max(document.length for document in documents_of(batches[0])) + 5
    for one_row in (False, True):
        engine = DecodeLoop(student, EngineSettings(2, [0], vocab_size=objective.columns))
        own = OnPolicyRollouts(
            engine,
            fraction=1.0,
            max_new_tokens=5,
            sampling=Sampling(1.0),
            seed=3,
            max_length=2 * longest,
            multiple=64,
            one_row=one_row,
        )
        (batch,) = own.replace(batches, 0, collate)
        assert (len(batch["input_ids"]) == 1) is one_row
        student.zero_grad()
        loss = student(**objective.student_inputs(batch))["loss"]
        loss.backward()
        said = sorted((document.ids, document.teacher_ids, document.route) for document in documents_of(batch))
        found.append((said, [loss.detach(), *(p.grad for p in student.parameters() if p.grad is not None)]))
    (expected, theirs), (got, ours) = found
    assert got == expected and any(document[2] is not None or document[1] is not None for document in got)
    for mine, other in zip(ours, theirs, strict=True):
        # models of float64 compute norms, rotations and attention's softmax in float32, whose vectorised sums follow
        # the layout of rows on AVX2: equal to float32's rounding
        torch.testing.assert_close(mine, other, rtol=0.0, atol=2e-7 * float(other.abs().max()))
