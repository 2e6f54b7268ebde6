"""`distill report`: one page that loads nothing, holds what the run measured, and takes all text for text."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from distill.cli import run_command
from distill.core.environment import environment
from distill.reports.plots import Chart, Series, limits, line_chart, short
from distill.reports.report import find_run, read_run, report_html
from distill.reports.style import DARK, LIGHT

HELD_OUT = {
    "tokens": 2048,
    "forward_kl": 1.5,
    "reverse_kl": 1.25,
    "agreement": 0.5,
    "student_cross_entropy": 3.0,
    "teacher_cross_entropy": 2.0,
    "student_entropy": 2.5,
    "teacher_entropy": 2.25,
}
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
        {
            "step": step,
            "loss": 3 / step,
            "kl": 2 / step,
            "tokens_per_second": 1000.0,
            "seconds": 2.0,
            "peak_memory_gib": 3.5,
            "mfu_teacher": 0.25,
            "mfu_student": 0.125,
        }
        for step in range(1, 11)
    ]
    rows[4] |= {"eval_kl": 0.5, "grad_norm": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo')
    answers = {"teacher": ["</pre><img src=x>"], "before": [""], "after": ["fine"]}
    before = {
        "started": "2026-11-22T23:59:30+00:00",
        "command": "distill run x.yaml --name '<mine>'",
        "device": "GPU 9",
    }
    before |= {"held_out": HELD_OUT, "answers": {"teacher": ["t"], "before": [""]}}
    (run / "before.json").write_text(json.dumps(before))
    after = HELD_OUT | {"forward_kl": 0.75, "agreement": 0.625}
    result = {
        "before": HELD_OUT,
        "after": after,
        "gap_closed": 0.5,
        "steps": 10,
        "answers": answers,
        "finished": "2026-11-23T01:12:00+00:00",
    }
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
    outside = [value for name, value in found.attributes if "//" in (value or "") and not name.startswith("xmlns")]
    assert not outside and "url(" not in text.replace("url(#", "") and "@import" not in text
    for expected in (
        "KL reduction",
        "50.0%",
        "was 1.5000",
        "0.7500",
        "62.5 %",
        "7.39",
        "20.09",
        "2,048 held-out tokens",
        "held out",
        "22 November 2026, 23:59 UTC",
        "1 h 12 min from start to end",
        "GPU 9",
        "--name &#x27;&lt;mine&gt;&#x27;",
        "student and teacher have the same top-1 token",
        "peak memory",
        "&lt;script&gt;alert(1)",
        "&lt;/pre&gt;&lt;img src=x&gt;",
        "(nothing)",
        "fine",
        "2.&lt;9&gt;",
        "&lt;b&gt;small",
        "20.0 s of training for 20,000 tokens",
        "teacher's arithmetic 25.0%",
        "below the GPU's peak 62.5%",
        "steps: 10",
    ):
        assert expected in text, expected
    assert text.count("<figure>") == 4, "one chart a figure that was logged: loss, KL, tokens per second, memory"
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_an_unfinished_run_has_a_page_too(folder):
    (folder / "result.json").unlink()
    text = report_html(read_run(folder))
    assert "has not finished" in text and "22 November 2026" in text and "from start to end" not in text
    (folder / "before.json").unlink()
    (folder / "metrics.jsonl").unlink()
    text = report_html(read_run(folder))
    Page(text)
    assert "<svg" not in text and "Recipe" in text


def test_a_run_of_few_steps_has_no_plots_of_one_dot(folder):
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "kl": 1.5, "agreement": 0.5}) + "\n")
    text = report_html(read_run(folder))
    Page(text)
    assert "<svg" not in text and "No curves: a line needs two logged steps" in text


def test_the_time_split_weighs_intervals_by_their_steps(folder):
    """Two intervals, of 1 and of 9 steps; a phase's share is its seconds over those of all."""
    rows = [{"step": 1, "loss": 2.0, "kl": 2.0, "seconds": 9.0}, {"step": 10, "loss": 1.0, "kl": 1.0, "seconds": 9.0}]
    rows[0] |= {"time_teacher": 1.0, "time_student": 7.0, "time_data": 1.0}
    rows[1] |= {"time_teacher": 1.0, "time_student": 0.0, "time_loss": None, "time_data": 0.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report_html(read_run(folder))
    Page(text)
    for expected in ("teacher 55.6%", "student, both ways 38.9%", "loss 0.0%", "data and host 5.6%"):
        assert expected in text, expected
    assert "arithmetic" not in text, "no MFU was measured"
    assert text.count("<svg") == 1, "the loss is the KL, which is drawn once"


def test_report_as_json_and_to_another_path(folder, tmp_path, capsys):
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
        (["mine", "-o", "no/page.html"], "--output: expected a file in an existing folder, but no does not exist"),
        (["mine", "-o", "runs"], "--output: expected a file to write, got the folder runs"),
    ],
)
def test_mistakes_are_one_line(arguments, message, folder, capsys):
    assert run_command(["report", *arguments]) == 2
    assert capsys.readouterr().err == f"distill: {message}\n"


def test_a_damaged_file_is_named(folder):
    (folder / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result\.json: cannot be read"):
        read_run(find_run("mine"))


def test_a_page_without_matplotlib_has_the_figures_and_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = report_html(read_run(folder))
    Page(text)
    assert "<svg" not in text and "pip install &#x27;distill-toolkit[plots]&#x27;" in text
    assert "<td>KL to teacher (nats a token), held out</td><td>0.5 at step 5</td>" in text
    assert "2 at step 1, 1 at step 2" in text and "0.2 at step 10" in text


def points_of(chart):
    """Return the (left, top) corners of each line of a chart that is drawn in the first colour."""
    lines = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: #2563eb', chart)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", line)] for line in lines]


def test_charts_draw_lines_where_there_are_numbers():
    chart = line_chart(
        Chart("a $b$", [Series("a<b", [(1, 1.0), (2, 3.0), (3, float("nan")), (4, 2.0), (5, 3.0)])]), 'x "y"'
    )
    assert 'aria-label="x &quot;y&quot;; last: a&lt;b 3"' in chart and ">a $b$<" in chart, "no formula is read"
    (drawn,) = points_of(chart)
    (x1, y1), (x2, y2), (x4, y4), (x5, y5) = drawn
    assert x2 - x1 == pytest.approx(x5 - x4) == pytest.approx((x4 - x2) / 2) and y1 > y4 > y2 == y5
    assert chart.count("<use ") == len(drawn), "dots of few points"
    many = line_chart(Chart("", [Series("a", [(x, x) for x in range(100)])]), "x")
    assert len(points_of(many)) == 1 and "<use " not in many
    with pytest.raises(ValueError, match="finite point"):
        line_chart(Chart("", [Series("a", [(1, float("inf"))])]), "x")


def test_numbers_are_printed_with_few_digits():
    assert [short(x) for x in (0, 2e-5, 0.5, 12_345, 3.2e6, 8e9)] == ["0", "2e-5", "0.5", "12.3k", "3.2M", "8B"]


def test_a_few_outliers_do_not_flatten_a_panel():
    values = [2.0 + 0.1 * (number % 5) for number in range(40)]
    assert limits(values) == (2.0, 2.4) and limits(values, True) == (0.0, 2.4)
    assert limits([*values, 140.0]) == (2.0, 2.4) and limits([140.0, *values, -50.0]) == (-50.0, 140.0)
    assert limits([*values, 5.0]) == (2.0, 5.0), "what leaves the others room stays inside"
    assert limits([1.0, 1.0, 90.0]) == (1.0, 90.0), "of so few none is an outlier"
    falling = [9 * 0.5**number for number in range(10)] + [0.01] * 90
    assert limits(falling) == (0.01, 9.0), "the beginning of training is no outlier"
    chart = line_chart(Chart("", [Series("norm", [*enumerate(values), (40, 140.0), (41, 2.1)])]), "x")
    assert "▲ 1 point up to 140" in chart
    heights = [y for line in points_of(chart) for _, y in line][:40]
    assert max(heights) - min(heights) > 80, "the others fill the chart"
    assert "▲" not in line_chart(Chart("", [Series("norm", list(enumerate(values)))]), "x")


def contrast(a, b):
    """Return the contrast ratio of two colours (WCAG 2.2)."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(palette):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name in ("ink", "quiet"):
        assert min(contrast(palette[name], palette[on]) for on in ("paper", "card")) >= 4.5, name
    assert all(contrast(palette[f"series-{number}"], palette["paper"]) >= 4.5 for number in range(8))
    assert set(LIGHT) == set(DARK)


def test_the_environment_names_versions():
    found = environment()
    assert found["torch"] and found["transformers"] and all(found.values())
