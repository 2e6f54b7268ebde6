"""Defaults of teachers and their plans: what holds where nothing is overridden, and the way through those inside."""

import pytest
import torch
from tiny import tiny_model

from distill.data.collator import Collator
from distill.objectives.targets import TargetFormat
from distill.teachers import base, interface, load_context
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.base import InnerPlan, TeacherPlan
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.load_context import CutRequest
from distill.teachers.rows.context.teacher import ContextTeacher
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
        self.prefetched = []

    def prefetch(self, batch):
        self.prefetched.append(batch)

    def prefetch_error(self, batches):
        return "gone" if len(batches[0]["input_ids"]) > 3 else None


class Following(BigramTeacher):
    """A bigram teacher that training changes."""

    follows_student = True

    def __init__(self):
        super().__init__(40)
        self.students = []

    def update_ema(self, student):
        self.students.append(student)


def test_a_teacher_that_overrides_nothing_has_the_defaults():
    teacher = BigramTeacher(40)
    for outer in (teacher, ContextTeacher(teacher), MixtureTeacher([teacher, teacher], [1, 1])):
        assert outer.prefetch_depth == 0 and outer.prefetch_error([]) is None and outer.respond(["?"], None) is None
        assert not outer.follows_student and not outer.stores_outputs and not outer.is_collective()
        outer.quantise(), outer.flush(), outer.update_ema(None), outer.close()
        assert outer.size_text() == "0 parameters"
        request = CutRequest(None, torch.device("cpu"), torch.float32, None)
        with pytest.raises(ValueError, match="has no layers to cut from"):
            outer.cut_student(request)
    assert teacher.validate_first_batch({}, None, None) == [] and teacher.constructor() is None
    twin = teacher.truncated_copy([0])
    assert twin is not teacher and twin.table is teacher.table


def test_heads_outside_of_models_are_found_inside_every_teacher():
    teacher = BigramTeacher(40)
    routed = RoutedTeacher([ContextTeacher(teacher), LoadedTeacher(tiny_model())], ["a", "b"])
    found = dict(routed.head_tensors())
    assert found["the bigram head"] is teacher.stored_head.weights.weight
    assert set(found) == {"the bigram head", "the weights of the teacher's head"}
    routed.move_to(torch.device("meta"))
    assert teacher.stored_head.weights.weight.is_meta and all(p.is_meta for p in routed.models["teacher"].parameters())


def test_a_teacher_inside_follows_the_student():
    following = Following()
    routed = RoutedTeacher([BigramTeacher(40), ContextTeacher(following)], ["a", "b"])
    assert routed.follows_student
    routed.update_ema("student")
    assert following.students == ["student"]


def test_work_is_counted_by_the_columns_that_are_read():
    model, other = tiny_model(seed=1), tiny_model(layers=3, seed=2)
    (one,), (two,) = (LoadedTeacher(each).flops_per_token().values() for each in (model, other))
    members = [LoadedTeacher(model), LoadedTeacher(other, field="teachers.1")]
    assert MixtureTeacher(members, [1, 1]).flops_per_token() == {"": one._make(map(sum, zip(one, two, strict=True)))}
    routed = RoutedTeacher([ContextTeacher(members[0]), members[1]], ["a", "b"])
    assert routed.flops_per_token() == {"route0_teacher_": one, "route1_": two}
    assert list(routed.unwrap_all()) == [routed, routed.members[0], *members]


def test_only_what_prefetches_is_asked_ahead_each_for_its_own_rows():
    asked = Prefetching()
    routed = RoutedTeacher([BigramTeacher(40), asked], ["a", "b"])
    batch = Collator(0, columns=routed.columns)(ROWS)
    assert routed.prefetch_depth == 2 and routed.prefetch_error([batch]) is None
    routed.prefetch(batch)
    (own,) = asked.prefetched
    assert own["rows"].tolist() == batch["route1_rows"].tolist() and "route1_rows" not in own
    alone = Collator(0, columns=routed.columns)([row | {"route": [0]} for row in ROWS])
    routed.prefetch(alone)
    assert len(asked.prefetched) == 1, "none of its route is in the batch"
    mixture = MixtureTeacher([BigramTeacher(40), asked], [1, 1])
    assert mixture.prefetch_error([Collator(0, columns=mixture.columns)(ROWS)]) == "gone"


def test_formats_of_whole_distributions_compare_tokens():
    targets = torch.randn(1, 5, 16)
    ((rows, tokens),) = BigramTeacher(40).format.likeliest(targets, torch.arange(5), 3).values()
    assert rows.tolist() == [0, 1, 2] and len(tokens) == 3
    assert TargetFormat().likeliest(targets, torch.arange(5), 3) == {}


class Leaf(TeacherPlan):
    """A plan that overrides everything."""

    def __init__(self):
        self.sections, self.noted = {}, []

    def note_data(self, splits):
        self.noted.append(splits)

    def data_problems(self, splits):
        return [f"teacher.path: {splits} is missing"]

    def problems(self, *, cuda, sharded, family=None):
        return ["teacher.dtype: expected another"]

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


class Around(TeacherPlan):
    """A plan around others, whose teachers read rows of their own."""

    def __init__(self, *plans, several):
        self.sections, self.plans, self.several = {}, plans, several

    def parts(self):
        return [
            InnerPlan(plan, lambda splits, n=number: f"{splits}{n}", number if self.several else None)
            for number, plan in enumerate(self.plans)
        ]


def test_plans_have_what_those_inside_have_and_of_several_what_holds_for_all():
    leaf = Leaf()
    outer = Around(leaf, several=False)
    assert outer.smaller("hopper") == ["hopper"] and outer.is_to_be_made()
    assert outer.measure() == "its own" and outer.data_problems("rows") == ["teacher.path: rows0 is missing"]
    other, several = Leaf(), Around(outer, Leaf(), several=True)
    assert several.smaller("hopper") == [] and not several.is_to_be_made()
    assert several.measure().name == "KL" and several.config_section() == "config"
    assert several.data_problems("rows") == [
        "teachers.0.path: rows00 is missing",
        "teachers.1.path: rows1 is missing",
    ]
    assert several.problems(cuda=False, sharded=False) == [
        "teachers.0.dtype: expected another",
        "teachers.1.dtype: expected another",
    ]
    Around(leaf, other, several=True).note_data("rows")
    assert (leaf.noted, other.noted) == (["rows0"], ["rows1"])
    assert list(several.unwrap_all()) == [several, outer, leaf, several.plans[1]]


def test_the_former_names_are_the_same_classes():
    assert interface.Teacher is base.Teacher and interface.TeacherSource is base.TeacherPlan
    assert interface.LoadContext is load_context.LoadContext and interface.CutRequest is CutRequest
