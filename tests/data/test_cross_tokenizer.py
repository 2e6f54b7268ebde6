"""A student with its own tokenizer: data by both tokenizers, the objective, the contract, and a whole run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_as_good_as_torch
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_tokenizers import MERGED, PIECES, readers

from distill.cli import run_command
from distill.data.collator import Collator
from distill.doctor.reference_spans import ReferenceLogits, dense_spans
from distill.evaluation.evaluate import evaluate
from distill.objectives.span_loss import Spans
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import Data, parse
from distill.recipe.loss import Loss, PlainTerm
from distill.run import run
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.retokenised.data import NAMES, CrossColumns, load_cross_data
from distill.teachers.rows.retokenised.teacher import CrossTeacher
from distill.teachers.rows.retokenised.vocabularies import compare_by_bytes


def data_section(folder, **more):
    validation = {"fraction": 0.25, **more.pop("validation", {})}
    return Data(source=str(folder / "data.jsonl"), max_length=160, validation=validation, **more)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_hold_both_readings(folders, packing):
    splits = load_cross_data(data_section(folders, packing=packing), PIECES, MERGED, seed=1)
    assert set(splits.train.column_names) == {*NAMES, "row"}
    count, several = 0, False
    for row in splits.train:
        for ids, positions in (("input_ids", "position_ids"), ("teacher_input_ids", "teacher_position_ids")):
            assert len(row[ids]) == len(row[positions]) <= 160 and row[positions][0] == 0
        spans = np.array(row["spans"]).reshape(-1, 4)
        learned = np.flatnonzero(np.array(row["labels"]) != -100)
        assert (learned == spans[:, 0]).all() and (
            np.array(row["labels"])[learned] == np.array(row["input_ids"])[learned]
        ).all()
        # no span begins a document, nor lies in two
        for side, name in ((0, "position_ids"), (2, "teacher_position_ids")):
            positions = np.array(row[name])
            assert (positions[spans[:, side]] > 0).all()
            document = (positions == 0).cumsum()
            assert (document[spans[:, side] - 1] == document[spans[:, side + 1] - 1]).all()
        both = [(np.array(row[name]) == 0).cumsum() for name in ("position_ids", "teacher_position_ids")]
        assert (both[0][spans[:, 0]] == both[1][spans[:, 2]]).all()
        several |= both[0][-1] > 1
        count += len(spans)
    assert several == packing and count == splits.report.spans
    assert "one token of each" in str(splits.report)
    again = load_cross_data(data_section(folders, packing=packing), PIECES, MERGED, seed=1)
    assert again.report.from_cache and again.train[0] == splits.train[0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_name_the_spans(folders, side):
    rows = list(load_cross_data(data_section(folders), PIECES, MERGED, seed=1).train)[:3]
    batch = Collator(0, 32, side, columns=[CrossColumns()])(rows)
    spans = batch["spans"].tolist()
    expected = [
        (row["input_ids"][a:b], row["teacher_input_ids"][c:d])
        for row in rows
        for a, b, c, d in np.array(row["spans"]).reshape(-1, 4)
    ]
    own, others = batch["input_ids"].flatten().tolist(), batch["teacher_input_ids"].flatten().tolist()
    assert [(own[a:b], others[c:d]) for a, b, c, d in spans] == expected
    assert (batch["labels"] != -100).sum() == len(spans)
    assert batch["valid_rows"].tolist() == [a - 1 for a, *_ in spans]


# ---------------------------------------------------------------- the objective, the contract, a whole run

RECIPE = """
teacher: {{model: {teacher}}}
student: {{model: {student}, vocabulary: cross}}
data: {{source: {data}, max_length: 96, validation: {{fraction: 0.25}}}}
loss: {{temperature: 2.0, terms: [{{type: forward_kl, weight: 1.0}}, {{type: cross_entropy, weight: 0.1}}]}}
train: {{steps: 12, batch_size: 2, learning_rate: 0.01, device: cpu, log_every: 4, eval_every: 6}}
generate: {{prompts: [The teacher], max_new_tokens: 4}}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher and a student with tokenizers of different kinds, and text."""
    root = tmp_path_factory.mktemp("cross")
    save_tiny(root / "teacher", tiny_model(MERGED, 2, 64, seed=1), MERGED)
    save_tiny(root / "student", tiny_model(PIECES, 1, 32, seed=3), PIECES)
    rows = [{"text": f"The teacher number {n} explains {n * n} and the student listens. Größe {n}"} for n in range(80)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def pair_of_models(loss="forward_kl", **settings):
    vocabularies = compare_by_bytes(*readers("pieces", "merged"))
    teacher, student = tiny_model(MERGED, 2, 64, seed=1, kind="gemma2"), tiny_model(PIECES, 1, seed=3)
    loss = {"terms": [{"type": loss}], **settings}
    objective = DistillationObjective(CrossTeacher(teacher, vocabularies.shared), student, loss)
    return objective, student.requires_grad_(), teacher


def rows_of(folders, count=8, **more):
    return list(load_cross_data(data_section(folders, **more), PIECES, MERGED, seed=1).train)[:count]


def test_objective_follows_the_definition(folders):
    """Both models' own logits, a document at a time: packing and padding mix nothing."""
    objective, student, teacher = pair_of_models(temperature=1.5)
    rows = rows_of(folders, 3)
    collate = Collator(0, pad_to_multiple_of=64, columns=objective.teacher.columns)
    output = student(**objective.student_inputs(collate(rows)))
    losses = []
    for row in rows:
        spans = torch.tensor(row["spans"]).view(-1, 4)
        z_s, z_t = (
            torch.cat(
                [
                    model(input_ids=torch.tensor([row[ids][start:stop]]), use_cache=False).logits[0].detach().double()
                    for start, stop in documents(row[positions])
                ]
            )
            for model, ids, positions in (
                (student, "input_ids", "position_ids"),
                (teacher, "teacher_input_ids", "teacher_position_ids"),
            )
        )
        losses.append(
            dense_spans(
                ReferenceLogits(z_s, row["input_ids"]),
                ReferenceLogits(z_t, row["teacher_input_ids"]),
                Spans(spans[:, :2], spans[:, 2:]),
                objective.teacher.shared,
                Loss(terms=[PlainTerm(type="forward_kl")], temperature=1.5),
            )
        )
    exact = torch.cat(losses).mean()
    assert_as_good_as_torch(output["loss"], exact, exact, torch.float32)


def documents(positions):
    starts = [number for number, position in enumerate(positions) if position == 0]
    return zip(starts, [*starts[1:], len(positions)], strict=True)


@pytest.mark.plain("forward_kl")
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_padding_and_accumulation_change_nothing(folders, kind):
    objective, student, _ = pair_of_models(kind)
    rows = rows_of(folders)
    items = sum(len(row["spans"]) // 4 for row in rows)

    def gradients(size, plain):
        student.zero_grad()
        collate = replace(plain, columns=objective.teacher.columns)
        total = 0.0
        for start in range(0, len(rows), size):
            loss = student(**objective.student_inputs(collate(rows[start : start + size]), num_items=items))["loss"]
            loss.backward()
            total += loss.detach()
        return [total, *(p.grad.clone() for p in student.parameters())]

    whole = gradients(8, Collator(0))
    for other in (gradients(1, Collator(0)), gradients(8, Collator(0, pad_to_multiple_of=128, padding_side="left"))):
        for one, right in zip(other, whole, strict=True):
            assert_as_good_as_torch(one, right, right, torch.float32)


def test_equal_models_have_nothing_to_learn(folders):
    student = tiny_model(PIECES, 1, seed=3)
    same = compare_by_bytes(*readers("pieces", "pieces"))
    objective = DistillationObjective(CrossTeacher(student, same.shared), student, "forward_kl")
    student.requires_grad_()
    rows = list(load_cross_data(data_section(folders), PIECES, PIECES, seed=1).train)[:3]
    batch = Collator(0, columns=objective.teacher.columns)(rows)
    output = student(**objective.student_inputs(batch))
    output["loss"].backward()
    assert output["loss"] < 1e-6 and max(p.grad.abs().max() for p in student.parameters()) < 1e-6
    (line,) = objective.teacher.validate_first_batch(batch, student, objective.alignment)
    assert line.split(maxsplit=1)[1].startswith("100.0% of the teacher's probability")
    # and it is the plain objective of one tokenizer
    objective.detach()
    teacher = tiny_model(PIECES, 2, seed=5)
    figures = []
    own = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    for kind, inputs in ((CrossTeacher(teacher, same.shared), batch), (teacher, own)):
        made = DistillationObjective(kind, student, "reverse_kl")
        student.zero_grad()
        loss = student(**made.student_inputs(inputs))["loss"]
        loss.backward()
        figures.append([loss.detach(), *(p.grad.clone() for p in student.parameters())])
        made.detach()
    for one, other in zip(*figures, strict=True):
        assert_as_good_as_torch(one, other, other, torch.float32)


@pytest.mark.full
def test_a_run_learns_across_tokenizers(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = parse(RECIPE.format(**{path.stem: path for path in folders.iterdir()}))
    result = run(recipe)
    assert result.after.forward_kl < 0.9 * result.before.forward_kl
    said = capsys.readouterr().out
    assert "tokens are the same" in said and "of the teacher's probability is on shared tokens" in said
    assert "one token of each" in said and "span divergence to teacher" in said
    assert "step 4/12  loss " in said and "  span divergence " in said and "aligned spans" in said
    card = (result.folder / "student" / "README.md").read_text()
    assert "different tokenizers" in card and "| forward span divergence |" in card
    told = _what_commands_say(result, capsys)
    kept = json.loads((result.folder / "result.json").read_text())
    assert kept["after"]["forward_divergence"] == result.after.forward_kl and "forward_kl" not in kept["after"]
    assert kept["after"]["spans"] == result.after.tokens and kept["measure"]["name"] == "span divergence"
    for text in (said, card.split("## Recipe")[0].replace("are not KL", ""), *told):
        assert not [text[max(0, m.start() - 60) : m.end()] for m in re.finditer(r"(?<![a-z_])kl|KL", text)]
    # the student keeps its tokenizer
    kept = AutoTokenizer.from_pretrained(result.folder / "student")
    assert kept.get_vocab() == PIECES.get_vocab()
    # the held-out figure, from the saved student by the definition
    splits = load_cross_data(recipe.data, PIECES, MERGED, seed=recipe.train.seed)
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    teacher = AutoModelForCausalLM.from_pretrained(folders / "teacher")
    teacher = CrossTeacher(teacher, compare_by_bytes(*readers("pieces", "merged")).shared)
    again = evaluate(student, teacher, splits.validation, batch_size=3)
    for name in ("forward_kl", "reverse_kl", "student_cross_entropy", "teacher_cross_entropy"):
        one, other = torch.tensor(getattr(again, name)), torch.tensor(getattr(result.after, name))
        assert_as_good_as_torch(one, other, other, torch.float32, name)
    assert again.tokens == result.after.tokens


def _what_commands_say(result, capsys):
    """The report's page, the comparison's table and page, and the judgement of a run; held to its own figures."""
    name = str(result.folder)
    assert run_command(["report", name]) == run_command(["compare", name, "--plot", "c.html"]) == 0
    page = (result.folder / "report.html").read_text().split("<h2>Recipe")[0]
    for expected in (
        "forward span divergence",
        "held-out aligned spans",
        "span divergence to the teacher, relative to before training",
        "span divergence to teacher (nats an aligned span)",
        "loss (nats an aligned span)",
    ):
        assert expected in page, expected
    said = capsys.readouterr().out
    assert "span divergence to teacher" in said
    plot = Path("c.html").read_text()
    for where in ("held out", "in training"):
        assert f">span divergence to the teacher (nats an aligned span), {where}<" in plot
    assert plot.count('id="axes_1"') == 4, "divergence and agreement, held out and in training"
    assert run_command(["compare", name, "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)
    assert group["divergence"] == [result.after.forward_kl] and group["measure"] == "span divergence"
    assert run_command(["eval", name]) == 0
    table = capsys.readouterr().out
    assert "forward span divergence" in table and f"over {result.after.tokens:,} aligned spans" in table
    assert "calibration" not in table
    assert run_command(["eval", name, "--before", name + "/student", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spans"] == result.after.tokens and found["figures"]["gap_closed"]["value"] == 0
    for key, field in (
        ("forward_divergence", "forward_kl"),
        ("reverse_divergence", "reverse_kl"),
        ("agreement", "agreement"),
        ("student_cross_entropy",) * 2,
        ("teacher_cross_entropy",) * 2,
        ("student_entropy",) * 2,
        ("teacher_entropy",) * 2,
    ):
        figure = found["figures"][key]
        assert figure["value"] == pytest.approx(getattr(result.after, field), rel=1e-4)
        assert figure["low"] <= figure["value"] <= figure["high"]
    return [page, said, plot, table, json.dumps(group), json.dumps(found)]


@pytest.mark.parametrize("random", [False, True])
def test_check_reports_the_vocabularies_of_two_tokenizers(folders, random):
    """`distill check` of a recipe across tokenizers: no verdict on ids, the data by both tokenizers."""
    text = RECIPE.format(**{path.stem: path for path in folders.iterdir()})
    dry = ["student.init=random", f"student.config={folders / 'student' / 'config.json'}"]
    report = check_run(parse(text, dry if random else []), find_device("cpu"))
    assert report.problems == [] and report.vocabulary_ok and "tokens are the same" in report.vocabulary
    assert "one token of each" in report.data


@pytest.mark.full
def test_a_dry_run_keeps_the_students_tokenizer_and_every_id_needs_a_row(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = RECIPE.format(**{path.stem: path for path in folders.iterdir()})
    config = json.loads((folders / "student" / "config.json").read_text())
    for rows in (len(PIECES), 200):
        Path(f"{rows}.json").write_text(json.dumps(config | {"vocab_size": rows}))
    dry = ["student.init=random", "train.steps=1", "student.config="]
    result = run(parse(text, [*dry[:2], f"{dry[2]}{len(PIECES)}.json"]))
    assert AutoTokenizer.from_pretrained(result.folder / "student").get_vocab() == PIECES.get_vocab()
    few, told = parse(text, [*dry[:2], f"{dry[2]}200.json"]), "student.model: expected a row .* up to 329; got 200"
    with pytest.raises(ValueError, match=told):
        run(few)
    assert re.match(told, check_run(few, find_device("cpu")).problems[0])
