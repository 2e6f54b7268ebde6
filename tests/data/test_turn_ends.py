"""The end of a turn in training: the token that inference stops at, by the template and the model's settings."""

import json

from test_chat_coverage import (
    ASKED,
    CALL,
    CLOSED_BY_THE_NEXT,
    answer,
    texts,
)
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.data.chat import load_template
from distill.generation.stopping import end_tokens

# no turn is closed: the next one's header ends it, as GLM's
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def served(folder, source, specials, **config):
    """A tokenizer read from a folder whose generation configuration is `config`."""
    save_tiny(folder, None, tiny_tokenizer(256 + len(specials), chat_template=source, specials=specials))
    (folder / "generation_config.json").write_text(json.dumps(config))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


SPECIALS = ("<|end|>", "<|user|>", "<|pad|>", "<|tool|>", "<|assistant|>", "<|system|>")


def test_the_next_header_ends_a_turn_where_the_model_stops_at_it(tmp_path):
    tokenizer = served(tmp_path / "glm", HEADERS, SPECIALS, eos_token_id=[0, 1, 3])
    chat = [
        ASKED,
        answer("", tool_calls=[CALL]),
        {"role": "tool", "content": "Snow"},
        answer("It snows."),
        ASKED,
        answer("Yes."),
    ]
    call = json.dumps(CALL["function"])
    assert texts(HEADERS, chat, tokenizer=tokenizer) == [[f"[{call}]<|tool|>", "It snows.<|user|>", "Yes.<|user|>"]]
    template = load_template("tokenizer", tokenizer)
    assert template.closings() == {"<|user|>", "<|tool|>"}
    assert end_tokens(tokenizer, tiny_model(tokenizer), template) == [0, 1, 3]


def test_the_end_of_text_ends_a_turn_where_the_model_does_not_stop_at_the_next_header(tmp_path):
    tokenizer = served(tmp_path / "hy", HEADERS, SPECIALS, eos_token_id=0)
    assert texts(HEADERS, [ASKED, answer("Yes."), ASKED, answer("No.")], tokenizer=tokenizer) == [
        ["Yes.<|end|>"],
        ["No.<|end|>"],
    ]


def test_a_last_turn_that_is_left_open_is_closed_as_the_others_are(tmp_path):
    tokenizer = served(tmp_path / "apertus", CLOSED_BY_THE_NEXT, ("<|end|>", "<|user|>", "<|pad|>", "<|start|>"))
    chat = [ASKED, answer("Yes."), ASKED, answer("No.")]
    assert texts(CLOSED_BY_THE_NEXT, chat, tokenizer=tokenizer) == [["Yes.<|end|>", "No.<|end|>"]]
