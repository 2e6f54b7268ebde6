"""`distill settings NAME` for arguments of other tools: each is a setting here, or there is none and it says why."""

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from distill.cli import run_command
from distill.commands.settings_schema import find_settings, settings
from distill.recipe.aliases import _arguments, answer_of

NAMES = yaml.safe_load(Path(__file__).with_name("other_tool_arguments.yaml").read_text(encoding="utf-8"))
OURS = {setting.name for setting in settings()}


@pytest.mark.plain("TRL 1.16.0", "LLaMA-Factory 0.9.5", "KDFlow 62d216b9")
@pytest.mark.parametrize("tool", NAMES)
def test_every_argument_of_a_tool_has_an_answer(tool):
    unanswered = []
    for name in NAMES[tool]:
        found = find_settings(name)
        by_name = answer_of(name) is not None or all(path.name.endswith(f".{name}") for path in found.settings)
        is_top = [setting.name for setting in found.settings] == [name]
        if not (by_name or is_top or name in OURS) or not (found.settings or found.text or found.option):
            unanswered.append(name)
    assert unanswered == [], "only names that are alike were found"
    assert len(NAMES[tool]) > 50


def test_every_training_argument_is_ours_or_is_passed_on_or_says_why_not():
    for field in dataclasses.fields(TrainingArguments):
        found = find_settings(field.name)
        assert found.settings or found.text or found.option, field.name
    passed = find_settings("adam_epsilon").settings
    assert [setting.name for setting in passed] == ["train.arguments.adam_epsilon"]


def test_the_table_names_settings_that_exist_and_each_name_once():
    patterns = [pattern for pattern, _ in _arguments()]
    assert len(patterns) == len(set(patterns))
    fields = {f"train.arguments.{field.name}" for field in dataclasses.fields(TrainingArguments)}
    assert {answer.setting for _, answer in _arguments()} <= OURS | fields | {"", "--resume"}
    assert all(answer.text for _, answer in _arguments() if not answer.setting)
    names = {name for names in NAMES.values() for name in names}
    assert {pattern for pattern in patterns if "*" not in pattern} <= names, "a name that no tool has"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gkd_logits_topk", "teacher.top_k\n"),
        ("lr_scheduler_type", "train.schedule\n"),
        ("seq_kd", "seq_kd: there is none, because the teacher's answers are generated beforehand: distill sample"),
        ("use_liger_kernel", "use_liger_kernel: there is none, because it replaces the forward"),
        ("vllm_gpu_memory_utilization", "vllm_gpu_memory_utilization: there is none, because data.on_policy.engine"),
        ("adam_beta2", "train.arguments.adam_beta2\n"),
        ("resume_from_checkpoint", "resume_from_checkpoint: the option --resume of distill run"),
        ("trl.num_generations", "data.on_policy.samples\n"),
        ("datasets.field_messages", "data.fields.messages\n"),
        ("kd-ratio", "loss.terms\n"),
    ],
)
def test_the_command_answers(name, says, capsys):
    assert run_command(["settings", name]) == 0
    answer = capsys.readouterr().out
    assert " ".join(answer.split()).startswith(" ".join(says.split())), answer


def test_the_names_of_trl_are_those_of_its_dataclass():
    """Where TRL is installed, with or without what it needs: its source is parsed, not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    folder = Path(spec.origin).parent
    known = {name for names in NAMES.values() for name in names}
    known |= {field.name for field in dataclasses.fields(TrainingArguments)}
    files = ("experimental/gkd/gkd_config.py", "trainer/sft_config.py", "trainer/base_config.py")
    read = set()
    for file in files:
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                read |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    assert "seq_kd" in read and read <= known
