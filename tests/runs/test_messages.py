"""Messages of runs, each seen in a whole tiny run: advice that fits, warnings in time, how to continue."""

import json
import os
import re
import signal

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from distill.cli import run_command
from distill.doctor.examine import prepare
from distill.doctor.invariants_rollouts import rollouts_end
from distill.objectives.measure import KL, cache_measure, combine_measures
from distill.recipe import Loss, load
from distill.reports import served_file
from distill.reports.curves import charts_of, same_axes
from distill.reports.plots import draw_lines, new_figure
from distill.run_results import RunResults
from distill.training.progress import MetricsFile, explain_loss

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: []}
"""
CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"It is {n}, surely."}]}
    for n in range(12)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    tokenizer = tiny_tokenizer(420)  # GGUF files hold none without merges
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    save_tiny(folder / "teacher", tiny_model(tokenizer, layers=3, seed=1, hidden=64), tokenizer)
    (folder / "text.txt").write_text(TEXT)
    (folder / "held.txt").write_text(TEXT.replace("hears", "reads"))
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (folder / "r.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def said(models, monkeypatch, capsys, caplog):
    """Run a command in the models' folder; return what it printed and logged, each line whole."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("COLUMNS", "500")

    def run(*arguments, code=0):
        caplog.clear()
        try:
            assert run_command(list(arguments)) == code
        except SystemExit as stop:
            assert stop.code == code
        captured = capsys.readouterr()
        return captured.out + captured.err + "".join(f"{record.getMessage()}\n" for record in caplog.records)

    return run


# ------------------------------------------------------------------ few data


@pytest.mark.full
def test_few_data_offers_only_what_helps(said):
    text = said("run", "r.yaml", "--name", "few")
    (line,) = [line for line in text.splitlines() if "too few to train on" in line]
    assert line.endswith("4 optimizer steps are too few to train on: increase train.steps, or use more data")
    (line,) = [line for line in text.splitlines() if "too few for reliable metrics" in line]
    # 4 documents are held out because of max_rows: a larger fraction would hold out no more
    assert line.endswith("increase data.validation.max_rows, or set data.validation.source") and "fraction" not in line
    text = said("run", "r.yaml", "data.validation={fraction: 0.01, max_rows: null}", "train.steps=1", "--name", "held")
    assert "reliable metrics: increase data.validation.fraction, set data.validation.source, or use more data" in text
    text = said("run", "r.yaml", "data.validation={source: held.txt, max_rows: 4}", "train.steps=1", "--name", "own")
    assert "reliable metrics: increase data.validation.max_rows, or use a larger data.validation.source" in text


# ------------------------------------------------------------------ rollouts

ON_POLICY = [
    "data.source=chats.jsonl",
    "data.max_length=64",
    "data.on_policy={max_new_tokens: 6, samples: 2}",
    "train.tokens_per_step=null",
]
REWARDED = "loss.terms=[{type: policy_gradient, reward: 'same.py:same', teacher_weight: 1.0}]"


def test_rollouts_that_teach_nothing_are_warned_of_once(said, models):
    (models / "same.py").write_text("def same(prompt, answer, row):\n    return 1.0\n")
    text = said("run", "r.yaml", *ON_POLICY, REWARDED, "--plugin", "same.py", "--name", "flat")
    (line,) = [line for line in text.splitlines() if "reward_zero_std" in line]
    assert line.startswith("step 2: the responses to each prompt all have the same reward (reward_zero_std 1.00)")
    (line,) = [line for line in text.splitlines() if "rollout_truncated" in line]
    assert line.startswith("step 2: 100% of the rollouts are cut off at data.on_policy.max_new_tokens")


@pytest.mark.full
def test_rollouts_with_different_rewards_are_not_warned_of(said, models):
    (models / "other.py").write_text(
        "def same(prompt, answer, row):\n    return float(len(answer) + hash(answer) % 7)\n"
    )
    text = said(
        "run", "r.yaml", *ON_POLICY, REWARDED.replace("same.py", "other.py"), "--plugin", "other.py", "--name", "varied"
    )
    assert "reward_zero_std" not in text


@pytest.mark.full
def test_a_base_student_is_named_by_check_and_doctor(said, models):
    """Its configuration ends at another token than a turn of the template."""
    tokenizer = AutoTokenizer.from_pretrained(models / "teacher")
    base = tiny_model(tokenizer, layers=1, seed=2, hidden=64)
    base.config.eos_token_id = base.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|pad|>")
    save_tiny(models / "base", base, tokenizer)
    named = "student.model: ends at <|pad|>, and not at <|end|>, which ends a turn of the chat template: a base model"
    student = "student={model: base}"
    assert named in said("check", "r.yaml", "--gpu", "cpu", *ON_POLICY, student)
    assert named not in said("check", "r.yaml", "--gpu", "cpu", *ON_POLICY), "the teacher's copy ends as it should"
    assert named not in said("check", "r.yaml", "--gpu", "cpu", *ON_POLICY, student, "data.on_policy=null")
    subject = prepare(load("r.yaml", [*ON_POLICY, student]))
    result = rollouts_end(subject)
    assert result.passed is False and named in result.detail
    half = prepare(load("r.yaml", [*ON_POLICY, student, "data.on_policy.fraction=0.5"]))
    assert rollouts_end(half).passed and named in rollouts_end(half).detail, "the data's responses are trained on too"
    assert rollouts_end(prepare(load("r.yaml", ON_POLICY))).passed


# ------------------------------------------------------------------ loss beside kl


@pytest.mark.full
def test_a_loss_that_is_not_the_kl_is_explained_once_under_the_first_line(said):
    settings = [
        "loss.temperature=2",
        "loss.terms=[{type: forward_kl, weight: 0.5}, {type: cross_entropy, weight: 0.1}]",
    ]
    lines = said("run", "r.yaml", *settings, "--name", "weighted").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/4"))
    assert lines[first + 1].strip() == (
        "loss is what is minimised: 0.5 x forward_kl + 0.1 x cross_entropy at temperature 2, divergences times 4; "
        "kl is the forward KL to the teacher, without weights and at temperature 1"
    )
    assert sum("is what is minimised" in line for line in lines) == 1
    assert "is what is minimised" not in said("run", "r.yaml", "--name", "plain"), "they are the same there"


def test_the_explanation_names_the_divergence_and_its_temperature():
    """The log's `kl` is that of the trained direction; of K tokens it is at the loss's temperatures."""
    reverse = Loss.model_validate({"temperature": 2, "terms": [{"type": "reverse_kl", "weight": 0.5}]})
    assert "kl is the reverse KL to the teacher, without weights and at temperature 1" in explain_loss(reverse, "kl")
    k_tokens = cache_measure({"kind": "top_k", "k": 8, "tail": "bucket", "temperature": 2.0})
    assert explain_loss(reverse, "kl", k_tokens).endswith("without weights and at temperature 2")
    pair = Loss.model_validate({"temperature": {"teacher": 1, "student": 1.3}})
    assert explain_loss(pair, "kl", combine_measures([KL, k_tokens])).endswith(
        "at temperature 1 (teacher), 1.3 (student), in the tables before and after training at 1 of both"
    )
    sampled = cache_measure({"kind": "top_k", "k": 8, "tail": "sampled", "temperature": 1.0})
    assert explain_loss(Loss(), "kl", sampled).endswith(
        "at temperature 1; loss is above it by a constant of the sampled tokens, without a gradient"
    )


# ------------------------------------------------------------------ signals


def test_sigterm_prints_the_command_that_continues(said, monkeypatch):
    written = MetricsFile.on_log

    def write_and_end(self, args, state, control, **kwargs):
        written(self, args, state, control, **kwargs)
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "on_log", write_and_end)
        text = said("run", "r.yaml", "train.seed=3", "--name", "ended")
    assert "stopped by SIGTERM after step" in text
    command = "distill run r.yaml train.seed=3 --name ended --resume"
    assert f"stopped; continue with: {command}\n" in text
    assert "continuing from runs/ended/checkpoint-" in said(*command.split()[1:])


@pytest.mark.full
def test_sigterm_in_exporting_prints_it_too(said, monkeypatch, models):
    write = served_file.export

    def end(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    export = ["export={gguf: f16, tokens: 0}"]
    with monkeypatch.context() as patch:
        patch.setattr(served_file, "export", end)
        text = said("run", "r.yaml", *export, "--name", "exported", code=143)
    assert "stopped by SIGTERM while exporting\n" in text
    assert "stopped; continue with: distill run r.yaml 'export={gguf: f16, tokens: 0}' --name exported --resume" in text
    assert signal.getsignal(signal.SIGTERM) == before
    folder = models / "runs/exported"
    assert (folder / "student").is_dir() and not (folder / "export").exists()
    said("run", "r.yaml", *export, "--name", "exported", "--resume")
    assert (folder / "export/export-f16.gguf").is_file()


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_after_training_keeps_the_student_and_names_the_command(said, monkeypatch, models, ends):
    measure = RunResults.measure

    def end(self):
        signal.raise_signal(ends)
        return measure(self)

    name = f"measured-{ends.name}"
    with monkeypatch.context() as patch:
        patch.setattr(RunResults, "measure", end)
        text = said("run", "r.yaml", "train.save_every=null", "--name", name, code=128 + ends)
    assert ("stopped by SIGTERM while measuring the trained student\n" in text) == (ends == signal.SIGTERM)
    assert f"continue with: distill run r.yaml train.save_every=null --name {name} --resume\n" in text
    assert f"continuing from runs/{name}/checkpoint-4" in said(
        "run", "r.yaml", "train.save_every=null", "--name", name, "--resume"
    )
    assert (models / "runs" / name / "student").is_dir()


# ------------------------------------------------------------------ stages


@pytest.mark.full
def test_each_stage_has_a_heading(said):
    stages = "stages=[{name: prune}, {name: again, train: {steps: 2}}]"
    lines = said("run", "r.yaml", stages, "--name", "staged").splitlines()
    headings = [number for number, line in enumerate(lines) if line.startswith("stage ")]
    assert [lines[number] for number in headings] == [
        "stage 1 of 2: prune, in runs/staged/stages/1-prune",
        "stage 2 of 2: again, in runs/staged",
    ]
    assert headings[0] < lines.index("reading     text.txt") < headings[1]
    lines = said("run", "r.yaml", stages, "--name", "staged", "--resume").splitlines()
    assert "stage 1 of 2: prune, in runs/staged/stages/1-prune, finished" in lines


# ------------------------------------------------------------------ report


@pytest.mark.full
def test_a_report_has_parameters_kept_layers_size_of_the_data_and_warnings(said, models):
    said("run", "r.yaml", "--name", "shown")
    said("report", "shown")
    page = (models / "runs/shown/report.html").read_text()
    assert re.search(r"<dt>student</dt><dd>[^<]*layers 0, [\d.]+ K parameters, [\d.]+ K trained", page)
    assert re.search(r"<dt>teacher</dt><dd>teacher, [\d.]+ K parameters", page)
    assert re.search(r"<dt>data</dt><dd>text.txt: text[^<]* train: [\d,]+ documents, [\d,]+ tokens", page)
    assert '<p class="warning">few data: 4 optimizer steps are too few to train on: increase train.steps' in page


def test_charts_of_a_run_share_their_steps_and_both_entropies_their_range():
    rows = [{"step": step, "kl": 1.0 / step, "student_entropy": 2.0, "teacher_entropy": 5.0} for step in (1, 2, 3)]
    rows += [{"step": 9, "eval_kl": 0.2}, {"step": 12, "eval_kl": 0.1}]
    charts = {chart.title: chart for chart in same_axes(charts_of(rows))}
    drawn = {}
    for title, chart in charts.items():
        with new_figure(3, 2) as figure:
            axes = figure.subplots()
            draw_lines(axes, chart)
            drawn[title] = axes.get_xlim(), axes.get_ylim()
    assert len({steps for steps, _ in drawn.values()}) == 1 and len(drawn) == 3
    both = {values for title, (_, values) in drawn.items() if "entropy" in title}
    assert len(both) == 1 and max(both)[1] > 5
    (other,) = (values for title, (_, values) in drawn.items() if title.startswith("KL"))
    assert other not in both
