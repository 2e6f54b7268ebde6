"""Runs of several stages that are killed, damaged or started twice at moments drawn from a seed.

Each case ends in one of two ways: with every bit of the undisturbed run, or with a refusal in one line; after what was
damaged has been restored the refused run, too, ends with the bits of the undisturbed one.
"""

import contextlib
import datetime
import json
import random
import re
import shutil
import signal
import time

import pytest
import torch
from forked import PIPE, Forked, clean_environment
from safetensors.torch import load_file
from tiny import save_models
from torch.distributed import TCPStore

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 3, intermediate: 96, importance: {rows: 4, layer_rows: 2}}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 8, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, save_every: 2, device: cpu}
generate: {prompts: []}
stages:
  - {name: prune}
  - {name: again, student: {from_teacher: {layers: 2, intermediate: 64}}}
  - {name: quantise, student: {quantise: {format: q4_0}}, train: {learning_rate: 1e-4}}
"""
FOLDERS = ("stages/1-prune", "stages/2-again", ".")  # of the three stages, in the run's folder
SECONDS = 200  # of one start; the undisturbed run takes some seconds
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from distill.cli import main
main()
"""


class Place:
    """A folder with models, data and recipe, and one run in it."""

    def __init__(self, folder, processes=1):
        self.folder = folder
        self.processes = processes
        self.run = folder / "runs/tiny"

    @contextlib.contextmanager
    def started(self, limit=None, arguments=("--name", "tiny", "--resume-if-any")):
        """Start the run, or go on with it, in the block: a list of its processes, which have ended after it."""
        common = {}
        if self.processes > 1:
            store = TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=SECONDS)
            )
            common = {
                "WORLD_SIZE": str(self.processes),
                "LOCAL_WORLD_SIZE": str(self.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        program = ["-m", "distill"] if limit is None else ["-c", LIMITED, str(limit)]
        processes = []
        for rank in range(self.processes):
            ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self.processes > 1 else {}
            processes.append(
                Forked(
                    [*program, "run", "tiny.yaml", *arguments],
                    cwd=self.folder,
                    env=clean_environment(HF_HUB_OFFLINE="1", **common, **ranked),
                    stdout=PIPE,
                    stderr=PIPE,
                )
            )
        try:
            yield processes
        finally:
            for each in processes:
                each.kill()
                each.wait()

    def go_on(self, limit=None, arguments=("--name", "tiny", "--resume-if-any")):
        """Exit code and error of rank 0 of a start that is not disturbed; all ranks must end by themselves."""
        with self.started(limit, arguments) as processes:
            errors = [each.communicate(timeout=SECONDS)[1] for each in processes]
            codes = [each.wait() for each in processes]
        assert len(set(codes)) == 1, errors
        return codes[0], errors[0]

    def outcome(self):
        """Students, and held-out figures before and after, of all stages."""
        students = [load_file(self.run / folder / "student/model.safetensors") for folder in FOLDERS]
        results = [json.loads((self.run / folder / "result.json").read_text()) for folder in FOLDERS]
        return students, [(result["before"], result["after"]) for result in results]


def assert_same(place, expected):
    """Compare a run with the undisturbed one, to the bit."""
    students, figures = place.outcome()
    for folder, student, other in zip(FOLDERS, students, expected[0], strict=True):
        assert student.keys() == other.keys(), folder
        assert [name for name, value in student.items() if not torch.equal(value, other[name])] == [], folder
    assert figures == expected[1]


def assert_ends_like(place, expected):
    """Go on with a run until its end, and compare it."""
    code, error = place.go_on()
    assert code == 0, error
    assert_same(place, expected)


class Undisturbed:
    """A finished run, what came out of it and how long it took."""

    def __init__(self, folder, processes):
        self.folder = folder
        save_models(folder, text=TEXT, teacher={"layers": 4, "seed": 1, "hidden": 64})
        (folder / "tiny.yaml").write_text(RECIPE)
        place = Place(folder, processes)
        with Forked(["-c", ""], cwd=folder, env=clean_environment()) as server:  # its imports are not the run's time
            server.wait()
        begun = time.monotonic()
        code, error = place.go_on()
        assert code == 0, error
        self.seconds = time.monotonic() - begun
        self.expected = place.outcome()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return Undisturbed(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return Undisturbed(tmp_path_factory.mktemp("together"), 2)


def copied(whole, folder, processes=1, *, finished=True):
    """Copy the inputs of a run, and its folder if it shall be finished."""
    ignored = () if finished else ("runs",)
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*ignored))
    return Place(folder, processes)


def remove(*paths):
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def end_before_the_last_stage(place):
    remove(*(path for path in place.run.iterdir() if path.name != "stages"))


def end_in_the_second_stage(place):
    end_before_the_last_stage(place)
    second = place.run / FOLDERS[1]
    remove(*(second / name for name in ("result.json", "manifest.json", "student", "checkpoint-8")))


# ------------------------------------------------------------------------------------------------------------- kills


def seeds(count):
    """Seeds of which the first is tried under `-m full`, the others under `-m slow`."""
    rest = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, count)]
    return [pytest.param(0, marks=pytest.mark.full), *rest]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("seed", seeds(10))
def test_a_run_that_is_ended_at_any_moment_is_continued_to_the_same_bits(alone, tmp_path, number, seed):
    draw = random.Random(f"{number.name}-{seed}")
    place = copied(alone, tmp_path, finished=False)
    for _ in range(draw.randint(1, 3)):
        with place.started() as [process]:
            time.sleep(draw.random() * alone.seconds)
            process.send_signal(number)
            error = process.communicate(timeout=SECONDS)[1]
            assert process.wait() in (0, -number), error
    assert_ends_like(place, alone.expected)


@pytest.mark.parametrize("seed", seeds(4))
def test_two_ranks_of_which_one_is_killed_at_any_moment_are_continued_to_the_same_bits(together, tmp_path, seed):
    draw = random.Random(f"(0,)-{seed}")
    place = copied(together, tmp_path, processes=2, finished=False)
    with place.started() as ranks:
        time.sleep(draw.random() * together.seconds)
        ranks[0].kill()
        errors = [each.communicate(timeout=SECONDS)[1] for each in ranks]
        codes = [each.wait() for each in ranks]
    finished = (place.run / "result.json").is_file()  # before it was killed
    assert finished or 0 not in codes, errors
    assert_ends_like(place, together.expected)


# ------------------------------------------------------------------------------------------------------------- flips

KINDS = {
    "student": lambda path: path.parent.name == "student",
    "checkpoint": lambda path: path.parent.name.startswith("checkpoint-"),
    "record": lambda path: path.parent.name in ("1-prune", "2-again"),
}


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("student", end_before_the_last_stage),
        ("checkpoint", end_in_the_second_stage),
        ("record", end_in_the_second_stage),
    ],
)
@pytest.mark.parametrize("seed", seeds(6))
def test_a_flipped_bit_in_an_earlier_stage_is_refused_or_changes_nothing(alone, tmp_path, end, kind, seed):
    draw = random.Random(f"{end.__name__}-{kind}-{seed}")
    place = copied(alone, tmp_path)
    end(place)
    files = sorted(path for path in (place.run / "stages").rglob("*") if path.is_file() and path.name[0] != ".")
    path = draw.choice([path for path in files if KINDS[kind](path) and path.stat().st_size])
    whole = path.read_bytes()
    damaged = bytearray(whole)
    at = draw.randrange(len(whole))
    damaged[at] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)
    code, error = place.go_on()
    what = f"{path.relative_to(place.run)}, byte {at}: {error}"
    if code == 0:
        assert_same(place, alone.expected)
        return
    assert not (place.run / "student").exists(), what
    assert len(error.strip().splitlines()) <= 2 and "Traceback" not in error and "unexpected" not in error, what
    path.write_bytes(whole)
    assert_ends_like(place, alone.expected)


# -------------------------------------------------------------------------------------------- two starts, full disks


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("seed", seeds(5))
def test_two_starts_of_one_run_end_in_one_run(alone, tmp_path, begun, seed):
    draw = random.Random(f"two-{begun}-{seed}")
    place = copied(alone, tmp_path, finished=False)
    if begun:
        with place.started() as [process]:
            time.sleep(draw.random() * alone.seconds)
            process.kill()
    with place.started() as [first]:
        time.sleep(draw.random() * alone.seconds / 2)
        with place.started() as [second]:
            errors = [each.communicate(timeout=SECONDS)[1] for each in (first, second)]
            codes = [each.wait() for each in (first, second)]
    assert 0 in codes, errors
    for code, error in zip(codes, errors, strict=True):
        refused = ("another process", "already", "another run began there")
        assert code == 0 or any(words in error for words in refused), error
    assert_ends_like(place, alone.expected)


@pytest.mark.parametrize("seed", seeds(8))
def test_after_a_full_disk_the_command_of_the_message_ends_the_run(alone, tmp_path, seed):
    """A limit on the size of a file stands for the disk: small files fit, weights and states do not."""
    draw = random.Random(f"full-{seed}")
    place = copied(alone, tmp_path, finished=False)
    sizes = sorted({path.stat().st_size for path in (alone.folder / "runs").rglob("*") if path.is_file()})
    code, error = place.go_on(limit=draw.choice(sizes[len(sizes) // 2 : -1]))
    if code == 0:
        assert_same(place, alone.expected)
        return
    assert "Traceback" not in error and "unexpected" not in error, error
    named = re.search(r"with ((?:--name \S+ )?--resume)", " ".join(error.split()))
    assert named or not place.run.exists(), error
    code, error = place.go_on(arguments=named[1].split() if named else ("--name", "tiny"))
    assert code == 0, error
    assert_same(place, alone.expected)
