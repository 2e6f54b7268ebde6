"""Ranks without a launcher that watches (srun): they need the same inputs, and one that is refused or killed ends all.

The store that they meet at is held by the first of them, or by a process that outlives them.
"""

import contextlib
import datetime
import shutil
import signal
import time

import pytest
from forked import PIPE, Forked, clean_environment, free_port
from safetensors.torch import load_file, save_file
from tiny import save_models
from torch.distributed import TCPStore

from distill.core.run_lock import RunLock

TEXT = "\n".join(f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(60))
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 4}}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, device: cpu}
generate: {prompts: []}
"""
# ranks wait less for each other at the end than 5 s and 10 s, which most tests would take
PROGRAM = """
from distill.core import heartbeat
heartbeat.GRACE_S, heartbeat.LINGER_S = 1.0, 2.0
from distill.cli import main
main()
"""
SECONDS = 100  # of a pair of processes; torch waits half an hour for a rank that does not join
HELD_OUT = "\n".join(f"Nobody knows {n} things {'at ' * (n % 3)}all about {n * 7919 % 991}." for n in range(30))
PLUGIN = """
def gap(student_logits, teacher_logits, labels):
    return (teacher_logits.log_softmax(-1) - student_logits.log_softmax(-1)).abs().sum(-1) * SCALE
TERMS = {"gap": gap}
SCALE = 1.0
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_models(folder, text=TEXT, teacher={"seed": 1}, student={"seed": 2})
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def places(inputs, tmp_path):
    """A folder of inputs for each of two ranks, which share the folder of runs."""
    for rank in (0, 1):
        shutil.copytree(inputs, tmp_path / str(rank))
    return tmp_path


@contextlib.contextmanager
def two_ranks(places, *more, command=None, own=((), ()), **store):
    """Start a command on two ranks, each in its own folder, with its `own` overrides beside those of both."""
    command = command or ["run", "tiny.yaml", "--name", "tiny", f"output_dir={places / 'runs'}"]
    port = store.pop("MASTER_PORT", None) or str(free_port())
    ranks = []
    for rank in (0, 1):
        launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            Forked(
                ["-c", PROGRAM, *command, *more, *own[rank]],
                cwd=places / str(rank),
                env=clean_environment(**launched, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **store),
                stdout=PIPE,
                stderr=PIPE,
            )
        )
    try:
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.fixture
def store():
    """Settings of ranks that meet at a store of this process."""
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=SECONDS))
    yield {"MASTER_PORT": str(held.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def outcome(ranks):
    """Exit codes and standard errors of both ranks, which must end by themselves."""
    errors = [each.communicate(timeout=SECONDS)[1] for each in ranks]
    return [each.wait() for each in ranks], errors


def other_data(places):
    (places / "1/text.txt").write_text(TEXT.replace("line 7 ", "line 8 "))


def other_held_out(places):
    for rank, word in enumerate(("Nobody", "Anybody")):
        recipe = RECIPE.replace("validation: {fraction: 0.1, max_rows: 4}", "validation: {source: held.txt}")
        (places / str(rank) / "tiny.yaml").write_text(recipe)
        (places / str(rank) / "held.txt").write_text(HELD_OUT.replace("Nobody", word))


def other_functions(places):
    for rank in (0, 1):
        (places / str(rank) / "mine.py").write_text(PLUGIN.replace("SCALE = 1.0", f"SCALE = {rank + 1}.0"))
        (places / str(rank) / "tiny.yaml").write_text(RECIPE + "loss: {terms: [{type: gap, weight: 1.0}]}\n")


def other_weights(model):
    def change(places):
        path = places / "1" / model / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"].view(-1)[3] += 2**-20
        save_file(tensors, path, metadata={"format": "pt"})

    return change


@pytest.mark.plain("train.log_every=1-recipe.train.log_every")
@pytest.mark.parametrize(
    "change, named",
    [
        (other_data, "data.source"),
        (other_held_out, "data.validation.held.txt differs"),
        (other_functions, "recipe.loss.plugin.sha256"),
        (other_weights("student"), "student.weights"),
        (other_weights("teacher"), "teacher.weights"),
        ("loss.terms.0.type=reverse_kl", "recipe.loss.terms"),
        ("train.log_every=1", "recipe.train.log_every"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_rank_with_other_inputs_is_named_and_nothing_is_trained(places, store, change, named):
    overrides = [change] if isinstance(change, str) else []
    if not overrides:
        change(places)
    of_both = ["--plugin", "mine.py"] if change is other_functions else []
    with two_ranks(places, *of_both, own=((), overrides), **store) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [2, 2], errors
    assert f"rank 1: {named}" in errors[0], errors
    assert not (places / "runs/tiny/student").exists()


@pytest.mark.full
def test_a_folder_that_is_in_use_ends_both(places, store):
    with RunLock(places / "runs/tiny") as held:
        held.acquire()
        with two_ranks(places, **store) as ranks:
            codes, errors = outcome(ranks)
    assert codes[0] == 1 and codes[1] != 0, errors
    assert "another process writes there" in errors[0] + errors[1]


def with_a_typo(place):
    (place / "tiny.yaml").write_text(RECIPE.replace("learning_rate", "learning_rat"))


def without_data(place):
    (place / "text.txt").unlink()


def without_teacher(place):
    shutil.rmtree(place / "teacher")


def with_truncated_weights(place):
    path = place / "student/model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.plain("with_truncated_weights-1")
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        (with_a_typo, 0),
        (without_data, 0),
        (without_teacher, 1),
        (with_truncated_weights, 1),
    ],
)
def test_a_rank_that_is_refused_at_any_point_ends_the_other(places, fault, rank):
    fault(places / str(rank))
    with two_ranks(places) as ranks:
        codes, errors = outcome(ranks)
    assert codes[rank] == 2 and codes[1 - rank] in (1, 2), errors
    # where both had joined, the other one may see the closed connection before it reads the reason
    line = errors[1 - rank].strip().splitlines()[-1]
    assert f"rank {rank} has ended: " in line or "another process of this run ended" in line, errors
    assert not (places / "runs/tiny/student").exists()


def test_a_mistake_that_all_ranks_have_ends_all_at_once(places):
    for rank in (0, 1):
        with_a_typo(places / str(rank))
    begun = time.monotonic()
    with two_ranks(places) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [2, 2], errors
    assert all("learning_rat" in error for error in errors)
    assert time.monotonic() - begun < 50  # less than a rank waits for others that have not started


@pytest.mark.plain("0")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_other(places, rank):
    with two_ranks(places, "train.steps=4000") as ranks:
        until = time.monotonic() + SECONDS
        while not (places / "runs/tiny/metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.2)
        ranks[rank].send_signal(signal.SIGKILL)
        codes, errors = outcome(ranks)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] not in (0, None), errors


def test_two_ranks_with_the_same_inputs_train(places):
    with two_ranks(places) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [0, 0], errors
    assert (places / "runs/tiny/student/model.safetensors").is_file()


# ------------------------------------------------------------------ other commands on several ranks

# of copies of a teacher, the ranks join no process group; of shards they do
COMMANDS = {
    "cache": ["cache", "tiny.yaml", "--hidden"],
    "cache in shards": ["cache", "tiny.yaml", "--hidden", "parallel.teacher=sharded"],
    "sample in shards": [
        *("sample", "tiny.yaml", "--from", "teacher", "--prompts", "prompts.txt", "--engine", "transformers"),
        *("--max-new-tokens", "8", "--batch-size", "1", "parallel.teacher=sharded"),
    ],
}


def command_of(name, places):
    (places / "0/prompts.txt").write_text("".join(f"What is {n}?\n" for n in range(2000)))
    shutil.copy(places / "0/prompts.txt", places / "1/prompts.txt")
    out = places / ("made.jsonl" if name.startswith("sample") else "made")
    return [*COMMANDS[name], "--out", str(out)], out


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fault", "rank"),
    [
        ("cache", with_a_typo, 1),
        ("cache in shards", without_data, 0),
        ("sample in shards", without_data, 1),
    ],
)
def test_a_refused_rank_ends_the_other_one_of_a_command(places, name, fault, rank):
    command, out = command_of(name, places)
    if fault is without_data and name.startswith("sample"):
        fault = lambda place: (place / "prompts.txt").unlink()  # noqa: E731  (the data of this command)
    fault(places / str(rank))
    with two_ranks(places, command=command) as ranks:
        codes, errors = outcome(ranks)
    assert codes[rank] == 2 and codes[1 - rank] in (1, 2), errors
    line = errors[1 - rank].strip().splitlines()[-1]
    assert f"rank {rank} has ended: " in line, errors
    assert not (out / "manifest.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(("name", "rank"), [("cache", 1), ("cache in shards", 0), ("sample in shards", 0)])
def test_a_killed_rank_ends_the_other_one_of_a_command(places, name, rank):
    command, out = command_of(name, places)
    if name.startswith("cache"):
        for place in ("0", "1"):  # enough that the other one is at work when it is killed
            (places / place / "text.txt").write_text(
                "\n".join(f"Line {n} says {n * 7919} things." for n in range(5000))
            )
        command += ["--batch-size", "1"]
    with two_ranks(places, command=command) as ranks:
        until = time.monotonic() + SECONDS
        while not out.exists() and time.monotonic() < until:
            time.sleep(0.05)
        ranks[rank].send_signal(signal.SIGKILL)
        codes, errors = outcome(ranks)
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] not in (0, None), errors
    assert errors[1 - rank].strip(), errors


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_sound_ranks_ends_in_order(places, name):
    command, out = command_of(name, places)
    for place in ("0", "1"):
        (places / place / "prompts.txt").write_text("What is 4?\nWhat is 5?\n")
    with two_ranks(places, command=command) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [0, 0], errors
    assert out.exists() and not any("has ended" in error for error in errors)
