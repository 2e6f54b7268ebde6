"""Two worlds in one launch: the ranks that train and, after them, the ranks that hold the teacher.

Trainer and accelerate share data out, reduce and wait over their whole world. So each side has a default process group
of its own, under a prefix of the launch's store, with RANK and WORLD_SIZE that count its own ranks only; what passes
between the sides goes through that store and a third group (`distill/teachers/ranks/`).

    with split(teacher_ranks=1) as worlds:      # on every rank of the launch, before any process group is there
        state = PartialState(cpu=True, **worlds.own_group())

Each rank gives a sign of life a second, and says how it ended. A rank that has ended is known at once on its own host,
elsewhere by its silence; nobody begins to wait for a rank without looking (`wait`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn, Self

from distill.core.faults import TeacherGone
from distill.core.ranks import store_of_attempt, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

BEAT_S = 1.0
SILENT_S = 15.0  # without a sign of life
BEGINS_S = 300.0  # before the first one: imports
LOOKS_S = 0.001  # between two looks into the store
LINGERS_S = 10.0
STORE_GONE = "the rank that holds the store of this launch is gone"


class Worlds:
    """Both worlds, as one rank sees them.

    Args:
        store: of the launch, shared by all its ranks.
        rank: in the launch.
        students: ranks that train; the first ones.
        teachers: ranks that hold the teacher.
    """

    current: Worlds | None = None  # of this process, while a run with ranks for its teacher goes on
    runs = 0  # of this process so far

    def __init__(self, store: Store, rank: int, students: int, teachers: int) -> None:
        self.store, self.rank, self.students, self.teachers = store, rank, students, teachers
        self.is_teacher = rank >= students
        self._seen: dict[int, tuple[bytes, float, float]] = {}  # a rank's sign, for how long the same, when checked
        self._checked = 0.0
        self._ended = threading.Event()
        self._before: dict[str, str] = {}  # variables that `split` has changed
        self._thread = threading.Thread(target=self._beat, args=(clone(store),), daemon=True, name="sign of life")
        self._thread.start()

    @property
    def own_rank(self) -> int:
        """In its own world."""
        return self.rank - self.students * self.is_teacher

    @property
    def others(self) -> range:
        """The ranks of the other side."""
        return range(self.students) if self.is_teacher else range(self.students, self.students + self.teachers)

    def own_group(self) -> dict[str, object]:
        """What `init_process_group` takes for the default group of this rank's own world; nothing for one that trains
        alone, and needs none."""
        from torch.distributed import PrefixStore

        if not self.is_teacher and self.students == 1:
            return {}
        side, size = ("teacher", self.teachers) if self.is_teacher else ("students", self.students)
        return {"store": PrefixStore(side, clone(self.store)), "rank": self.own_rank, "world_size": size}

    # ------------------------------------------------------------- how it ends

    def __enter__(self) -> Self:
        Worlds.current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        code = error.code if isinstance(error, SystemExit) else 0 if error is None else 1
        self.end(2 if isinstance(error, ValueError) else int(code or 0), str(error or ""))
        Worlds.current = None

    def end(self, code: int = 0, text: str = "") -> None:
        """Say that this rank has ended, and how; 2 is the user's input, which `text` is about."""
        self._ended.set()
        self._thread.join()
        os.environ.update(self._before)
        with contextlib.suppress(RuntimeError, ValueError):  # the rank that has the store was faster
            self.store.set(f"end/{self.rank}", json.dumps({"code": code, "text": text}))
            until = time.monotonic() + LINGERS_S
            # unless torchrun has it, the store ends with this rank, and with it what the others want to know
            while self.rank == 0 and time.monotonic() < until and not all(map(self._fault_of, self.others)):
                time.sleep(10 * LOOKS_S)

    def ends(self) -> list[dict[str, object]] | None:
        """`code` and `text` of the other side's ranks, once one has failed or all have ended; None before."""
        ends = [json.loads(self.store.get(f"end/{rank}")) for rank in self.others if self.store.check([f"end/{rank}"])]
        return ends if len(ends) == len(self.others) or any(end["code"] for end in ends) else None

    # ---------------------------------------------------------- signs of life

    def _beat(self, store: Store) -> None:
        own = f"{os.getpid()} {socket.gethostname()}"
        with contextlib.suppress(RuntimeError):  # the store is gone with the rank that has it
            for count in itertools.count():
                store.set(f"sign/{self.rank}", f"{count} {own}")
                if self._ended.wait(BEAT_S):
                    return

    def fault(self, ranks: Iterable[int] | None = None) -> str | None:
        """Which of some ranks (by default the other side's) is gone, in words; looked at once in a while.

        Raises:
            ValueError: it ended by a mistake of the user's, which its text names.
        """
        now = time.monotonic()
        if now - self._checked < BEAT_S / 4:
            return None
        self._checked = now
        try:
            return next(filter(None, (self._fault_of(rank, now) for rank in ranks or self.others)), None)
        except RuntimeError:  # torch's DistNetworkError
            return STORE_GONE

    def _fault_of(self, rank: int, now: float = 0.0) -> str | None:
        if self.store.check([f"end/{rank}"]):
            end = json.loads(self.store.get(f"end/{rank}"))
            if end["code"] == 2:
                raise ValueError(end["text"])
            if self.is_teacher and not end["code"]:  # done, while others that train may not be
                return None
            return f"rank {rank} has ended" + (f": {end['text']}" if end["text"] else "")
        sign = self.store.get(f"sign/{rank}") if self.store.check([f"sign/{rank}"]) else b""
        before, silent, checked = self._seen.get(rank, (None, 0.0, now))
        # time in which this rank itself stood still says nothing of others, which may have stood still with it
        silent = silent + min(max(now - checked, 0.0), BEAT_S) if sign == before else 0.0
        self._seen[rank] = sign, silent, now
        if not sign:
            return f"rank {rank} has not begun" if silent > BEGINS_S else None
        _, pid, host = sign.decode().split(" ", 2)
        who = f"rank {rank} (process {pid} on {host})"
        if host == socket.gethostname() and not _runs(int(pid)):
            return f"{who} is gone"
        return f"{who} has given no sign of life for {silent:.0f} s" if silent > SILENT_S else None

    def wait(self, key: str, rank: int) -> bytes:
        """The value of a key that another rank sets.

        Raises:
            TeacherGone: that rank is gone.
            ValueError: it ended by what the user gave it.
        """
        while not self.has(key):
            if fault := self.fault([rank]):
                self.lose(fault)
            time.sleep(LOOKS_S)
        return self.store.get(key)

    def has(self, key: str) -> bool:
        """Whether another rank has set a key.

        Raises:
            TeacherGone: nobody can tell.
        """
        try:
            return self.store.check([key])
        except RuntimeError:
            self.lose(STORE_GONE)

    def fault_soon(self, rank: int) -> str | None:
        """Why a rank is gone whose connection has just broken; its host has not noticed yet, maybe."""
        until = time.monotonic() + 2 * BEAT_S
        while (fault := self.fault([rank])) is None and time.monotonic() < until:
            time.sleep(10 * LOOKS_S)
        return fault

    def lose(self, fault: str) -> NoReturn:
        """Raise that the other side is gone."""
        raise TeacherGone(f"parallel.teacher: {fault}")


def clone(store: Store) -> Store:
    """Another connection to the same store: whoever waits by one keeps all others that use it waiting."""
    again: Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return again


def _runs(pid: int) -> bool:
    """Whether a process of this host has not ended; one that nobody has waited for yet has."""
    import psutil  # comes with accelerate

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def require_teacher_ranks(teacher_ranks: int, world: int) -> None:
    """Hold that ranks are left that train.

    Raises:
        ValueError: there are too few.
    """
    if world <= teacher_ranks:
        raise ValueError(
            f"parallel.teacher: ranks needs {teacher_ranks} process(es) for the teacher (parallel.teacher_ranks), and "
            f"one or more to train; got {world} in all: start more (torchrun --nproc-per-node N -m distill run ...), "
            "or set parallel.teacher to copied or sharded"
        )


def join(teacher_ranks: int) -> Worlds:
    """This process's place in a launch whose last ranks hold the teacher; its environment stays as it is."""
    import torch.distributed as dist

    rank, world, given = int(os.environ["RANK"]), world_size(), store_of_attempt().get("store")
    store: Store = given if isinstance(given, dist.Store) else next(dist.rendezvous("env://", rank, world))[0]
    Worlds.runs += 1
    return Worlds(dist.PrefixStore(f"worlds-{Worlds.runs}", store), rank, world - teacher_ranks, teacher_ranks)


def split(teacher_ranks: int) -> Worlds:
    """Part this launch's ranks: the last ones hold the teacher; RANK and WORLD_SIZE become those of one's own side.

    Raises:
        ValueError: there are too few.
    """
    world = world_size()
    require_teacher_ranks(teacher_ranks, world)
    worlds = join(teacher_ranks)
    worlds._before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    os.environ["RANK"] = str(worlds.own_rank)
    os.environ["WORLD_SIZE"] = str(teacher_ranks if worlds.is_teacher else worlds.students)
    if not worlds.is_teacher and worlds.students == 1:
        os.environ.pop("LOCAL_RANK", None)  # accelerate would look for other processes
    return worlds
