"""Capabilities of teachers and their sources: asked through layers, with what holds for a teacher without one."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from distill.data.collator import Collator
from distill.objectives.targets import token_comparison
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.capabilities import (
    first_batch_lines,
    flops_per_token,
    flush,
    following,
    head_tensors,
    layers_of,
    move_to,
    parts_of,
    prefetching_of,
    quantise_layers,
    responses_of,
    size_text,
    student_cut_from,
    truncated_copy,
)
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.interface import CutRequest
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.source_capabilities import (
    SourcePart,
    data_problems,
    files_of,
    is_to_be_made,
    measure_of_source,
    note_data,
    smaller_teachers,
)
from scripts.examples.backend import BigramTeacher

ROWS = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "position_ids": [0, 1, 2, 3], "route": [number % 2]}
    for number in range(4)
]


class Prefetching(BigramTeacher):
    """A bigram teacher that prefetches."""

    prefetch_depth = 2

    def __init__(self):
        super().__init__(40)
        self.submitted = []

    def submit(self, batch):
        self.submitted.append(batch)

    def fault_of(self, batches):
        return "gone" if len(batches[0]["input_ids"]) > 3 else None


def test_a_teacher_without_capabilities_has_what_holds_without_them():
    teacher = BigramTeacher(40)
    for layered in (teacher, ContextTeacher(teacher), MixtureTeacher([teacher, teacher], [1, 1])):
        assert prefetching_of(layered) is None and responses_of(layered, ["?"], None) is None
        assert following(layered) == [] and first_batch_lines(teacher, {}, None, None) == []
        quantise_layers(layered), flush(layered)
        assert size_text(layered) == "0 parameters"
        request = CutRequest(None, torch.device("cpu"), torch.float32, None)
        with pytest.raises(ValueError, match="has no layers to cut from"):
            student_cut_from(layered, request)
    twin = truncated_copy(teacher, [0])
    assert twin is not teacher and twin.table is teacher.table


def test_heads_outside_of_models_are_found_below_every_layer():
    teacher = BigramTeacher(40)
    routed = RoutedTeacher([ContextTeacher(teacher), LoadedTeacher(tiny_model())], ["a", "b"])
    found = dict(head_tensors(routed))
    assert found["the bigram head"] is teacher.stored_head.weights.weight
    assert set(found) == {"the bigram head", "the weights of the teacher's head"}
    move_to(routed, torch.device("meta"))
    assert teacher.stored_head.weights.weight.is_meta and all(p.is_meta for p in routed.models["teacher"].parameters())


def test_work_is_counted_by_the_columns_that_are_read():
    model, other = tiny_model(seed=1), tiny_model(layers=3, seed=2)
    (one,), (two,) = (flops_per_token(LoadedTeacher(each)).values() for each in (model, other))
    members = [LoadedTeacher(model), LoadedTeacher(other, field="teachers.1")]
    assert flops_per_token(MixtureTeacher(members, [1, 1])) == {"": one._make(map(sum, zip(one, two, strict=True)))}
    routed = RoutedTeacher([ContextTeacher(members[0]), members[1]], ["a", "b"])
    assert flops_per_token(routed) == {"route0_teacher_": one, "route1_": two}
    assert list(layers_of(routed)) == [routed, routed.members[0], *members]


def test_only_what_prefetches_is_asked_ahead_each_for_its_own_rows():
    asked = Prefetching()
    routed = RoutedTeacher([BigramTeacher(40), asked], ["a", "b"])
    batch = Collator(0, columns=routed.columns)(ROWS)
    prefetching = prefetching_of(routed)
    assert prefetching.prefetch_depth == 2 and prefetching.fault_of([batch]) is None
    prefetching.submit(batch)
    (own,) = asked.submitted
    assert own["rows"].tolist() == batch["route1_rows"].tolist() and "route1_rows" not in own
    alone = Collator(0, columns=routed.columns)([row | {"route": [0]} for row in ROWS])
    prefetching.submit(alone)
    assert len(asked.submitted) == 1, "none of its route is in the batch"
    mixture = MixtureTeacher([BigramTeacher(40), asked], [1, 1])
    assert prefetching_of(mixture).fault_of([Collator(0, columns=mixture.columns)(ROWS)]) == "gone"


def test_formats_of_whole_distributions_compare_tokens():
    teacher = BigramTeacher(40)
    assert token_comparison(teacher.format) is teacher.format and token_comparison(SimpleNamespace()) is None


class Leaf:
    """A source that knows everything."""

    def __init__(self):
        self.sections, self.noted = {}, []

    def note_data(self, splits):
        self.noted.append(splits)

    def data_problems(self, splits):
        return [f"teacher.path: {splits} is missing"]

    def smaller(self, family=None):
        return [family]

    def is_to_be_made(self):
        return True

    def measure(self):
        return "its own"

    def config_section(self):
        return "config"

    def tokenizer_section(self):
        return "tokenizer"


def around(*sources, several):
    """A source around others, whose teachers read rows of their own."""
    parts = [
        SourcePart(source, lambda splits, n=number: f"{splits}{n}", number if several else None)
        for number, source in enumerate(sources)
    ]
    return SimpleNamespace(parts=lambda: parts, sections={})


def test_sources_are_asked_through_layers_and_of_several_what_holds_for_all():
    leaf = Leaf()
    layer = around(leaf, several=False)
    assert smaller_teachers(layer, "hopper") == ["hopper"] and is_to_be_made(layer)
    assert measure_of_source(layer) == "its own" and data_problems(layer, "rows") == ["teacher.path: rows0 is missing"]
    other, several = Leaf(), around(layer, Leaf(), several=True)
    assert smaller_teachers(several, "hopper") == [] and not is_to_be_made(several)
    assert measure_of_source(several).name == "KL" and files_of(several).config_section() == "config"
    assert data_problems(several, "rows") == [
        "teachers.0.path: rows00 is missing",
        "teachers.1.path: rows1 is missing",
    ]
    note_data(around(leaf, other, several=True), "rows")
    assert (leaf.noted, other.noted) == (["rows0"], ["rows1"])
    assert parts_of(SimpleNamespace()) == ()
