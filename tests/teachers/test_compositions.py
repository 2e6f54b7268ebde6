"""Backends, rows and combinations compose: each pair trains as the same outputs do without the layer, to the bit.

The runs are those of test_golden_runs.py, with other teachers: a model here, a server, and a store that is filled as it
is read compute the same hidden states, so a run's losses, held-out metrics and weights must not depend on which.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_golden_runs import (
    INFORMED,
    PAIRS,
    REVERSE,
    ROLLOUTS,
    STUDENT,
    TEXT,
    TWO_TERMS,
    Golden,
    alone,
    figures_of,
    flat,
    hash_of,
)
from test_golden_runs import place as place
from test_golden_runs import url as url

from distill.cli import run_command
from distill.data.collator import Collator
from distill.recipe import parse
from distill.run import run
from distill.teachers.backends.stored.teacher import read_only
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.registry import source_of

CROSS_STUDENT = "student: {model: pieces, vocabulary: cross, lora: {r: 2, head: true}}\n"
CROSS, CROSS_OWN = CROSS_STUDENT + TWO_TERMS + TEXT, CROSS_STUDENT + REVERSE + PAIRS % ("", ROLLOUTS)
CROSS_ROUTED = CROSS_STUDENT + TWO_TERMS + PAIRS % (", teacher: domain", "")
CROSS_ROUTED_OWN = CROSS_STUDENT + REVERSE + PAIRS % (", teacher: domain", ROLLOUTS)
TOLD = STUDENT + TWO_TERMS + PAIRS % ("", "")
OWN = STUDENT + REVERSE + PAIRS % ("", ROLLOUTS)
ROUTED = STUDENT + TWO_TERMS + PAIRS % (", teacher: domain", "")
MIXED = STUDENT + TWO_TERMS + TEXT
BASES = {
    "context": f"teacher: {{model: teacher, {INFORMED}}}\n{TOLD}",
    "context, on-policy": f"teacher: {{model: teacher, {INFORMED}}}\n{OWN}",
    "retokenised": f"teacher: {{model: merged}}\n{CROSS}",
    "retokenised, on-policy": f"teacher: {{model: merged}}\n{CROSS_OWN}",
    "routed": f"teachers: [{{model: other, {INFORMED}, route: even}}, {{model: teacher, route: odd}}]\n{ROUTED}",
    "routed, one retokenised": (
        f"teachers: [{{model: merged, route: even}}, {{model: pieces, route: odd}}]\n{CROSS_ROUTED}"
    ),
    "routed, one retokenised, on-policy": (
        f"teachers: [{{model: merged, route: even}}, {{model: pieces, route: odd}}]\n{CROSS_ROUTED_OWN}"
    ),
    "mixture, one with a context": f"teachers: [{{model: teacher, weight: 3, {INFORMED}}}, {{model: other}}]\n{TOLD}",
    "the same, on-policy": f"teachers: [{{model: teacher, weight: 3, {INFORMED}}}, {{model: other}}]\n{OWN}",
    "routed, a mixture with a context": (
        f"teachers: [{{model: other, {INFORMED}, route: even}}, {{model: teacher, route: even}}, "
        f"{{model: teacher, route: odd}}]\n{ROUTED}"
    ),
    "mixture": f"teachers: [{{model: teacher, weight: 3}}, {{model: other}}]\n{MIXED}",
}
SERVED, MERGED = "type: server, url: '{url}'", "type: server, url: '{merged}'"
# by name: the run that it equals, and its teacher
COMPOSITIONS = {
    "served, context": ("context", f"teacher: {{{SERVED}, {INFORMED}}}\n{TOLD}"),
    "filled, context": ("context", f"teacher: {{model: teacher, online_cache: kept, {INFORMED}}}\n{TOLD}"),
    "served and filled, context": ("context", f"teacher: {{{SERVED}, online_cache: kept, {INFORMED}}}\n{TOLD}"),
    "served, context, on-policy": ("context, on-policy", f"teacher: {{{SERVED}, {INFORMED}}}\n{OWN}"),
    "served, retokenised": ("retokenised", f"teacher: {{{MERGED}}}\n{CROSS}"),
    "served, retokenised, on-policy": ("retokenised, on-policy", f"teacher: {{{MERGED}}}\n{CROSS_OWN}"),
    "filled, retokenised": ("retokenised", f"teacher: {{model: merged, online_cache: kept}}\n{CROSS}"),
    "served and filled, retokenised": ("retokenised", f"teacher: {{{MERGED}, online_cache: kept}}\n{CROSS}"),
    "routed: filled with a context, served and filled": (
        "routed",
        f"teachers: [{{model: other, online_cache: one, {INFORMED}, route: even}}, "
        f"{{{SERVED}, online_cache: two, route: odd}}]\n" + ROUTED,
    ),
    "routed: served and retokenised": (
        "routed, one retokenised",
        f"teachers: [{{{MERGED}, route: even}}, {{model: pieces, route: odd}}]\n{CROSS_ROUTED}",
    ),
    "routed: filled and retokenised, the student's tokens": (
        "routed, one retokenised",
        "teachers: [{model: merged, online_cache: kept, route: even}, {model: pieces, route: odd}]\n" + CROSS_ROUTED,
    ),
    "routed: served and retokenised, on-policy": (
        "routed, one retokenised, on-policy",
        f"teachers: [{{{MERGED}, route: even}}, {{model: pieces, route: odd}}]\n{CROSS_ROUTED_OWN}",
    ),
    "served with a context and filled, in a mixture": (
        "mixture, one with a context",
        f"teachers: [{{{SERVED}, weight: 3, {INFORMED}}}, {{model: other, online_cache: kept}}]\n{TOLD}",
    ),
    "served with a context, in a mixture, on-policy": (
        "the same, on-policy",
        f"teachers: [{{{SERVED}, weight: 3, {INFORMED}}}, {{model: other}}]\n{OWN}",
    ),
    "filled with a context, served, in a routed mixture": (
        "routed, a mixture with a context",
        f"teachers: [{{model: other, online_cache: one, {INFORMED}, route: even}}, {{{SERVED}, route: even}}, "
        f"{{{SERVED}, route: odd}}]\n{ROUTED}",
    ),
    "mixture: served, filled": (
        "mixture",
        f"teachers: [{{{SERVED}, weight: 3}}, {{model: other, online_cache: kept}}]\n{MIXED}",
    ),
}


@pytest.fixture(scope="module")
def merged(place):
    """Return the address of the teacher with another tokenizer."""
    from served import engine_in, serving

    with serving(engine_in(place, f"teacher.model={place}/merged")) as address:
        yield address


@pytest.fixture(scope="module")
def addressed(url, merged):
    """Return a recipe's text with the servers' addresses."""
    return lambda text: text.replace("{url}", url).replace("{merged}", merged)


@pytest.fixture(scope="module")
def figures_of_base(place):
    """Return the metrics of a run of `BASES`, made once."""
    made = {}

    def figures(name):
        if name not in made:
            with alone(place):
                made[name] = figures_of(Golden(BASES[name]), None)
        return made[name]

    return figures


@pytest.mark.plain("filled, retokenised")
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_layer_changes_no_bit(name, place, addressed, figures_of_base):
    base, text = COMPOSITIONS[name]
    with alone(place):
        assert figures_of(Golden(addressed(text)), None) == figures_of_base(base)


@pytest.mark.plain("retokenised-rows1")
@pytest.mark.parametrize(("base", "rows"), [("context", f", {INFORMED}}}\n{TOLD}"), ("retokenised", f"}}\n{CROSS}")])
def test_a_filled_store_is_read_without_the_teacher(base, rows, place, figures_of_base):
    """Both spellings work; rounding depends on the rows that a document was first read with."""
    model = "merged" if base == "retokenised" else "teacher"
    filling = f"teacher: {{model: {model}, online_cache: kept{rows}"
    with alone(place) as folder:
        run(parse(filling, ["train.steps=24"], name="filling"), name="filling")
        (folder / model).unlink()  # a link to the model
        figures = figures_of(Golden(f"teacher: {{type: cache, path: kept{rows}"), None)
    assert dict(flat(figures)) == pytest.approx(dict(flat(figures_of_base(base))), rel=1e-4)


@pytest.mark.full
def test_a_resumed_run_of_layers_is_bit_identical(place, addressed, figures_of_base):
    """The layers are a server, a store and a context."""
    text = addressed(COMPOSITIONS["served and filled, context"][1])
    with alone(place) as folder:
        recipe = parse(text, ["train.save_every=2"], name="golden")
        run(recipe, name="golden")
        own = folder / "runs" / "golden"
        for name in ("checkpoint-4", "student"):
            shutil.rmtree(own / name, ignore_errors=True)
        (own / "result.json").unlink()
        result = run(recipe, name="golden", resume=True)
        assert hash_of(result.folder / "student") == figures_of_base("context")["weights"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "stores"),
    [("routed: filled with a context, served and filled", ("one", "two")), ("mixture: served, filled", ("kept",))],
)
def test_a_run_whose_stores_are_full_by_now_is_resumed(name, stores, place, addressed):
    """Teachers that are no longer loaded are those that the run began with."""
    with alone(place) as folder:
        recipe = parse(addressed(COMPOSITIONS[name][1]), ["train.steps=24", "train.save_every=12"], name="golden")
        expected = hash_of(run(recipe, name="golden").folder / "student")
        own = folder / "runs" / "golden"
        for each in (*own.glob("checkpoint-24"), own / "student"):
            shutil.rmtree(each)
        (own / "result.json").unlink()
        assert all((folder / store / "manifest.json").exists() for store in stores), "not all is stored"
        assert hash_of(run(recipe, name="golden", resume=True).folder / "student") == expected


@pytest.mark.full
@pytest.mark.parametrize("rows", [OWN, TOLD], ids=["on-policy", "data"])
def test_a_teacher_with_a_context_mixed_with_itself_is_that_teacher(rows, place):
    """And not the teacher without its context."""
    found = {}
    for name, teachers in {
        "alone": f"teacher: {{model: teacher, {INFORMED}}}",
        "itself": f"teachers: [{{model: teacher, weight: 3, {INFORMED}}}, {{model: teacher, {INFORMED}}}]",
        "without": f"teachers: [{{model: teacher, weight: 3, {INFORMED}}}, {{model: teacher}}]",
    }.items():
        with alone(place):
            figures = figures_of(Golden(f"{teachers}\n{rows}"), None)
        found[name] = {key: value for key, value in flat(figures) if key.startswith(("loss", "before"))}
    assert found["itself"] == pytest.approx(found["alone"], rel=1e-4)
    assert found["without"]["before.forward_kl"] != pytest.approx(found["alone"]["before.forward_kl"], rel=1e-3)


@pytest.mark.full
def test_two_stored_teachers_are_a_mixture(place):
    """Each finds its own outputs in a batch: a mixture of one teacher with itself has that teacher's outputs."""
    from torch import equal

    with alone(place) as folder:
        run(
            parse(f"teacher: {{model: teacher, online_cache: kept}}\n{MIXED}", ["train.steps=24"], name="filling"),
            name="filling",
        )
        stored, other = read_only(folder / "kept"), read_only(folder / "kept")
        recipe = parse(f"teacher: {{type: cache, path: kept}}\n{MIXED}")
        rows = list(source_of(recipe).vocabulary().read(recipe.data, 0).train)[:2]
        mixture, plain = MixtureTeacher([stored, other], [1.0, 1.0]), Collator(0)
        batch = replace(plain, columns=mixture.columns)(rows)
        first, second = mixture.targets(batch)
        assert equal(first, second)
        assert equal(first, stored.targets(replace(plain, columns=stored.columns)(rows)))
        assert mixture.student_batch(batch, True).keys() == plain(rows).keys()


def test_an_fp8_teacher_reads_by_its_own_tokenizer(place, figures_of_base):
    """The cost of fp8 is measured on the teacher's own rows; its divergence from the student moves a little."""
    text = BASES["retokenised"].replace("{model: merged}", "{model: merged, dtype: fp8}")
    with alone(place):
        figures = figures_of(Golden(text), None)
    plain = figures_of_base("retokenised")
    assert figures["weights"] != plain["weights"]
    assert figures["after"]["forward_kl"] == pytest.approx(plain["after"]["forward_kl"], rel=0.05)


# of the compositions, whose runs are those of their bases to the bit, each layer over each kind of rows once
DOCTORED = {
    "served top k, context": f"teacher: {{{SERVED}, top_k: 8, {INFORMED}}}\n{STUDENT}{REVERSE}{PAIRS % ('', '')}",
    **{
        name: COMPOSITIONS[name][1]
        for name in (
            "served, context, on-policy",
            "served and filled, context",
            "served, retokenised, on-policy",
            "filled, retokenised",
            "routed: filled with a context, served and filled",
            "routed: served and retokenised, on-policy",
            "served with a context and filled, in a mixture",
            "filled with a context, served, in a routed mixture",
        )
    },
}
LOCAL_TOP_K = f"teacher: {{model: teacher, top_k: 8}}\n{STUDENT}"
DOCTORED |= {
    "local top k": f"{LOCAL_TOP_K}{REVERSE}{TEXT}",
    "local top k, on-policy": (
        f"{LOCAL_TOP_K}loss: {{temperature: 2.0, terms: [{{type: forward_kl}}]}}\n{PAIRS % ('', ROLLOUTS)}"
    ),
    "routed, one of top k": (
        f"teachers: [{{model: other, top_k: 8, route: even}}, {{{SERVED}, route: odd}}]\n"
        f"{STUDENT}{REVERSE}{PAIRS % (', teacher: domain', '')}"
    ),
}
DOCTORED["mixture, one with a context, on-policy"] = BASES["the same, on-policy"]


@pytest.mark.plain("local top k, on-policy")
@pytest.mark.parametrize("name", DOCTORED)
def test_every_invariant_holds(name, place, addressed, capsys, monkeypatch):
    """Loss and gradients against the reference in fp64, accumulation, packing, padding and the tokens that are read."""
    from distill.doctor import examine

    monkeypatch.setattr(examine, "RUN_CHECKS", ())
    with alone(place):
        Path("golden.yaml").write_text(addressed(DOCTORED[name]))
        assert run_command(["doctor", "golden.yaml"]) == 0, capsys.readouterr()
    assert "invariants, all passed" in capsys.readouterr().out
