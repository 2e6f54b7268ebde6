"""Rows that other readers lose words of, through the templates that models ship.

Words in capitals are markers. Each is in the rendered text, or its column or key is named in the report, or its row is
dropped and counted, or the run is refused; and what is trained on is exactly what `row_cases.jsonl` says.
"""

import json
import re
from pathlib import Path

import pytest
from test_row_layouts import marked, written

from distill.data.chat import ChatTemplate
from distill.data.load import check_first_rows, format_of, require_words_are_read
from distill.data.row_counts import RowCounts
from distill.data.sources import open_source
from distill.data.tokenise import Encoder
from distill.recipe import Data
from scripts.public_templates import originals, stops_of, tokenizer_for

CASES = [json.loads(line) for line in (Path(__file__).parent / "row_cases.jsonl").read_text("utf-8").splitlines()]
MARKER = re.compile(r"\b[A-Z]{3,}[A-Z0-9]*\b")
# SmolLM2's is TRL's of no name: ChatML with a system prompt of its own
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\nBe helpful."
    "<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template_of(name):
    if name == "smollm2":
        return tokenizer_for("chatml", SMOLLM2), SMOLLM2
    try:
        source = originals()[name]
    except OSError as error:
        pytest.skip(str(error))
    return tokenizer_for(name, source), source


def outcome(case, name, folder):
    """The marked texts, the counts, and the message if the run is refused."""
    settings = dict(case["settings"])
    rows = "".join(json.dumps(row) + "\n" for row in case["rows"])
    data = Data(source=str(written(rows, settings.pop("fmt", "jsonl"), folder)), **settings)
    tokenizer, text = template_of(name)
    template = None if data.chat_template == "none" else ChatTemplate(text, tokenizer)
    if template is not None and name != "smollm2":
        template.stops = frozenset(stops_of(name))
    source, counts = open_source(data.source), RowCounts()
    try:
        format = format_of(source, data, [template])
        check_first_rows(source, format)
        pieces = list(
            Encoder(tokenizer, format, template, max_length=2**20).documents(list(enumerate(source.rows())), counts)
        )
        require_words_are_read(counts, format, source.name)
    except ValueError as error:
        return [], counts, str(error)
    return [marked(piece, tokenizer) for piece in pieces], counts, ""


def trained_of(text):
    """The trained parts of a marked text."""
    return [part for part in re.split("«[^»]*»", text) if part]


def places(value, name=""):
    """Yield each marker of a row with the names that a report may call its column or key by."""
    if isinstance(value, str):
        yield from ((marker, {name, name.partition(".")[0]}) for marker in MARKER.findall(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            yield from places(item, name)


PAIRS = [(case, name) for case in CASES for name in case["templates"]]


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=[f"{case['case']} | {name}" for case, name in PAIRS])
def test_no_word_is_lost_and_what_is_trained_on_is_right(case, name, tmp_path):
    texts, counts, refused = outcome(case, name, tmp_path)
    expected = case["expected"][name]
    if "trained" in expected:
        assert [trained_of(text) for text in texts] == expected["trained"]
    if "dropped" in expected:
        assert sorted(reason.partition(":")[0] for reason in counts.dropped) == expected["dropped"]
    assert sorted(counts.unread) == expected["unread"]
    if "dropped" in expected or "refused" in expected:
        assert bool(refused) == expected.get("refused", False), refused
    else:  # whether a template that cannot be used ends the run or drops a row is not this table's
        assert refused or counts.dropped or texts
    if refused:
        assert "\n" not in refused
        return
    everything = "\n".join(texts)
    named = {*counts.unread, *(what for what in counts.unrendered)}
    for number, row in enumerate(case["rows"]):
        lost = [m for m, names in places(row) if m not in everything and not any(n in named for n in names)]
        if lost and "reasoning" in named:
            lost = [marker for marker in lost if not marker.startswith("THK")]
        # a row without any of its answers was dropped, and is counted
        answers = [m for m, _ in places(row) if m.startswith(("ANS", "CALL", "REFUSED")) and m in everything]
        assert not lost or (not answers and sum(counts.dropped.values())), (number, lost)
    trained = "".join(part for text in texts for part in trained_of(text))
    assert not {"ANSBAD", "ANSREJ", "ANSPRE2", "USERFAKE"} & set(MARKER.findall(trained))


def test_every_case_names_what_is_right_for_each_of_its_templates():
    assert len(CASES) == 38 and all(set(case["expected"]) == set(case["templates"]) for case in CASES)
