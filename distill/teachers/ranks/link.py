"""What passes between ranks that train and ranks that hold the teacher.

    ask/S/T/n     in the launch's store: question n of the training rank S to the teacher's rank T: safetensors as
                  /v1/targets takes them (`teachers/server/wire.py`), after a byte that says what is asked for
    ready/S/T/n   the answer is computed, and on its way: whoever asked posts its receive now
    teacher       who the teacher is (`TeacherFacts`), once it is loaded

Answers are tensors by send and receive in a group of all ranks (gloo, on GPUs NCCL), those of one pair in the order of
its questions: hidden states [M, H] of the M learned rows in the teacher's dtype, or fp32 logits [M, V]. What a training
rank asks for is under way while it trains: a thread of it receives each answer once it is ready, on a stream of its
own. Questions go to the teacher's ranks in turn, so that they are equally busy.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import torch

from distill.core.faults import TeacherGone
from distill.core.worlds import LOOKS_S, Worlds, clone
from distill.models.head import HeadWeights
from distill.teachers.server.wire import TargetRequest, read_body

if TYPE_CHECKING:
    from torch.distributed import Work

HIDDEN, LOGITS = 1, 2  # what is asked for
HEADER = struct.Struct("<BQ")  # that, and how many answers of this pair have come
STALLED = datetime.timedelta(minutes=30)  # of one transfer, with both ranks alive


class TeacherFacts(NamedTuple):
    """What training ranks are told of the teacher.

    Attributes:
        fingerprint: for the lock file.
        scale, softcap: how its logits follow from its head's product.
        rows, width: of its head; `bias`: whether it has one.
        dtype: of hidden states and head.
        parameters: its size, for people; `held`: copied or sharded.
    """

    fingerprint: dict[str, object]
    scale: float
    softcap: float | None
    rows: int
    width: int
    bias: bool
    dtype: str
    parameters: str
    held: str


class Transfers(Protocol):
    """What is used of ProcessGroupGloo and ProcessGroupNCCL, whose stubs in torch lack it."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...

    def abort(self) -> None: ...


def joining_group(worlds: Worlds, device: torch.device) -> Transfers:
    """A group of all ranks of the launch beside their default groups, for send and receive alone."""
    import torch.distributed as dist

    place = dist.PrefixStore("joint", clone(worlds.store)), worlds.rank, worlds.students + worlds.teachers
    if device.type != "cuda":
        return dist.ProcessGroupGloo(*place, STALLED)  # type: ignore[return-value]
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # a transfer is short: it goes first
    options._timeout = STALLED
    return dist.ProcessGroupNCCL(*place, options)  # type: ignore[return-value]


class Pair(NamedTuple):
    """A training rank and one of the teacher's, both by their number on their own side."""

    student: int
    teacher: int

    def key(self, what: str, number: int) -> str:
        """In the store."""
        return f"{what}/{self.student}/{self.teacher}/{number}"


def pairs_of(worlds: Worlds) -> list[Pair]:
    """Those that this rank is one of, in an order in which all ranks can meet one after another."""
    return [
        Pair(student, teacher)
        for student in range(worlds.students)
        for teacher in range(worlds.teachers)
        if worlds.own_rank == (teacher if worlds.is_teacher else student)
    ]


class Expected(NamedTuple):
    """An answer under way to a training rank.

    Attributes:
        number: of the question, among the pair's.
        shape, dtype: of the tensor.
        learned: whether it is hidden states, rather than logits.
        future: that gets it.
    """

    number: int
    shape: tuple[int, int]
    dtype: torch.dtype
    learned: bool
    future: Future[torch.Tensor]


class StudentLink:
    """The training rank's end.

    Args:
        worlds: of this process.
        device: where answers are to lie.

    Attributes:
        facts: of the teacher, waited for.
        head: its weights on the device, in `dtype` as hidden states are.
        received: bytes of hidden states so far, and `positions` that they were of.
    """

    def __init__(self, worlds: Worlds, device: torch.device) -> None:
        self.worlds, self.device = worlds, device
        self.group = joining_group(worlds, device)
        self.pairs = pairs_of(worlds)
        self._count = 0
        self._numbers = dict.fromkeys(self.pairs, 0)
        self._complete = dict.fromkeys(self.pairs, 0)  # answers
        self._waiting: dict[Pair, deque[Expected]] = {pair: deque() for pair in self.pairs}
        self._changed = threading.Condition()  # what waits, and whether anything is still received
        self._end: BaseException | None = None
        self.received = self.positions = 0
        self.facts = TeacherFacts(**json.loads(worlds.wait("teacher", worlds.students)))
        self.dtype: torch.dtype = getattr(torch, self.facts.dtype)
        self.head = self._head()
        self._thread = threading.Thread(target=self._receive_all, daemon=True, name="answers")
        self._thread.start()

    def _head(self) -> HeadWeights:
        """From each of the teacher's ranks in turn, which makes the connections too."""
        facts = self.facts
        weight = torch.empty(facts.rows, facts.width, dtype=self.dtype, device=self.device)
        bias = torch.empty(facts.rows, dtype=self.dtype, device=self.device) if facts.bias else None
        for pair in self.pairs:
            self.worlds.wait(pair.key("head", 0), self._rank(pair))
            for tensor in (weight, *([] if bias is None else [bias])):
                self._wait(self.group.recv([tensor], self._rank(pair), 0), pair)
        return HeadWeights(weight, bias, None)

    def _rank(self, pair: Pair) -> int:
        return self.worlds.students + pair.teacher

    def ask(self, query: TargetRequest, what: int = HIDDEN) -> Future[torch.Tensor]:
        """Ask of at least one row; hidden states [M, H], or fp32 logits [M, V], which are on the device once the future
        has them. It raises TeacherGone where the rank that sends them is gone."""
        pair = self.pairs[(self._count * self.worlds.students + self.worlds.own_rank) % len(self.pairs)]
        self._count += 1
        number, self._numbers[pair] = self._numbers[pair], self._numbers[pair] + 1
        width, dtype = (self.facts.rows, torch.float32) if what == LOGITS else (self.facts.width, self.dtype)
        expected = Expected(number, (len(query.rows), width), dtype, what == HIDDEN, Future())
        try:
            self.worlds.store.set(pair.key("ask", number), HEADER.pack(what, self._complete[pair]) + query.body())  # type: ignore[arg-type]
        except RuntimeError as error:
            self._lose(error, pair)
        with self._changed:
            if self._end is None:
                self._waiting[pair].append(expected)
            else:
                expected.future.set_exception(self._end)
            self._changed.notify()
        return expected.future

    def close(self) -> None:
        """Receive no more."""
        self._finish(TeacherGone("parallel.teacher: this run has ended"))
        self._thread.join(timeout=10)
        if self.device.type == "cuda":  # what nobody came for would keep GPUs busy until their processes end
            self.group.abort()

    def _finish(self, end: BaseException) -> None:
        with self._changed:
            self._end = self._end or end
            left = [expected for waiting in self._waiting.values() for expected in waiting]
            self._waiting = {pair: deque() for pair in self.pairs}
            self._changed.notify()
        for expected in left:
            expected.future.set_exception(self._end)

    def _receive_all(self) -> None:
        """Each answer as soon as it is ready, beside the training: until it is received its rank's GPU waits with it,
        and computes the next one more slowly."""
        try:
            with _beside(self.device):
                while self._end is None:
                    if not self._receive_ready():
                        time.sleep(LOOKS_S)
        except BaseException as error:  # whoever waits for an answer raises it
            self._finish(error)

    def _receive_ready(self) -> int:
        """How many answers were ready, and are received."""
        with self._changed:
            while self._end is None and not any(self._waiting.values()):
                self._changed.wait()
            first = {pair: waiting[0] for pair, waiting in self._waiting.items() if waiting}
        ready = {p: e for p, e in first.items() if self.worlds.has(p.key("ready", e.number))}
        for pair, expected in ready.items():
            answer = torch.empty(expected.shape, dtype=expected.dtype, device=self.device)
            try:
                work = self.group.recv([answer], self._rank(pair), 0)
                self.worlds.store.delete_key(pair.key("ready", expected.number))
            except RuntimeError as error:
                self._lose(error, pair)
            self._wait(work, pair)
            if expected.learned:
                self.received += answer.nbytes
                self.positions += len(answer)
            with self._changed:
                self._complete[pair] = expected.number + 1
                if self._end is None:
                    self._waiting[pair].popleft().future.set_result(answer)
        if not ready and (fault := self.worlds.fault([self._rank(pair) for pair in first])):
            self.worlds.lose(fault)
        return len(ready)

    def _wait(self, work: Work, pair: Pair) -> None:
        """For a transfer. gloo ends one whose other end is gone; NCCL's is looked after here."""
        try:
            while self.device.type == "cuda" and not work.is_completed():
                if fault := self.worlds.fault([self._rank(pair)]):
                    self.group.abort()
                    self.worlds.lose(fault)
                time.sleep(LOOKS_S / 10)
            work.wait()
        except RuntimeError as error:
            self._lose(error, pair)

    def _lose(self, error: RuntimeError, pair: Pair) -> NoReturn:
        """A connection broke: the fault of the rank that is gone, where that shows soon, else what torch says."""
        if isinstance(error, TeacherGone):
            raise error
        fault = self.worlds.fault_soon(self._rank(pair))
        self.worlds.lose(fault or f"the connection to rank {self._rank(pair)} broke: {str(error).splitlines()[0]:.100}")


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """A stream of its own in this thread: what it does there does not wait for the step that is computed."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


class TeacherLink:
    """The teacher's end, of one of its ranks.

    Args:
        worlds: of this process.
        device: where answers are.
    """

    def __init__(self, worlds: Worlds, device: torch.device) -> None:
        self.worlds, self.device = worlds, device
        self.group = joining_group(worlds, device)
        self.pairs = deque(pairs_of(worlds))
        self._next = dict.fromkeys(self.pairs, 0)
        self._sent: dict[Pair, deque[tuple[int, Work, torch.Tensor]]] = {pair: deque() for pair in self.pairs}

    def introduce(self, facts: TeacherFacts, head: Sequence[torch.Tensor]) -> None:
        """Tell all training ranks who the teacher is, and send them its head: weight, and bias where it has one."""
        if self.worlds.own_rank == 0:
            self.worlds.store.set("teacher", json.dumps(facts._asdict()))
        for pair in list(self.pairs):
            self.worlds.store.set(pair.key("head", 0), "")
            for tensor in head:
                self.group.send([tensor.contiguous()], pair.student, 0).wait()

    def question(self) -> tuple[Pair, int, TargetRequest] | None:
        """The next one, of the training rank whose turn it is; None where nobody asks."""
        for _ in range(len(self.pairs)):
            self.pairs.rotate(-1)
            pair = self.pairs[-1]
            key = pair.key("ask", self._next[pair])
            if self.worlds.store.check([key]):
                body = self.worlds.store.get(key)
                self.worlds.store.delete_key(key)
                what, complete = HEADER.unpack_from(body)
                self._forget(pair, complete)
                return pair, what, read_body(body[HEADER.size :], json_body=False)
        return None

    def answer(self, pair: Pair, values: torch.Tensor) -> None:
        """Send the answer to the pair's next question; the device has made it when this returns."""
        values = values.contiguous()
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        number, self._next[pair] = self._next[pair], self._next[pair] + 1
        self._sent[pair].append((number, self.group.send([values], pair.student, 0), values))
        self.worlds.store.set(pair.key("ready", number), "")

    def close(self) -> None:
        """Answer no more."""
        if self.device.type == "cuda":
            self.group.abort()

    def _forget(self, pair: Pair, complete: int) -> None:
        """Let go of the first so many answers, which have arrived."""
        sent = self._sent[pair]
        while sent and sent[0][0] < complete:
            sent.popleft()[1].wait()
