"""`distill verify` and a resumed run see what was damaged, in every file of a run and of a teacher's store, and what
the line says to do about it works."""

import json
import logging
import random
import re
import shutil
from pathlib import Path

import pytest
from test_online_cache import here, losses, models, recipe  # noqa: F401  (fixtures, and a run with teacher.online_cache)
from test_resume import WHOLE, figures

from distill.cli import run_command
from distill.core.manifest import MANIFEST, add_to_manifest, entry_mismatch
from distill.generation.environment import EnvironmentLog
from distill.run import run
from distill.training.rollout_files import files

ROLLOUTS = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: pairs.jsonl, max_length: 64, cache: false, validation: {fraction: 0.1, max_rows: 2},
       fields: {prompt: q, completion: a}, on_policy: {max_new_tokens: 6, store_every: 2}}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, schedule: constant, log_every: 1, save_every: 2,
        device: cpu}
generate: {prompts: [Hello], max_new_tokens: 4}
"""
COVERED = [
    "recipe.yaml",
    "lock.yaml",
    "before.json",
    "metrics.jsonl",
    "result.json",
    "samples.md",
    "manifest.json",
    "rollouts/step-00000002.parquet",
]


# a run with rollouts
pytestmark = pytest.mark.place(
    **WHOLE
    | {
        "files": {
            "r.yaml": ROLLOUTS,
            "pairs.jsonl": [{"q": f"word {n}", "a": f"so {n} is"} for n in range(40)],
        }
    }
)


@pytest.fixture
def place(workplace):
    return workplace / "runs/whole"


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(content)


def test_an_undamaged_run_is_as_written(place, capsys):
    assert run_command(["verify", "whole"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    assert {Path(name).name for name in COVERED} <= {line.split()[1] for line in lines}
    assert len(files(place)) == 2


@pytest.mark.plain("recipe.yaml")
@pytest.mark.parametrize("name", COVERED)
def test_a_flipped_bit_of_any_file_of_a_run_is_seen(place, name, capsys):
    path, draw = place / name, random.Random(name)
    whole = path.read_bytes()
    for _ in range(6):
        flip(path, draw.randrange(len(whole)))
        capsys.readouterr()
        assert run_command(["verify", "whole"]) == 1
        damaged = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("DAMAGED")]
        assert path.name in damaged and (name == MANIFEST or set(damaged) <= {path.name, "student"}), damaged
        path.write_bytes(whole)
    if name not in (MANIFEST, "recipe.yaml"):  # without the one there are no checksums, without the other no run
        path.unlink()
        assert run_command(["verify", "whole"]) == 1
        assert re.search(rf"DAMAGED +{path.name} +{name} is missing", capsys.readouterr().out)


def test_a_damaged_reply_of_the_environment_is_named(place, capsys):
    EnvironmentLog(place, 0).add({"a": None, "b": [{"role": "tool", "content": "It is 2."}]})
    assert run_command(["verify", "whole"]) == 0
    assert "replies to 2 conversations" in capsys.readouterr().out
    log = place / "environment/00000.jsonl"
    log.write_bytes(log.read_bytes().replace(b"It is 2", b"It is 3"))
    assert run_command(["verify", "whole"]) == 1
    assert re.search(r"DAMAGED +\S*00000.jsonl +line 2 is not as it was written", capsys.readouterr().out)


def test_a_run_of_before_there_were_checksums_is_read_for_its_form(place, capsys):
    (place / MANIFEST).unlink()
    assert run_command(["verify", "whole"]) == 0
    (place / "result.json").write_text('{"before": {"forward_kl": "much"}, "after": {}}')
    assert run_command(["verify", "whole"]) == 1
    assert "metrics that are not numbers" in capsys.readouterr().out


def test_entries_are_made_anew_where_a_file_is_and_only_there(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    add_to_manifest(tmp_path, "a", "b", "absent")
    (tmp_path / "a").write_text("other")
    add_to_manifest(tmp_path, "b")
    assert entry_mismatch(tmp_path, "b") is None and "a is damaged" in (entry_mismatch(tmp_path, "a") or "")
    assert entry_mismatch(tmp_path, "absent") is None


# ------------------------------------------------------------------ a run that goes on


@pytest.fixture
def plain(placed):
    return placed(**WHOLE)


@pytest.fixture
def resumed(plain, tmp_path, monkeypatch):
    """Damages a file of a finished run with `change`, and goes on from its first checkpoint."""
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("runs/whole/checkpoint-4")

    def resume(name, change):
        path = Path("runs/whole", name)
        path.write_bytes(change(path.read_bytes()))
        assert run_command(["run", "r.yaml", "--name", "whole", "--resume"]) == 0
        return figures(path.parent)

    return resume


def test_damaged_metrics_are_named_on_resume(resumed, plain, caplog):
    with caplog.at_level(logging.WARNING):
        rows = resumed("metrics.jsonl", lambda content: content.replace(b'"step": 2', b'"s|ep": 2'))
    assert "runs/whole/metrics.jsonl: line 2 is damaged, and excluded from the metrics" in caplog.text
    assert rows == [row for row in figures(plain / "runs/whole") if row["step"] != 2]


@pytest.mark.full
def test_a_line_cut_short_by_a_kill_is_no_damage(resumed, plain, caplog):
    with caplog.at_level(logging.WARNING):
        Path("runs/whole", MANIFEST).unlink()  # which a run that did not end has no entry of the file in
        rows = resumed("metrics.jsonl", lambda content: content[:-9])
    assert "damaged" not in caplog.text and rows == figures(plain / "runs/whole")


@pytest.mark.full
def test_a_figure_from_before_training_that_is_not_as_written_is_made_again(resumed, plain, caplog):
    def change(content):
        record = json.loads(content)
        record["held_out"]["forward_kl"] *= 2
        return json.dumps(record).encode()

    with caplog.at_level(logging.WARNING):
        resumed("before.json", change)
    assert "before.json is damaged; the student is evaluated again" in caplog.text
    ours, theirs = (json.loads((at / "runs/whole/before.json").read_text()) for at in (Path(), plain))
    assert ours["held_out"] == theirs["held_out"]
    assert run_command(["verify", "whole"]) == 0


# ------------------------------------------------------------------ a store of a teacher's outputs


@pytest.fixture(scope="module")
def stored(models, tmp_path_factory):  # noqa: F811
    """A complete store of two shards, and what a run over it comes to."""
    folder = tmp_path_factory.mktemp("stored")
    shutil.copytree(models, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as limit:
        limit.chdir(folder)
        limit.setattr("distill.teachers.backends.stored.store.SHARD_BYTES", 100_000)
        run(recipe(), name="first")
        assert len(list(Path("kept").glob("shard-0*"))) >= 2
        return folder, losses(run(recipe(), name="whole"))


def apply_cure(line):
    """Do what an error line says: delete the file that it names, and the manifest where it says so, or the folder."""
    path = Path(re.search(r"kept/[\w./-]+(?=:| is )", line)[0])
    assert path.is_file() or "is missing" in line, line
    if "move its folder away" in line:
        Path("kept").rename("moved")
        return
    assert "delete" in line, line
    path.unlink(missing_ok=True)
    if f"and {MANIFEST}" in line:
        Path("kept", MANIFEST).unlink(missing_ok=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "at", "complete"),
    [
        ("plan.json", 60, True),
        (MANIFEST, 60, True),  # the end of filling
        ("shard-00000.safetensors", 20, False),  # its header
        ("shard-00001.safetensors", 0.5, True),
        ("shard-00001.safetensors", 0.5, False),
        ("shard-00001.safetensors", None, True),  # deleted
        ("shard-00001.safetensors", None, False),
        ("head.safetensors", 0.5, True),  # read beside the manifest
    ],
)
def test_the_cure_that_a_damaged_store_names_works(stored, tmp_path, monkeypatch, capsys, name, at, complete):
    folder, expected = stored
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if not complete:
        Path("kept", MANIFEST).unlink()
    assert run_command(["verify", "kept"]) == 0
    path = Path("kept", name)
    if at is None:
        path.unlink()
    else:
        flip(path, int(at * path.stat().st_size) if at < 1 else at)
    assert run_command(["verify", "kept"]) == (1 if at is not None or complete else 0)
    capsys.readouterr()
    again = None
    for attempt in range(3):  # the faults of one file may be several
        try:
            again = run(recipe(), name=f"again-{attempt}")
            break
        except ValueError as error:
            apply_cure(str(error))
    assert again is not None and losses(again) == expected
    assert run_command(["verify", "kept"]) == 0


@pytest.mark.full  # of a store in a plain run
def test_the_cure_that_a_damaged_cache_names_works(plain, tmp_path, monkeypatch, capsys):
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    command = ["cache", "r.yaml", "--top-k", "8", "--tail", "bucket", "--out", "kept"]
    read = ["run", "r.yaml", "teacher={type: cache, path: kept}", "--name"]
    assert run_command(command) == 0 and run_command([*read, "whole-cache"]) == 0
    for at in (20, 0.5, None):
        path = Path("kept/shard-00000.safetensors")
        path.unlink() if at is None else flip(path, int(at * path.stat().st_size) if at < 1 else at)
        capsys.readouterr()
        assert run_command(["verify", "kept", "--json"]) == 1
        apply_cure(next(row["result"] for row in json.loads(capsys.readouterr().out) if not row["sound"]))
        assert run_command(command) == 0 and run_command(["verify", "kept"]) == 0
    assert run_command([*read, "again"]) == 0
    assert figures(Path("runs/again")) == figures(Path("runs/whole-cache"))
