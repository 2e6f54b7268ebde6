"""A backend that another package registers takes contexts, stores and routes like those of this package."""

import importlib.metadata
from dataclasses import replace

import pytest
import subjects
from test_compositions import MIXED, TOLD
from test_golden_runs import INFORMED, PAIRS, STUDENT, TWO_TERMS, Golden, alone, figures_of
from test_golden_runs import place as place
from tiny import tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.doctor.invariants import fused_equals_reference
from distill.teachers.base import Teacher
from scripts.examples.backend import BigramTeacher

PLUGIN = "type: plugin, backend: bigram, model: teacher"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register scripts/examples/backend.py as an installed package would."""
    entry = importlib.metadata.EntryPoint("bigram", "scripts.examples.backend:BigramPlan", "distill.backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] * (group == "distill.backends"))


def figures(text, place):
    with alone(place):
        return figures_of(Golden(text), None)


@pytest.mark.full
def test_stores_and_contexts_change_no_bit(place):
    """A bigram's outputs depend on the last token alone, so that a prompt before the answer changes nothing."""
    plain = figures(f"teacher: {{{PLUGIN}}}\n{MIXED}", place)
    assert len(set(plain["loss"])) == 4 and plain["before"]["forward_kl"] != plain["after"]["forward_kl"]
    assert figures(f"teacher: {{{PLUGIN}, online_cache: kept}}\n{MIXED}", place) == plain
    told = figures(f"teacher: {{{PLUGIN}}}\n{TOLD}", place)
    for layers in (INFORMED, f"online_cache: kept, {INFORMED}"):
        found = figures(f"teacher: {{{PLUGIN}, {layers}}}\n{TOLD}", place)
        assert found["after"]["forward_kl"] == pytest.approx(told["after"]["forward_kl"], rel=0.05)


def test_plugin_backend_serves_a_route(place):
    routed = STUDENT + TWO_TERMS + PAIRS % (", teacher: domain", "")
    found = figures(f"teachers: [{{{PLUGIN}, route: even}}, {{model: other, route: odd}}]\n{routed}", place)
    assert found["after"]["forward_kl"] < found["before"]["forward_kl"]


def bigram_setup(teacher):
    tokenizer = tiny_tokenizer()
    return replace(subjects.one(), teacher=teacher, student=tiny_model(tokenizer), rows=subjects.rows(3))


@pytest.mark.parametrize("shift, passes", [(0.0, True), (0.1, False)])
def test_doctor_compares_a_plugin_backend_with_its_reference_logits(shift, passes):
    class Shifted(BigramTeacher):
        def targets(self, batch):
            return super().targets(batch) + shift

    found = fused_equals_reference(bigram_setup(Shifted(259)))
    assert found.passed is passes, found


def test_doctor_names_the_method_that_a_plugin_backend_lacks():
    class Lacking(Teacher):
        __init__, targets, fingerprint = BigramTeacher.__init__, BigramTeacher.targets, BigramTeacher.fingerprint

    with pytest.raises(ValueError, match=r"teacher: expected Lacking to have reference_logits\(input_ids\)"):
        fused_equals_reference(bigram_setup(Lacking(259)))


def test_commands_accept_or_name_a_plugin_backend(place, capsys):
    with alone(place) as folder:
        (folder / "golden.yaml").write_text(f"teacher: {{{PLUGIN}}}\n{MIXED}")
        assert run_command(["validate", "golden.yaml"]) == 0
        assert run_command(["check", "golden.yaml"]) == 0, capsys.readouterr()
        assert run_command(["serve", "golden.yaml"]) == 2
    assert "requires a teacher whose weights are loaded; got teacher.type: plugin" in capsys.readouterr().err


def test_an_unregistered_backend_is_a_one_line_error(place, capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with alone(place) as folder:
        (folder / "golden.yaml").write_text(f"teacher: {{{PLUGIN}}}\n{MIXED}")
        assert run_command(["run", "golden.yaml"]) == 2
        assert run_command(["validate", "golden.yaml", "teacher.backend=null"]) != 0
    assert "teacher.backend: expected one that an installed package registers (none), got 'bigram'" in (
        capsys.readouterr().err
    )
