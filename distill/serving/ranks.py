"""A rank that holds the teacher: what it does in a run, beside the ranks that train (`parallel.teacher: ranks`).

It loads the teacher, alone or in shards with the other ranks of its side, tells the training ranks who it is, and
answers what they ask until they have ended. Each question is computed alone, in the rows that the trainer has, so that
the student learns the same bits as with the teacher in its own process. Ranks with shards gather weights together: they
go forward together, one that nobody asks with two tokens of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers

from distill.core.faults import RunError
from distill.core.folders import runs_folder
from distill.core.worlds import LOOKS_S, STORE_GONE, Worlds, split
from distill.evaluation.evaluate import as_trained
from distill.models.attention_choice import AttentionChoices
from distill.models.cards import family_in, runs_our_kernels
from distill.models.compiling import compile_layers
from distill.models.precision import resolve_precision
from distill.models.sharding import Sharing
from distill.planning.ranks import is_sharded_on_ranks
from distill.recipe import Recipe
from distill.teachers.base import OpenContext
from distill.teachers.model import LoadedTeacher, ModelSource
from distill.teachers.opening import patch_model
from distill.teachers.ranks.link import HIDDEN, LOGITS, Pair, TeacherFacts, TeacherLink
from distill.teachers.server.wire import TargetRequest
from distill.training.failures import explained

NOBODY = TargetRequest(np.zeros((1, 2), np.int32), None, np.zeros(1, np.int32))
Forward = Callable[[int, TargetRequest], torch.Tensor]


def answer_ranks(recipe: Recipe, device: torch.device, worlds: Worlds) -> NoReturn:
    """A teacher's rank from beginning to end.

    Raises:
        ValueError: the teacher cannot be loaded; the training ranks end by it too.
        RunError: one of them, or the memory, is gone.
        SystemExit: with code 0 once they are done, with 1 where one of them has failed.
    """
    with explained(recipe, runs_folder(recipe.output_dir)):
        _answer(recipe, device, worlds)
    raise SystemExit(0)


def _answer(recipe: Recipe, device: torch.device, worlds: Worlds) -> None:
    precision = resolve_precision(recipe, device)
    if recipe.train.deterministic:  # before the first product, as in the ranks that train: cuBLAS has other ways then
        transformers.enable_full_determinism(recipe.train.seed)
    sharded = is_sharded_on_ranks(recipe, device, worlds.students)
    teacher = load_teacher_ranks(recipe, OpenContext(
        device, precision, Sharing("ddp", sharded, True), AttentionChoices(recipe)
    ))  # fmt: skip

    def forward(what: int, query: TargetRequest) -> torch.Tensor:
        with as_trained(device, precision.autocast):
            return forward_of(teacher, device, what, query)

    answering = Answering(TeacherLink(worlds, device), forward, sharded)
    answering.introduce(teacher)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends when they do, who finish their step first
        signal.signal(number, signal.SIG_IGN)
    try:
        answering.run()
    finally:
        answering.link.close()


def load_teacher_ranks(recipe: Recipe, context: OpenContext) -> LoadedTeacher:
    """The teacher, patched and in 8 bits where the recipe has it."""
    source, device = ModelSource(recipe), context.device
    sharded = context.sharing.teacher_sharded
    for problem in source.problems(cuda=device.type == "cuda", sharded=sharded, family=family_in(device)):
        raise ValueError(problem)
    teacher = LoadedTeacher(source.load(context), fp8=recipe.teacher.dtype == "fp8", skip=recipe.teacher.fp8_skip)
    if runs_our_kernels(device) and device.type == "cuda" and not sharded:
        attention = context.attention.of(teacher.model, "teacher")
        patch_model(teacher.model, "teacher", attention, compiles=recipe.train.compile)
    teacher.quantise()
    if recipe.train.compile:
        compile_layers(teacher.model)
    return teacher


def forward_of(teacher: LoadedTeacher, device: torch.device, what: int, query: TargetRequest) -> torch.Tensor:
    """Hidden states [M, H] of the rows asked for, or fp32 logits [M, V] by the model's own forward."""
    arrays = {"input_ids": query.ids, "position_ids": query.positions, "rows": query.rows}
    batch = {n: torch.from_numpy(a.astype(np.int64)).to(device) for n, a in arrays.items() if a is not None}
    rows = batch.pop("rows")
    if what == LOGITS:
        with torch.no_grad():
            return teacher.model(**batch, use_cache=False).logits.flatten(0, 1).index_select(0, rows).float()
    hidden = teacher.targets({**batch, "valid_rows": rows})
    if teacher.is_collective:  # a head that is one unit with the embedding: the body alone has left it gathered
        with teacher.hidden.head.open():
            pass
    assert isinstance(hidden, torch.Tensor)
    return hidden.flatten(0, 1).index_select(0, rows)


class Answering:
    """Answers questions until nobody is left to ask.

    Args:
        link: to the training ranks.
        forward: what is answered.
        together: whether all of the teacher's ranks must go forward at once.
    """

    def __init__(self, link: TeacherLink, forward: Forward, together: bool) -> None:
        self.link, self.forward, self.together = link, forward, together
        self._pending: tuple[Pair, int, TargetRequest] | None = None
        self._idle = 0  # looks since the last question

    def introduce(self, teacher: LoadedTeacher) -> None:
        """Say who the teacher is; its head is gathered for it."""
        self.forward(HIDDEN, NOBODY)  # after which shards are cut: a fingerprint is of them
        with teacher.hidden.head.open() as weights:
            head = [each.detach().clone() for each in (weights.weight, weights.bias) if each is not None]
        fingerprint = teacher.fingerprint()
        (rows, width), transform = head[0].shape, teacher.hidden.transform
        self.link.introduce(TeacherFacts(
            fingerprint, transform.scale, transform.softcap, rows, width, len(head) > 1,
            str(head[0].dtype).removeprefix("torch."), teacher.parameters_text(),
            "sharded (FSDP2)" if self.together else "copied",
        ), head)  # fmt: skip

    def run(self) -> None:
        """Until all training ranks have ended."""
        while self.step():
            pass

    def step(self) -> bool:
        """One look, and one forward where somebody asks; False once they have ended.

        Raises:
            RunError: a training rank is gone.
            SystemExit: with code 1, where one has failed.
        """
        try:
            ends, fault = self.link.worlds.ends(), None
            self._pending = self._pending or (self.link.question() if ends is None else None)
            fault = self.link.worlds.fault() if ends is None else None
        except RuntimeError:  # of torch's store
            ends, fault = None, STORE_GONE
        over = 0 if ends is None else 2 if any(end["code"] for end in ends) else 1
        what, over = self._agreed(self._pending[1] if self._pending else 0, 2 if fault else over)
        if over:
            if fault:
                raise RunError(f"{fault}, so the teacher's ranks end too")
            if over > 1:
                raise SystemExit(1)
            return False
        self._idle = 0 if what else self._idle + 1
        if not what:
            time.sleep(min(LOOKS_S * (1 + self._idle // 100), 20 * LOOKS_S))
        elif self._pending and self._pending[1] == what:
            pair, _, query = self._pending
            self._pending, values = None, self.forward(what, query)
            try:
                self.link.answer(pair, values)
            except RuntimeError as error:  # of gloo, where the other end is gone
                raise RunError(f"a training rank is gone, so the teacher's end too ({error!s:.100})") from error
        else:
            self.forward(what, NOBODY)
        return True

    def _agreed(self, what: int, over: int) -> tuple[int, int]:
        """What all of the teacher's ranks do next."""
        if not self.together:
            return what, over
        both = torch.tensor([what, over], device=self.link.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        agreed: list[int] = both.tolist()
        return agreed[0], agreed[1]


@contextlib.contextmanager
def worlds_of(recipe: Recipe) -> Iterator[Worlds | None]:
    """This rank's place where the recipe has ranks for the teacher, while the run goes on; None where it has none."""
    ranks = recipe.parallel.teacher_ranks
    if ranks is None:
        yield None
        return
    with split(ranks) as worlds:
        yield worlds
