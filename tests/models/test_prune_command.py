"""`distill prune`: shapes for a share of a teacher's cost, measured before training, and the recipe of the best one."""

import json

import pytest
import torch
from tiny import tiny_model
from torch import nn
from transformers import AutoConfig

from distill.cli import run_command
from distill.models import prune_candidates as prune_candidates
from distill.models.prune.pruning import cut_layers
from distill.models.prune_candidates import TeacherOutputs, candidates, parameters_of_cut, parameters_share
from distill.recipe import FromTeacher, load
from distill.run import run

LINES = [f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80)]
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2, importance: {rows: 4, layer_rows: 2}}, lora: {r: 2}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 2, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, device: cpu}
generate: {prompts: []}
"""


pytestmark = pytest.mark.place(
    text="\n".join(LINES), files={"tiny.yaml": RECIPE}, teacher={"layers": 8, "seed": 1, "hidden": 64}
)


@pytest.mark.plain("llama-0.8")
@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_shapes_cost_what_was_asked_for(kind, share):
    """Every shape is within the share and near it, and counts are those of the models themselves."""
    config = tiny_model(layers=8, hidden=64, kind=kind).config
    found = list(candidates(config, share, parameters_share(config)))
    assert len(found) >= 2 and len({each.cut.model_dump_json() for each in found}) == len(found)
    whole = parameters_of_cut(config, FromTeacher(layers=8))
    for each in found:
        assert 0.9 * share <= each.cost <= share and each.parameters == round(each.cost * whole)
    assert found == list(candidates(config, share, parameters_share(config))), "the same again"


def test_sizes_of_real_models_hold_whole_blocks_of_quantised_weights():
    """A hidden size of 468 would leave all layers that read it in 16 bits, a file in 4 bits or not."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", num_hidden_layers=8, vocab_size=1000, **shape)
    found = list(candidates(config, 0.6, parameters_share(config)))
    sizes = [getattr(each.cut, name) for each in found for name in ("hidden", "intermediate")]
    assert len(found) >= 3 and any(sizes) and not [size for size in sizes if size is not None and size % 32]


def test_the_divergence_is_that_of_all_logits():
    teacher = tiny_model(layers=4, kind="gemma2")
    student = cut_layers(teacher, [0, 3])
    row = {"input_ids": list(range(5, 37)), "labels": [-100] * 9 + list(range(14, 37)), "position_ids": list(range(32))}
    found = TeacherOutputs(teacher, [row, row]).divergence(student)
    with torch.no_grad():
        ids = torch.tensor([row["input_ids"]])
        full, cut = (model(input_ids=ids, use_cache=False).logits[0, 8:31].double() for model in (teacher, student))
    expected = nn.functional.kl_div(cut.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none")
    assert found == pytest.approx(float(expected.sum(-1).mean()), rel=1e-4)


@pytest.mark.full
def test_the_best_shape_is_written_and_runs(workplace, capsys):
    assert run_command(["prune", "tiny.yaml", "--to", "0.6", "--output", "small.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = min(found, key=lambda each: each["kl"])
    assert [each["best"] for each in found] == [each is best for each in found] and len(found) > 2
    recipe = load("small.yaml")
    assert recipe.student.from_teacher.model_dump(exclude_none=True) == best["from_teacher"]
    assert recipe.student.lora.r == 2 and recipe.student.from_teacher.importance.rows == 4
    result = run(recipe.model_copy(update={"name": "small"}))
    assert result.before.forward_kl == pytest.approx(best["kl"], rel=0.2), "on all held-out rows"
    assert run_command(["prune", "tiny.yaml", "--to", "0.6"]) == 0
    out = capsys.readouterr().out
    assert "KL before training" in out and f"best: {best['name']}, KL {best['kl']:.4f}" in out
    assert run_command(["prune", "tiny.yaml", "--to", "0.6", "--output", "small.yaml"]) == 2
    assert "--output: small.yaml exists" in capsys.readouterr().err
    assert run_command(["prune", "tiny.yaml", "--to", "0.6", "--output", "no/small.yaml"]) == 2  # before measuring
    assert "--output: expected a file in an existing folder, but no does not exist" in capsys.readouterr().err


@pytest.mark.full
def test_a_share_of_the_time_is_measured(workplace, capsys, monkeypatch, limit, watch):
    """The clock is the machine's; here a forward takes as many seconds as there are layers."""
    limit.setattr(prune_candidates, "PROPORTIONS", {"depth": {"layers": 1.0}})
    monkeypatch.setenv("DISTILL_CACHE", str(workplace / "cache"))
    clock, power = [0.0], 1
    called = nn.Module.__call__

    def call(self, *arguments, **named):
        if hasattr(self, "lm_head"):
            clock[0] += self.config.num_hidden_layers**power
        return called(self, *arguments, **named)

    monkeypatch.setattr(nn.Module, "__call__", call)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    command = ["prune", "tiny.yaml", "--to", "0.5", "--latency", "--json", "data.cache=true"]
    assert run_command(command) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["from_teacher"]["layers"] == 4 and found["share"] == 0.5
    power = 2  # a clock that differs, as real ones do: the costs and the parts are those of the first time
    watch.setattr("distill.teachers.calibration.select_parts", None)
    assert run_command(command) == 0
    assert json.loads(capsys.readouterr().out) == [found]
    power = 1
    (workplace / "tiny.yaml").write_text(RECIPE.replace("max_length: 32", "max_length: 16"))
    with pytest.raises(TypeError, match="NoneType"), monkeypatch.context() as patch:
        patch.setenv("DISTILL_TRACE", "1")
        run_command(command)  # other rows: chosen anew


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--to", "1.5"], "--to: expected a fraction of the teacher between 0 and 1, got 1.5"),
        (["--to", "0.01"], "--to: no shape of LlamaConfig costs about 0.01 of the whole"),
        (["teacher={type: cache, path: stored}"], "teacher: expected one model to prune; name it by teacher.model"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(workplace, capsys, arguments, said):
    assert run_command(["prune", "tiny.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
