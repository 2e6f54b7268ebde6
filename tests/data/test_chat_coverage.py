"""Text that a chat template drops is always reported; turns end where inference stops."""

import json

import pytest
from test_chat import CHAT, DROPS_REASONING, TOOLS
from test_chat_data import all_rows, learned, load, own_cache, write  # noqa: F401
from tiny import CHAT_TEMPLATE, save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.data import assistant_turns
from distill.data.chat import ChatOptions, ChatTemplate, load_template
from distill.data.rendering import Renderer
from distill.data.rows import RowFault
from distill.generation.prompts import read_prompts
from distill.recipe.data import Fields

CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
ASKED = {"role": "user", "content": "How is it?"}
PARTS = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}", "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CUTS_THOUGHTS = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}")
# as DeepSeek-R1: the prompt opens a thought, and finished turns leave it out
OPENS_AND_CUTS = CUTS_THOUGHTS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# an answer is closed when another turn follows, as Apertus'
CLOSED_BY_THE_NEXT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>{{ m.content }}"
    "{% if not loop.last %}<|end|>{% endif %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def texts(source, messages, tools=None, tokenizer=None, **options):
    """Return the text trained on in each example."""
    template = ChatTemplate(source, tokenizer or tiny_tokenizer())
    made = template.for_training(messages, tools, ChatOptions(**options))
    return [[each.text[start:end] for start, end in each.spans] for each in made.examples]


# what is not written


@pytest.mark.parametrize(
    "source, messages, tools, field",
    [
        (CHAT_TEMPLATE, [ASKED, answer("", tool_calls=[CALL])], None, "tool_calls"),
        (
            TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            [ASKED, answer("", tool_calls=[CALL, CALL])],
            [TOOL],
            "the second of parallel tool_calls",
        ),
        (
            TOOLS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
            [ASKED, answer("I look.", tool_calls=[CALL])],
            [TOOL],
            "content beside tool_calls",
        ),
        (CHAT_TEMPLATE, [ASKED, answer("Fine.")], [TOOL], "tools"),
        (
            "{% for m in messages if m.role != 'system' %}" + CHAT_TEMPLATE.partition("%}")[2].replace("message", "m"),
            [{"role": "system", "content": "Be brief."}, ASKED, answer("Fine.")],
            None,
            "system",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}" + TOOLS.partition("{% for m in messages %}")[2],
            [ASKED, answer("", tool_calls=[CALL]), {"role": "tool", "content": "Snow"}, answer("Snow.")],
            None,
            "tool",
        ),
    ],
    ids=["calls", "the second call", "text beside a call", "tools", "a system prompt", "a tool's result"],
)
def test_text_that_the_template_leaves_out_drops_the_row(source, messages, tools, field, tokenizer):
    with pytest.raises(RowFault, match=rf"^{field}: not rendered by this chat template; choose a template"):
        texts(source, messages, tools)


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_a_message_of_the_words_of_another_one_is_not_taken_for_it(dropped):
    """Of questions and answers that are said twice, the template leaves one out."""
    chat = [ASKED, answer("Fine."), ASKED, answer("Fine."), {"role": "user", "content": "So?"}, answer("Yes.")]
    less = CHAT_TEMPLATE.replace("in messages", f"in messages[:{dropped}] + messages[{dropped + 1}:]")
    assert texts(CHAT_TEMPLATE, chat) == [["Fine.<|end|>", "Fine.<|end|>", "Yes.<|end|>"]]
    with pytest.raises(RowFault, match=r"not rendered by this chat template|cannot be located"):
        texts(less, chat, train_on="last")


def test_words_that_only_the_answer_holds_are_not_the_prompts():
    less = CHAT_TEMPLATE.replace("in messages", "in messages if message['role'] != 'system'")
    chat = [{"role": "system", "content": "Fine."}, ASKED, answer("Fine.")]
    with pytest.raises(RowFault, match=r"^system: not rendered by this chat template"):
        texts(less, chat)


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, answer("One. ### Two.")],
        [{"role": "user", "content": "One? ### Two?"}, answer("Fine.")],
        [ASKED, answer("One. ### Two."), ASKED, answer("Fine.")],
    ],
    ids=["an answer", "a question", "an earlier answer"],
)
def test_text_that_a_template_cuts_drops_the_row_though_a_marker_in_its_place_is_written(messages):
    cuts = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('###')[0]")
    assert texts(cuts, [ASKED, answer("One.")]) == [["One.<|end|>"]]
    with pytest.raises(RowFault, match=r"not rendered by this chat template.*incomplete: 'One. \#\#\# Two.'|'One\?"):
        texts(cuts, messages, train_on="all")


def test_arguments_are_looked_for_word_by_word_in_whatever_way_they_are_escaped(tokenizer):
    arguments = {"text": 'Größe "a"\nb\t\\c', "deep": [{"n": 12.5}, "日本"], "flag": True, "none": {}}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    assert len(texts(TOOLS, [ASKED, answer("", tool_calls=[call])])) == 1
    less = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments.text")
    with pytest.raises(RowFault, match=r"^tool_calls: not rendered"):
        texts(less, [ASKED, answer("", tool_calls=[call])])


def test_rows_are_counted_by_field_and_template_and_the_run_refused_when_they_are_most(tmp_path, tokenizer):
    calls = {"messages": [ASKED, answer("", tool_calls=[CALL])]}
    plain = [{"messages": [{"role": "user", "content": f"And {n}?"}, answer("Fine.")]} for n in range(4)]
    some = load(write(tmp_path / "some.jsonl", [calls] * 3 + plain), tokenizer)
    reason = "tool_calls: not rendered by this chat template; choose a template with tools"
    assert some.report.dropped == {reason: 3} and f"dropped 3: {reason}" in str(some.report)
    assert {learned(row, tokenizer) for row in all_rows(some)} == {"Fine.<|end|>"}
    expected = (
        r"^data\.chat_template: tool_calls: not rendered by this chat template; 5 of 9 rows of \S+ dropped; "
        "choose a template with tools"
    )
    with pytest.raises(ValueError, match=expected):
        load(write(tmp_path / "most.jsonl", [calls] * 5 + plain), tokenizer)
    (tmp_path / "mine.jinja").write_text(CHAT_TEMPLATE)
    with pytest.raises(ValueError, match=r"not rendered by the chat template mine\.jinja; 5 of 9"):
        load(str(tmp_path / "most.jsonl"), tokenizer, chat_template=str(tmp_path / "mine.jinja"))


# reasoning


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "the text"])
def test_reasoning_is_learned_where_the_template_writes_it(field):
    turn = answer("Four.", **{field: "2 and 2"}) if field != "the text" else answer("<think>2 and 2</think>Four.")
    assert texts(THINKS, [ASKED, turn]) == [["<think>2 and 2</think>Four.<|end|>"]]
    assert texts(THINKS, [ASKED, turn], reasoning="drop") == [["Four.<|end|>"]]
    assert texts(THINKS, [ASKED, turn], reasoning="require") == [["<think>2 and 2</think>Four.<|end|>"]]


def test_reasoning_that_is_not_written_is_named_dropped_or_required(tmp_path, tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"And {n}?"}, answer("Four.", reasoning_content="2 and 2")]}
        for n in range(4)
    ]
    bare = [{"messages": [ASKED, answer("Fine.")]}] * 5
    path = write(tmp_path / "a.jsonl", rows + bare)
    kept = load(path, tokenizer)
    assert kept.report.unrendered == {"reasoning": 4} and not kept.report.dropped
    assert "reasoning in 4 rows: not rendered by this chat template; trained on without it" in str(kept.report)
    required = load(path, tokenizer, reasoning="require")
    assert sum(required.report.dropped.values()) == 4 and not required.report.unrendered
    assert {learned(row, tokenizer) for row in all_rows(required)} == {"Fine.<|end|>"}
    dropped = load(path, tokenizer, reasoning="drop")
    assert not dropped.report.unrendered and not dropped.report.dropped and not dropped.report.from_cache


def test_reasoning_in_the_text_that_a_template_cuts_is_named(tokenizer):
    made = ChatTemplate(CUTS_THOUGHTS, tokenizer).for_training([ASKED, answer("<think>2 and 2</think>Four.")])
    assert made.named == ("reasoning",) and made.examples[0].text.endswith("Four.<|end|>\n")


def test_reasoning_is_written_after_the_prompt_that_opens_it(tokenizer):
    for turn in (answer("<think>\n2 and 2\n</think>\n\nFour."), answer("Four.", reasoning_content="2 and 2")):
        made = ChatTemplate(OPENS_AND_CUTS, tokenizer).for_training([ASKED, turn, ASKED, turn])
        assert made.rewritten and not made.named
        for example in made.examples:
            ((start, _),) = example.spans
            assert example.text[:start].endswith("<|start|>assistant\n<think>\n")
            assert example.text[start:] == "2 and 2\n</think>\n\nFour.<|end|>"


def test_inspect_and_check_name_what_is_not_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "teacher", tiny_model(tiny_tokenizer()), tiny_tokenizer())
    rows = [
        {"messages": [{"role": "user", "content": f"And {n}?"}, answer("Four.", reasoning_content="2")]}
        for n in range(8)
    ]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "r.yaml").write_text(
        "{teacher: {model: ./teacher}, student: {from_teacher: {layers: 1}}, data: {source: ./a.jsonl, "
        "max_length: 64}, train: {steps: 1, device: cpu}}"
    )
    for command in ("inspect", "check"):
        run_command([command, "r.yaml"])
        assert "reasoning in 8 rows: not rendered by this chat template" in " ".join(capsys.readouterr().out.split())


# empty answers


def test_empty_answers_are_dropped_unless_the_recipe_keeps_them(tmp_path, tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"And {n}?"}, answer(said)]}
        for n in range(4)
        for said in ("Fine.", "")
    ]
    path = write(tmp_path / "a.jsonl", rows)
    splits = load(path, tokenizer)
    assert splits.report.dropped == {"empty": 4}
    assert {learned(row, tokenizer) for row in all_rows(splits)} == {"Fine.<|end|>"}
    kept = load(path, tokenizer, empty_answers="keep")
    assert sorted(learned(row, tokenizer) for row in all_rows(kept)) == ["<|end|>"] * 4 + ["Fine.<|end|>"] * 4
    thoughts = [ASKED, answer("", reasoning_content="Hm.")]
    assert texts(THINKS, thoughts) == [["<think>Hm.</think><|end|>"]]
    for source, options in ((CHAT_TEMPLATE, {}), (THINKS, {"reasoning": "drop"})):
        with pytest.raises(RowFault, match="empty"):
            texts(source, thoughts, **options)


# layouts


def test_text_for_a_template_of_parts_and_developer_for_one_of_system():
    chat = [{"role": "developer", "content": "Be brief."}, ASKED, answer("Fine.")]
    for source in (PARTS, CHAT_TEMPLATE):
        text = ChatTemplate(source, tiny_tokenizer()).for_training(chat).examples[0].text
        assert (
            text
            == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHow is it?<|end|>\n<|start|>assistant\nFine.<|end|>\n"
        )
    knows = "{% if messages[0]['role'] == 'developer' %}{% endif %}" + CHAT_TEMPLATE
    assert "<|start|>developer\nBe brief." in ChatTemplate(knows, tiny_tokenizer()).render(chat)


@pytest.mark.parametrize(
    "turn",
    [
        answer(None, tool_calls=[CALL]),
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": '{"place": "Oslo"}'}]},
        answer(None, function_call={"name": "look", "arguments": '{"place": "Oslo"}'}),
    ],
    ids=["null beside it", "without function", "function_call"],
)
@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content or '' }}",
        "{% if m.content is not none %}{{ m.content + '' }}{% endif %}",
        "{% if m.content is none %}{% else %}{{ m.content }}{% endif %}",
    ],
    ids=["any", "text or null", "null or text"],
)
def test_layouts_of_a_tool_call_are_one(turn, content, tmp_path, tokenizer):
    source = TOOLS.replace("{{ m.content }}", content)
    rows = [{"messages": [{"role": "user", "content": f"And {n}?"}, turn]} for n in range(3)]
    splits = load(write(tmp_path / "a.jsonl", rows), tiny_tokenizer(chat_template=source))
    assert {learned(row, tokenizer) for row in all_rows(splits)} == {'[look({"place": "Oslo"})]<|end|>'}


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"tool_calls": {"name": "look"}}, "wrong type"),
        ({"tool_calls": ["look"]}, "wrong type"),
        ({"tool_calls": [{"function": "look"}]}, "wrong type"),
        ({"tool_calls": "[{"}, "invalid JSON"),
        ({"reasoning_content": ["2 and 2"]}, "wrong type"),
    ],
)
def test_calls_and_reasoning_that_are_none_are_counted(more, reason, tmp_path):
    rows = [{"messages": [ASKED, answer("Fine.", **more)]}, *[{"messages": [ASKED, answer(f"{n}.")]} for n in range(3)]]
    splits = load(write(tmp_path / "a.jsonl", rows), tiny_tokenizer(chat_template=TOOLS))
    assert splits.report.dropped == {reason: 1}


def test_calls_as_text_are_read_and_an_empty_list_is_none(tmp_path, tokenizer):
    source = TOOLS.replace("{{ m.content }}", "{{ m.content }}{% if 'tool_calls' in m %}!{% endif %}")
    turns = [answer("", tool_calls=json.dumps([CALL])), answer("Fine.", tool_calls=[])] * 2
    rows = [{"messages": [{"role": "user", "content": f"And {n}?"}, turn]} for n, turn in enumerate(turns)]
    splits = load(write(tmp_path / "a.jsonl", rows), tiny_tokenizer(chat_template=source))
    assert {learned(row, tokenizer) for row in all_rows(splits)} == {
        '![look({"place": "Oslo"})]<|end|>',
        "Fine.<|end|>",
    }


# where turns end


# an example a turn


def test_examples_of_one_conversation_are_held_out_together_and_kept_apart_in_the_cache(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=DROPS_REASONING)
    rows = [
        {
            "messages": [
                CHAT[0],
                {"role": "user", "content": f"Is it {n}?"},
                answer(f"Yes, {n}."),
                CHAT[3],
                answer(f"No, {n}."),
            ]
        }
        for n in range(12)
    ]
    path = write(tmp_path / "a.jsonl", rows)
    splits = load(path, tokenizer, validation={"fraction": 0.25})
    assert splits.report.rewritten == 12 and len(splits.train) == 18 and len(splits.validation) == 6
    assert "one example a turn (data.train_on: each) of 12 chats" in str(splits.report)
    said = [{learned(row, tokenizer).split(", ")[1] for row in part} for part in (splits.train, splits.validation)]
    assert not said[0] & said[1] and len(said[1]) == 3
    last = load(path, tokenizer, train_on="last")
    assert len(all_rows(last)) == 12 and not last.report.rewritten
    for row in all_rows(splits):
        thought = "<think>\n\n</think>\n\n"
        assert learned(row, tokenizer).startswith(thought)
        text = tokenizer.decode(row["input_ids"])
        assert text.count(thought) == 1 and text.endswith(learned(row, tokenizer))


@pytest.mark.full
def test_processes_make_the_same_examples(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=DROPS_REASONING)
    rows = [{"messages": [*CHAT[:3], {"role": "user", "content": f"Is it {n}?"}, CHAT[4]]} for n in range(1200)]
    path = write(tmp_path / "a.jsonl", rows)
    one, two = (load(path, tokenizer, workers=workers, cache=False) for workers in (0, 2))
    assert (
        one.train["input_ids"][:] == two.train["input_ids"][:] and one.report.rewritten == two.report.rewritten == 1200
    )


def test_turns_whose_prompts_are_too_long_are_left_out_and_the_others_trained(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=DROPS_REASONING)
    turns = [turn for n in range(40) for turn in ({"role": "user", "content": f"Is it {n}?"}, answer(f"Yes, {n}."))]
    splits = load(write(tmp_path / "a.jsonl", [{"messages": turns}, {"messages": turns[:2]}]), tokenizer)
    kept = splits.report.documents + splits.report.validation_documents
    assert splits.report.left_out + kept == 41 and 2 <= kept < 8 and not splits.report.dropped
    assert f"128 tokens or more: {splits.report.left_out}" in str(splits.report)


def test_prompts_of_chats_are_those_of_inference_and_whole(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=DROPS_REASONING)
    template = load_template("tokenizer", tokenizer)
    write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": [ASKED], "tools": [TOOL]}])
    found = read_prompts(str(tmp_path / "a.jsonl"), tokenizer, template, Fields(), max_length=200)
    assert [tokenizer.decode(each.ids) for each in found.prompts] == [template.render(CHAT[:4], prompt=True)]
    assert list(found.dropped) == ["tools: not rendered by this chat template; choose a template with tools"]


# long conversations


def long_chat(count):
    said = [f"{'Is it' if n % 2 == 0 else 'It is'} number {n}." for n in range(count)]
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(said)]


def characters_of(source, chat, monkeypatch):
    """Return the total characters of all renderings of a conversation."""
    spent, raw = [], Renderer.raw

    def counted(self, *arguments, **more):
        rendered = raw(self, *arguments, **more)
        spent.append(len(rendered.text))
        return rendered

    with monkeypatch.context() as watch:
        watch.setattr(Renderer, "raw", counted)
        texts(source, chat)
    return sum(spent)


@pytest.mark.full
def test_a_long_conversation_is_rendered_in_linear_time_and_to_the_same_spans(monkeypatch):
    short, long = (characters_of(CHAT_TEMPLATE, long_chat(count), monkeypatch) for count in (400, 1600))
    assert long < 4.2 * short, "four times the messages, four times the characters"
    for source in (CHAT_TEMPLATE, CLOSED_BY_THE_NEXT, TOOLS):
        chat = [{"role": "system", "content": "Be brief."}, *long_chat(150)]
        template = ChatTemplate(source, tiny_tokenizer())
        windows = template.for_training(chat)
        with monkeypatch.context() as limit:
            limit.setattr(assistant_turns, "WHOLE", 1000)
            assert ChatTemplate(source, tiny_tokenizer()).for_training(chat) == windows
        assert len(windows.examples[0].spans) == 75
