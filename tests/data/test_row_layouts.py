"""Rows in, trained tokens out: the layouts that data sets have, each with the text that is trained on.

The table is `row_layouts.yaml`, from which the page *Row layouts* of the documentation is written.
"""

import json

import pytest
import yaml

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatTemplate
from distill.data.load import check_first_rows, format_of, require_words_are_read
from distill.data.report import DataReport
from distill.data.sources import open_source
from distill.data.tokenise import Encoder
from distill.recipe import Data
from scripts.public_templates import tokenizer_of
from scripts.row_layouts_page import TABLE, TEMPLATE

CASES = yaml.safe_load(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else []


def marked(piece, tokenizer):
    """The text of a document, with what is masked from the loss in «»."""
    runs = []
    for token, label in zip(piece.ids.tolist(), piece.labels.tolist(), strict=True):
        trained = label != IGNORE_INDEX
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    return "".join(tokenizer.decode(ids) if trained else f"«{tokenizer.decode(ids)}»" for trained, ids in runs)


def written(rows, file, folder):
    if file == "parquet":
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([json.loads(row) for row in rows.splitlines()]), folder / "rows.parquet")
    else:
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    return folder / f"rows.{file}"


def result_of(case, folder):
    """What a case's rows become: the texts and the lines of the report, or the message that refuses them."""
    settings = dict(case.get("settings") or {})
    data = Data(source=str(written(case["rows"], settings.pop("file", "jsonl"), folder)), **settings)
    tokenizer = tokenizer_of(["<|im_end|>", "<|im_start|>", "<|pad|>"], TEMPLATE)
    template = None if data.chat_template == "none" else ChatTemplate(TEMPLATE, tokenizer)
    source = open_source(data.source)
    report = DataReport(source="rows", max_length=2**20)
    try:
        format = format_of(source, data, [template])
        check_first_rows(source, format)
        encoder = Encoder(tokenizer, format, template, max_length=report.max_length)
        pieces = list(encoder.documents(list(enumerate(source.rows())), report))
        require_words_are_read(report, format, source.name)
    except ValueError as error:
        return {"refused": str(error).replace(source.name, source.name.rpartition("/")[2])}
    found = {"read": [marked(piece, tokenizer) for piece in pieces]}
    lines = str(report).splitlines()[3:]
    return found | ({"report": lines} if lines else {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['layout']}: {case['case']}")
def test_rows_become_the_text_of_the_table(case, tmp_path):
    expected = {name: case[name] for name in ("read", "report", "refused") if name in case}
    assert result_of(case, tmp_path) == expected


def test_the_table_has_the_layouts_of_the_tools_that_people_come_from():
    layouts = {case["layout"] for case in CASES}
    assert len(CASES) >= 60
    assert layouts >= {"ShareGPT", "OpenAI", "Alpaca", "Dolly", "SQuAD", "OpenOrca", "ms-swift", "axolotl", "TRL"}
    assert layouts >= {"smoltalk2", "UltraFeedback", "KTO", "LLaVA"}
