"""Named held-out sets: each is measured by its own name, whatever the teacher, and is never trained on."""

import json

import pytest
from tiny import save_models

from distill.cli import run_command
from distill.recipe import parse
from distill.reports.report import read_run, report_html
from distill.run import run

TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(80))
MATHS = [{"ask": f"What is {n} and {n}?", "say": f"It is {2 * n}, of course."} for n in range(12)]
# every third line of the training data
PART = TEXT.splitlines()[::3]

RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: text.jsonl, max_length: 128, cache: false, validation: {fraction: 0.1, sets: [
    {name: maths, source: maths.jsonl, fields: {prompt: ask, completion: say}},
    {name: part, source: part.jsonl, max_rows: 20}]}}
train: {steps: 6, batch_size: 2, tokens_per_step: 256, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu,
        eval_every: 2}
generate: {prompts: []}
"""


def as_jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 4, "seed": 1}, student={"seed": 2})
    (tmp_path / "text.jsonl").write_text(as_jsonl(TEXT.splitlines()))
    (tmp_path / "part.jsonl").write_text(as_jsonl(PART))
    (tmp_path / "maths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MATHS))
    return tmp_path


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_every_evaluation_has_the_figures_of_every_set(here, capsys):
    result = run(parse(RECIPE, name="sets"))
    evaluated = [row for row in rows_of(result.folder) if "eval_kl" in row]
    assert [row["step"] for row in evaluated] == [2, 4, 6]
    own = {name[5:] for name in evaluated[0] if name.startswith("eval_") and "maths" not in name and "part" not in name}
    for name in ("maths", "part"):
        assert {f"eval_{name}_{figure}" for figure in own} <= evaluated[0].keys()
        before, after = result.sets[name]
        assert after.forward_kl == pytest.approx(evaluated[-1][f"eval_{name}_kl"], rel=1e-5)
        assert before.forward_kl > after.forward_kl != pytest.approx(result.after.forward_kl, rel=1e-3)
    written = json.loads((result.folder / "result.json").read_text())
    assert written["sets"]["part"]["after"]["forward_kl"] == result.sets["part"][1].forward_kl
    printed = capsys.readouterr().out
    assert "maths: after" in printed and "step 4/6  held out, part: loss " in printed
    assert "maths: student after" in report_html(read_run(result.folder))
    assert run_command(["compare", "sets"]) == 0
    assert "part: KL" in capsys.readouterr().out


def test_documents_of_a_set_are_not_trained_on(here):
    from tiny import tiny_tokenizer

    from distill.data.load import load_data

    tokenizer = tiny_tokenizer()
    splits = load_data(parse(RECIPE).data, tokenizer, seed=0)
    trained = tokenizer.decode([token for row in splits.train["input_ids"] for token in row])
    held_out = tokenizer.decode([token for row in splits.sets["part"]["input_ids"] for token in row])
    assert held_out.count("line") == 20, "max_rows"
    found = {line for line in PART if line in held_out}
    assert len(found) == 20 and not any(line in trained for line in found)
    # without sets the same rows are held out
    alone = load_data(parse(RECIPE, ["data.validation.sets=[]"]).data, tokenizer, seed=0)
    assert alone.validation["input_ids"] == splits.validation["input_ids"] and not alone.sets


@pytest.mark.full
def test_a_set_decides_which_student_is_kept(here):
    result = run(parse(RECIPE, ["train.keep_best=maths_agreement"], name="best"))
    values = {row["step"]: row["eval_maths_agreement"] for row in rows_of(result.folder) if "eval_kl" in row}
    best = json.loads((result.folder / "result.json").read_text())["best"]
    assert best["figure"] == "maths_agreement" and values[best["step"]] == max(values.values())


CONTEXT = [
    "teacher.context={template: 'Answer in one sentence.'}",
    "data.source=maths.jsonl",
    "data.fields={prompt: ask, completion: say}",
    "data.validation.fraction=0.3",
    "data.validation.sets=[{name: maths, source: more.jsonl}]",
]


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [["teacher.online_cache=store"], ["teacher={type: cache, path: kept}"], CONTEXT],
    ids=["online", "stored", "context"],
)
def test_sets_are_measured_with_every_kind_of_teacher(here, more):
    (here / "more.jsonl").write_text("".join(json.dumps(row | {"ask": row["ask"] + "!"}) + "\n" for row in MATHS))
    if "path: kept" in str(more):
        (here / "recipe.yaml").write_text(RECIPE)
        assert run_command(["cache", "recipe.yaml", "--top-k", "8", "--out", "kept"]) == 0
    result = run(parse(RECIPE, more, name="kinds"))
    plain = run(parse(RECIPE, more if more is CONTEXT else [], name="plain"))
    before, after = result.sets["maths"]
    assert after.forward_kl < before.forward_kl
    if "online" in str(more):
        assert after.forward_kl == pytest.approx(plain.sets["maths"][1].forward_kl, rel=1e-3)
    assert "eval_maths_agreement" in rows_of(result.folder)[-1]


@pytest.mark.full
def test_evaluations_have_a_batch_size_of_their_own(here):
    from distill.training.trainer import DistillationTrainer

    plain = run(parse(RECIPE, name="plain"))
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        figures = DistillationTrainer.held_out_figures

        def noted(self, batches):
            batches = list(batches)
            sizes.extend(len(batch["input_ids"]) for batch in batches)
            return figures(self, batches)

        patch.setattr(DistillationTrainer, "held_out_figures", noted)
        large = run(parse(RECIPE, ["eval.batch_size=5"], name="large"))
    assert max(sizes) == 5 and plain.folder != large.folder
    student = [result.folder / "student" / "model.safetensors" for result in (plain, large)]
    assert student[0].read_bytes() == student[1].read_bytes(), "training is the same"
    assert large.after._asdict() == pytest.approx(plain.after._asdict(), rel=1e-5)
    for before, after in zip(rows_of(plain.folder), rows_of(large.folder), strict=True):
        own = {name: value for name, value in before.items() if name.startswith("eval_")}
        assert {name: after[name] for name in own} == pytest.approx(own, rel=1e-5)
