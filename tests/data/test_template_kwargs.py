"""Variables of the chat template: of the data, of the teacher, of a row; and the named templates of a tokenizer."""

import json

import pytest
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.data.chat import ChatOptions, ChatTemplate, load_template, template_kwargs_of, template_of
from distill.data.load import load_data
from distill.data.rows import RowFault
from distill.evaluation.sample import AnswerSettings, sample
from distill.generation.environment import ChatFormat, Environment, EnvironmentLog
from distill.generation.function_calls import FunctionInput
from distill.generation.prompts import encode_prompt
from distill.recipe import Data, parse
from distill.run import run
from distill.teachers.registry import source_of

# an assistant that thinks unless told not to; documents and the amount of thought stand before the question
THINKING = (
    "{% if documents %}{% for document in documents %}<|start|>document\n{{ document.text }}<|end|>\n{% endfor %}"
    "{% endif %}{% if effort is defined %}<|start|>effort\n{{ effort }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<none>\n{% endif %}{% endif %}"
)
# as above, with the empty thought in the last turn too, as Qwen3 has it
EMPTY_THOUGHT = THINKING.replace(
    "{{ m.content }}<|end|>",
    "{% if loop.last and m.role == 'assistant' %}<none>\n{% endif %}{{ m.content }}<|end|>",
)
WITH_TOOLS = "{{ tools | tojson }}" + CHAT_TEMPLATE
TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {}}}


def thinking_tokenizer(source=EMPTY_THOUGHT):
    return tiny_tokenizer(chat_template=source)


def row(number, **more):
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {'so ' * (number % 3)}nine."},
        ],
        **more,
    }


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def documents_of_rows(splits, tokenizer, who=""):
    """The text of every document, and what of it is trained on."""
    found = []
    for each in [*splits.train, *splits.validation]:
        for start, end in document_bounds(each[f"{who}position_ids"]):
            ids = each[f"{who}input_ids"][start:end]
            labels = each["labels"][start:end] if not who else ids
            text = tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
            found.append((tokenizer.decode(ids), text))
    return found


def loaded(tmp_path, rows, tokenizer, **settings):
    data = Data(source=write(tmp_path / "rows.jsonl", rows), max_length=256, packing=False, cache=False, **settings)
    splits = load_data(data, tokenizer, seed=0)
    return documents_of_rows(splits, tokenizer), splits.report


def test_the_datas_variables_are_those_of_training_and_a_rows_own_take_precedence(tmp_path):
    tokenizer = thinking_tokenizer()
    rows = [row(n) for n in range(4)] + [row(9, chat_template_kwargs={"enable_thinking": True, "effort": "high"})]
    found, _ = loaded(tmp_path, rows, tokenizer, chat_template_kwargs={"enable_thinking": False})
    own = [(text, trained) for text, trained in found if "What is 9?" in text]
    others = [(text, trained) for text, trained in found if "What is 9?" not in text]
    assert len(others) == 4 and len(own) == 1
    for text, trained in others:  # the empty thought belongs to the prompt
        assert "<|start|>assistant\n<none>\nIt is" in text and "<none>" not in trained and "effort" not in text
    ((text, trained),) = own
    assert text.startswith("<|start|>effort\nhigh<|end|>") and trained.startswith("<none>\nIt is")


def test_a_table_gives_every_row_the_names_of_all(tmp_path):
    rows = [row(n, chat_template_kwargs={"enable_thinking": None, "effort": None}) for n in range(3)]
    found, report = loaded(tmp_path, rows, thinking_tokenizer(), chat_template_kwargs={"enable_thinking": False})
    assert all("<none>" not in trained and "effort" not in text for text, trained in found) and not report.unrendered


@pytest.mark.parametrize(
    "given, reason",
    [
        ("[1]", "wrong type"),
        ({"add_generation_prompt": True}, "wrong value"),
        ({"tools": []}, "wrong value"),
        ("{", "invalid JSON"),
    ],
)
def test_a_rows_variables_that_cannot_be_used_drop_the_row(tmp_path, given, reason):
    found, report = loaded(tmp_path, [*map(row, range(3)), row(9, chat_template_kwargs=given)], thinking_tokenizer())
    assert report.dropped == {reason: 1} and len(found) == 3


def test_what_the_template_does_not_read_is_named(tmp_path, tokenizer):
    rows = [row(n) for n in range(3)] + [row(9, chat_template_kwargs={"effort": "high"})]
    found, report = loaded(tmp_path, rows, tokenizer)
    assert len(found) == 4 and "chat_template_kwargs.effort" in str(report)
    rows[-1] = row(9, chat_template_kwargs={"documents": [{"text": "Nine is nine."}]})
    found, report = loaded(tmp_path, rows, tokenizer)
    assert len(found) == 3 and "documents: not rendered by" in str(report)
    with pytest.raises(
        ValueError, match=r"^data\.chat_template_kwargs: expected variables that .* got enable_thinkng$"
    ):
        loaded(tmp_path, rows, thinking_tokenizer(), chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ValueError, match=r"expected a chat template that reads effort, got none"):
        template_of(Data(source="x", chat_template="none", chat_template_kwargs={"effort": 1}), tokenizer)


def test_documents_stand_in_the_prompt_or_the_row_is_dropped(tmp_path):
    rows = [row(n, chat_template_kwargs={"documents": [{"text": f"Fact {n}."}]}) for n in range(4)]
    found, _ = loaded(tmp_path, rows, thinking_tokenizer())
    assert sorted(text.split("<|end|>")[0] for text, _ in found) == [f"<|start|>document\nFact {n}." for n in range(4)]
    assert not any("Fact" in trained for _, trained in found)
    cuts = THINKING.replace("{{ document.text }}", "{{ document.text[:3] }}")
    with pytest.raises(ValueError, match="documents: not rendered by"):
        loaded(tmp_path, rows, thinking_tokenizer(cuts))


# named templates


def test_with_tools_the_template_tool_use_is_taken_as_in_transformers(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": WITH_TOOLS}
    template = load_template("tokenizer", tokenizer)
    for tools in (None, [TOOL]):
        theirs = tokenizer.apply_chat_template(TURNS[:1], tools, tokenize=False, add_generation_prompt=True)
        assert template.prompt(TURNS[:1], tools) == theirs
        (example,) = template.for_training(TURNS, tools).examples
        assert example.text.startswith(theirs)
        assert [example.text[start:end] for start, end in example.spans] == ["So.<|end|>"]
    found, _ = loaded(tmp_path, [row(0), row(1, tools=[TOOL]), row(2)], tokenizer)
    assert sorted("Sum." in text for text, _ in found) == [False, False, True]


def test_without_a_default_template_chats_and_pairs_are_refused_alike_and_text_is_not(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.chat_template = {"tool_use": WITH_TOOLS, "rag": CHAT_TEMPLATE}
    pairs = [{"prompt": f"What is {n}?", "completion": "Nine."} for n in range(3)]
    for rows in ([row(n) for n in range(3)], pairs):
        with pytest.raises(ValueError, match=r"chat templates tool_use, rag, and none called default"):
            loaded(tmp_path, rows, tokenizer)
    assert len(loaded(tmp_path, [{"text": f"Number {n}."} for n in range(3)], tokenizer)[0]) == 3
    assert len(loaded(tmp_path, [row(n, tools=[TOOL]) for n in range(3)], tokenizer)[0]) == 3
    assert len(loaded(tmp_path, pairs, tokenizer, chat_template="none")[0]) == 3


# a teacher with variables of its own


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = thinking_tokenizer()
    save_tiny(folder / "student", tiny_model(tokenizer, seed=1), tokenizer)
    save_tiny(folder / "teacher", tiny_model(tokenizer, seed=2), tokenizer)
    write(folder / "chat.jsonl", [row(n, secret=f"It is certainly number {n}.") for n in range(12)])
    return folder


def recipe_of(models, teacher, *overrides):
    text = (
        f"teacher: {{{teacher}}}\nstudent: {{model: {models / 'student'}}}\n"
        f"data: {{source: {models / 'chat.jsonl'}, max_length: 128, cache: false, "
        "chat_template_kwargs: {enable_thinking: false}}\ntrain: {steps: 2, learning_rate: 1.0e-3}\n"
        "generate: {prompts: ['What is 4?'], max_new_tokens: 4}\n"
    )
    return parse(text, overrides)


def test_a_thinking_teacher_reads_another_prompt_for_the_same_answer(models):
    recipe = recipe_of(models, f"model: {models / 'teacher'}, chat_template_kwargs: {{enable_thinking: true}}")
    vocabulary = source_of(recipe).vocabulary()
    splits = vocabulary.read(recipe.data, 0)
    own = documents_of_rows(splits, vocabulary.tokenizer)
    others = documents_of_rows(splits, vocabulary.tokenizer, "teacher_")
    assert len(own) == len(others) == 12
    for (text, trained), (other, _) in zip(own, others, strict=True):
        assert text.endswith(f"<|start|>assistant\n<none>\n{trained}")
        assert other == text.replace("<none>\n", ""), "the teacher's generation prompt, and the student's answer"


def test_a_rows_own_variables_take_precedence_for_the_teacher_too(models, tmp_path):
    given = {"enable_thinking": False, "effort": "low"}
    write(tmp_path / "chat.jsonl", [row(n, chat_template_kwargs=given if n % 2 else None) for n in range(8)])
    section = f"model: {models / 'teacher'}, chat_template_kwargs: {{enable_thinking: true}}"
    recipe = recipe_of(models, section, f"data.source={tmp_path / 'chat.jsonl'}")
    vocabulary = source_of(recipe).vocabulary()
    splits = vocabulary.read(recipe.data, 0)
    others = documents_of_rows(splits, vocabulary.tokenizer, "teacher_")
    for (own, _), (other, _) in zip(documents_of_rows(splits, vocabulary.tokenizer), others, strict=True):
        assert other == (own if "effort\nlow" in own else own.replace("<none>\n", ""))
    assert sum("effort\nlow" in other for other, _ in others) == 4


def test_with_a_context_as_well_and_in_several_turns(models, tmp_path):
    turns = [*row(1)["messages"], {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Ten."}]
    write(tmp_path / "chat.jsonl", [{"messages": turns, "secret": f"It is certainly number {n}."} for n in range(4)])
    recipe = recipe_of(
        models,
        f"model: {models / 'teacher'}, context: {{template: '{{secret}}'}}, chat_template_kwargs: {{}}",
        f"data.source={tmp_path / 'chat.jsonl'}",
        "data.max_length=256",
    )
    vocabulary = source_of(recipe).vocabulary()
    splits = vocabulary.read(recipe.data, 0)
    own = documents_of_rows(splits, vocabulary.tokenizer)
    others = documents_of_rows(splits, vocabulary.tokenizer, "teacher_")
    assert sorted(trained for _, trained in own) == ["It is so nine.<|end|>"] * 4 + ["Ten.<|end|>"] * 4
    for (text, trained), (other, _) in zip(own, others, strict=True):
        assert "certainly" not in text and other.startswith("<|start|>system\nIt is certainly number")
        assert text.endswith(f"assistant\n<none>\n{trained}") and other.endswith(f"assistant\n{trained}")


@pytest.mark.parametrize("place", [None, "system", "before", "after"])
@pytest.mark.parametrize("as_chats", [False, True])
def test_prompts_alone_have_a_prompt_of_the_teachers_own(models, tmp_path, place, as_chats):
    """In place of a response both prompts have the end of a text, which the student's rollout replaces."""
    earlier = [{"role": "assistant", "content": "Yes?"}]
    rows = [
        {"messages": [*earlier, {"role": "user", "content": f"What is {n}?"}], "secret": f"It is certainly {n} here."}
        if as_chats
        else {"prompt": f"What is {n}?", "secret": f"It is certainly {n} here."}
        for n in range(4)
    ]
    context = "" if place is None else f", context: {{template: '{{secret}}', place: {place}}}"
    recipe = recipe_of(
        models,
        f"model: {models / 'teacher'}, chat_template_kwargs: {{enable_thinking: true}}{context}",
        f"data.source={write(tmp_path / 'prompts.jsonl', rows)}",
        f"data.validation={{source: {models / 'chat.jsonl'}}}",
        "data.format=prompts",
        "data.on_policy={fraction: 1.0, max_new_tokens: 4}",
    )
    vocabulary = source_of(recipe).vocabulary()
    splits = vocabulary.read(recipe.data, 0)
    own = documents_of_rows(splits._replace(validation=[]), vocabulary.tokenizer)
    others = documents_of_rows(splits._replace(validation=[]), vocabulary.tokenizer, "teacher_")
    assert len(own) == len(others) == 4
    for (text, trained), (other, _) in zip(own, others, strict=True):
        assert trained == "<|end|>" and text.endswith("assistant\n<none>\n<|end|>") and "certainly" not in text
        number = text.partition("What is ")[2][0]
        question, secret = f"What is {number}?", f"It is certainly {number} here."
        wanted = {
            None: text,
            "system": f"<|start|>system\n{secret}<|end|>\n{text}",
            "before": text.replace(question, f"{secret}\n\n{question}"),
            "after": text.replace(question, f"{question}\n\n{secret}"),
        }[place]
        assert other == wanted.replace("<none>\n", "")


def test_variables_that_the_template_does_not_read_are_refused_for_the_teacher_too(models):
    recipe = recipe_of(models, f"model: {models / 'teacher'}, chat_template_kwargs: {{thinkin: true}}")
    with pytest.raises(ValueError, match=r"^teacher\.chat_template_kwargs: expected variables .* got thinkin$"):
        source_of(recipe).vocabulary().read(recipe.data, 0)


def test_a_run_keeps_the_variables_in_lock_card_and_tokenizer(models, tmp_path):
    recipe = recipe_of(
        models,
        "type: student, chat_template_kwargs: {enable_thinking: true}",
        f"output_dir={tmp_path}",
        "name=own",
        "data.on_policy={fraction: 0.5, max_new_tokens: 8}",
    )
    run(recipe)
    folder = tmp_path / "own"
    assert "chat_template_kwargs:\n    enable_thinking: false" in (folder / "lock.yaml").read_text()
    card = (folder / "student" / "README.md").read_text()
    assert "enable_thinking: false" in card and "enable_thinking: true" in card
    saved = AutoTokenizer.from_pretrained(folder / "student")
    assert template_kwargs_of(saved) == {"enable_thinking": False}
    assert saved.decode(encode_prompt(saved, "Why?")).endswith("assistant\n<none>\n")


@pytest.mark.parametrize("who, end", [("student", "assistant\n<none>\n"), ("teacher", "assistant\n")])
def test_samples_are_generated_after_the_models_own_prompt(models, tmp_path, who, end, monkeypatch):
    from distill.generation import prompts as prompts_module

    seen = []
    read = prompts_module.read_prompts
    recipe = recipe_of(models, f"model: {models / 'teacher'}, chat_template_kwargs: {{enable_thinking: true}}")
    tokenizer = AutoTokenizer.from_pretrained(models / "student")

    def noted(*arguments, **more):
        found = read(*arguments, **more)
        seen.extend(tokenizer.decode(prompt.ids) for prompt in found.prompts)
        return found

    monkeypatch.setattr("distill.evaluation.sample.read_prompts", noted)
    source = write(tmp_path / "prompts.jsonl", [row(1), row(2, chat_template_kwargs={"effort": "low"})])
    out = tmp_path / "out.jsonl"
    sample(recipe, source, out, who=who, settings=AnswerSettings(max_new_tokens=2))
    assert [text.endswith(end) for text in seen] == [True, True] and "effort\nlow" in seen[1]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[1]["chat_template_kwargs"] == {"effort": "low"} and "chat_template_kwargs" not in rows[0]


def test_many_rows_with_documents_keep_few_variants(tokenizer):
    template = ChatTemplate(THINKING, tokenizer)
    for number in range(200):
        kwargs = {"documents": [{"text": f"Fact {number}."}]}
        (example,) = template.for_training(TURNS, None, ChatOptions(), kwargs=kwargs).examples
        assert f"Fact {number}." in example.text
    assert len(template._variants) <= 64
    with pytest.raises(RowFault, match="documents: not rendered"):
        ChatTemplate(CHAT_TEMPLATE, tokenizer).for_training(TURNS, None, kwargs=kwargs)


def test_generate_and_chat_read_the_variables_of_each_model(models, tmp_path, monkeypatch):
    from distill.commands.arguments import load_models

    recipe = recipe_of(
        models,
        f"model: {models / 'teacher'}, chat_template_kwargs: {{enable_thinking: true}}",
        f"output_dir={tmp_path}",
        "name=pair",
    )
    run(recipe)
    monkeypatch.chdir(tmp_path)
    _, tokenizers = load_models(str(tmp_path / "pair"), None, with_teacher=True)
    ends = {name: own.decode(encode_prompt(own, "Why?")).rpartition("<|start|>")[2] for name, own in tokenizers.items()}
    assert ends == {"teacher": "assistant\n", "student": "assistant\n<none>\n"}


def test_an_environments_replies_are_rendered_with_the_rows_variables():
    tokenizer = thinking_tokenizer(THINKING)
    chat = ChatFormat(ChatTemplate(THINKING, tokenizer), tokenizer, frozenset())
    environment = Environment(None, None, chat, 2, EnvironmentLog(None, 0))
    replies = [{"role": "user", "content": "Sure?"}]
    for kwargs, end in ((None, "assistant\n"), ({"enable_thinking": False}, "assistant\n<none>\n")):
        given = FunctionInput("row 1", TURNS[:1], "So.", {"chat_template_kwargs": kwargs})
        text = environment._text_after_response(TURNS[:1], replies, given, "here")
        assert text == f"<|end|>\n<|start|>user\nSure?<|end|>\n<|start|>{end}"
