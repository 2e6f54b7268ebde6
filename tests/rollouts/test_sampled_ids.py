"""What was sampled is what is trained: `distill sample`, then a run, for teachers whose answers are more than text.

Four tiny teachers are taught their answers by heart: plain ones, reasoning before an answer (R1: the prompt opens it
and the template drops it), tool calls between special tokens (Mistral), channels (gpt-oss).
"""

import json

import pytest
import torch
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.data.collator import Collator
from distill.data.load import load_data
from distill.data.sampled_rows import COLUMNS, OTHER_TOKENS
from distill.data.source_rows import SourceRowColumn
from distill.evaluation.sample import AnswerSettings, sample
from distill.generation.documents import documents_of
from distill.generation.reward_rows import row_table_from_recipe
from distill.generation.sampling import Sampling
from distill.recipe import parse
from distill.run import run
from distill.teachers.registry import source_of

END, START, PAD = "<|end|>", "<|start|>", "<|pad|>"
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: answers.jsonl, max_length: 160, cache: false, validation: {fraction: 0.2}}
train: {steps: 2, batch_size: 2, tokens_per_step: 320, device: cpu}
generate: {prompts: []}
"""
BEGIN = "{% for message in messages %}<|start|>{{ message['role'] }}\n"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
R1_TEMPLATE = (
    BEGIN + "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|end|>\n" + PROMPT + "<think>\n{% endif %}"
)
CALLS_TEMPLATE = (
    BEGIN + "{% if message['tool_calls'] %}[TOOL_CALLS][{% for call in message['tool_calls'] %}"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ message['content'] }}{% endif %}<|end|>\n"
    + PROMPT
    + "{% endif %}"
)
CALLS_PARSER = {
    "start_anchor": "<|start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": END},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close": END,
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
    },
}
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
CHANNEL_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}{% if message['role'] == 'assistant' %}"
    f"{{% if message['thinking'] and loop.last %}}{ANALYSIS}{{{{ message['thinking'] }}}}<|end|><|start|>assistant"
    f"{{% endif %}}{FINAL}{{{{ message['content'] }}}}{{% if loop.last %}}<|return|>{{% else %}}<|end|>{{% endif %}}"
    "{% else %}<|message|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNEL_PARSER = {
    "start_anchor": "<|start|>assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": ANALYSIS, "close": END},
        "content": {"open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>", "close": "<|return|>"},
    },
}
MOST = 56  # tokens of an answer; the last one of each teacher is longer, and cut off
LONG = "It goes on and on, and then on again, until somebody stops it in the middle of a"
QUESTIONS = ["What is 2 and 3?", "Name a colour.", "Say it.", "Count to three.", "Tell a long story."]
# a teacher's special tokens, template, response template, answers with the token that ends them
TEACHERS = {
    "plain": (
        (END, START, PAD),
        CHAT_TEMPLATE,
        None,
        ["Five.", "Blue, says the teacher.", "It.", "One two three.", LONG + " story."],
    ),
    "reasoning": (
        (END, START, PAD),
        R1_TEMPLATE,
        None,
        [
            "Two and three.\n</think>\n\nFive.",
            "Any.\n</think>\n\nBlue.",
            "\n</think>\n\nIt.",
            "1 2 3\n</think>\n\nOne two three.",
            LONG + " thought.\n</think>\n\nDone.",
        ],
    ),
    "calls": (
        (END, START, PAD, "[TOOL_CALLS]"),
        CALLS_TEMPLATE,
        CALLS_PARSER,
        [
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]',
            "Blue.",
            '[TOOL_CALLS][{"name":"say","arguments":{}}]',  # JSON as the template does not write it
            "One two three.",
            LONG + " call.",
        ],
    ),
    "channels": (
        ("<|return|>", START, PAD, END, "<|channel|>", "<|message|>"),
        CHANNEL_TEMPLATE,
        CHANNEL_PARSER,
        [
            f"{ANALYSIS}Two and three.<|end|><|start|>assistant{FINAL}Five.",
            f"{FINAL}Blue.",
            f"{ANALYSIS}Say it.<|end|><|start|>assistant{FINAL}It.",
            f"{FINAL}One two three.",
            f"{ANALYSIS}{LONG} channel.<|end|><|start|>assistant{FINAL}Done.",
        ],
    ),
}
# how a student with another tokenizer and its own layout of reasoning and calls writes the same
OTHER_TEMPLATE = (
    BEGIN + "{% if message['reasoning_content'] %}(thinks {{ message['reasoning_content'] }}){% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}(calls {{ call['function']['name'] }} "
    "{{ call['function']['arguments'] | tojson }}){% endfor %}<|end|>\n" + PROMPT + "{% endif %}"
)
AS_OTHERS = {
    "plain": ["Five.<|end|>", "Blue, says the teacher.<|end|>", "It.<|end|>", "One two three.<|end|>", LONG[:MOST]],
    "reasoning": [
        "(thinks Two and three.)Five.<|end|>",
        "(thinks Any.)Blue.<|end|>",
        "It.<|end|>",
        "(thinks 1 2 3)One two three.<|end|>",
        None,  # cut off within its reasoning
    ],
    "calls": ['(calls add {"a": 2, "b": 3})<|end|>', "Blue.<|end|>", None, "One two three.<|end|>", LONG[:MOST]],
    "channels": [
        "(thinks Two and three.)Five.<|end|>",
        "Blue.<|end|>",
        "(thinks Say it.)It.<|end|>",
        "One two three.<|end|>",
        None,
    ],
}


def tokenizer_of(kind):
    specials, template, parser, _ = TEACHERS[kind]
    tokenizer = tiny_tokenizer(256 + len(specials), template, specials)
    if parser is not None:
        tokenizer.response_template = parser
    return tokenizer


def prompt_ids(tokenizer, question):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def taught(kind, tokenizer):
    """Return a tiny model that has learned its answers by heart."""
    model = tiny_model(tokenizer, hidden=64, tie=False, initializer_range=0.05).train()
    rows = []
    for question, answer in zip(QUESTIONS, TEACHERS[kind][3], strict=True):
        own = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        before = prompt_ids(tokenizer, question)
        rows.append((before + own, [-100] * len(before) + own))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [2] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.005:
            break
    assert loss < 0.02
    return model.eval()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Return a function that gives the folder of a teacher, taught once."""
    made = {}

    def teacher(kind):
        if kind not in made:
            tokenizer = tokenizer_of(kind)
            made[kind] = save_tiny(tmp_path_factory.mktemp(kind), taught(kind, tokenizer), tokenizer)
        return made[kind]

    return teacher


@pytest.fixture
def place(tmp_path, monkeypatch, teachers):
    """Return a function that prepares the folder of a run of one kind of teacher, and enters it."""

    def prepare(kind):
        (tmp_path / "teacher").symlink_to(teachers(kind))
        save_tiny(tmp_path / "student", tiny_model(tokenizer_of(kind), seed=2), tokenizer_of(kind))
        other = tiny_tokenizer(300, OTHER_TEMPLATE)
        save_tiny(tmp_path / "other", tiny_model(other, seed=3), other)
        (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS))
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return prepare


def sampled(folder, *overrides, name="answers.jsonl", **more):
    settings = AnswerSettings(max_new_tokens=MOST, batch_size=2, sampling=Sampling(0.0), **more)
    result = sample(parse(RECIPE, list(overrides)), "questions.txt", folder / name, "teacher", settings)
    return result, [json.loads(line) for line in (folder / name).read_text().splitlines()]


def documents(recipe, tokenizer):
    """Return the ids of all documents, and those that are trained on, of training and held-out rows."""
    splits, found = load_data(recipe.data, tokenizer, seed=0), []
    for row in [*splits.train, *splits.validation]:
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        for begin, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            ids, labels = row["input_ids"][begin:end], row["labels"][begin:end]
            found.append((ids, [label for label in labels if label != -100]))
    return found, splits.report


@pytest.mark.plain("calls")
@pytest.mark.parametrize("kind", TEACHERS)
def test_a_student_of_the_same_vocabulary_is_trained_on_the_sampled_ids(kind, place, capsys):
    folder, tokenizer = place(kind), tokenizer_of(kind)
    result, rows = sampled(folder)
    assert result.made == len(QUESTIONS) and result.refused == 0 and result.truncated == 1
    for question, answer, row in zip(QUESTIONS, TEACHERS[kind][3], rows, strict=True):
        own = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"][:MOST]
        assert row["prompt"] == question and row["prompt_ids"] == prompt_ids(tokenizer, question)
        assert row["completion_ids"] == own, "the teacher knows its answers by heart"
        assert row["completion"] == tokenizer.decode(own).removesuffix(tokenizer.eos_token), "no special token is lost"
        assert row["truncated"] == (row is rows[-1]) == (own[-1] != tokenizer.eos_token_id)
    found, report = documents(parse(RECIPE), tokenizer)
    expected = [(row["prompt_ids"] + row["completion_ids"], row["completion_ids"]) for row in rows]
    assert sorted(found) == sorted(expected)
    assert report.by_ids == len(rows) and report.without_end == 1 and not report.dropped
    assert "trained on by their sampled token ids: 5 rows" in str(report)
    assert run(parse(RECIPE), name=kind).steps == 2
    assert "trained on by their sampled token ids: 5 rows" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("kind", TEACHERS)
def test_a_student_of_another_vocabulary_reads_what_leads_back_to_the_ids(kind, place):
    folder, other = place(kind), tiny_tokenizer(300, OTHER_TEMPLATE)
    cross = ["student.model=other", "student.vocabulary=cross"]
    result, rows = sampled(folder, *cross)
    expected = dict(zip(QUESTIONS, AS_OTHERS[kind], strict=True))
    assert [row["prompt"] for row in rows] == [question for question in QUESTIONS if expected[question] is not None]
    assert result.refused == AS_OTHERS[kind].count(None) and result.made == len(rows)
    found, report = documents(parse(RECIPE), other)
    trained = {tuple(learned) for _, learned in found}
    assert {other.decode(list(learned)) for learned in trained} == set(filter(None, expected.values()))
    assert report.by_ids == 0 and report.without_end == sum(row["truncated"] for row in rows)
    if kind in ("plain", "calls"):  # a loss over two tokenizers compares answers that both templates write alike
        run(parse(RECIPE, cross), name=kind)


@pytest.mark.plain("calls")
@pytest.mark.parametrize("kind", ["calls", "channels", "reasoning"])
def test_a_row_whose_text_is_not_its_tokens_is_not_read_as_text(kind, place):
    """The file was made for a student of the teacher's vocabulary; another one drops what it cannot read, counted."""
    folder = place(kind)
    _, rows = sampled(folder)
    assert [row["sampled"]["same_text"] for row in rows] == [text is not None for text in AS_OTHERS[kind]]
    found, report = documents(parse(RECIPE), tiny_tokenizer(300, OTHER_TEMPLATE))
    assert report.dropped[OTHER_TOKENS] == AS_OTHERS[kind].count(None)
    assert len(found) == len(rows) - AS_OTHERS[kind].count(None)


@pytest.mark.full
def test_sampling_for_another_vocabulary_goes_on_where_it_stopped(place):
    folder, cross = place("calls"), ["student.model=other", "student.vocabulary=cross"]
    sampled(folder, *cross)
    whole = (folder / "answers.jsonl").read_bytes()
    for kept in range(5):
        (folder / "answers.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:kept]))
        result, rows = sampled(folder, *cross)
        assert (folder / "answers.jsonl").read_bytes() == whole
        assert (
            result.found == kept
            and result.made == 4 - kept
            and [row["sampled"]["prompt"] for row in rows] == [0, 1, 3, 4]
        )
        # a response that was not written is made again only where no later line tells that it was
        assert result.refused == (kept < 3)


def test_a_stop_string_is_no_end_that_was_sampled(place):
    folder = place("plain")
    _, rows = sampled(folder, stop=("says",))
    stopped = rows[1]
    assert stopped["completion"] == "Blue, says" and not stopped["truncated"]
    found, report = documents(parse(RECIPE), tokenizer_of("plain"))
    assert stopped["completion_ids"] in [learned for _, learned in found] and report.without_end == 2
    other = tiny_tokenizer(300, OTHER_TEMPLATE)
    found, _ = documents(parse(RECIPE), other)
    assert "Blue, says" in [other.decode(learned) for _, learned in found]


def test_a_file_without_ids_trains_no_end_of_a_cut_off_answer(place):
    """As `distill sample` wrote them before, and as other tools do."""
    folder = place("plain")
    _, rows = sampled(folder)
    for layout in ("pairs", "chats", "text"):
        kept = []
        for row in rows:
            row = {key: value for key, value in row.items() if key not in COLUMNS or key == "truncated"}
            if layout == "chats":
                turns = [("user", row.pop("prompt")), ("assistant", row.pop("completion"))]
                row["messages"] = [{"role": role, "content": content} for role, content in turns]
            kept.append(json.dumps(row))
        (folder / "answers.jsonl").write_text("\n".join(kept))
        template = "none" if layout == "text" else "tokenizer"
        tokenizer = tokenizer_of("plain")
        found, report = documents(parse(RECIPE, [f"data.chat_template={template}"]), tokenizer)
        texts = [tokenizer.decode(learned) for _, learned in found]
        assert sorted(text.removesuffix(END) for text in texts) == sorted(row["completion"] for row in rows)
        assert [text for text in texts if not text.endswith(END)] == [rows[-1]["completion"]]
        assert report.without_end == 1 and report.by_ids == 0


@pytest.mark.full
def test_ids_go_with_the_settings_that_decide_what_is_trained(place):
    folder, tokenizer = place("reasoning"), tokenizer_of("reasoning")
    _, rows = sampled(folder)
    # reasoning that is dropped has to be found in the text
    found, report = documents(parse(RECIPE, ["data.reasoning=drop"]), tokenizer)
    assert report.by_ids == 0 and "Five.<|end|>" in [tokenizer.decode(learned) for _, learned in found]
    # what exceeds max_length is cut from the ids, and a prompt that fills it drops its row
    longest = len(rows[0]["prompt_ids"]) + 5
    found, report = documents(parse(RECIPE, [f"data.max_length={longest}"]), tokenizer)
    assert report.truncated == len(found) > 0 and all(len(ids) == longest for ids, _ in found)
    assert sum(report.dropped.values()) == len(rows) - len(found)
    for column, value in (("completion_ids", [5, "6"]), ("prompt_ids", []), ("completion_ids", [9999])):
        changed = [rows[0] | {column: value}, *rows[1:]]
        (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, changed)))
        _, report = documents(parse(RECIPE), tokenizer)
        assert report.dropped == {"wrong type": 1} and report.by_ids == len(rows) - 1


def test_chats_keep_their_answers_in_parts(place):
    folder = place("calls")
    chats = [{"messages": [{"role": "user", "content": question}], "tools": []} for question in QUESTIONS]
    (folder / "questions.txt").unlink()
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings = AnswerSettings(max_new_tokens=MOST, sampling=Sampling(0.0))
    sample(parse(RECIPE), "chats.jsonl", folder / "answers.jsonl", "teacher", settings)
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert rows[2]["messages"][-1]["content"] == '[TOOL_CALLS][{"name":"say","arguments":{}}]'
    found, report = documents(parse(RECIPE), tokenizer_of("calls"))
    assert sorted(learned for _, learned in found) == sorted(row["completion_ids"] for row in rows)
    assert report.by_ids == len(rows)


@pytest.mark.full
def test_the_command_tells_how_many_were_not_written(place, capsys):
    folder = place("channels")
    (folder / "r.yaml").write_text(RECIPE)
    arguments = ["sample", "r.yaml", "student.model=other", "student.vocabulary=cross", "--prompts", "questions.txt"]
    arguments += ["--out", "answers.jsonl", "--from", "teacher", "--max-new-tokens", str(MOST), "--temperature", "0"]
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert "1 response not written: the student reads other tokens" in out and "4 responses, " in out


@pytest.mark.plain("calls")
@pytest.mark.parametrize("kind", ["reasoning", "calls"])
def test_a_teacher_that_reads_more_scores_the_sampled_ids(kind, place):
    folder, tokenizer = place(kind), tokenizer_of(kind)
    _, rows = sampled(folder)
    hint = "Remember that the sum is five."
    recipe = parse(RECIPE, [f"teacher.context={{template: '{hint}', place: system}}", "data.packing=false"])
    splits = source_of(recipe).vocabulary().read(recipe.data, 0)
    found = [*splits.train, *splits.validation]
    assert len(found) == len(rows) and splits.report.by_ids == len(rows)
    by_prompt = {tuple(row["prompt_ids"]): row for row in rows}
    for document in found:
        learned = [label for label in document["labels"] if label != -100]
        prompt = document["input_ids"][: -len(learned)]
        row = by_prompt[tuple(prompt)]
        assert learned == row["completion_ids"] == document["teacher_input_ids"][-len(learned) :]
        teacher_prompt = tokenizer.decode(document["teacher_input_ids"][: -len(learned)])
        assert hint in teacher_prompt and row["prompt"] in teacher_prompt and hint not in tokenizer.decode(prompt)
        assert teacher_prompt.endswith(tokenizer.decode(prompt)[-len("<|start|>assistant\n") :])


def test_rewards_find_the_rows_of_sampled_answers(place):
    folder, tokenizer = place("calls"), tokenizer_of("calls")
    _, rows = sampled(folder)
    changed = [row | {"right": number} for number, row in enumerate(rows)]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, changed)))
    recipe = parse(RECIPE, ["data.on_policy={samples: 2, max_new_tokens: 4}", "data.packing=false"])
    splits = load_data(recipe.data, tokenizer, seed=0)
    table = row_table_from_recipe(recipe, tokenizer, [tokenizer.eos_token_id])
    found = documents_of(Collator(2, columns=[SourceRowColumn()])([*splits.train, *splits.validation]))
    assert len(found) == len(rows)
    for document in found:
        answer = document.ids[len(document.prompt) :]
        given = table.function_input(document, answer)
        row = rows[given.row["right"]]
        assert answer == row["completion_ids"] and given.answer == row["completion"], "special tokens included"
        assert given.prompt == [{"role": "user", "content": row["prompt"]}]
