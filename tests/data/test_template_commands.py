"""Every command renders the chat template as the training does: which prompts each model reads, seen at the models.

A cell is a pair of models with variables of the template, and a command. A prompt of a model that thinks ends at the
assistant's header, and one of a model that does not, with an empty thought after it.
"""

import functools
import json
import re
import sys
import types

import pytest
from test_template_kwargs import EMPTY_THOUGHT, row, write
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaModel

from distill.cli import run_command

PLAIN, THINKS = "assistant\n<none>", "assistant"
OTHER = ("<eos>", "<bos>")
HIDDEN = {"student": 32, "teacher": 64}  # by which a model is known
# name: tokenizer of the teacher, its template, its own variables, and the prompts of student and teacher
PAIRS = {
    "the data's": ("same", EMPTY_THOUGHT, None, PLAIN, PLAIN),
    "the teacher's own": ("same", EMPTY_THOUGHT, {"enable_thinking": True}, PLAIN, THINKS),
    "another family": ("other", EMPTY_THOUGHT, None, PLAIN, PLAIN),
    "another family, its own": ("other", EMPTY_THOUGHT, {"enable_thinking": True}, PLAIN, THINKS),
    "another family without variables": ("other", CHAT_TEMPLATE, None, PLAIN, THINKS),
}
COMMANDS = {
    "run": ["run", "pair.yaml", "--name", "again"],
    "run on prompts": [
        *("run", "pair.yaml", "--name", "prompted", "data.format=prompts", "data.source=prompts.jsonl"),
        *("data.on_policy={fraction: 1.0, max_new_tokens: 4}", "data.validation={source: chat.jsonl}"),
        *("loss.terms=[{type: forward_kl}]",),
    ],
    "doctor": ["doctor", "pair.yaml"],
    "cache": ["cache", "pair.yaml", "--hidden", "--out", "cached"],
    "sample teacher": ["sample", "pair.yaml", "--from", "teacher", "--prompts", "prompts.jsonl", "--out", "t.jsonl"],
    "sample student": ["sample", "pair.yaml", "--from", "student", "--prompts", "prompts.jsonl", "--out", "s.jsonl"],
    "generate": ["generate", "runs/pair", "-p", "What is 4?", "--with-teacher", "--max-new-tokens", "3"],
    "eval": ["eval", "runs/pair", "--json"],
    "eval of other data": ["eval", "runs/pair", "--data", "chat.jsonl", "--max-length", "128", "--json"],
    "eval tasks": ["eval", "runs/pair", "--tasks", "any", "--chat"],
}
# by nature: a model that is compared on rows reads those rows, unless they hold its own tokens beside the student's
REFUSED = {
    ("the teacher's own", "eval"): "distill eval: requires a teacher that reads the student's prompts",
    ("the teacher's own", "eval of other data"): "distill eval: requires a teacher that reads the student's prompts",
}
# each command with the pairs that tell most: the teacher's own variables, and a tokenizer of another family
CELLS = [
    ("the teacher's own", "run"),
    ("another family, its own", "run"),
    ("another family, its own", "run on prompts"),
    ("the teacher's own", "cache"),
    ("another family without variables", "cache"),
    ("the teacher's own", "sample teacher"),
    ("another family without variables", "sample teacher"),
    ("the data's", "sample student"),
    ("the teacher's own", "generate"),
    ("another family, its own", "generate"),
    ("the data's", "eval"),
    ("the teacher's own", "eval"),
    ("another family, its own", "eval"),
    ("the teacher's own", "eval of other data"),
    ("another family", "eval of other data"),
    ("another family without variables", "eval tasks"),
    pytest.param("the teacher's own", "doctor", marks=pytest.mark.full),
    pytest.param("another family, its own", "doctor", marks=pytest.mark.full),
]
SEES = {"sample teacher": {"teacher"}, "sample student": {"student"}, "cache": {"teacher"}}


@functools.cache
def tokenizer_of(kind, template):
    if kind == "same":
        return tiny_tokenizer(chat_template=template)
    return tiny_tokenizer(380, template.replace("<|end|>", "<eos>"), OTHER)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each pair, with a finished run in it."""
    root = tmp_path_factory.mktemp("pairs")

    @functools.cache
    def make(name):
        kind, template, own, _, _ = PAIRS[name]
        folder = root / name.replace(" ", "-").replace("'", "").replace(",", "")
        tokenizers = {"student": tokenizer_of("same", EMPTY_THOUGHT), "teacher": tokenizer_of(kind, template)}
        for who, tokenizer in tokenizers.items():
            save_tiny(folder / who, tiny_model(tokenizer, 1, HIDDEN[who], seed=HIDDEN[who]), tokenizer)
        write(folder / "chat.jsonl", [row(n) for n in range(16)])
        write(folder / "prompts.jsonl", [{"prompt": f"What is {n}?"} for n in range(8)])
        recipe = {
            "teacher": {"model": "./teacher", **({} if own is None else {"chat_template_kwargs": own})},
            "student": {"model": "./student", **({} if kind == "same" else {"vocabulary": "cross"})},
            "data": {
                **{"source": "chat.jsonl", "max_length": 128, "cache": False},
                **{"chat_template_kwargs": {"enable_thinking": False}, "validation": {"fraction": 0.25}},
            },
            "train": {"steps": 1, "batch_size": 2, "learning_rate": 1e-3, "device": "cpu"},
            "generate": {"prompts": ["What is 4?"], "max_new_tokens": 2},
        }
        (folder / "pair.yaml").write_text(json.dumps(recipe))
        with pytest.MonkeyPatch.context() as place:
            place.chdir(folder)
            assert run_command(["run", "pair.yaml", "--name", "pair"]) == 0
        return folder

    return make


@pytest.fixture
def prompts_read(watch, without):
    """How the prompts end that each model, known by its width, reads."""
    read = {"student": set(), "teacher": set()}
    forward = LlamaModel.forward
    tokenizers = {}

    @functools.wraps(forward)
    def noted(self, input_ids=None, **arguments):
        if input_ids is not None and tokenizers:
            who = {HIDDEN[who]: who for who in HIDDEN}[self.config.hidden_size]
            for ids in input_ids.reshape(len(input_ids), -1).tolist():
                text = tokenizers[who].decode(ids)
                # the decode loop reads a prompt's last token, the end of its line, by itself
                read[who] |= set(re.findall(r"<\|start\|>(assistant(?:\n<none>)?)", text))
        return forward(self, input_ids, **arguments)

    watch.setattr(LlamaModel, "forward", noted)
    # a prefix that prompts share is read apart from their ends
    without.setattr("distill.generation.shared_prefixes.MIN_SHARED_TOKENS", 10**6)
    return read, tokenizers


@pytest.fixture
def harness(library):
    """Stands in for lm_eval: a task with one question, rendered with the tokenizer and variables it is given."""
    import torch

    root, tasks, models = (types.ModuleType(f"lm_eval{name}") for name in ("", ".tasks", ".models"))
    huggingface = types.ModuleType("lm_eval.models.huggingface")
    root.__spec__ = sys.__spec__

    class TaskManager:
        def __init__(self, include_path=None):
            pass

        def match_tasks(self, names):
            return names

    class HFLM:
        def __init__(self, pretrained, tokenizer, batch_size, chat_template_args=None):
            self.model = pretrained
            self.tokenizer = tokenizer
            self.variables = chat_template_args or {}

    def simple_evaluate(model, apply_chat_template, **settings):
        assert apply_chat_template
        turns = [{"role": "user", "content": "What?"}]
        text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **model.variables)
        model.model(input_ids=torch.tensor([model.tokenizer(text, add_special_tokens=False).input_ids]))
        return {"results": {"any": {"acc,none": 1.0}}}

    root.simple_evaluate, tasks.TaskManager, huggingface.HFLM = simple_evaluate, TaskManager, HFLM
    for module in (root, tasks, models, huggingface):
        library.setitem(sys.modules, module.__name__, module)


@pytest.mark.plain(
    "the data's-eval",
    "the teacher's own-cache",
    "another family, its own-generate",
    "another family without variables-cache",
    "another family, its own-run on prompts",
    "another family without variables-eval tasks",
)
@pytest.mark.parametrize(("pair", "command"), CELLS)
@pytest.mark.usefixtures("forked_ranks")  # of the doctor
def test_a_command_reads_the_prompts_of_training(folders, prompts_read, harness, monkeypatch, capsys, pair, command):
    *_, student, teacher = PAIRS[pair]
    folder = folders(pair)
    monkeypatch.chdir(folder)
    read, tokenizers = prompts_read
    tokenizers |= {who: AutoTokenizer.from_pretrained(folder / who) for who in read}
    for found in read.values():
        found.clear()
    code = run_command(COMMANDS[command])
    told = capsys.readouterr()
    if (pair, command) in REFUSED:
        assert code == 2 and REFUSED[pair, command] in told.err
        return
    assert code == 0, told
    expected = {"student": {student}, "teacher": {teacher}}
    assert {who: ends for who, ends in read.items() if ends} == {
        who: expected[who] for who in SEES.get(command, expected)
    }
