"""`distill report`: one page that loads nothing, holds what the run measured, and takes all text for text."""

import json
import re
from html.parser import HTMLParser

import pytest

from distill.cli import run_command
from distill.core.environment import environment
from distill.reports.report import find_run, page, read_run
from distill.reports.svg_plot import Series, line_chart, short, ticks

HELD_OUT = {
    "tokens": 2048, "forward_kl": 1.5, "reverse_kl": 1.25, "agreement": 0.5, "student_cross_entropy": 3.0,
    "teacher_cross_entropy": 2.0, "student_entropy": 2.5, "teacher_entropy": 2.25,
}  # fmt: skip
RECIPE = """
teacher: {model: big}
student: {model: "<b>small"}
data: {source: x.jsonl}
train: {steps: 10}
generate: {prompts: ["<script>alert(1)</script>"]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A finished run."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(RECIPE)
    rows = [
        {"step": step, "loss": 3 / step, "kl": 2 / step, "tokens_per_second": 1000.0, "seconds": 2.0,
         "peak_memory_gib": 3.5, "mfu_teacher": 0.25, "mfu_student": 0.125}
        for step in range(1, 11)
    ]  # fmt: skip
    rows[4] |= {"eval_kl": 0.5, "grad_norm": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo')
    answers = {"teacher": ["</pre><img src=x>"], "before": [""], "after": ["fine"]}
    (run / "before.json").write_text(json.dumps({"held_out": HELD_OUT, "answers": {"teacher": ["t"], "before": [""]}}))
    after = HELD_OUT | {"forward_kl": 0.75, "agreement": 0.625}
    result = {"before": HELD_OUT, "after": after, "gap_closed": 0.5, "steps": 10, "answers": answers}
    (run / "result.json").write_text(json.dumps(result | {"environment": {"torch": "2.<9>"}}))
    return run


class Page(HTMLParser):
    """Tags and attributes of a page; complains about tags left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_holds_the_run_and_loads_nothing(folder, capsys):
    assert run_command(["report", "mine"]) == 0
    assert capsys.readouterr().out == "wrote runs/mine/report.html\n"
    text = (folder / "report.html").read_text()
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "b small"} & set(found.tags)
    assert not {"src", "href", "onload"} & {name for name, _ in found.attributes}
    assert "http" not in text and "url(" not in text and "@import" not in text
    for expected in (
        "gap closed", "50.0%", "was 1.5000", "0.7500", "62.5 %", "7.39", "20.09", "2,048 held-out tokens", "held out",
        "peak memory", "&lt;script&gt;alert(1)", "&lt;/pre&gt;&lt;img src=x&gt;", "(nothing)", "fine", "2.&lt;9&gt;",
        "&lt;b&gt;small", "20.0 s of training for 20,000 tokens", "teacher's arithmetic 25.0%",
        "below the GPU's peak 62.5%", "steps: 10",
    ):  # fmt: skip
        assert expected in text, expected
    assert text.count("<svg") == 4, "one chart a figure that was logged: loss, KL, tokens per second, memory"
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_an_unfinished_run_has_a_page_too(folder):
    (folder / "result.json").unlink()
    assert "has not finished" in page(read_run(folder))
    (folder / "before.json").unlink()
    (folder / "metrics.jsonl").unlink()
    text = page(read_run(folder))
    Page(text)
    assert "<svg" not in text and "Recipe" in text


def test_the_time_split_weighs_intervals_by_their_steps(folder):
    """Two intervals, of 1 and of 9 steps; a phase's share is its seconds over those of all."""
    rows = [{"step": 1, "loss": 2.0, "kl": 2.0, "seconds": 9.0}, {"step": 10, "loss": 1.0, "kl": 1.0, "seconds": 9.0}]
    rows[0] |= {"time_teacher": 1.0, "time_student": 7.0, "time_data": 1.0}
    rows[1] |= {"time_teacher": 1.0, "time_student": 0.0, "time_loss": None, "time_data": 0.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page(read_run(folder))
    Page(text)
    for expected in ("teacher 55.6%", "student, both ways 38.9%", "loss 0.0%", "data and host 5.6%"):
        assert expected in text, expected
    assert "arithmetic" not in text, "no MFU was measured"
    assert text.count("<svg") == 1, "the loss is the KL, which is drawn once"


def test_report_as_json_and_elsewhere(folder, tmp_path, capsys):
    assert run_command(["report", str(folder), "-o", "page.html"]) == 0
    assert (tmp_path / "page.html").exists() and not (folder / "report.html").exists()
    capsys.readouterr()
    assert run_command(["report", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held_out"]["after"]["forward_kl"] == 0.75 and len(found["metrics"]) == 10


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["yours"], "'yours': no such run (a folder with a recipe.yaml); runs here: mine"),
        (["mine", "-o", "no/page.html"], "--output: the folder no does not exist"),
        (["mine", "-o", "runs"], "--output: expected a file to write, came the folder runs"),
    ],
)
def test_mistakes_are_one_line(arguments, message, folder, capsys):
    assert run_command(["report", *arguments]) == 2
    assert capsys.readouterr().err == f"distill: {message}\n"


def test_a_damaged_file_is_named(folder):
    (folder / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json: cannot be read"):
        read_run(find_run("mine"))


def test_charts_draw_lines_where_there_are_numbers():
    chart = line_chart([Series("a<b", [(1, 1.0), (2, float("nan")), (3, 2.0), (4, 3.0)])], 'x "y"')
    assert chart.count("<polyline") == 1 and chart.count("<circle") == 3 and "a&lt;b, step 1: 1" in chart
    assert 'aria-label="x &quot;y&quot;"' in chart
    places = [float(y) for y in re.findall(r'cy="([\d.]+)"', chart)]
    assert places == sorted(places, reverse=True), "larger is higher"
    many = line_chart([Series("a", [(x, x) for x in range(100)])], "x")
    assert "<circle" not in many
    assert "<circle" in line_chart([Series("a", [(5, 5.0)])], "x")
    with pytest.raises(ValueError, match="finite point"):
        line_chart([Series("a", [(1, float("inf"))])], "x")


def test_numbers_are_round_and_short():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and ticks(3, 3) == [3]
    assert [short(x) for x in (0, 2e-5, 0.5, 12_345, 3.2e6, 8e9)] == ["0", "2e-5", "0.5", "12.3k", "3.2M", "8B"]


def test_the_environment_names_versions():
    found = environment()
    assert found["torch"] and found["transformers"] and all(found.values())
