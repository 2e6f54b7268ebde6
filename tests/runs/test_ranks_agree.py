"""Several processes without a launcher that watches (srun): they need the same inputs, and end together."""

import contextlib
import datetime
import shutil
import signal
import time

import pytest
from forked import PIPE, Forked, clean_environment
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
SECONDS = 100  # of a pair of processes; a rank that waits for the other one waits for hours


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
def two_ranks(places, more=((), ())):
    """Start `distill run tiny.yaml` on two ranks, each in its own folder, with its own overrides."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=SECONDS)
    )
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        Forked(
            ["-m", "distill", "run", "tiny.yaml", "--name", "tiny", f"output_dir={places / 'runs'}", *more[rank]],
            cwd=places / str(rank),
            env=clean_environment(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=PIPE,
            stderr=PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def outcome(ranks):
    """Exit codes and standard errors of both ranks, which must end by themselves."""
    errors = [each.communicate(timeout=SECONDS)[1] for each in ranks]
    return [each.wait() for each in ranks], [error if isinstance(error, str) else error.decode() for error in errors]


def other_data(place):
    (place / "text.txt").write_text(TEXT.replace("line 7 ", "line 8 "))


def other_weights(model):
    def change(place):
        path = place / model / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"].view(-1)[3] += 2**-20
        save_file(tensors, path, metadata={"format": "pt"})

    return change


@pytest.mark.plain(
    "other_data-data.source",
    "loss.terms.0.type=reverse_kl-recipe.loss.terms",
    "train.log_every=1-recipe.train.log_every",
)
@pytest.mark.parametrize(
    "change, named",
    [
        (other_data, "data.source"),
        (other_weights("teacher"), "teacher.weights"),
        (other_weights("student"), "student.weights"),
        ("train.learning_rate=1e-3", "recipe.train.learning_rate"),
        ("loss.terms.0.type=reverse_kl", "recipe.loss.terms"),
        ("train.batch_size=1", "recipe.train.batch_size"),
        ("train.seed=7", "recipe.train.seed"),
        ("data.max_length=16", "recipe.data.max_length"),
        ("train.steps=6", "recipe.train.steps"),
        ("train.log_every=1", "recipe.train.log_every"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_rank_with_other_inputs_is_named_and_nothing_is_trained(places, change, named):
    overrides = [change] if isinstance(change, str) else []
    if not overrides:
        change(places / "1")
    with two_ranks(places, ((), overrides)) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [2, 2], errors
    assert f"rank 1: {named}" in errors[0], errors
    assert not (places / "runs/tiny/student").exists()


def test_two_ranks_with_the_same_inputs_train(places):
    with two_ranks(places) as ranks:
        codes, errors = outcome(ranks)
    assert codes == [0, 0], errors
    assert (places / "runs/tiny/student/model.safetensors").is_file()


def without_data(place):
    (place / "text.txt").unlink()


def without_teacher(place):
    shutil.rmtree(place / "teacher")


def with_broken_config(place):
    (place / "teacher/config.json").write_text("{")


def with_truncated_weights(place):
    path = place / "student/model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.plain("without_data-0", "with_truncated_weights-1")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [without_data, without_teacher, with_broken_config, with_truncated_weights])
def test_a_refusal_on_one_rank_ends_the_other(places, fault, rank):
    fault(places / str(rank))
    with two_ranks(places) as ranks:
        codes, errors = outcome(ranks)
    assert 0 not in codes and None not in codes, errors
    assert codes[rank] == 2 and errors[rank].strip(), errors
    other = errors[1 - rank].strip().splitlines()
    assert len(other) >= 1, errors
    assert not (places / "runs/tiny/student").exists()


def test_a_folder_that_is_in_use_ends_both(places):
    with RunLock(places / "runs/tiny") as held:
        held.acquire()
        with two_ranks(places) as ranks:
            codes, errors = outcome(ranks)
    assert codes[0] == 1 and codes[1] != 0, errors
    assert "another process writes there" in errors[0] + errors[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_other(places, rank):
    with two_ranks(places, (("train.steps=4000",), ("train.steps=4000",))) as ranks:
        until = time.monotonic() + SECONDS
        while not (places / "runs/tiny/metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.2)
        ranks[rank].send_signal(signal.SIGKILL)
        codes, errors = outcome(ranks)
    assert codes[1 - rank] not in (0, None), errors
