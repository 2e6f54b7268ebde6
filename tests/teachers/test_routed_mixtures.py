"""Routes of several teachers, loaded, served and cached, and of one that reads more: mixtures and contexts by route."""

import json

import pytest
import torch
from safetensors.torch import load_file
from served import opened, serving
from subjects import Silent, informed, routed_informed
from tiny import save_models, tiny_model

from distill.commands.cache_epoch import load, make_cache
from distill.data.collator import Collator
from distill.doctor.examine import examine
from distill.doctor.invariants import fused_equals_reference, models_read_the_same_tokens
from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.targets import HeadForward, StepInputs
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import dump, parse
from distill.run import run
from distill.serving.open import open_engine
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.student import FILE
from distill.teachers.combination.mixture import MixtureFormat
from distill.teachers.combination.route_data import RouteColumns
from distill.teachers.combination.routes import RoutedFormat, RoutedTeacher, RouteTargets
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.training.lock_file import read_lock
from distill.training.progress import read_metrics

TEACHERS = ("math", "talk")
HINT = "The number that is asked for is"
CONTEXT = f"context: {{template: '{HINT} {{hint}}'}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    save_models(folder, **{name: {"seed": n, "hidden": 32 + 16 * n} for n, name in enumerate(("student", *TEACHERS))})
    rows = [
        {
            "prompt": f"Say {n}?",
            "completion": f"It is {'so ' * (n % 5)}{n}.",
            "domain": TEACHERS[n % 3 // 2],
            "hint": f"{n} and no other one, of all that there are.",
        }
        for n in range(36)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "math.jsonl").write_text("\n".join(json.dumps(row) for row in rows if row["domain"] == "math"))
    return folder


@pytest.fixture(scope="module")
def url(place):
    """Address of the second teacher's server."""
    recipe = f"{{teacher: {{model: {place}/talk}}, student: {{model: {place}/student}}, "
    data = f"data: {{source: {place}/rows.jsonl}}, train: {{steps: 1, device: cpu}}}}"
    with serving(open_engine(parse(recipe + data), 4096)) as url:
        yield url


@pytest.fixture(scope="module")
def cache(place):
    """Second teacher's cached outputs for the first route's rows."""
    recipe = parse(
        f"{{teacher: {{model: {place}/talk}}, student: {{model: {place}/student}}, train: {{steps: 1, device: cpu}}, "
        f"data: {{source: {place}/math.jsonl, max_length: 160, cache: false}}, generate: {{prompts: []}}}}"
    )
    settings = CacheOptions(hidden=True, dtype="float32").checked()
    make_cache(load(recipe), place / "cache", settings, say=lambda line: None, progress=Silent)
    return f"type: cache, path: {place}/cache"


def recipe_of(place, teachers, *overrides):
    """A run of some steps with teachers as they are spelled, each with its route."""
    return parse(
        f"""
        teachers: [{", ".join(f"{{{teacher}}}" for teacher in teachers)}]
        student: {{model: {place}/student}}
        data: {{source: {place}/rows.jsonl, max_length: 160, packing: true, cache: false, fields: {{teacher: domain}}}}
        train: {{steps: 4, batch_size: 2, device: cpu, log_every: 1}}
        loss: {{terms: [{{type: reverse_kl}}]}}
        generate: {{prompts: []}}
        output_dir: {place}/runs
        """,
        overrides,
        name="mixtures",
    )


def mixed(place, other):
    """Two teachers of the first route, the second of them as it is given, and one of the other route."""
    return [
        f"model: {place}/math, weight: 3, route: math",
        f"{other}, route: math",
        f"model: {place}/talk, route: talk",
    ]


def informed_routes(place, more=""):
    """A teacher, and a running average of the student that reads a hint."""
    own = f"type: student, ema: 0.9, {CONTEXT}, route: talk"
    return [f"model: {place}/math, route: math", own + more]


def trained(recipe, name, **options):
    result = run(recipe, name=name, **options)
    return load_file(result.folder / "student" / "model.safetensors"), result


# ------------------------------------------------------------------ a mixture of several kinds in a route


@pytest.fixture(scope="module")
def loaded(place):
    return trained(recipe_of(place, mixed(place, f"model: {place}/talk")), "loaded")


@pytest.mark.full
def test_a_served_part_of_a_mixture_changes_no_bit(place, url, loaded):
    recipe = recipe_of(place, mixed(place, f"type: server, url: '{url}', timeout: 5"))
    assert parse(dump(recipe)) == recipe
    weights, result = trained(recipe, "served")
    assert result.after == loaded[1].after
    assert all(torch.equal(value, loaded[0][name]) for name, value in weights.items())
    teacher = read_lock(result.folder / "lock.yaml")["teacher"]
    assert [name for name in teacher if name.startswith("route ")] == ["route math member 1"]
    assert len(teacher["route math member 1"]["server"]) == 32


def test_a_cached_part_of_a_mixture_is_the_loaded_one(place, cache, loaded):
    """Up to rounding: the cache was made of other batches."""
    weights, result = trained(recipe_of(place, mixed(place, cache)), "cached")
    assert result.after.forward_kl == pytest.approx(loaded[1].after.forward_kl, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value, loaded[0][name], rtol=1e-6, atol=1e-6)


def test_a_mixture_in_a_route_is_the_mixture_without_one(place, url):
    """Loss and gradients of rows of one route, asked ahead and not."""
    served, _ = opened(recipe_of(place, mixed(place, f"type: server, url: '{url}'")))
    plain, vocabulary = opened(
        parse(
            dump(
                recipe_of(
                    place, [f"model: {place}/math, weight: 3", f"model: {place}/talk"], "data.fields.teacher=null"
                )
            )
        )
    )
    rows = list(vocabulary.read(plain_data(place), 0).train)
    student = tiny_model(vocabulary.tokenizer)
    figures = []
    for teacher, ahead in ((plain, False), (served, False), (served, True)):
        own = [row | {"route": [0] * row["position_ids"].count(0)} for row in rows] if teacher is served else rows
        objective = DistillationObjective(teacher, student, {"terms": [{"type": "jsd"}], "temperature": 2.0})
        batch = Collator(0, columns=objective.teacher.columns)(own[:4])
        if ahead:
            teacher.prefetch(batch)
            assert teacher.members[0].members[1]._pending and teacher.prefetch_error([batch]) is None
        output = student(**objective.student_inputs(batch))
        output["loss"].backward()
        figures.append(
            (
                output["loss"].detach(),
                output["statistics"][:7].detach(),
                *(p.grad.clone() for p in student.parameters()),
            )
        )
        student.zero_grad()
        objective.detach()
    for other in figures[1:]:
        torch.testing.assert_close(other, figures[0], rtol=1e-5, atol=1e-6)
    assert sum("log-probabilities of" in line for line in served.validate_first_batch(batch, None, None)) == 1
    served.close()


def plain_data(place):
    return recipe_of(place, [f"model: {place}/math"], "data.fields.teacher=null").data


@pytest.mark.full
@pytest.mark.parametrize("kind", ["server", "cache", "context"])
def test_doctor_passes_on_mixtures_in_routes(place, url, cache, forked_ranks, kind):
    """Answers of the student's own too, but of a cache."""
    own = ["data.on_policy={max_new_tokens: 6, fraction: 0.5}", "data.packing=false"] * (kind != "cache")
    other = f"type: server, url: '{url}'" if kind == "server" else cache
    teachers = informed_routes(place) if kind == "context" else mixed(place, other)
    findings = list(examine(recipe_of(place, teachers, "train.steps=2", *own)))
    assert len(findings) > 8 and not [finding for finding in findings if not finding.passed]


# ------------------------------------------------------------------ a teacher with a context in a route


def test_only_its_route_reads_the_context(place):
    """And a run logs what each says, follows the student and learns."""
    recipe = recipe_of(place, informed_routes(place), "train.eval_every=2", "train.learning_rate=3e-3")
    teacher, vocabulary = opened(recipe)
    splits = vocabulary.read(recipe.data, 0)
    assert "tokens per document in the teacher's rows" in str(splits.report)
    batch = Collator(0, columns=teacher.columns)([splits.train[n] for n in range(len(splits.train))])
    texts = {n: vocabulary.tokenizer.decode(batch[n].flatten().tolist()) for n in batch if n.endswith("input_ids")}
    counts = {name: text.count(HINT) for name, text in texts.items() if text.count(HINT)}
    asked = texts["route1_input_ids"].count("Say ")
    assert asked > 8 and counts == {"teacher_input_ids": asked, "route1_teacher_input_ids": asked}
    result = run(recipe, name="informed")
    assert result.after.forward_kl < result.before.forward_kl
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert any({"kl_math", "agreement_talk", "kl_talk"} <= set(row) for row in rows)


def test_a_reading_of_other_rows_is_found(monkeypatch):
    """The context of one document before the answer of another, of the route that has one."""
    subject = routed_informed()
    assert models_read_the_same_tokens(subject).passed and fused_equals_reference(subject).passed
    targets = ContextTeacher.targets

    def shifted(self, batch):
        ids = batch["teacher_input_ids"]
        return targets(self, {**batch, "teacher_input_ids": ids.roll(1, 0)})

    monkeypatch.setattr(ContextTeacher, "targets", shifted)
    assert not models_read_the_same_tokens(subject).passed
    assert not fused_equals_reference(subject).passed


def test_rows_at_the_wrong_teacher_are_found(monkeypatch):
    """The documents of two routes exchanged between the collator and the teachers."""
    subject, targets = routed_informed(), RoutedTeacher.targets

    def exchanged(self, batch):
        numbers = {"route0_": "route2_", "route2_": "route0_"}
        return targets(self, {numbers.get(n[:7], n[:7]) + n[7:]: value for n, value in batch.items()})

    monkeypatch.setattr(RoutedTeacher, "targets", exchanged)
    assert not models_read_the_same_tokens(subject).passed
    assert not fused_equals_reference(subject).passed


def test_a_context_in_a_route_is_the_context_without_one():
    """Loss and gradients of rows of one route."""
    subject, figures = informed(), []
    student = subject.student
    (model,) = subject.teacher.models.values()
    for teacher in (subject.teacher, RoutedTeacher([ContextTeacher(LoadedTeacher(model))], ["all"])):
        is_routed = isinstance(teacher, RoutedTeacher)
        rows = [row | {"route": [0] * 2} for row in subject.rows] if is_routed else subject.rows
        objective = DistillationObjective(teacher, student, subject.loss)
        output = student(**objective.student_inputs(Collator(0, columns=objective.teacher.columns)(rows)))
        output["loss"].backward()
        figures.append((output["loss"].detach(), *(p.grad.clone() for p in student.parameters())))
        student.zero_grad()
        objective.detach()
        assert list(teacher.flops_per_token()) == ["route0_teacher_" if is_routed else "teacher_"]
    torch.testing.assert_close(figures[1], figures[0], rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["context", "server"])
def test_resume_of_mixtures_in_routes_is_exact(place, url, kind):
    """The running average is in the checkpoint; answers of the student's own keep what their teacher reads."""
    teachers = informed_routes(place) if kind == "context" else mixed(place, f"type: server, url: '{url}'")
    more = ["data.on_policy={max_new_tokens: 6, fraction: 0.5}", "train.save_every=2", "data.packing=false"]
    recipe = recipe_of(place, teachers, *more)
    whole, result = trained(recipe, f"whole-{kind}")
    folder = place / "runs" / f"resumed-{kind}"
    trained(recipe, folder.name)
    assert (folder / "checkpoint-2" / FILE).exists() == (kind == "context")
    for name in ("checkpoint-4", "student"):
        (folder / name).rename(place / f"{name}-{kind}")
    (folder / "result.json").unlink()
    again, resumed = trained(recipe, folder.name, resume=True)
    assert resumed.after == result.after and all(torch.equal(value, whole[name]) for name, value in again.items())
    if kind == "context":
        averages = [load_file(run / "checkpoint-4" / FILE) for run in (folder, result.folder)]
        assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())
        first = load_file(folder / "checkpoint-2" / FILE)
        assert not all(torch.equal(value, averages[0][name]) for name, value in first.items())


# ------------------------------------------------------------------ figures


def heads(generator, widths, rows=40):
    return [StoredHead(HeadWeights(torch.randn(rows, width, generator=generator), None, None)) for width in widths]


def test_overlap_by_route_is_that_of_dense_probabilities():
    """A mixture's overlap is that of its probabilities; each row counts for its own route only."""
    generator = torch.Generator().manual_seed(0)
    own, (one, first, second) = torch.randn(40, 8, generator=generator), heads(generator, (6, 5, 7))
    formats = [HiddenFormat(head, LogitTransform()) for head in (one, first)]
    formats.append(HiddenFormat(second, LogitTransform(softcap=2.0)))
    format = RoutedFormat([formats[0], MixtureFormat(formats[1:], (0.7, 0.3))], ["code", "talk"])
    hidden, *theirs = (torch.randn(2, 5, width, generator=generator) for width in (8, 6, 5, 7))
    places = torch.tensor([0, 1, 2, 6]), torch.tensor([3, 4, 7, 8])
    targets = {0: RouteTargets(theirs[0], places[0]), 1: RouteTargets(tuple(theirs[1:]), places[1])}
    call = HeadForward(hidden, HeadWeights(own, None, None), StepInputs(targets, None, True), None, None)
    rows = torch.tensor([1, 3, 4, 6, 7, 8])
    shares = format.overlap(format.pair(LogitTransform(), 40, None), call, rows)
    z = [h.flatten(0, 1)[rows] @ f.head.weights.weight.T for h, f in zip(theirs, formats, strict=True)]
    mixture = 0.7 * z[1].softmax(-1) + 0.3 * (2 * torch.tanh(z[2] / 2)).softmax(-1)
    student = (hidden.flatten(0, 1)[rows] @ own.T).topk(8).indices.tolist()
    for name, dense, at in (("code", z[0], places[0]), ("talk", mixture, places[1])):
        likeliest = dense.topk(8).indices.tolist()
        expected = [len(set(x) & set(y)) / 8 for x, y in zip(student, likeliest, strict=True)]
        assert len(set(expected)) > 1
        for row, share, value in zip(rows.tolist(), shares[name].tolist(), expected, strict=True):
            assert share == value if row in at.tolist() else share != share


def test_a_log_line_has_the_overlap_of_each_route(place):
    """The mean of the routes' is that of all; a teacher that is the student overlaps wholly in the first step."""
    teachers = [
        f"model: {place}/student, route: math",
        f"model: {place}/math, route: talk",
        f"model: {place}/talk, route: talk",
    ]
    own = ("data.on_policy={max_new_tokens: 6}", "data.packing=false", "train.batch_size=4")
    rows = read_metrics(run(recipe_of(place, teachers, *own), name="overlap").folder / "metrics.jsonl")
    both = [row for row in rows if "overlap_math" in row and "overlap_talk" in row]
    assert both and all(0 <= row["overlap_talk"] < 1 for row in both)
    assert next(row["overlap_math"] for row in rows if "overlap_math" in row) > 0.9
    for row in both:
        low, high = sorted((row["overlap_math"], row["overlap_talk"]))
        assert low < row["overlap"] < high


def test_check_counts_what_each_model_reads(place):
    """FLOPs of the student's and of the teacher's forward by the tokens and pairs of each document."""
    recipe = recipe_of(
        place,
        ["model: a, route: b"],
        "teachers=[]",
        "data.fields.teacher=null",
        f"teacher={{model: {place}/math, {CONTEXT}}}",
    )
    report = check_run(recipe, find_device("H100"))
    teacher, vocabulary = opened(recipe)
    splits = vocabulary.read(recipe.data, 0)
    from distill.models.flops import count_flops
    from distill.models.loading import load_student

    student = count_flops(load_student(recipe.student, device="cpu", dtype=torch.float32), trains=True)
    (work,) = teacher.flops_per_token().values()
    own, read = ([row[f"{who}position_ids"] for row in splits.train] for who in ("", "teacher_"))
    learned = sum(label != -100 for row in splits.train for label in row["labels"])
    sizes = [(sum(map(len, rows)), learned, sum(at + 1 for row in rows for at in row)) for rows in (own, read)]
    assert sizes[1][0] > 1.5 * sizes[0][0]
    flops = student.total(*sizes[0]) + work.total(*sizes[1])  # of all data; a step is full of the longer reading
    expected = flops * report.tokens_per_step / sizes[1][0]
    assert report.flops_per_step == pytest.approx(expected, rel=0.01)


# ------------------------------------------------------------------ what does not go together


def test_rows_need_the_teachers_reading():
    subject = routed_informed()
    rows = [{name: row[name] for name in ("input_ids", "labels", "position_ids", "route")} for row in subject.rows]
    with pytest.raises(ValueError, match="expected teacher_input_ids"):
        Collator(0, columns=subject.teacher.columns)(rows)
    plain = Collator(0, columns=[RouteColumns([()] * len(subject.teacher.routes))])(rows)
    with pytest.raises(ValueError, match="expected teacher_input_ids"):
        subject.objective().student_inputs(plain)
