"""lock.yaml: what it holds, the same run again, and the first difference by name."""

import datasets
import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn

from distill.core.diff_settings import diff_settings
from distill.data.load import Splits
from distill.data.rendering import FROZEN_DAY
from distill.data.report import DataReport
from distill.models.load.fingerprint import fingerprint
from distill.recipe import parse
from distill.run import run
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.registry import source_of
from distill.training.checkpoints import checkpoints
from distill.training.lock_file import build_lock, hash_rows, read_lock

ROW = {"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]}
TEXT = "\n".join(f"The teacher explains line {number} and the student listens." for number in range(40))


pytestmark = pytest.mark.place(text=TEXT, teacher={"layers": 3, "seed": 1})


def recipe(*overrides):
    return parse(
        """
        teacher: {model: teacher}
        student: {from_teacher: {layers: 2}}
        data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
        train: {steps: 2, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
        generate: {prompts: []}
        """,
        overrides,
        name="tiny",
    )


def test_the_same_run_again(workplace):
    first = run(recipe())
    path = first.folder / "lock.yaml"
    lock = read_lock(path)
    assert lock["environment"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(lock["teacher"]["weights"]) == 64 and lock["data"]["chat_template"]
    again = run(recipe(), lock=path)
    assert again.folder != first.folder and again.after == first.after
    assert read_lock(again.folder / "lock.yaml") == lock


def change_text(workplace):
    (workplace / "text.txt").write_text(TEXT.replace("listens", "learns"))


def change_teacher(workplace):
    save_tiny(workplace / "teacher", tiny_model(tiny_tokenizer(), layers=3, seed=9), tiny_tokenizer())


def change_template(workplace):
    save_tiny(
        workplace / "teacher",
        tiny_model(tiny_tokenizer(), layers=3, seed=1),
        tiny_tokenizer(chat_template="{{ messages[0]['content'] }}"),
    )


@pytest.mark.plain("recipe")
@pytest.mark.parametrize(
    "change, expected",
    [
        (change_text, r"data\.source differs"),
        (change_teacher, r"teacher\.weights differs"),
        (change_template, r"data\.chat_template differs"),
        ("train.learning_rate=1e-3", r"recipe\.train\.learning_rate differs: locked 0\.003, here 0\.001"),
    ],
    ids=["text", "teacher", "template", "recipe"],
)
def test_the_first_difference_is_named_and_nothing_runs(workplace, change, expected):
    path = run(recipe()).folder / "lock.yaml"
    before = sorted((workplace / "runs").iterdir())
    overrides = [change] if isinstance(change, str) else []
    if not overrides:
        change(workplace)
    with pytest.raises(ValueError, match=expected) as error:
        run(recipe(*overrides), lock=path)
    assert len(str(error.value).splitlines()) == 1
    assert sorted((workplace / "runs").iterdir()) == before and not checkpoints(before[0])


@pytest.mark.parametrize("text", [None, "- 1\n", "a: [", "recipe: {}\n"])
def test_missing_and_damaged_lock_files_are_refused(workplace, text):
    if text is not None:
        (workplace / "lock.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"--lock lock\.yaml"):
        run(recipe(), lock=workplace.__class__("lock.yaml"))
    assert not (workplace / "runs").exists()


def test_the_hash_of_rows_sees_every_part():
    rows = [{"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]}]
    others = [{**rows[0], name: [1, 3]} for name in rows[0]]
    moved = [
        {name: values[:1] for name, values in rows[0].items()},
        {name: values[1:] for name, values in rows[0].items()},
    ]
    found = {
        hash_rows(rows),
        hash_rows(rows * 2),
        hash_rows(moved),
        *(hash_rows([other]) for other in others),
    }
    assert len(found) == 6


@pytest.mark.full
def test_the_hash_of_rows_is_the_same_for_a_data_set_whatever_its_batches():
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ROW})
    rows = [{name: [number, *values] for name, values in ROW.items()} for number in range(9000)]
    table = datasets.Dataset.from_list(rows, features=features)
    assert hash_rows(table) == hash_rows(rows)
    assert hash_rows(table.select([1, 0, *range(2, 9000)])) != hash_rows(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_sees_one_changed_value_anywhere_and_two_exchanged(dtype):
    model = nn.Linear(300, 257, dtype=dtype)  # rows of the checksum, and bytes that fill none
    flat = model.weight.detach().view(-1)
    found = {fingerprint(model)}
    for place in (0, 4095, 4096, 40_000, flat.numel() - 1):
        kept = flat[place].clone()
        flat[place] = torch.nextafter(kept.float(), torch.tensor(9.0)).to(dtype) if dtype == torch.float32 else kept + 1
        found.add(fingerprint(model))
        flat[place] = kept
    for a, b in ((0, 1), (0, 4), (4, 5000), (7, flat.numel() - 1)):
        flat[[a, b]] = flat[[b, a]]
        found.add(fingerprint(model))
        flat[[a, b]] = flat[[b, a]]
    assert len(found) == 10 and fingerprint(model) in found
    model.weight = nn.Parameter(model.weight.detach().T.contiguous().T)
    assert fingerprint(model) in found, "how it lies in memory plays no part"


def test_a_parameter_that_is_a_piece_of_another_tensor():
    held = torch.randn(9001)
    odd, plain = nn.Module(), nn.Module()
    odd.weight, plain.weight = nn.Parameter(held[1:]), nn.Parameter(held[1:].clone())
    assert fingerprint(odd) == fingerprint(plain)


def test_an_entangled_lock_is_refused(workplace):
    """Aliases in YAML could make a small file endless."""
    (workplace / "lock.yaml").write_text("recipe: &a [1]\ndata: *a\n")
    with pytest.raises(ValueError, match=r"--lock .*aliases"):
        read_lock(workplace / "lock.yaml")


def test_the_template_in_use_and_its_day_are_locked(workplace):
    (workplace / "t.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    models = {"teacher": LoadedTeacher(tiny_model()), "student": tiny_model()}
    overrides = [[], ["data.chat_template=t.jinja"], ["data.chat_template=none"]]
    vocabularies = [source_of(recipe(*more)).vocabulary() for more in overrides]
    made = [
        build_lock(
            recipe(*more), **models, vocabulary=own, splits=Splits([], [], DataReport(), mix=None, sets={}), processes=1
        )["data"]
        for more, own in zip(overrides, vocabularies, strict=True)
    ]
    assert [data["chat_template_date"] for data in made] == [None, str(FROZEN_DAY), None]
    assert made[1]["chat_template"].startswith(
        repr(FROZEN_DAY.strftime("%d %b %Y"))[1:-1], 4
    ) and "strftime" not in str(made)
    assert made[0]["chat_template"] == tiny_tokenizer().chat_template and made[2]["chat_template"] is None


@pytest.mark.full
def test_attention_is_taken_from_the_lock_and_not_timed_again(workplace, hardware):
    from distill import run as run_module

    seen = []
    make = run_module.AttentionChoices

    def watched(recipe, recorded=None):
        choices = make(recipe, recorded)
        seen.append(dict(choices.found))
        choices.found.setdefault("student", {"backend": "triton"})  # as timing on a GPU would
        return choices

    hardware.setattr(run_module, "AttentionChoices", watched)
    path = run(recipe()).folder / "lock.yaml"
    assert read_lock(path)["attention"] == {"student": "triton"}
    run(recipe(), lock=path)
    assert seen == [{}, {"student": {"backend": "triton"}}]
    path.write_text(path.read_text().replace("student: triton", "student: somebody/kernels"))
    with pytest.raises(ValueError, match=r"--lock .*attention: expected back ends of"):
        run(recipe(), lock=path)


def test_differences_are_found_in_both_directions():
    found = diff_settings({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4})
    assert found == [("b.c", 2, 3), ("d", None, 4)]


def test_a_difference_within_a_list_has_its_place():
    before = {"terms": [{"weight": 1.0}, {"weight": 2.0}], "lora": None, "files": ["a"]}
    now = {"terms": [{"weight": 1.0}, {"weight": 3.0}], "lora": {}, "files": ["a", "b"]}
    assert diff_settings(before, now) == [("terms.1.weight", 2.0, 3.0), ("lora", None, {}), ("files.1", None, "b")]
