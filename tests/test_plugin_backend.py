"""A backend that another package registers takes contexts, stores and routes like those of this package."""

import importlib.metadata

import pytest
from test_compositions import MIXED, TOLD
from test_golden_runs import INFORMED, PAIRS, STUDENT, TWO_TERMS, Golden, alone, figures_of
from test_golden_runs import place as place

from distill.cli import run_command

PLUGIN = "type: plugin, backend: bigram, model: teacher"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Register scripts/examples/backend.py as an installed package would."""
    entry = importlib.metadata.EntryPoint("bigram", "scripts.examples.backend:BigramSource", "distill.backends")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] * (group == "distill.backends"))


def figures(text, place):
    with alone(place):
        return figures_of(Golden(text), None)


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
