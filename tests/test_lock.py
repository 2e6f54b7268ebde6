"""lock.yaml: what it holds, the same run again, and the first difference by name."""

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.lock import differences, hash_of_rows, hash_of_weights, read_lock
from distill.recipe import parse
from distill.run import run
from distill.training.checkpoints import checkpoints

TEXT = "\n".join(f"The teacher explains line {number} and the student listens." for number in range(40))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "teacher", tiny_model(tokenizer, layers=3, seed=1), tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


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
    assert lock["environment"]["torch"] == torch.__version__.split("+")[0] or lock["environment"]["torch"]
    assert len(lock["teacher"]["weights_sha256"]) == 64 and lock["data"]["chat_template"]
    again = run(recipe(), lock=path)
    assert again.folder != first.folder and again.after == first.after
    assert read_lock(again.folder / "lock.yaml") == lock


def change_text(workplace):
    (workplace / "text.txt").write_text(TEXT.replace("listens", "learns"))


def change_teacher(workplace):
    save_tiny(workplace / "teacher", tiny_model(tiny_tokenizer(), layers=3, seed=9), tiny_tokenizer())


def change_template(workplace):
    save_tiny(workplace / "teacher", tiny_model(tiny_tokenizer(), layers=3, seed=1),
              tiny_tokenizer(chat_template="{{ messages[0]['content'] }}"))  # fmt: skip


@pytest.mark.parametrize(
    "change, expected",
    [
        (change_text, r"data\.rows_sha256 differs"),
        (change_teacher, r"teacher\.weights_sha256 differs"),
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
def test_what_is_not_a_lock(workplace, text):
    if text is not None:
        (workplace / "lock.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"--lock lock\.yaml"):
        run(recipe(), lock=workplace.__class__("lock.yaml"))
    assert not (workplace / "runs").exists()


def test_hashes_see_every_part():
    rows = [{"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]}]
    others = [{**rows[0], name: [1, 3]} for name in rows[0]]
    found = {hash_of_rows(rows), hash_of_rows(rows * 2), *(hash_of_rows([other]) for other in others)}
    assert len(found) == 5
    model, other = tiny_model(), tiny_model()
    assert hash_of_weights(model) == hash_of_weights(other)
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    assert hash_of_weights(model) != hash_of_weights(other)


def test_differences_are_found_in_both_directions():
    found = list(differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4}))
    assert found == [("b.c", 2, 3), ("d", None, 4)]
