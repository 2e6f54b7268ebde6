"""Training from a teacher in another process: the same bits as from one that is loaded, whatever servers do."""

import contextlib
import json
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from served import engine_in, from_server, opened, recipe_in, serving, write_models

from distill.core.errors import RunError, TeacherUnavailableError
from distill.data.collator import Collator
from distill.doctor import examine, invariants, invariants_runs
from distill.objectives.top_k import top_k_targets
from distill.objectives.top_k_encoding import Encoding, encode
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.run import run
from distill.serving.app import RequestLimits, make_app
from distill.serving.engine import ServingEngine
from distill.serving.open import running
from distill.serving.worker import Full
from distill.teachers.backends.served import client
from distill.teachers.backends.served.client import Servers
from distill.teachers.backends.served.protocol import tensors_of
from distill.training.lock_file import read_lock

ACCUMULATED = ("train.tokens_per_step=192", "train.steps=5", "train.save_every=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("place"), kind="gemma2", final_logit_softcapping=5.0)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.2)


def trained(place, name, *overrides, **options):
    """Weights of the trained student, and what the run logged."""
    result = run(recipe_in(place, *overrides), name=name, **options)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    figures = [
        {key: line[key] for key in ("step", "loss", "grad_norm") if key in line} for line in lines if "loss" in line
    ]
    return load_file(result.folder / "student" / "model.safetensors"), figures, result


def assert_same(one, other):
    assert one[1] == other[1] and one[2].after == other[2].after
    assert one[0].keys() == other[0].keys() and all(torch.equal(one[0][name], other[0][name]) for name in one[0])


@pytest.fixture(scope="module")
def in_process(place):
    """The run with its teacher loaded."""
    return trained(place, "in-process", *ACCUMULATED)


# ------------------------------------------------------------------ the same bits


@pytest.mark.plain("1")
@pytest.mark.parametrize("prefetch", [1, 7])
def test_training_is_the_same_to_the_bit(place, url, in_process, prefetch):
    served = trained(place, f"served-{prefetch}", *ACCUMULATED, *from_server(url, prefetch=prefetch))
    assert_same(served, in_process)
    lock = read_lock(served[2].folder / "lock.yaml")
    assert (
        lock["teacher"]["softcap"] == 5.0 and lock["teacher"]["send"] == "auto" and len(lock["teacher"]["server"]) == 32
    )


def test_packed_with_others_it_differs_by_rounding(place, url, in_process):
    _, figures, _ = trained(place, "shared", *ACCUMULATED, *from_server(url, deterministic=False))
    for one, other in zip(figures, in_process[1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)


@pytest.mark.full
def test_fp8_on_the_wire_costs_little(place, url, in_process):
    _, figures, _ = trained(place, "fp8", *ACCUMULATED, *from_server(url, transfer_dtype="fp8"))
    losses = [(one["loss"], other["loss"]) for one, other in zip(figures, in_process[1], strict=True)]
    assert all(one == pytest.approx(other, rel=0.02) for one, other in losses) and losses[0][0] != losses[0][1]


@pytest.mark.plain("2")
@pytest.mark.parametrize("ahead", [0, 2])
def test_rollouts_are_submitted_to_the_teacher_as_soon_as_they_exist(place, url, ahead):
    chats = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n * n}."}]}
        for n in range(40)
    ]
    (place / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    own = [
        f"data.source={place}/chat.jsonl",
        "data.max_length=96",
        "loss.terms=[{type: reverse_kl}]",
        "train.steps=3",
        f"data.on_policy={{fraction: 0.5, max_new_tokens: 6, max_staleness: {ahead}}}",
    ]
    assert_same(trained(place, f"own-served-{ahead}", *own, *from_server(url)), trained(place, f"own-{ahead}", *own))


def test_top_k_is_what_a_cache_would_hold(place, engine, url):
    recipe = recipe_in(place, *from_server(url, top_k=8), "loss.terms.0.type=reverse_kl", "loss.temperature=2")
    teacher, vocabulary = opened(recipe)
    rows = [vocabulary.read(recipe.data, 0).train[number] for number in range(3)]
    batch = Collator(2, omit_plain_positions=True, columns=teacher.columns)(rows)
    targets = teacher.targets(batch)
    hidden = engine.forward({"input_ids": batch["input_ids"]}).flatten(0, 1)[batch["valid_rows"]]
    labels = batch["input_ids"].flatten()[batch["valid_rows"] + 1]
    stored = encode(hidden, engine.weights, engine.transform, labels, Encoding(259, 8, "bucket", 2.0)).to(torch.float16)
    expected = top_k_targets(stored._asdict(), batch["valid_rows"], batch["input_ids"].shape, "bucket")
    assert all(torch.equal(*pair) for pair in zip(targets[:4], expected[:4], strict=True))
    assert teacher.client.servers.received / teacher.client.servers.positions < 8 * 4 + 6 + 8


@pytest.mark.full
def test_a_student_cut_from_the_model_that_is_named(place, url):
    cut = ["student={from_teacher: {layers: 2}}", "train.steps=2"]
    assert_same(trained(place, "cut-served", *cut, *from_server(url)), trained(place, "cut", *cut))


def test_no_query_is_sent_where_the_loss_needs_none(place, url):
    before = _requests(url)
    recipe = recipe_in(place, *from_server(url), "loss.terms=[{type: cross_entropy}]")
    teacher, _ = opened(recipe)
    assert _requests(url) == before and teacher.prefetch_depth == 2


def test_check_asks_once_who_it_is_whatever_it_advises(place, engine):
    app, paths = make_app(engine, None, RequestLimits(4096, 2048, 1 << 16)), []

    async def noted(scope, receive, send):
        paths.append(scope.get("path"))
        await app(scope, receive, send)

    with running(noted) as url:
        report = check_run(recipe_in(place, *from_server(url)), find_device("cpu"))
    assert not report.problems and "bytes per trained token come from there" in report.teacher_text
    assert paths.count("/v1/identity") == 1


def _requests(url):
    import httpx2

    return httpx2.get(f"{url}/health").json()["requests"]


# ------------------------------------------------------------------ servers that die


class Counted:
    """Answers of an engine, the last of which is number `at - 1`: then something happens.

    A server takes a while to end, in which it would go on answering: how much, by the machine's load.
    """

    def __init__(self, engine, patch):
        self.answer, self.count, self.at, self.then = engine.answer, 0, float("inf"), None
        patch.setattr(engine, "answer", self)

    def __call__(self, jobs):
        self.count += 1
        if self.count == self.at:
            threading.Thread(target=self.then).start()
        if self.count >= self.at:
            raise Full(1.0)
        return self.answer(jobs)


@pytest.mark.full
def test_of_two_servers_one_dies(place, in_process, monkeypatch):
    one, other = engine_in(place), engine_in(place)
    counted = Counted(one, monkeypatch)
    with contextlib.ExitStack() as dies, serving(other) as stays:
        goes = dies.enter_context(serving(one))
        counted.at, counted.then = 6, dies.close
        served = trained(place, "one-dies", *ACCUMULATED, *from_server(goes, stays))
    assert_same(served, in_process)
    assert counted.count >= 6


@pytest.mark.full
def test_all_are_gone_and_the_run_is_resumed_to_the_bit(place, in_process, monkeypatch):
    engine = engine_in(place)
    counted = Counted(engine, monkeypatch)
    with contextlib.ExitStack() as dies:
        address = dies.enter_context(serving(engine))
        counted.at, counted.then = 7, dies.close  # one answer after the third step's last
        asks = [*ACCUMULATED, *from_server(address, timeout=1.0)]
        with pytest.raises(RunError) as gone:
            trained(place, "gone", *asks)
    assert "no response within 1 s" in str(gone.value) and "\n" not in str(gone.value), gone.value
    step = int(str(gone.value).rpartition("from step ")[2].split()[0])
    folder = place / "runs" / "gone"
    assert step % 2 == 1 and (folder / f"checkpoint-{step}" / "manifest.json").is_file(), (
        "a step that no interval saves"
    )
    counted.at = float("inf")
    with serving(engine) as elsewhere:
        run(recipe_in(place, *ACCUMULATED, *from_server(elsewhere)), name="gone", resume=True)
    weights = load_file(folder / "student" / "model.safetensors")
    assert all(torch.equal(weights[name], in_process[0][name]) for name in weights)


@pytest.mark.full
def test_another_teacher_is_named_and_refused(place, tmp_path, engine, url):
    other = engine_in(write_models(tmp_path, seed=9))
    with serving(other) as another:
        with pytest.raises(ValueError, match="are different teachers: model is"):
            trained(place, "two", *from_server(url, another))
        begun = trained(place, "changes", *ACCUMULATED, *from_server(url, model=None))
        (begun[2].folder / "result.json").unlink()
        with pytest.raises(ValueError, match=r"--resume: .*teacher\.model differs: locked "):
            trained(place, "changes", *ACCUMULATED, *from_server(another, model=None), resume=True)
        with pytest.raises(ValueError, match=r"teacher\.model: the server's files_sha256 is"):
            trained(place, "named", *from_server(another))
        teacher, vocabulary = opened(recipe_in(place, *from_server(url)))
        teacher.client.servers._servers[0].url = another  # started anew with another model, under the run
        batch = Collator(2, columns=teacher.columns)([vocabulary.read(recipe_in(place).data, 0).train[0]])
        with pytest.raises(TeacherUnavailableError, match="is another teacher now"):
            teacher.targets(batch)


def test_a_token_and_no_server(place, engine, tmp_path, monkeypatch):
    monkeypatch.delenv("DISTILL_SERVE_TOKEN", raising=False)
    (tmp_path / "token").write_text("a-token-of-more-than-sixteen\n")
    with serving(engine, "a-token-of-more-than-sixteen") as address:
        with pytest.raises(RunError, match=r"teacher\.token_file: .* refuses the token"):
            opened(recipe_in(place, *from_server(address)))
        assert opened(recipe_in(place, *from_server(address, token_file=str(tmp_path / "token"))))
    with pytest.raises(RunError, match=r"no response within 0\.3 s .*Connect"):
        opened(recipe_in(place, *from_server("http://127.0.0.1:9", timeout=0.3)))
    with pytest.raises(ValueError, match=r"data\.chat_template: the template differs"):
        _with_other_template(place, engine)


def _with_other_template(place, engine):
    (place / "other.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": "It is so."}]}
    (place / "few.jsonl").write_text("\n".join([json.dumps(chat)] * 20))
    data = [f"data.source={place}/few.jsonl", f"data.chat_template={place}/other.jinja"]
    with serving(engine) as address:
        trained(place, "template", *data, *from_server(address))


# ------------------------------------------------------------------ faults have a name


def final_norm_is_missing(engine, patch):
    """Hidden states as a connector of vLLM writes them."""

    def before_norm(batch):
        seen = []
        hook = engine.model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with hook:
            forward(batch)
        return seen[0]

    forward = engine.forward
    patch.setattr(engine, "forward", before_norm)


def soft_cap_is_not_told(engine, patch):
    patch.setattr(engine, "identity", engine.identity._replace(softcap=None))


def another_soft_cap_is_told(engine, patch):
    patch.setattr(engine, "identity", engine.identity._replace(softcap=50.0))


def scale_is_not_told(engine, patch):
    patch.setattr(engine, "identity", engine.identity._replace(scale=2.0))


def shifted_by_one(engine, patch):
    alone = ServingEngine._alone
    patch.setattr(
        engine, "_alone", lambda job: alone(engine, job) if job.options.logits else alone(engine, job).roll(1, 0)
    )


def head_of_another(engine, patch):
    answer = engine.answer
    patch.setattr(
        engine,
        "answer",
        lambda jobs: [
            {name: value if name == "logits" else value.flip(-1) for name, value in each.items()}
            for each in answer(jobs)
        ],
    )


FAULTS = {
    final_norm_is_missing: "final norm is missing",
    soft_cap_is_not_told: "soft cap is missing: its logits are capped at 5",
    another_soft_cap_is_told: "soft cap",
    scale_is_not_told: "logit scale is missing: its logits are 1 times the GEMM's, it reports 2",
    shifted_by_one: "shifted by one position",
    head_of_another: "the head is another one",
}


@pytest.mark.plain("another_soft_cap_is_told")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_a_server_gets_wrong_is_refused_by_name(place, fault, monkeypatch):
    """On the first batch of a run; and doctor's invariant fails."""
    engine = engine_in(place)
    fault(engine, monkeypatch)
    with serving(engine) as address:
        with pytest.raises(ValueError, match=f"teacher.url: .*{FAULTS[fault]}") as refused:
            trained(place, f"fault-{fault.__name__}", *from_server(address))
        assert "\n" not in str(refused.value)
        subject = _subject(place, address)
        finding = invariants.fused_equals_reference(subject)
        assert not finding.passed, finding


def test_k_tokens_of_another_place_are_refused(place, monkeypatch):
    engine = engine_in(place)
    shifted_by_one(engine, monkeypatch)
    with serving(engine) as address, pytest.raises(ValueError, match="other positions or columns"):
        trained(place, "k-shifted", *from_server(address, top_k=8))


def _subject(place, address):
    from subjects import TWO_TERMS, rows
    from tiny import tiny_model

    from distill.doctor.check_setup import CheckSetup
    from distill.recipe.loss import Loss

    teacher, vocabulary = opened(recipe_in(place, *from_server(address)))
    student = tiny_model(vocabulary.tokenizer, seed=2)
    return CheckSetup(student, teacher, rows(), Loss.model_validate(TWO_TERMS), tokenizers=(vocabulary.tokenizer,) * 2)


@pytest.mark.plain("<lambda>-hidden: expected \\\\(0")
@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda hidden: hidden[:-1], r"hidden: expected \("),
        (lambda hidden: hidden[:, :-1], r"hidden: expected \("),
        (lambda hidden: hidden.masked_fill(hidden > 1, torch.nan), "NaN or infinite"),
    ],
)
def test_answers_are_looked_at(place, url, engine, monkeypatch, spoil, told):
    teacher, vocabulary = opened(recipe_in(place, *from_server(url)))
    batch = Collator(2, columns=teacher.columns)([vocabulary.read(recipe_in(place).data, 0).train[0]])
    answer = engine.answer
    monkeypatch.setattr(
        engine, "answer", lambda jobs: [{"hidden": spoil(a["hidden"]).contiguous()} for a in answer(jobs)]
    )
    with serving(engine) as address:
        teacher.client.servers._servers[0].url = address
        with pytest.raises(TeacherUnavailableError, match=told):
            teacher.targets(batch)


def test_an_answer_that_is_no_answer(place, url):
    teacher, _ = opened(recipe_in(place, *from_server(url)))
    from distill.teachers.backends.served.protocol import TargetRequest

    with pytest.raises(TeacherUnavailableError, match="an invalid response"):
        teacher.client.protocol.read(
            torch.zeros(20, dtype=torch.uint8), TargetRequest(np.zeros((1, 2), np.int32), None, np.zeros(1, np.int32))
        )
    with pytest.raises(ValueError, match="expected safetensors"):
        tensors_of(b"nothing")


# ------------------------------------------------------------------ what is left of it


def _left(url, before):
    """Threads of clients that were not there before, and connections, once those under way had time to end."""
    port, until = int(url.rpartition(":")[2]), time.monotonic() + 10
    while True:
        threads = [thread for thread in threading.enumerate() if thread.name == "asking" and thread not in before]
        ends = [end for end in psutil.Process().net_connections("tcp") if end.raddr and end.raddr.port == port]
        open_ends = [end for end in ends if end.status == psutil.CONN_ESTABLISHED]
        if not (threads or open_ends) or time.monotonic() > until:
            return threads, open_ends
        time.sleep(0.05)


@pytest.mark.full
def test_nothing_is_left_of_a_run_or_a_doctor(place, engine, forked_ranks, monkeypatch):
    held, close, before = [], Servers.close, set(threading.enumerate())
    monkeypatch.setattr(Servers, "close", lambda servers: (held.append(len(servers._threads)), close(servers)))
    with serving(engine) as address:
        trained(place, "closes", *from_server(address, prefetch=3))
        assert held == [3] and _left(address, before) == ([], []), "the run's"
        with monkeypatch.context() as patch:
            shifted_by_one(engine, patch)
            with pytest.raises(ValueError, match="shifted"):
                trained(place, "fails", *from_server(address))
        assert len(held) == 2 and _left(address, before) == ([], []), "of one that failed"
        monkeypatch.setattr(examine, "CHECKS", (invariants.fused_equals_reference,))
        monkeypatch.setattr(examine, "RUN_CHECKS", (invariants_runs.ranks_change_nothing,))
        findings = list(examine.examine(recipe_in(place, *from_server(address))))
        assert [finding.passed for finding in findings] == [True, True], findings
        assert len(held) == 4 and _left(address, before) == ([], []), "the doctor's"
