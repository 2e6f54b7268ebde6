"""Checks printed before training: agreement of teacher and data, and room for responses."""

import json

import pytest
import torch
from subjects import across, informed, one, routed
from tiny import save_models

from distill.core.labels import shift_labels
from distill.data.collator import Collator
from distill.doctor.remote_outputs import column_prefix
from distill.recipe import Data, parse
from distill.reports import first_batch_report
from distill.reports.first_batch_report import room_for_rollouts_line, teacher_agreement_line
from distill.run import run


@pytest.mark.parametrize("make", [one, informed], ids=["one", "context"])
def test_the_share_is_that_of_the_teachers_own_logits(make, limit):
    """The share equals that of dense logits, document by document, over the first tokens."""
    limit.setattr(first_batch_report, "TOKENS", 7)
    subject = make()
    (model,) = subject.teacher.models.values()
    prefix, hits = column_prefix(subject.teacher), []
    for part in subject.documents():
        best = model(torch.tensor([part[f"{prefix}input_ids"]])).logits[0, :-1].argmax(-1)
        labels = torch.tensor(part["labels"][1:])
        best = best[len(best) - len(labels) :]
        hits += (best == labels)[labels != -100].tolist()
    (line,) = teacher_agreement_line(subject.objective(), subject.batch())
    assert f"top-1 token is the data's: {sum(hits[:7]) / 7:.1%} of 7 held-out tokens" in line


def test_agreement_with_the_data_is_reported_for_each_route(monkeypatch):
    """The other route is a mixture, whose likeliest token is that of its members' probabilities."""
    subject = routed()
    batch, objective = subject.batch(), subject.objective()
    labels = shift_labels(batch["labels"]).flatten()
    first, second = (batch[f"route{n}_rows"] for n in range(2))
    members = objective.teacher.format.members

    def line_where(**off):
        for number, member in enumerate(members):
            said = labels + off.get(f"route{number}", 0)

            def answer(targets, own, most, said=said):
                return {"": (own[:most], said[own[:most]])}

            monkeypatch.setattr(member, "likeliest", answer)
        (line,) = teacher_agreement_line(objective, batch)
        return line

    shares = f"{{:.1%}} of {len(first)} by {objective.routes[0]}, {{:.1%}} of {len(second)} by {objective.routes[1]}"
    assert shares.format(1, 1) in (line := line_where()) and "this is low" not in line
    assert shares.format(0, 1) in (line := line_where(route0=1)) and "this is low" in line
    assert shares.format(1, 0) in (line := line_where(route1=1)) and "this is low" in line


def test_the_top_1_token_of_a_mixture():
    """The top-1 token of a route with two models follows from their full distributions."""
    subject = routed()
    objective = subject.objective()
    mixture = objective.teacher.format.members[1]
    widths = [next(head.head.model.parameters()).shape[1] for head in mixture.members]
    hidden = tuple(torch.randn(1, 6, width) for width in widths)
    ((rows, tokens),) = mixture.likeliest(hidden, torch.arange(6), 4).values()
    each = [head.logits(part[0]).softmax(-1) for head, part in zip(mixture.members, hidden, strict=True)]
    mean = sum(share * p for share, p in zip(mixture.weights, each, strict=True))
    assert rows.tolist() == [0, 1, 2, 3] and torch.equal(tokens, mean.argmax(-1)[:4])


def test_a_teacher_without_live_outputs_is_not_queried():
    subject = across()
    assert teacher_agreement_line(subject.objective(), subject.batch()) == []


def test_hard_labels_ask_no_teacher():
    subject = one({"terms": [{"type": "cross_entropy"}]})
    assert teacher_agreement_line(subject.objective(), subject.batch()) == []


def test_prompts_that_leave_no_room_are_counted():
    rows = [
        {"input_ids": [5] * n, "labels": [-100] * (n - 2) + [5, 5], "position_ids": list(range(n))}
        for n in (4, 8, 12, 16)
    ]
    data = Data(source="x.jsonl", max_length=16, on_policy={"max_new_tokens": 8})
    (line,) = room_for_rollouts_line(rows, Collator(0), data)
    assert "50.0% of 4 leave room for data.on_policy.max_new_tokens 8 within data.max_length 16" in line
    assert room_for_rollouts_line(rows, Collator(0), data.model_copy(update={"on_policy": None})) == []


def test_a_run_says_both(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, student={"seed": 0}, teacher={"seed": 1})
    rows = [{"prompt": f"Say {n}?", "completion": f"It is {n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(
        parse(
            "teacher: {model: teacher}\nstudent: {model: student}\ntrain: {steps: 1}\ngenerate: {prompts: []}\n"
            "loss: {terms: [{type: reverse_kl}]}\n"
            "data: {source: rows.jsonl, max_length: 64, cache: false, on_policy: {max_new_tokens: 4}}\n"
        )
    )
    said = capsys.readouterr().out
    assert "answers     the teacher's top-1 token is the data's: " in said
    assert "prompts     100.0% of " in said
