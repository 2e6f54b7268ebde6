"""Arguments of tool calls: an object or JSON text, in any characters, are rendered as inference renders them."""

import json

import pytest
from test_chat import TOOLS
from tiny import tiny_tokenizer

from distill.data.chat import ChatTemplate
from distill.data.formats import RowFormat
from distill.data.rows import RowFault

PRINTS_TEXT = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments")
ARGUMENTS = [
    {},
    {"city": "Tromsø"},
    {"city": "日本 😀"},
    {"note": 'a\n"b"\tc\\d/e'},
    {"n": 1e5, "flag": True, "none": None, "list": []},
    {"text": "{}"},
]


def arguments_read(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    row = {
        "messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    }
    return RowFormat("chat", {"messages": "messages"}).sample(row).messages


@pytest.mark.parametrize("source", [TOOLS, PRINTS_TEXT], ids=["as objects", "as text"])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_json_text_is_rendered_as_the_template_renders_it(source, ascii_only, arguments):
    template = ChatTemplate(source, tiny_tokenizer())
    messages = arguments_read(json.dumps(arguments, ensure_ascii=ascii_only))
    (example,) = template.for_training(messages).examples
    assert example.text == template.render(messages) or template.render(messages).startswith(example.text)
    prompt = template.render(messages[:1], prompt=True)
    assert example.text.startswith(prompt) and "look" in example.text[len(prompt) :]


def test_numbers_of_json_text_may_be_written_as_the_template_prints_them():
    template = ChatTemplate(PRINTS_TEXT, tiny_tokenizer())
    (example,) = template.for_training(arguments_read('{"n": 1E5}')).examples
    assert "1E5" in example.text


@pytest.mark.parametrize("arguments", ["", "  ", None])
def test_empty_arguments_are_an_empty_object(arguments):
    assert arguments_read(arguments)[-1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ['{"a": ', "look", "[1]", "5", ["a"], 5])
def test_arguments_that_are_no_json_object_drop_the_row(arguments):
    with pytest.raises(RowFault, match=r"^arguments of a tool call are no JSON: column 'messages': "):
        arguments_read(arguments)
