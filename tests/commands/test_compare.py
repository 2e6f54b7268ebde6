"""`distill compare` and `distill eval`: seeds grouped, differences named, p-values as tabulated; a run judged."""

import json
import re

import pytest
from test_run import TEXT
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.objectives.measure import KL, SPANS
from distill.recipe import parse
from distill.recipe.resume_policy import FREE, settings_of_steps
from distill.recipe.yaml_text import to_yaml
from distill.reports.compare_runs import over_seeds, welch_p_value
from distill.teachers.registry import measure_of
from distill.training.lock_file import FIRST


def make_run(
    name, kl, *, seed=0, rate="1e-4", result=True, student="{model: b}", more="", processes=None, split=0, teacher="a"
):
    from pathlib import Path

    folder = Path("runs") / name
    folder.mkdir(parents=True)
    key = "divergence" if "cross" in student else "kl"
    (folder / "recipe.yaml").write_text(
        f"name: {name}\nteacher: {{model: {teacher}}}\nstudent: {student}\n"
        f"data: {{source: x.txt, validation: {{seed: {split}}}}}\n"
        f"train: {{steps: 5, seed: {seed}, learning_rate: {rate}{more}}}\n"
    )
    if processes is not None:
        sections = {name: {} for name in FIRST} | {"processes": processes}
        (folder / "lock.yaml").write_text(to_yaml(sections))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, key: 2.0, f"eval_{key}": kl}) + "\n")
    if result:
        after = {f"forward_{key}": kl, "agreement": 0.5}
        (folder / "result.json").write_text(json.dumps({"after": after, "gap_closed": 1 - kl}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, kl in enumerate((0.50, 0.52, 0.54)):
        make_run(f"slow-{number}", kl, seed=number)
    for number, kl in enumerate((0.30, 0.31, 0.32)):
        make_run(f"fast-{number}", kl, seed=number, rate="1e-3")
    return tmp_path


ALL = [f"{name}-{number}" for name in ("slow", "fast") for number in range(3)]


def test_a_plot_is_a_file(folder, capsys):
    assert run_command(["compare", *ALL, "--plot", "runs"]) == 2
    assert capsys.readouterr().err == "distill: --plot: expected a file to write, got the folder runs\n"
    assert run_command(["compare", *ALL, "--plot", "curves.svg"]) == 2
    assert "expected a file name that ends in .html" in capsys.readouterr().err


def test_seeds_are_one_line_and_differences_are_named(folder, capsys):
    assert run_command(["compare", *ALL, "--plot", "curves.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == "slow-0 3 0.5200 ± 0.0200 0.5000 ± 0.0000 0.4800 ± 0.0200"
    assert lines[2].split()[2:5] == ["0.3100", "±", "0.0100"] and float(lines[2].split()[-1]) < 0.01
    assert lines[3] == "fast-0 differs from slow-0 in train.learning_rate=0.001"
    page = (folder / "curves.html").read_text()
    assert (
        "slow-0 (3 seeds)<" in page and "fast-0 (3 seeds): train.learning_rate=0.001<" in page and "<script" not in page
    )
    assert re.findall("<figcaption>(.*?)</figcaption>", page) == [
        "KL to the teacher (nats a token), held out",
        "KL to the teacher (nats a token), in training",
    ], "one panel each"
    assert run_command(["compare", *ALL, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert [group["runs"] for group in groups] == [ALL[:3], ALL[3:]] and groups[0]["p_value"] is None


@pytest.mark.parametrize(
    "more, told",
    [
        ({"split": 3}, "data.validation.seed 3, not 0"),
        ({"teacher": "larger"}, "teacher.model 'larger', not 'a'"),
    ],
)
def test_other_teachers_and_other_held_out_rows_are_refused_unless_asked_for(folder, more, told, capsys):
    make_run("other", 0.4, **more)
    assert run_command(["compare", "slow-0", "slow-1", "other"]) == 2
    fault = capsys.readouterr().err
    assert f"other was evaluated differently from slow-0: {told}\n" in fault and "--anyway prints the table" in fault
    assert run_command(["compare", "slow-0", "slow-1", "other", "--anyway"]) == 0
    assert f"other was evaluated differently from slow-0: {told}\n" in capsys.readouterr().out
    assert run_command(["compare", "slow-0", "slow-1", "fast-0"]) == 0
    assert "judged" not in capsys.readouterr().out


def test_a_line_is_the_mean_over_seeds_in_a_band_of_their_range():
    same = over_seeds("a", [[(1, 2.0), (2, 4.0)], [(1, 4.0), (2, 5.0)], []], 3)
    assert same == ("a", [(1, 3.0), (2, 4.5)], 3, [(1, 2.0, 4.0), (2, 4.0, 5.0)])
    # a seed that was resumed and logs at other steps: between its points, and only where there are points
    other = over_seeds("a", [[(1, 1.0), (2, 2.0), (4, 4.0)], [(2, 4.0), (6, 8.0)]], 0)
    assert other.points == [(2, 3.0), (4, 5.0)] and other.band == [(2, 2.0, 4.0), (4, 4.0, 6.0)]
    assert over_seeds("a", [[(1, 2.0)]], 0) == ("a", [(1, 2.0)], 0, ())


def groups_of(capsys, *runs):
    assert run_command(["compare", *runs, "--json"]) == 0
    return [(group["runs"], group["differs"]) for group in json.loads(capsys.readouterr().out)]


def test_settings_that_leave_the_steps_as_they_are_make_no_group(folder, capsys):
    """A run that was out of memory and went on with smaller micro-batches stays with its seeds."""
    make_run("whole", 0.5, seed=7, more=", batch_size: 8", processes=2)
    smaller = ", batch_size: 2, tokens_per_step: 16384, gradient_checkpointing: true, save_every: 3, log_every: 1"
    make_run("resumed", 0.5, seed=8, more=smaller + ", report_to: [wandb]", processes=2)
    assert groups_of(capsys, "whole", "resumed") == [(["whole", "resumed"], {})]
    # half the step, by the number of processes alone, and by what is asked for
    make_run("alone", 0.5, seed=9, more=", batch_size: 8", processes=1)
    make_run("half", 0.5, seed=10, more=", batch_size: 8, tokens_per_step: 8192")
    assert groups_of(capsys, "whole", "alone", "resumed", "half") == [
        (["whole", "resumed"], {}),
        (["alone", "half"], {"train.tokens_per_step": 8192}),
    ]


@pytest.mark.parametrize("name", FREE)
def test_every_free_setting_is_left_out(name):
    """Each is a field of the recipe, so that none of the names is misspelt, and the steps do not tell of it."""
    text = (
        "name: a\nteacher: {model: a}\nstudent: {model: b}\ntrain: {steps: 5}\n"
        "data: {source: x.txt, packing: false, on_policy: {fraction: 0.5}}\n"
    )
    if name.startswith("teacher.") and name != "teacher.offload":
        text = text.replace("teacher: {model: a}", "teacher: {type: server, url: 'http://a'}")
    if name == "teacher.folder":  # of one protocol
        text = text.replace("url: 'http://a'", "url: 'http://a', protocol: vllm, model: a, folder: there")
    if name.startswith("student.lora."):
        text = text.replace("student: {model: b}", "student: {model: b, lora: {r: 4}}")
    before = parse(text)
    values = {bool: "true", int: "7", list: "[wandb]", str: "elsewhere"}
    found = before.model_dump()
    for part in name.split("."):
        found = found[part]
    special = {
        "student.lora.save": "adapter",
        "teacher.offload": "cpu",
        "train.cuda_graph": "false",
        "train.on_divergence": "stop",
        "teacher.url": "http://b",
        "teacher.token_file": "t",
    }
    value = special.get(name) or ("false" if found is True else values.get(type(found), "7"))
    after = parse(text, [f"{name}={value}"])
    assert after != before and settings_of_steps(after, 2) == settings_of_steps(before, 2)
    other = settings_of_steps(parse(text, ["train.batch_size=2"]), 2)
    assert other["train.tokens_per_step"] == 2 * settings_of_steps(before, 2)["train.tokens_per_step"]


def test_a_batch_size_that_the_steps_depend_on_makes_a_group():
    text = (
        "name: a\nteacher: {model: a}\nstudent: {model: b}\ntrain: {steps: 5, tokens_per_step: 8192}\n"
        "data: {source: x.txt, on_policy: {fraction: 0.5}}\n"
    )

    def of(*overrides):
        return [settings_of_steps(parse(text, [f"train.batch_size={size}", *overrides]), 1) for size in (2, 4)]

    several, packed, plain = of("data.on_policy.samples=2"), of(), of("data.packing=false")
    assert several[0] != several[1] and packed[0] == packed[1] and plain[0] == plain[1]


def test_one_seed_has_no_test(folder, capsys):
    assert run_command(["compare", "slow-0", "fast-0"]) == 0
    assert "one seed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "runs, message",
    [(["slow-0", "slow-0"], "given twice"), (["slow-0", "gone"], "no such run"), (["half"], "no result")],
)
def test_mistakes_are_one_line(runs, message, folder, capsys):
    make_run("half", 1.0, result=False)
    assert run_command(["compare", *runs]) == 2
    assert message in capsys.readouterr().err


def test_measures_are_not_tested_against_each_other(folder, capsys):
    """A run across tokenizers beside one of KL: each line says what it is of, and no p-value is made up."""
    for number in range(2):
        make_run(f"cross-{number}", 0.1 * number, seed=number, student="{model: b, vocabulary: cross}")
    assert run_command(["compare", *ALL, "cross-0", "cross-1", "--plot", "both.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["run", "seeds", "measure", "to"] and "KL to teacher" not in lines[0]
    assert "span divergence" in lines[3] and lines[3].endswith("another measure")
    assert lines[1].split()[2] == "KL" and float(lines[2].split()[-1]) < 0.01, "runs of one measure are tested"
    page = (folder / "both.html").read_text()
    assert ">KL to the teacher (nats a token), held out<" in page and ">span divergence to the teacher (nats an" in page
    assert run_command(["compare", *ALL, "cross-0", "cross-1", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert "kl" in groups[0] and groups[2]["divergence"] == [0.0, 0.1] and "kl" not in groups[2]
    assert [group["p_value"] is None for group in groups] == [True, False, True]


@pytest.mark.parametrize(
    "manifest, name",
    [
        ({"kind": "hidden"}, "KL"),
        ({"kind": "top_k", "k": 64, "tail": "bucket", "temperature": 1.0}, "KL over 65 outcomes"),
        ({"kind": "top_k", "k": 64, "tail": "renormalize", "temperature": 2}, "KL over 64 tokens at T = 2"),
        ({"kind": "top_k", "k": 64, "tail": "sampled", "temperature": 1.0}, "estimated KL"),
        (None, "KL over what is cached"),
    ],
)
def test_a_cached_teachers_divergence_is_named_for_its_outcomes(manifest, name, tmp_path):
    text = (
        f"teacher: {{type: cache, path: {tmp_path}}}\nstudent: {{model: b}}\ndata: {{source: x}}\ntrain: {{steps: 1}}"
    )
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = measure_of(parse(text))
    assert found.name == name and found.key == "kl" and found.unit_label == "nats a token"
    assert found.display_name("kl") == name.replace("KL", "kl") and found.display_name("divergence") == "divergence"
    assert measure_of(parse(text), found._asdict()) == found, "kept with the run, it is not looked for again"


def test_figures_of_spans_are_not_written_as_kl():
    figures = {"tokens": 3, "forward_kl": 1.0, "reverse_kl": 2.0, "agreement": 0.5}
    told = SPANS.to_json(figures)
    assert told == {"spans": 3, "forward_divergence": 1.0, "reverse_divergence": 2.0, "agreement": 0.5}
    assert SPANS.read(told) == SPANS.read(figures) == figures, "runs from before the names were told apart are read too"
    assert KL.to_json(figures) == KL.read(figures) == figures
    assert SPANS.display_name("divergence") == "span divergence"


def test_welch_gives_the_tabulated_values():
    # t = 2.776 at 4 degrees of freedom is the two-sided 5 % point; equal variances and sizes give 4
    a = [-1.0, 0.0, 1.0]
    shift = 2.776445 * (2 / 3) ** 0.5
    assert welch_p_value(a, [x + shift for x in a]) == pytest.approx(0.05, abs=1e-5)
    assert welch_p_value(a, a) == pytest.approx(1) and welch_p_value([1.0], a) is None
    assert welch_p_value([1.0, 1.0], [2.0, 2.0]) == 0


@pytest.mark.full
def test_eval_of_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    save_tiny(tmp_path / "other", tiny_model(vocab_size=270), tiny_tokenizer(270))
    (tmp_path / "text.txt").write_text(TEXT)
    more = ["--teacher", "teacher", "--data", "text.txt", "--max-length", "64"]
    assert run_command(["eval", "student", *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    mean, low, high = (found["figures"]["forward_kl"][name] for name in ("value", "low", "high"))
    assert 0 < low < mean < high and 0 <= found["calibration_error"]["student"] <= 1
    assert run_command(["eval", "teacher", *more, "--before", "student"]) == 0
    out = capsys.readouterr().out
    assert "relative reduction" in out and "1.0000" in out and "student calibration error" in out
    assert "intervals by resampling documents" in out
    assert run_command(["eval", "other", *more]) == 2
    assert run_command(["eval", "student", "--data", "text.txt"]) == 2
    assert (
        "--teacher: required for a model; only a run has a teacher, and student is not a run" in capsys.readouterr().err
    )
    for ignored in (["--max-rows", "9"], ["--max-length", "64"], ["--tasks", "piqa", "--data", "text.txt"]):
        assert run_command(["eval", "student", "--teacher", "teacher", *ignored]) == 2
        assert "--data" in capsys.readouterr().err
