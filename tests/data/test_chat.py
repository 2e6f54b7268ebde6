"""Chat templates: what is learned is what the assistant wrote, whatever the template looks like."""

import datetime

import pytest
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from distill.data.chat import ChatOptions, ChatTemplate, load_template
from distill.data.rendering import FROZEN_DAY, TemplateError, freeze_date
from distill.data.rows import RowFault

ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}" + ASK
)
MARKED_CONTENT_ONLY = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
MARKED_TOO_FAR = MARKED.replace("<|end|>{% endgeneration %}", "<|end|>{{ '\\n' }}{% endgeneration %}")
# reasoning stays with the last turn only, as in Qwen3
DROPS_REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>{{ '\\n' }}{% endfor %}" + ASK
)
# the prompt opens a thought that finished turns do not hold, as in DeepSeek-R1
OPENS_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>{{ m.content }}<|end|>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|><think>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
TOOLS = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}({{ call.function.arguments | tojson }})]{% endfor %}"
    "<|end|>{{ '\\n' }}{% endfor %}" + ASK
)
# a whole chat ends with one token more, as in Phi-3
ENDS_THE_CHAT = CHAT_TEMPLATE.replace("{% endif %}", "{% else %}<|pad|>{% endif %}")
# the last turn is closed by another token than the others; with reasoning that only the last one keeps, as in gpt-oss
CLOSES_THE_LAST = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|pad|>{% else %}<|end|>{% endif %}{% endfor %}" + ASK
)
CLOSES_THE_LAST_AND_DROPS = CLOSES_THE_LAST.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
)
COUNTS = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]
BOTH = ["First.<|end|>", "Second.<|end|>"]


def learned(source, tokenizer, messages, tools=None, **options):
    """Return the tokens trained on, example by example; for one example its parts."""
    first = options.pop("first_trained", 0)
    made = ChatTemplate(source, tokenizer).for_training(messages, tools, ChatOptions(**options), first_trained=first)
    parts = [[example.text[start:end] for start, end in example.spans] for example in made.examples]
    return parts if len(parts) > 1 else parts[0]


@pytest.mark.parametrize(
    "source",
    [CHAT_TEMPLATE, MARKED, MARKED_CONTENT_ONLY, MARKED_TOO_FAR, OPENS_THOUGHT, TOOLS, ENDS_THE_CHAT],
    ids=[
        "plain prefix",
        "marked",
        "marks content only",
        "marks beyond the end",
        "opens a thought",
        "tools",
        "ends the chat",
    ],
)
def test_all_turns_or_the_last_with_their_end_tokens(source, tokenizer):
    assert learned(source, tokenizer, CHAT) == BOTH
    assert learned(source, tokenizer, CHAT, train_on="last") == BOTH[1:]
    assert learned(source, tokenizer, CHAT[1:]) == BOTH
    assert learned(source, tokenizer, [*CHAT, {"role": "user", "content": "And?"}]) == BOTH


def test_a_template_that_rewrites_earlier_turns(tokenizer):
    thought = "<think>\n\n</think>\n\n"
    assert learned(DROPS_REASONING, tokenizer, CHAT) == [[f"{thought}First.<|end|>"], [f"{thought}Second.<|end|>"]]
    made = ChatTemplate(DROPS_REASONING, tokenizer).for_training(CHAT)
    assert made.rewritten
    for example, end in zip(made.examples, (2, 4), strict=True):
        prompt = ChatTemplate(DROPS_REASONING, tokenizer).render(CHAT[:end], prompt=True)
        assert example.text[: example.spans[0][0]] == prompt


def test_an_end_token_inside_an_answer_does_not_end_the_turn_early(tokenizer):
    chat = [CHAT[1], {"role": "assistant", "content": "It is <|end|> here."}, *CHAT[3:]]
    assert learned(DROPS_REASONING, tokenizer, chat)[0] == ["<think>\n\n</think>\n\nIt is <|end|> here.<|end|>"]
    assert learned(CHAT_TEMPLATE, tokenizer, chat)[0] == "It is <|end|> here.<|end|>"


def test_a_template_that_ends_no_turn_gets_the_end_of_text_token(tokenizer):
    assert learned(PLAIN, tokenizer, CHAT) == [["First.<|end|>"], ["Second.<|end|>"]]


def test_tool_calls_are_learned_and_tool_results_are_not(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert learned(TOOLS, tokenizer, chat, [schema]) == ['[add({"a": 1})]<|end|>', "Two.<|end|>"]


CALLS = (
    "{% for m in messages %}<|start|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}WRITES{% endfor %}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    "writes, said",
    [
        ("{{ call.function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '(' + call.function.arguments + ')' }}", '({"a": 1})'),  # as DeepSeek's
        ("{{ call.function.arguments }}", '{"a": 1}'),
        ("{% for name, value in call.function.arguments | items %}{{ name }}={{ value }}{% endfor %}", "a=1"),
        (
            "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}",
            '{"a": 1}',
        ),
        ("{{ call.function.name }}", "add"),
    ],
    ids=["as JSON", "as text", "printed", "item by item", "as it is", "not at all"],
)
def test_arguments_of_tool_calls_are_given_as_the_template_reads_them(writes, said, tokenizer):
    """Objects (transformers) and JSON text (OpenAI) end as the same words, neither quoted twice nor as Python."""
    for arguments in ({"a": 1}, '{"a": 1}'):
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        chat = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        template = ChatTemplate(CALLS.replace("WRITES", writes), tokenizer)
        assert template.render(chat) == f"<|start|>1 + 1?<|end|><|start|>{said}<|end|>"
        assert call["function"]["arguments"] is arguments, "the caller's row is not touched"


def test_messages_before_first_trained_are_prompt(tokenizer):
    for source in (CHAT_TEMPLATE, MARKED):
        assert learned(source, tokenizer, CHAT, first_trained=3) == BOTH[1:]


def test_a_turn_is_found_after_a_prompt_that_a_later_message_changes(tokenizer):
    (example,) = ChatTemplate(COUNTS, tokenizer).for_training(CHAT[:3], None, ChatOptions("each")).examples
    assert example.text == "2Be brief.<|end|>One?<|end|>First.<|end|>"
    assert [example.text[start:end] for start, end in example.spans] == ["First.<|end|>"]


def test_a_row_whose_prompt_is_no_prefix_is_dropped_with_what_would_work(tokenizer):
    source = COUNTS.replace("<|end|>", "")  # nothing tells where a question ends and the answer begins
    with pytest.raises(RowFault, match=r"(?s)\{% generation %\} markers.*'2Be"):
        ChatTemplate(source, tokenizer).for_training(CHAT[:3])


@pytest.mark.parametrize("source", [CLOSES_THE_LAST, CLOSES_THE_LAST_AND_DROPS], ids=["same words", "rewritten"])
def test_a_template_that_closes_the_last_turn_otherwise_makes_an_example_of_each(source, tokenizer):
    thought = "<think></think>" if source is CLOSES_THE_LAST_AND_DROPS else ""
    assert learned(source, tokenizer, CHAT) == [[f"{thought}First.<|pad|>"], [f"{thought}Second.<|pad|>"]]
    assert learned(source, tokenizer, CHAT, train_on="last") == [f"{thought}Second.<|pad|>"]


def test_each_makes_an_example_a_turn_where_the_template_rewrites_nothing(tokenizer):
    assert learned(CHAT_TEMPLATE, tokenizer, CHAT, train_on="each") == [BOTH[:1], BOTH[1:]]


@pytest.mark.parametrize(
    "messages, reason",
    [
        (CHAT[:2], "no assistant turn"),
        (CHAT[2:3], "begins with the assistant"),
        ([{"role": "user"}, CHAT[2]], "refuses the row"),
    ],
)
def test_a_chat_that_cannot_be_used_is_a_row_fault(messages, reason, tokenizer):
    strict = "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    with pytest.raises(RowFault, match=reason):
        ChatTemplate(strict + CHAT_TEMPLATE, tokenizer).for_training(messages)


def test_a_template_that_is_not_jinja_is_refused(tokenizer):
    with pytest.raises(TemplateError, match=r"not a valid Jinja template, line 1"):
        ChatTemplate("{% for %}", tokenizer)


# dates


def test_todays_date_is_frozen_and_recorded(tokenizer):
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE, tokenizer)
    assert template.frozen_date == FROZEN_DAY
    assert template.render(CHAT).startswith(FROZEN_DAY.strftime("%d %b %Y") + "<|start|>")
    assert learned(template.source, tokenizer, CHAT) == BOTH


def test_a_template_that_asks_whether_dates_exist_keeps_its_answer(tokenizer):
    source = '{% if strftime_now is defined %}{{ strftime_now("%Y-%m") }}{% else %}none{% endif %}'
    frozen, day = freeze_date(source, datetime.date(2030, 2, 3))
    assert day == datetime.date(2030, 2, 3)
    assert ChatTemplate(frozen, tokenizer).render(CHAT) == "2030-02"


def test_a_template_without_a_date_is_left_alone(tokenizer):
    assert freeze_date(CHAT_TEMPLATE) == (CHAT_TEMPLATE, None)


def test_a_date_that_cannot_be_frozen_is_refused():
    with pytest.raises(TemplateError, match="expected literal date formats"):
        freeze_date("{% set f = '%Y' %}{{ strftime_now(f) }}")


# choosing a template


def test_templates_load_from_a_file_the_tokenizer_or_nowhere(tokenizer, tmp_path):
    assert load_template("none", tokenizer) is None
    assert load_template("tokenizer", tiny_tokenizer(chat_template=None)) is None
    assert load_template("tokenizer", tokenizer).source == CHAT_TEMPLATE
    file = tmp_path / "mine.jinja"
    file.write_text(MARKED)
    assert load_template(str(file), tokenizer).marked
    with pytest.raises(ValueError, match=r"data\.chat_template: expected tokenizer, none or a \.jinja file"):
        load_template(str(tmp_path / "gone.jinja"), tokenizer)


@pytest.mark.full
def test_smollm2_whose_template_has_no_markers(smollm2_tokenizer):
    source = smollm2_tokenizer.chat_template
    assert "generation %}" not in source
    ends = [text.replace("<|end|>", "<|im_end|>") for text in BOTH]
    assert learned(source, smollm2_tokenizer, CHAT) == ends
    assert learned(source, smollm2_tokenizer, CHAT[1:], train_on="last") == ends[1:]
