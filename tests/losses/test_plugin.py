"""A loss term of one's own through --plugin: the same as ours where it computes the same, and never run unasked."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import relative_error
from tiny import tiny_model

from distill import cli
from distill.objectives.plugin import Plugin, allowed_plugin, load_plugin
from distill.recipe import dump, parse
from distill.recipe.loss import Loss
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.objective import DistillationObjective
from distill.teachers.opening import use_plugin

PLUGIN = """
def own_kl(student_logits, teacher_logits, labels):
    p, q = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)

def own_cross_entropy(student_logits, teacher_logits, labels):
    return -student_logits.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]

TERMS = {"own_kl": own_kl, "own_cross_entropy": own_cross_entropy}
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def loss(terms, plugin):
    return Loss.model_validate({"terms": terms, "plugin": {"file": str(plugin), "sha256": "0" * 64}})


def batch():
    from distill.data.collator import Collator

    ids = torch.randint(3, 259, (3, 9), generator=torch.Generator().manual_seed(5)).tolist()
    rows = [{"input_ids": row, "labels": [-100, -100, *row[2:]], "position_ids": list(range(9))} for row in ids]
    return Collator(2)(rows)


def with_plugin(teacher, student, terms, plugin, functions=None):
    """An objective with the functions of a plugin's file, or with these."""
    teacher = LoadedTeacher(teacher)
    use_plugin(teacher, load_plugin(plugin) if functions is None else Plugin(functions, ""))
    return DistillationObjective(teacher, student, loss(terms, plugin))


def outcome(make, kind="llama"):
    student, teacher = (
        tiny_model(dtype=torch.float64, kind=kind),
        tiny_model(dtype=torch.float64, seed=1, hidden=64, kind=kind, vocab_size=270),
    )
    objective = make(teacher, student)
    output = student(**objective.student_inputs(batch(), num_items=torch.tensor(11)))
    (3 * output["loss"]).backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    return {"loss": output["loss"].detach(), **gradients}, output["statistics"], objective


@pytest.mark.plain("own alone-llama", "own twice-llama", "own twice-granite", "own after hard labels-granite")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])  # the last two cap and scale their logits
@pytest.mark.parametrize(
    "own, ours",
    [
        ([{"type": "own_kl", "weight": 0.7}], [{"type": "forward_kl", "weight": 0.7}]),
        (
            [{"type": "own_kl", "weight": 0.3}, {"type": "reverse_kl"}, {"type": "own_cross_entropy", "weight": 0.5}],
            [{"type": "forward_kl", "weight": 0.3}, {"type": "reverse_kl"}, {"type": "cross_entropy", "weight": 0.5}],
        ),
        (
            [{"type": "cross_entropy", "weight": 0.5}, {"type": "own_kl"}],
            [{"type": "cross_entropy", "weight": 0.5}, {"type": "forward_kl"}],
        ),
    ],
    ids=["own alone", "own twice", "own after hard labels"],
)
def test_a_term_of_ones_own_equals_ours(plugin, own, ours, kind):
    mine, _, objective = outcome(lambda t, s: with_plugin(t, s, own, plugin), kind)
    expected, _, _ = outcome(lambda t, s: DistillationObjective(t, s, {"terms": ours}), kind)
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert {(term.type, term.weight) for term in objective.terms} == {
        (term["type"], term.get("weight", 1.0)) for term in own
    }


@pytest.mark.parametrize("more", [[], [{"type": "cross_entropy"}], [{"type": "top_k_reverse_kl", "k": 8}]])
def test_figures_are_there_without_any_divergence(plugin, more):
    """The forward KL is reported; the losses are summed."""
    own = [{"type": "own_kl", "weight": 0.5}]
    mine, found, objective = outcome(lambda t, s: with_plugin(t, s, [*own, *more], plugin))
    expected, figures, _ = outcome(lambda t, s: DistillationObjective(t, s, "forward_kl"))
    torch.testing.assert_close(found, figures)
    assert objective.divergence == ("kl", 1.0)
    other = outcome(lambda t, s: with_plugin(t, s, more, plugin))[0] if more else {}
    for name, value in expected.items():  # norms inside the models are in fp32
        assert relative_error(mine[name], 0.5 * value + other.get(name, 0)) < (1e-12 if name == "loss" else 1e-6), name


def test_a_file_that_is_not_the_recipes_is_not_taken(plugin):
    recipes = loss([{"type": "own_kl"}], plugin)
    with pytest.raises(ValueError, match="expected the file with SHA-256 0000"):
        allowed_plugin(recipes, plugin)
    right = recipes.model_copy(
        update={"plugin": recipes.plugin.model_copy(update={"sha256": load_plugin(plugin).sha256})}
    )
    assert set(allowed_plugin(right, plugin).terms) == {"own_kl", "own_cross_entropy"}
    with pytest.raises(ValueError, match="was not resolved with it"):
        allowed_plugin(Loss(), plugin)


def test_held_out_figures_do_not_call_the_functions(plugin):
    from distill.evaluation.evaluate import evaluate

    def never(*_):
        raise AssertionError("called")

    student, teacher = tiny_model(), tiny_model(seed=1, hidden=64)
    objective = with_plugin(teacher, student, [{"type": "own_kl"}], plugin, {"own_kl": never})
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "position_ids": [0, 1, 2, 3]}]
    assert evaluate(student, teacher, rows, objective=objective).tokens == 3


RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss: {terms: [{type: own_kl}]}
train: {steps: 2, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 1, device: cpu}
generate: {prompts: []}
"""


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {i} once more." for i in range(60)),
    files={"r.yaml": RECIPE, "mine.py": PLUGIN},
    teacher={"layers": 3, "seed": 1},
    student={"seed": 2},
)


def test_a_run_with_a_plugin_equals_one_with_our_term(workplace, capsys):
    assert cli.run_command(["run", "r.yaml", "--plugin", "mine.py", "--name", "own"]) == 0
    assert "1 own_kl, temperature 1" in capsys.readouterr().out
    assert cli.run_command(["run", "r.yaml", "loss.terms.0.type=forward_kl", "--name", "ours"]) == 0
    found = [json.loads((workplace / "runs" / name / "result.json").read_text()) for name in ("own", "ours")]
    assert found[0]["after"] == pytest.approx(found[1]["after"], rel=1e-5)
    assert found[0]["after"] != found[0]["before"]
    # the run's own recipe says what ran, and still does not run it unasked
    resolved = (workplace / "runs/own/recipe.yaml").read_text()
    assert "function: own_kl" in resolved and "sha256:" in resolved
    assert dump(parse(resolved)) == resolved
    capsys.readouterr()
    assert cli.run_command(["run", "runs/own/recipe.yaml", "--name", "third"]) == 2
    assert "this recipe runs code, from mine.py; allow it with --plugin mine.py" in capsys.readouterr().err
    (workplace / "mine.py").write_text(PLUGIN + "\n# another file\n")
    assert cli.run_command(["run", "r.yaml", "--plugin", "mine.py", "--name", "own", "--resume"]) == 2
    assert " differs from " in capsys.readouterr().err
    assert not (workplace / "runs/third").exists()


def test_without_a_plugin_a_strange_type_is_a_mistake(workplace, capsys):
    assert cli.run_command(["validate", "r.yaml"]) == 2
    assert "unknown type 'own_kl'" in capsys.readouterr().err
    assert cli.run_command(["validate", "r.yaml", "loss.terms=[{type: plugin, function: own_kl}]"]) == 2
    assert "need distill run RECIPE --plugin FILE.py" in capsys.readouterr().err


@pytest.fixture
def selective(tmp_path):
    """The file of the page's example."""
    page = (Path(__file__).parents[2] / "docs/guides/custom-loss.md").read_text()
    path = tmp_path / "selective.py"
    path.write_text(re.search(r"```python\n(# selective\.py\n.*?)```", page, re.DOTALL)[1])
    return path


def test_the_pages_weights_choose_what_they_say(selective):
    """Three tokens: both certain, the student uncertain, both uncertain; at a fourth the models are equal."""
    sure, other, flat = torch.zeros(3, 12, dtype=torch.float64)
    sure[0], other[1] = 20.0, 20.0
    flat[:] = torch.linspace(0, 0.3, 12)
    student = torch.stack([other, flat, flat.flip(0), flat]).requires_grad_()
    teacher = torch.stack([sure, sure, flat, flat])
    labels = torch.zeros(4, dtype=torch.int64)
    s, t = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    forward, reverse = (t.exp() * (t - s)).sum(-1), (s.exp() * (s - t)).sum(-1)
    terms = load_plugin(selective).terms
    chosen = terms["unsure_tokens"](student, teacher, labels)
    torch.testing.assert_close(chosen, torch.tensor([0.0, 1, 1, 1]).double() * reverse)
    (gradient,) = torch.autograd.grad(chosen.sum(), student)
    assert (gradient[0] == 0).all() and gradient[1].norm() > 0.1
    mixed = terms["by_teachers_entropy"](student, teacher, labels)
    torch.testing.assert_close(mixed[:2], reverse[:2], rtol=1e-3, atol=0)
    share = 1 - 1 / (-(t[2].exp() * t[2]).sum()).exp()
    torch.testing.assert_close(mixed[2], share * forward[2] + (1 - share) * reverse[2])
    overlap = terms["by_overlap"](student, teacher, labels)
    common = torch.tensor([8, 8, 4, 8]) / 8  # ties are broken by the lowest index
    common[:2] = (2 - overlap[:2] / forward[:2]).detach()
    assert ((common >= 0) & (common <= 1)).all()
    torch.testing.assert_close(overlap, (2 - common.double()) * forward)
    assert mixed[3] == overlap[3] == 0


@pytest.mark.parametrize("name", ["unsure_tokens", "by_teachers_entropy", "by_overlap"])
def test_a_student_learns_by_the_pages_weights(selective, name):
    torch.manual_seed(0)
    student, teacher = tiny_model(), tiny_model(seed=1, hidden=64)
    objective = with_plugin(teacher, student, [{"type": "plugin", "function": name}], selective)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    seen = []
    for _ in range(12):
        output = student(**objective.student_inputs(batch()))
        seen.append(output["statistics"][0].item())
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[-1] < 0.7 * seen[0]
