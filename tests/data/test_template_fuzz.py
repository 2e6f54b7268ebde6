"""A turn's text is what the template renders for that turn, whatever the conversation: turns and a fuzz of shapes.

The templates are our own; each does what one of those that models ship does (named in its comment).
`template_fuzz.py` runs the same over the templates of two packages.
"""

import pytest
from template_fuzz import TOOL, Conversation, faults_of, run
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from distill.data.assistant_turns import Turns
from distill.data.chat import ChatOptions, ChatTemplate
from distill.data.formats import RowFormat
from distill.data.load import load_data
from distill.data.rendering import NOT_LOCATED
from distill.data.rows import RowFault
from distill.recipe import Data

ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
TOOLS = "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
TEMPLATES = {
    "plain": TOOLS
    + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|end|>\n{% endfor %}" + ASK,
    # reasoning of earlier turns is dropped, and the last turn has it, or an empty one (Qwen3)
    "thinks last": TOOLS
    + "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + CALLS + "<|end|>\n{% endfor %}" + ASK,
    # the last turn has another header than the generation prompt and than earlier turns (Hy3, Cohere2MoE, Spark 2.5)
    "heads the last": TOOLS
    + "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' and loop.last %}{{ ':thinks' if m.reasoning_content else ':' }}{% endif %}{{ '\\n' }}"
    "{% if loop.last and m.reasoning_content %}{{ m.reasoning_content }}<|pad|>{% endif %}"
    "{{ m.content | trim }}" + CALLS + "<|end|>\n{% endfor %}" + ASK,
    # an earlier message changes with the number of messages, before every turn
    "counts": TOOLS
    + "{{ messages | length }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    + CALLS + "<|end|>\n{% endfor %}" + ASK,
    # two messages of the assistant in a row are one turn (Gemma 4)
    "joins": TOOLS
    + "{% for m in messages %}{% if m.role != 'assistant' or loop.previtem is not defined "
    "or loop.previtem.role != 'assistant' %}<|start|>{{ m.role }}\n{% endif %}{{ m.content }}" + CALLS +
    "{% if m.role != 'assistant' or loop.nextitem is not defined or loop.nextitem.role != 'assistant' %}<|end|>\n"
    "{% endif %}{% endfor %}" + ASK,
    # the assistant's turn stays open until the user's next one, over calls, which have an end of their own (Apertus)
    "stays open": TOOLS
    + "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if not ns.open %}<|start|>assistant\n{% set ns.open = true %}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}" + CALLS + "<|pad|>{% endif %}{% elif m.role == 'tool' %}[{{ m.content }}]"
    "{% else %}{% if ns.open %}<|end|>{% set ns.open = false %}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt and not ns.open %}<|start|>assistant\n{% endif %}",
    # two turns of one role in a row are refused (Mistral, and many others)
    "alternates": "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}" + ASK,
    # markers, in a template that drops reasoning and counts messages
    "marked": "{{ messages | length }}{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}" + ASK,
}  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def said(text, thought=None):
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


ALIKE = " please answer in one short sentence and do not repeat the question. "
SAME = " the same long ending of sixty four characters and a little more, here"
TURNS = {
    "two turns with reasoning": [user("USERQ1"), said("A1 done", "T1"), user("USERQ2 please"), said("A2 done", "T2")],
    "reasoning in one turn and none in the next": [
        user("USERQ1"),
        said("ANSA1", "THK1 hm"),
        user("USERQ2"),
        said("ANSA2"),
        user("USERQ3"),
        said("ANSA3"),
    ],
    "two questions that end alike": [user("FIRST." + ALIKE), said("ANSA1"), user("SECOND." + ALIKE), said("ANSA2")],
    "the same question and answer twice": [user("Again?"), said("Yes."), user("Again?"), said("Yes.")],
    "two answers in a row that end like the question": [user("Q" + SAME), said("A" + SAME), said("B" + SAME)],
}


def template_of(name):
    return ChatTemplate(TEMPLATES[name], tiny_tokenizer())


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", TURNS)
def test_a_turn_is_never_found_in_another_one(name, kind):
    talk = Conversation(TURNS[kind], None)
    for train_on in ("all", "each", "last"):
        assert not faults_of(template_of(name), talk, train_on)


@pytest.mark.parametrize("name", ["thinks last", "counts", "marked"])
def test_turns_after_a_rewritten_history_are_trained(name):
    """The prompt of each is that of inference, although the text with the turn has another one."""
    messages = TURNS["two questions that end alike"]
    template = template_of(name)
    first, second = template.for_training(messages).examples
    for example, count in ((first, 1), (second, 3)):
        start, end = example.spans[0]
        assert example.text[:start] == template.render(messages[:count], prompt=True)
        assert example.text[start:end].endswith(f"ANSA{(count + 1) // 2}<|end|>") and end == len(example.text)


def test_two_answers_that_a_template_joins_are_refused():
    with pytest.raises(RowFault, match="cannot be located"):
        template_of("joins").for_training(TURNS["two answers in a row that end like the question"])


def test_a_turn_that_stays_open_ends_with_the_token_that_closes_it():
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": {"what": "x"}}}
    messages = [user("What is it?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    sample = RowFormat("chat", {"messages": "messages"}).sample({"messages": messages, "tools": [TOOL]})
    (example,) = template_of("stays open").for_training(sample.messages, sample.tools).examples
    (span,) = example.spans
    assert example.text[slice(*span)].startswith("<call>") and example.text[slice(*span)].endswith(
        "</call><|pad|><|end|>"
    )


def test_a_row_whose_shape_the_template_cannot_split_is_one_dropped_row(tmp_path):
    import json

    joined = TURNS["two answers in a row that end like the question"]
    rows = [{"messages": [user(f"What is {n}?"), said("Nine.")]} for n in range(4)]
    rows.insert(2, {"messages": joined})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tiny_tokenizer(chat_template=TEMPLATES["joins"])
    report = load_data(Data(source=str(file), cache=False), tokenizer, seed=0).report
    assert report.dropped == {NOT_LOCATED: 1} and report.examples[NOT_LOCATED].startswith("row 3: ")
    file.write_text("\n".join(json.dumps({"messages": joined}) for _ in range(3)))
    with pytest.raises(ValueError, match=r"^data\.chat_template: no trainable tokens .* 3 dropped: .*generation"):
        load_data(Data(source=str(file), cache=False), tokenizer, seed=0)


def test_conversations_of_any_shape():
    templates = {name: template_of(name) for name in TEMPLATES}
    outcomes, wrong = run(templates, 8, seed=1)
    assert not wrong, "\n".join(wrong)
    assert outcomes["right"] > outcomes.total() // 3 and outcomes["refused"] > 0


@pytest.mark.full
def test_many_conversations_of_any_shape():
    outcomes, wrong = run({name: template_of(name) for name in TEMPLATES}, 50, seed=2)
    assert not wrong, "\n".join(wrong)
    assert outcomes["right"] > outcomes.total() // 3


def test_the_oracle_sees_a_turn_that_is_found_by_the_end_of_its_prompt(fault):
    def by_its_end(self, messages, tools, number, before, upto):
        place = upto.find(before[-64:])
        return None if place < 0 or upto.count(before[-64:]) > 1 else place + 64

    fault.setattr(Turns, "_place", by_its_end)
    found = {
        name: kind
        for name in TEMPLATES
        for kind, messages in TURNS.items()
        if any(faults_of(template_of(name), Conversation(messages, None), train_on) for train_on in ("all", "last"))
    }
    assert {"heads the last", "joins"} <= found.keys()


def test_the_plain_template_is_the_one_of_other_tests():
    assert template_of("plain").render(TURNS["the same question and answer twice"]) == ChatTemplate(
        CHAT_TEMPLATE, tiny_tokenizer()
    ).render(TURNS["the same question and answer twice"])
    assert ChatOptions() == ChatOptions("all", "keep", "drop")
