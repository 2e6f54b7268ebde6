"""`load_best_model_at_end` loads all that a checkpoint has: weights, masters, scales, merged weights, projections."""

import json

import pytest
import torch
from safetensors.torch import load_file

from distill.cli import run_command
from distill.recipe import parse
from distill.run import run

RECIPE = """
teacher: {model: teacher}
student: {model: student, quantise: {format: q4_0}}
data: {source: synthetic, max_length: 32, max_rows: 200, cache: false, validation: {fraction: 0.1}}
train: {steps: 6, batch_size: 4, tokens_per_step: 256, learning_rate: 0.3, warmup: 0, schedule: constant, log_every: 2,
        device: cpu, save_every: 2, eval_every: 2,
        arguments: {load_best_model_at_end: true, metric_for_best_model: eval_kl, greater_is_better: false}}
generate: {prompts: []}
"""
# the checkpoint that is loaded must not be the last
WORST = "train.arguments.greater_is_better=true"


pytestmark = pytest.mark.place(teacher={"hidden": 64, "layers": 3, "seed": 1}, student={"hidden": 64, "seed": 2})


def best_of(folder):
    """Return the checkpoint that the last one's state calls the best, which must not be the last."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    best = json.loads((last / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best.rpartition("/")[2] != last.name
    return folder / best.rpartition("/")[2]


@pytest.mark.full
@pytest.mark.parametrize("more", [[], ["student.lora.r=4", WORST]], ids=["full", "lora"])
def test_a_quantised_student_is_that_of_the_best_checkpoint(workplace, more):
    result = run(parse(RECIPE, more, name="best"))
    best = best_of(result.folder)
    assert run_command(["export", str(best), "-o", "of-checkpoint"]) == 0
    assert run_command(["export", str(result.folder), "-o", "of-run"]) == 0
    for file in ("model.safetensors", "quantised_scales.safetensors"):
        ours, theirs = (load_file(workplace / name / file) for name in ("of-run", "of-checkpoint"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


@pytest.mark.full
def test_projections_of_layers_are_those_of_the_best_checkpoint(workplace, watch):
    from distill.objectives import layer_matching

    seen, restore = [], layer_matching.LayerMatching.restore

    def noted(self, checkpoint):
        restore(self, checkpoint)
        seen.append((checkpoint.name, {str(n): each.weight.clone() for n, each in enumerate(self._projections())}))

    watch.setattr(layer_matching.LayerMatching, "restore", noted)
    term = "loss.terms=[{type: forward_kl}, {type: hidden_state, projection: learned}]"
    result = run(parse(RECIPE, ["student.quantise=null", term, WORST], name="best"))
    best = best_of(result.folder)
    ((name, weights),) = seen
    saved = load_file(best / layer_matching.FILE)
    assert name == best.name and saved.keys() == weights.keys() != set()
    assert all(torch.equal(saved[key], weights[key]) for key in saved)


# ------------------------------------------------------------------ train.keep_best and train.early_stopping

KEPT = RECIPE.replace(
    """save_every: 2, eval_every: 2,
        arguments: {load_best_model_at_end: true, metric_for_best_model: eval_kl, greater_is_better: false}}""",
    """eval_every: 2, keep_best: kl}""",
)
PLAIN = "student.quantise=null"


def evaluations(folder, figure="kl"):
    """Return the value of a held-out figure by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[f"eval_{figure}"] for row in rows if f"eval_{figure}" in row}


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def weights_of(folder, name="model.safetensors"):
    return load_file(folder / name)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.plain("kl-min")
@pytest.mark.parametrize("figure, best_of", [("kl", min), ("perplexity", min), ("agreement", max)])
def test_the_student_of_the_best_evaluation_is_kept(workplace, figure, best_of):
    result = run(parse(KEPT, [PLAIN, f"train.keep_best={figure}", "train.steps=7"], name="best"))
    values = evaluations(result.folder, figure)
    assert list(values) == [2, 4, 6, 7], "the last step is evaluated, too"
    step = best_of(values, key=values.get)
    found = result_of(result.folder)
    assert found["best"] == {"figure": figure, "value": values[step], "step": step}
    assert found["steps"] == result.steps == 7 and not found["stopped_early"]
    assert (result.folder / f"checkpoint-{step}").is_dir()
    assert same(weights_of(result.folder / "student"), weights_of(result.folder / f"checkpoint-{step}"))
    if figure == "kl":
        assert result.after.forward_kl == pytest.approx(values[step], rel=1e-5)


@pytest.mark.full
def test_older_checkpoints_are_deleted_but_never_the_best(workplace):
    # the first evaluation is the best, since the learning rate is far too high
    more = [PLAIN, "train.learning_rate=3", "train.steps=12", "train.save_every=3"]
    result = run(parse(KEPT, more, name="best"))
    values = evaluations(result.folder)
    step = min(values, key=values.get)
    assert step < 9
    kept = {path.name for path in result.folder.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{step}", "checkpoint-9", "checkpoint-12"}
    assert same(weights_of(result.folder / "student"), weights_of(result.folder / f"checkpoint-{step}"))


STOPPING = [PLAIN, "train.learning_rate=3", "train.steps=40", "train.early_stopping={patience: 3}"]


@pytest.mark.full
def test_training_ends_once_the_figure_no_longer_improves(workplace, capsys):
    result = run(parse(KEPT, STOPPING, name="best"))
    values = evaluations(result.folder)
    best = min(values, key=values.get)
    assert result.steps == best + 6 == max(values) < 40
    assert result_of(result.folder)["stopped_early"] and result_of(result.folder)["best"]["step"] == best
    assert (
        f"stopped early after step {result.steps} of 40: held-out kl was best at step {best}" in capsys.readouterr().out
    )
    assert same(weights_of(result.folder / "student"), weights_of(result.folder / f"checkpoint-{best}"))
    # nothing is left to train: the run is concluded again, with the same student
    again = run(parse(KEPT, STOPPING, name="best"), name="best", resume=True)
    assert again.steps == result.steps and again.after == result.after


@pytest.mark.parametrize(
    "values, min_delta, waited",
    [
        ([1.0, 2.0, 3.0], 0.0, (0, 3)),
        ([1.0, 1.0, 1.0], 0.0, (2, 1)),
        ([1.0, 1.4, 1.8], 0.5, (0, 3)),
        ([1.0, 1.4, 1.5], 0.5, (2, 1)),
        ([float("nan"), 1.0, float("nan")], 0.0, (1, 2)),
        ([], 0.0, (0, 0)),
    ],
)
def test_evaluations_without_an_improvement_are_counted_from_the_best(values, min_delta, waited):
    from distill.training.early_stopping import count_waited

    assert count_waited(enumerate(values, 1), min_delta) == waited


class Killed(BaseException):
    """End of the process."""


def killed_in(watch, moment, step):
    """End the process at a moment of a step: `before` its evaluation, or `after` it and before its checkpoint."""
    from distill.training.trainer import DistillationTrainer

    evaluate = DistillationTrainer.evaluate

    def end(self, *args, **kwargs):
        if self.state.global_step == step and moment == "before":
            self._save_checkpoint(self.model, None)
            raise Killed
        metrics = evaluate(self, *args, **kwargs)
        if self.state.global_step == step:
            raise Killed
        return metrics

    watch.setattr(DistillationTrainer, "evaluate", end)


@pytest.mark.full
@pytest.mark.parametrize(
    "moment, more", [("before", [PLAIN]), ("after", ["student.lora.r=4"])], ids=["before-full", "after-quantised-lora"]
)
def test_a_run_killed_around_an_evaluation_is_that_of_an_uninterrupted_one(workplace, monkeypatch, moment, more):
    more = [*more, "train.learning_rate=3e-2", "train.steps=8", "train.early_stopping={patience: 2}"]
    whole = run(parse(KEPT, more, name="whole"))
    with monkeypatch.context() as patch:
        killed_in(patch, moment, result_of(whole.folder)["best"]["step"])
        with pytest.raises(Killed):
            run(parse(KEPT, more, name="killed"))
    (workplace / "runs" / "killed").rename(workplace / "runs" / "moved")
    resumed = run(parse(KEPT, more, name="killed"), name="moved", resume=True)
    assert evaluations(resumed.folder) == evaluations(whole.folder)
    assert result_of(resumed.folder)["best"] == result_of(whole.folder)["best"]
    assert resumed.after == whole.after and resumed.steps == whole.steps
    assert same(weights_of(resumed.folder / "student"), weights_of(whole.folder / "student"))


@pytest.mark.full
def test_each_stage_keeps_its_own_best(workplace):
    text = KEPT + "stages: [{name: first, train: {learning_rate: 3}}, {name: second, train: {keep_best: agreement}}]\n"
    result = run(parse(text, [PLAIN, "train.learning_rate=3e-2"], name="staged"))
    first = result.folder / "stages" / "1-first"
    for folder, figure, best_of in ((first, "kl", min), (result.folder, "agreement", max)):
        values = evaluations(folder, figure)
        best = result_of(folder)["best"]
        assert best["figure"] == figure and values[best["step"]] == best_of(values.values())
        assert same(weights_of(folder / "student"), weights_of(folder / f"checkpoint-{best['step']}"))


def test_a_figure_that_the_loss_does_not_have_is_refused_before_training(workplace):
    with pytest.raises(ValueError, match=r"expected a held-out figure, loss, divergence, .*; got 'kl'"):
        run(parse(KEPT, [PLAIN, "loss.terms=[{type: jsd, beta: 0.5}]"], name="best"))
    assert not (workplace / "runs" / "best" / "recipe.yaml").exists()


def test_a_route_without_held_out_documents_has_no_best_figure(workplace):
    """Else the first evaluation would end the run."""
    rows = [{"prompt": f"Say {n}?", "completion": f"It is {n}.", "by": "ab"[n % 2]} for n in range(20)]
    (workplace / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (workplace / "held.jsonl").write_text("\n".join(map(json.dumps, rows[1::2])))
    routed = [
        PLAIN,
        "teacher=null",
        "teachers=[{model: teacher, route: a}, {model: teacher, route: b}]",
        "data={source: rows.jsonl, max_length: 32, fields: {teacher: by}, chat_template: none}",
        "data.validation={source: held.jsonl}",
    ]
    with pytest.raises(ValueError, match=r"keep_best: kl_a: expected held-out documents of this route"):
        run(parse(KEPT, [*routed, "train.keep_best=kl_a"], name="best"))
    assert not (workplace / "runs" / "best" / "recipe.yaml").exists()
    (workplace / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 3)))
    result = run(parse(KEPT, [*routed, "train.keep_best=kl_b"], name="best"))
    assert result_of(result.folder)["best"]["figure"] == "kl_b"


@pytest.mark.full
def test_a_sharded_student_is_that_of_the_best_checkpoint(workplace):
    from two_ranks import run_as_two

    more = [PLAIN, "train.learning_rate=3", "train.steps=8", "train.batch_size=2", "parallel.strategy=fsdp"]
    (workplace / "best.yaml").write_text(KEPT)
    run_as_two("-m", "distill", "run", "best.yaml", "--name", "best", *more, cwd=workplace)
    folder = workplace / "runs" / "best"
    values = evaluations(folder)
    best = result_of(folder)["best"]
    assert values[best["step"]] == min(values.values()) and best["step"] < 8
    assert result_of(folder)["after"]["forward_kl"] == pytest.approx(values[best["step"]], rel=1e-5)
