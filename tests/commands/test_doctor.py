"""`distill doctor`: lines about the machine, and a recipe's own models and data examined."""

import json
import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from distill_kernels.quantisation.formats import reference_fake_quantise

from distill.cli import run_command
from distill.data.packing import Documents
from distill.doctor import examine, invariants_runs
from distill.doctor.invariants import accumulation_changes_nothing, packing_changes_nothing
from distill.doctor.rows import shortened_rows
from distill.models.dtypes import quantised_weights
from distill.recipe import load
from distill.teachers.backends.local import LoadedTeacher

NAMES = [
    "fused loss",
    "divergence",
    "accumulation",
    "packing",
    "padding",
    "patching",
    "workspace",
    "same tokens",
    "gradients",
    "resume",
]
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(60))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 3}, lora: {r: 2, head: true}}
data: {source: text.txt, max_length: 64, cache: false}
train: {steps: 6, batch_size: 2, device: cpu}
"""


pytestmark = pytest.mark.place(text=TEXT, files={"r.yaml": RECIPE}, teacher={"layers": 4, "seed": 1})


@pytest.fixture
def no_second_process(without):
    """Starting two processes takes 15 s; tests/teachers/test_invariants.py does it."""
    without.setattr(examine, "RUN_CHECKS", examine.RUN_CHECKS[:1])


@pytest.mark.full
def test_a_recipe_is_examined(workplace, no_second_process, capsys):
    assert run_command(["doctor", "r.yaml"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    found = [line.split(":")[0] for line in lines if line.startswith(("pass", "FAIL"))]
    assert found == [f"pass  {name}" for name in NAMES]
    assert all(re.search(r" \[\d+ s\]$", line) for line in lines if line.startswith(("pass", "FAIL")))
    assert lines[-1] == "10 invariants, all passed" and "shards" not in captured.err and "it/s" not in captured.err
    assert not (workplace / "runs").exists()


@pytest.mark.full
@pytest.mark.parametrize("lora", [["student.lora={r: 4}"], ["student.lora=null"]])
def test_a_quantised_student_is_examined_as_the_run_trains_it(workplace, no_second_process, lora):
    recipe = load("r.yaml", ["student.quantise={format: q4_0}", *lora])
    subject = examine.prepare(recipe)
    for student in (subject.student, subject.truncated().student):
        weights = quantised_weights(student)
        assert {type(matrix).__name__ for matrix in weights.matrices.values()} >= {
            "QuantisedMatrix" if lora == ["student.lora=null"] else "AdaptedMatrix"
        }
        for matrix in weights.matrices.values():
            rounded = reference_fake_quantise(matrix.master, matrix.form.name, matrix.scales)
            assert torch.equal(matrix.parameter, rounded) and not torch.equal(rounded, matrix.master)
    failed = [finding for finding in examine.examine(recipe) if not finding.passed]
    assert failed == []


@pytest.mark.full
def test_a_fault_is_code_1_with_the_figure(workplace, fault, no_second_process, capsys):
    targets = LoadedTeacher.targets
    fault.setattr(
        LoadedTeacher,
        "targets",
        lambda self, batch: targets(self, {**batch, "input_ids": batch["input_ids"].roll(1, dims=1)}),
    )
    assert run_command(["doctor", "r.yaml", "student.lora=null", "--json"]) == 1
    findings = {row["name"]: row["passed"] for row in json.loads(capsys.readouterr().out)["recipe"]}
    assert findings.pop("fused loss") is False and findings.pop("same tokens") is False
    # rolled, a padded row hands its first token a padding: what it learns hangs on the shape of the batch
    assert findings["accumulation"] is False and findings["workspace"] and findings["resume"]


@pytest.mark.full
def test_a_check_that_breaks_is_a_finding(workplace, fault, no_second_process, capsys):
    def broken(self, inputs):
        raise RuntimeError("no such kernel\nmore")

    fault.setattr(LoadedTeacher, "targets", broken)
    assert run_command(["doctor", "r.yaml"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in out and "10 invariants" in out


def test_two_layers_of_large_models(workplace, limit, no_second_process):
    limit.setattr(examine, "LARGE", 1000)
    subject = examine.prepare(load("r.yaml", ["student.lora=null"]))
    assert [model.config.num_hidden_layers for model in subject.models] == [2, 2]
    assert len(subject.rows) == examine.ROWS


def test_a_student_of_the_first_and_last_layer_is_not_held_against_itself(workplace):
    subject = examine.prepare(load("r.yaml", ["student={from_teacher: {layers: 2}}"]), small=True)
    ours, theirs = (model.state_dict() for model in subject.models)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours), "two equal models have nothing to compare"


def test_a_schedule_is_no_fault(workplace):
    """The trainer follows it; what the doctor computes beside it knows no steps."""
    schedule = [{"setting": "temperature", "steps": [0, 2], "values": [1, 3]}]
    subject = examine.prepare(
        load("r.yaml", [f"loss={{temperature: 2, schedule: {json.dumps(schedule)}}}"]), small=True
    )
    assert accumulation_changes_nothing(subject).passed


def test_kernels_are_deterministic_only_while_a_resumed_run_is_examined():
    with pytest.raises(KeyError), invariants_runs._deterministic(True):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    with invariants_runs._deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled(), "a CPU adds in a fixed order anyway"


def test_a_recipe_that_cannot_be_used_is_code_2(workplace, capsys):
    assert run_command(["doctor", "r.yaml", "teacher.model=nowhere"]) == 2
    assert "teacher.model" in capsys.readouterr().err


def test_rows_are_cut_around_what_is_learned():
    row = {
        "input_ids": list(range(400)),
        "labels": [-100] * 200 + list(range(200, 400)),
        "position_ids": list(range(400)),
    }
    settings = {"whole": False, "count": 2, "tokens": examine.TOKENS}
    (cut, _) = shortened_rows([row, row, row], **settings)
    assert len(cut["input_ids"]) == 216 and cut["labels"][-1] == 215
    with pytest.raises(ValueError, match=r"data\.source: expected at least 2 rows"):
        shortened_rows([row], **settings)


@pytest.mark.full
def test_positions_that_do_not_restart_in_packed_rows_are_seen(workplace, fault):
    (workplace / "lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in TEXT.splitlines()))
    recipe = load("r.yaml", ["student.lora=null", "data.source=lines.jsonl", "data.max_length=200"])
    assert packing_changes_nothing(examine.prepare(recipe)).passed
    rows = Documents.rows

    def counted_on(self, groups, **settings):
        for batch in rows(self, groups, **settings):
            positions = batch["position_ids"]
            values = np.concatenate([np.arange(n, dtype=np.int32) for n in positions.lengths])
            yield batch | {"position_ids": positions._replace(values=values)}

    fault.setattr(Documents, "rows", counted_on)
    finding = packing_changes_nothing(examine.prepare(recipe))
    assert not finding.passed and "position_ids must restart at 0" in finding.detail, finding


def test_lines_about_the_machine(tmp_path, fault, without):
    lines = {line.name: line for line in examine.environment_lines(tmp_path)}
    assert {"torch", "transformers", "triton", "memory", "disk", "hub"} <= lines.keys()
    usage = namedtuple("usage", "free")
    fault.setattr("shutil.disk_usage", lambda folder: usage(2**30))
    without.setattr(examine, "environment", dict)
    line = next(line for line in examine.environment_lines(tmp_path) if line.name == "disk")
    assert not line.fine and "make room" in str(line)
