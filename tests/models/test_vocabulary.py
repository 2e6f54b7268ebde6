"""Two vocabularies: what may be compared token by token, what may not, and how a student is given more tokens."""

import copy
import json

import pytest
import torch
from tiny import SPECIALS, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from distill.models.load.vocabulary import PROBES, compare, extend_student


@pytest.fixture(scope="module")
def base():
    return tiny_tokenizer()


def changed(tokenizer, change):
    """A copy whose serialised backend went through `change`."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    change(state)
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIALS[0], pad_token=SPECIALS[2])


def with_tokens(tokenizer, *tokens):
    more = copy.deepcopy(tokenizer)
    more.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return more


def test_equal_vocabularies_match_and_padded_rows_are_named(base):
    verdict = compare(base, copy.deepcopy(base), teacher_vocab_size=384, student_vocab_size=320)
    assert verdict.compatible
    assert verdict.require() == verdict.shared == 320
    assert f"teacher {384 - len(base)} padded rows" in str(verdict)
    assert f"student {320 - len(base)} padded rows" in str(verdict)
    assert "\n" not in str(verdict)


def test_names_of_a_gguf_file_for_padded_rows_are_no_tokens(base):
    """llama.cpp wants a name for each row of the head: `[PAD259]` and so on, as for the rows of Qwen's models."""
    file = with_tokens(base, *(f"[PAD{number}]" for number in range(len(base), 320)))
    for verdict in (compare(base, file, 320, 320), compare(file, base, 320, 320)):
        assert verdict.compatible and verdict.teacher_tokens == verdict.student_tokens == len(base)
    assert not compare(base, with_tokens(base, "[PAD7]"), 320, 320).compatible, "a token of that name elsewhere"


def test_a_student_with_more_head_rows_is_reported(base):
    verdict = compare(base, base, teacher_vocab_size=300, student_vocab_size=320)
    assert verdict.require() == 300
    assert "last 20 rows" in str(verdict)


def test_one_swapped_pair_of_ids_is_found_and_named(base):
    def swap(state):
        vocabulary = state["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    other = changed(base, swap)
    verdict = compare(base, other)
    first = min(base.convert_tokens_to_ids(["a", "b"]))
    assert [item.id for item in verdict.differing] == sorted(base.convert_tokens_to_ids(["a", "b"]))
    with pytest.raises(ValueError, match=rf"student\.model.*id {first} is 'a' to the teacher and 'b' to the student"):
        verdict.require()


def test_the_same_ids_by_other_rules_fail_the_probe():
    merged = tiny_tokenizer(300)

    def unmerge(state):
        state["model"]["merges"] = []

    verdict = compare(merged, changed(merged, unmerge))
    assert not (verdict.differing or verdict.teacher_only or verdict.student_only)
    assert verdict.probe
    with pytest.raises(ValueError, match="the same text becomes different ids"):
        verdict.require()


def test_a_teachers_extra_token_asks_for_extend_and_is_never_cut(base):
    verdict = compare(with_tokens(base, "<|turn_end|>"), base, teacher_vocab_size=320, student_vocab_size=320)
    assert verdict.extensible
    with pytest.raises(ValueError, match=r"'<\|turn_end\|>' to the teacher and no token.*student\.vocabulary: extend"):
        verdict.require()


def test_a_students_own_token_is_refused(base):
    verdict = compare(base, with_tokens(base, "<|mine|>"))
    assert not verdict.extensible
    with pytest.raises(ValueError, match="known to the student only"):
        verdict.require()


def test_a_real_token_without_a_row_is_refused(base):
    verdict = compare(base, base, student_vocab_size=len(base) - 2)
    assert [item.id for item in verdict.cut] == [len(base) - 2, len(base) - 1]
    with pytest.raises(ValueError, match="2 ids without a row"):
        verdict.require()


def test_habits_that_differ_are_notes_not_faults(base):
    other = copy.deepcopy(base)
    other.eos_token = SPECIALS[1]
    verdict = compare(base, other)
    assert verdict.compatible
    assert "eos_token is '<|end|>' to the teacher and '<|start|>' to the student" in str(verdict)


def test_tokenizers_with_and_without_a_beginning_token_are_distinguished(base):
    from tokenizers.processors import TemplateProcessing

    begins, plain = copy.deepcopy(base), copy.deepcopy(base)
    begins.bos_token = plain.bos_token = SPECIALS[1]
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        f"{SPECIALS[1]} $A", None, [(SPECIALS[1], begins.bos_token_id)]
    )
    assert compare(begins, plain).compatible
    assert "only the teacher's tokenizer begins a text with bos_token" in str(compare(begins, plain))
    assert "only the student's tokenizer begins a text with bos_token" in str(compare(plain, begins))
    assert "begins" not in str(compare(begins, begins))


def test_a_run_that_extends_saves_the_tokenizer_it_was_trained_with(base, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill.cli import run_command

    monkeypatch.chdir(tmp_path)
    teacher_tokenizer = with_tokens(base, "<|turn_end|>")
    save_tiny(tmp_path / "teacher", tiny_model(vocab_size=len(base) + 1, seed=1), teacher_tokenizer)
    save_tiny(tmp_path / "student", tiny_model(base, seed=2), base)
    (tmp_path / "text.txt").write_text("The teacher explains <|turn_end|> and the student listens.\n" * 40)
    (tmp_path / "r.yaml").write_text(
        "{teacher: {model: teacher}, student: {model: student}, generate: {prompts: []}, data: {source: text.txt, "
        "max_length: 32, cache: false, validation: {max_rows: 1}}, train: {steps: 1, device: cpu}}"
    )
    assert run_command(["run", "r.yaml"]) == 2
    assert run_command(["run", "r.yaml", "student.vocabulary=extend"]) == 0
    saved = AutoTokenizer.from_pretrained("runs/r/student")
    model = AutoModelForCausalLM.from_pretrained("runs/r/student")
    assert saved.get_vocab() == teacher_tokenizer.get_vocab()
    assert model.config.vocab_size == len(saved) == len(base) + 1


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("padded", [0, 5])
def test_extend_gives_rows_of_mean_sub_tokens_and_touches_no_other(base, tie, padded):
    teacher_tokenizer = with_tokens(base, "<|turn_end|>", "<|tool|>")
    student = tiny_model(base, tie=tie, vocab_size=len(base) + padded)
    before = [student.get_input_embeddings().weight.clone(), student.get_output_embeddings().weight.clone()]
    added = extend_student(student, base, teacher_tokenizer)
    assert added == ("<|turn_end|>", "<|tool|>")
    rows = student.config.vocab_size
    assert rows == max(len(base) + padded, len(base) + 2)
    after = [student.get_input_embeddings().weight, student.get_output_embeddings().weight]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[: len(base)], old[: len(base)])
        for number, token in enumerate(added, len(base)):
            parts = base(token, add_special_tokens=False)["input_ids"]
            assert len(parts) > 1
            torch.testing.assert_close(new[number], old[parts].mean(0))
    assert (after[0] is after[1]) == tie
    verdict = compare(teacher_tokenizer, teacher_tokenizer, student_vocab_size=rows)
    assert verdict.compatible
    ids = torch.tensor([teacher_tokenizer("hi<|turn_end|>")["input_ids"]])
    assert student(ids).logits.shape[-1] == rows


def test_extend_refuses_what_it_cannot_repair(base):
    with pytest.raises(ValueError, match=r"student\.vocabulary.*known to the student only"):
        extend_student(tiny_model(vocab_size=400), with_tokens(base, "<|mine|>"), base)


def test_extend_with_nothing_to_add_changes_nothing(base):
    student = tiny_model(base)
    before = student.get_input_embeddings().weight.clone()
    assert extend_student(student, base, base) == ()
    assert torch.equal(student.get_input_embeddings().weight, before)


@pytest.mark.full
def test_smollm2_agrees_with_itself(smollm2_tokenizer):
    verdict = compare(smollm2_tokenizer, smollm2_tokenizer, 49_152, 49_152)
    assert verdict.require() == 49_152
    assert all(smollm2_tokenizer(text)["input_ids"] for text in PROBES)
