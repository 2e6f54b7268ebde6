"""The student's own words in training: some answers of a step are replaced by what the student says now.

The teacher then judges the tokens that the student would choose, so that it learns to go on from its own mistakes
(Agarwal et al., 2024, "On-policy distillation of language models: learning from self-generated mistakes", GKD; their
lambda is `fraction`, drawn here for each document rather than for each batch, so that the answers of a whole step are
generated together and neither the number of micro-batches nor of ranks plays a part).

Which documents are replaced, and every token that is drawn, follow from (seed, step, document) and the weights: a run
that is resumed says the same again.

The student itself answers; where its weights lie in shards, a whole copy of it (`Snapshot`), into which they are
gathered before. With `ahead` the answers of so many more steps are drawn in the same go, by the same weights: a token
of twice as many sequences takes far less than twice as long, since what it takes is reading the weights. Answers of
steps to come are a part of every checkpoint.
"""

from __future__ import annotations

import itertools
import json
import logging
import operator
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distill.core.files import write_text
from distill.core.labels import IGNORE_INDEX
from distill.data.packing import best_fit
from distill.generation.decode_loop import Engine
from distill.generation.documents import Document, Row, as_row, documents_of, drawn_log_probs, token_advantages
from distill.generation.rewards import NO_REWARDS, Rewards, reward_figures
from distill.generation.sampling import Sampling
from distill.models.snapshot import Snapshot

log = logging.getLogger(__name__)

Collated = dict[str, Any]
Batches = Sequence[Collated]
FILE = "answers-{:05d}.json"  # of a checkpoint: answers of steps to come


@dataclass
class OnPolicy:
    """Replaces documents of a step's micro-batches by the student's own answers to their prompts.

    Attributes:
        engine: Generates with the student as it stands.
        fraction: Share of the documents that are replaced.
        max_new_tokens: The most an answer may have.
        sampling: What their tokens are drawn from.
        seed: Fixes what is replaced and what is drawn.
        max_length: The most tokens a row may have.
        batch_size: Prompts of a step that are answered at once, at most.
        samples: Answers of each document that is replaced, which then stands so often.
        ahead: Steps whose answers are drawn with those of a step before them; the most optimizer steps between the
            weights that answer and those that learn.
        student: Whose weights `snapshot` takes.
        snapshot: What answers in the student's place; None for itself.
        log_probs: Give each drawn token's log-probability with the batches (`drawn_log_p`); the engine must too.
        multiple: Packed rows get a length that it divides, or `max_length`: steps of few shapes are replayed from CUDA
            graphs, and kernels are compiled apart for lengths that 16 divides.
        one_row: Put a micro-batch's documents into one row, however long, so that nothing is padding: for models whose
            attention leaves out what lies between documents (`attends_within_documents`).
        rewards: Judge each answer; the batches then have `advantages` [B, S]. None for no reward.
    """

    engine: Engine
    fraction: float
    max_new_tokens: int
    sampling: Sampling
    seed: int
    max_length: int
    batch_size: int = 64
    samples: int = 1
    ahead: int = 0
    student: nn.Module | None = None
    snapshot: Snapshot | None = None
    log_probs: bool = False
    multiple: int = 1
    one_row: bool = False
    rewards: Rewards | None = None
    # answers, their tokens, cut off, left out, that repeat themselves, seconds, steps that the weights were old, and
    # sums of `rewards`
    _sums: np.ndarray = field(init=False, default_factory=lambda: np.zeros(7 + len(NO_REWARDS)))
    # answers of the steps that they were drawn for, by `_seed_of` their documents
    _answers: dict[int, dict[int, _Answer]] = field(init=False, default_factory=dict)
    # of the same steps, as far as this process drew them: their micro-batches, and what is put into them
    _coming: dict[int, _Step] = field(init=False, default_factory=dict)
    _epoch: _Epoch | None = field(init=False, default=None)

    def replace(
        self, batches: Batches, step: int, collate: Callable[[list[Row]], Collated], following: int = 0
    ) -> list[Collated]:
        """The micro-batches of one optimizer step with some answers replaced; others are given back as they are.

        A micro-batch never gets more rows than it had, times `samples`: of a row that the longest possible answers
        would not fit into, documents chosen at random are left out, and counted. Rows of `distill.data` have room.

        Args:
            batches: Collated, on any device.
            step: Optimizer steps done.
            collate: Makes a batch of rows.
            following: Steps after this one that may be drawn for with it, of as many micro-batches, as far as the epoch
                (`epoch`) has them.
        """
        now = self._coming.pop(step, None)
        if now is None or not (len(now.batches) == len(batches) and all(map(operator.is_, now.batches, batches))):
            now = _Step(batches, self._plans(batches, step))
        known = self._answers.get(step)
        if known is None or any(seed not in known for seed, _ in self._asked(now.plans, step)):
            self._coming = self._steps_to_come(len(batches), step, following)
            self._draw({step: now} | self._coming)
        made, figures = now.result or self._put_in(now, step, collate)
        del self._answers[step]
        self._sums += figures
        return made

    def to_come(self, collate: Callable[[list[Row]], Collated]) -> Iterator[Collated]:
        """The micro-batches of steps whose answers wait, as `replace` will give them, each once: for who can begin."""
        for step, coming in self._coming.items():
            if coming.result is None:
                result = self._put_in(coming, step, collate)
                self._coming[step] = coming._replace(result=result)
                yield from result.batches

    def epoch(self, batches: Iterator[Collated]) -> Iterator[Collated]:
        """The micro-batches of an epoch in their order; `replace` looks at those to come.

        Args:
            batches: The same object for all of an epoch's calls.
        """
        if self._epoch is None or self._epoch.batches is not batches:
            self._epoch = _Epoch(batches)
        return self._epoch

    def save(self, checkpoint: Path, rank: int) -> None:
        """Write the answers of steps to come into a checkpoint's folder; every process calls it."""
        if self._answers:
            checkpoint.mkdir(exist_ok=True)
            write_text(checkpoint / FILE.format(rank), json.dumps(self._answers))

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, of however many processes."""
        self._answers.clear()
        self._coming.clear()
        for file in sorted(checkpoint.glob(FILE.replace("{:05d}", "*"))):
            for step, answers in json.loads(file.read_text()).items():
                own = self._answers.setdefault(int(step), {})
                own.update((int(seed), _Answer(*answer)) for seed, answer in answers.items())

    def _plans(self, batches: Iterable[Collated], step: int) -> list[_Plan]:
        return [self._plan(documents_of(batch), len(batch["labels"]), step) for batch in batches]

    def _steps_to_come(self, count: int, step: int, most: int) -> dict[int, _Step]:
        """The steps after `step`, of `count` micro-batches each, whose answers are drawn with its own.

        Which ones follows from their number, so that a run that is resumed forms the same groups.
        """
        if self._epoch is None:
            return {}
        more = min(self.ahead - step % (self.ahead + 1), most)
        batches = iter(self._epoch.look(count * more))
        groups = enumerate((list(itertools.islice(batches, count)) for _ in range(more)), step + 1)
        return {number: _Step(group, self._plans(group, number)) for number, group in groups if group}

    def _asked(self, plans: Iterable[_Plan], step: int) -> Iterator[tuple[int, Document]]:
        """The documents that are answered anew in a step, with the seed that their answers are drawn by."""
        return ((self._seed_of(document, step), document) for plan in plans for document in plan.asked)

    def _draw(self, steps: dict[int, _Step]) -> None:
        """Answer the prompts of some steps, the present one first, by the weights as they are."""
        start = time.perf_counter()
        at = next(iter(steps))
        if self.snapshot is not None:
            assert self.student is not None
            self.snapshot.take(self.student)
        asked = [(step, *each) for step, own in steps.items() for each in self._asked(own.plans, step)]
        answers = self.engine.generate(
            [document.prompt for _, _, document in asked],
            max_new_tokens=[self._limit(document) for _, _, document in asked],
            sampling=self.sampling,
            seeds=[seed for _, seed, _ in asked],
            batch_size=self.batch_size * (self.ahead + 1),
        )
        self._answers |= {step: {} for step in steps}
        log_probs = answers.log_probs if self.log_probs else [[]] * len(asked)
        drawn = zip(asked, answers.tokens, answers.truncated, log_probs, strict=True)
        seconds = (time.perf_counter() - start) / max(len(asked), 1)
        for (step, seed, _), tokens, truncated, log_p in drawn:
            self._answers[step][seed] = _Answer(tokens, truncated, log_p, at, seconds)

    def _put_in(self, own: _Step, step: int, collate: Callable[[list[Row]], Collated]) -> _StepBatches:
        """The micro-batches with answers in their place."""
        batches, plans, _ = own
        if not any(plan.changes for plan in plans):
            return _StepBatches(list(batches), np.zeros_like(self._sums))
        asked = list(self._asked(plans, step))
        answers = [self._answers[step][seed] for seed, _ in asked]
        judged = [(document, answer.tokens) for (_, document), answer in zip(asked, answers, strict=True)]
        advantages, rewards = ([None] * len(judged), NO_REWARDS) if self.rewards is None else self.rewards.judge(judged)
        new = iter(
            document.answered(document.prompt, answer.tokens, answer.log_probs if self.log_probs else None, advantage)
            for (_, document), answer, advantage in zip(asked, answers, advantages, strict=True)
        )
        made: list[Collated] = []
        for plan, batch in zip(plans, batches, strict=True):
            rows = plan.rows(new, self.max_length, self.one_row)
            if plan.limit is not None and rows:
                self._lengthen(max(rows, key=_length), self.max_length * (plan.limit if self.one_row else 1))
            made.append(collate(list(map(as_row, rows))) if plan.changes else dict(batch))
            if self.log_probs:
                made[-1]["drawn_log_p"] = drawn_log_probs(rows if plan.changes else [], made[-1]["input_ids"].shape)
            if self.rewards is not None:
                made[-1]["advantages"] = token_advantages(rows if plan.changes else [], made[-1]["input_ids"].shape)
        figures = (
            len(asked), sum(len(answer.tokens) for answer in answers), sum(answer.truncated for answer in answers),
            sum(plan.left_out for plan in plans), sum(repeats_itself(answer.tokens) for answer in answers),
            sum(answer.seconds for answer in answers), sum(step - answer.step for answer in answers),
            *rewards,
        )  # fmt: skip
        return _StepBatches(made, np.array(figures))

    def read(self, reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[str, float]:
        """The figures of the interval since the last call, over all ranks.

        Args:
            reduce: Sums a tensor over the ranks.
            device: Where `reduce` wants it.

        Returns:
            rollouts, rollouts_per_second (over the time spent generating, ranks side by side), rollout_length (mean,
            tokens), rollout_truncated (share cut off at max_new_tokens), rollout_repeated (share that repeat
            themselves), rollouts_left_out (documents that did not fit any more); with `ahead` rollout_lag (mean,
            optimizer steps); with `rewards` those of `reward_figures`.
        """
        precision = torch.float32 if device.type == "mps" else torch.float64
        here = torch.tensor([*self._sums, 1.0], dtype=precision, device=device)
        count, tokens, truncated, dropped, repeated, seconds, lag, *rewards, ranks = reduce(here).tolist()
        self._sums[:] = 0
        more = {"rollout_lag": lag / max(count, 1)} if self.ahead else {}
        more |= {} if self.rewards is None else reward_figures(rewards, count)
        return more | {
            "rollouts": count,
            "rollouts_per_second": count / max(seconds / ranks, 1e-9),
            "rollout_length": tokens / max(count, 1),
            "rollout_truncated": truncated / max(count, 1),
            "rollout_repeated": repeated / max(count, 1),
            "rollouts_left_out": dropped,
        }

    def _plan(self, documents: list[Document], rows: int, step: int) -> _Plan:
        """Which documents of a micro-batch are answered anew, and which stay at all."""
        asked = [self._drawn(document, step) for document in documents]
        if not any(asked):
            return _Plan(documents, asked, rows)
        packed = len({document.row for document in documents}) < len(documents)
        pairs = list(self._that_fit(documents, asked, step) if packed else zip(documents, asked, strict=True))
        each = [(own, drawn, n) for own, drawn in pairs for n in range(self.samples if drawn else 1)]
        left_out = len(documents) + (self.samples - 1) * sum(asked) - len(each)
        documents = [replace(own, sample=n) if n else own for own, _, n in each]
        return _Plan(documents, [drawn for _, drawn, _ in each], rows * self.samples if packed else None, left_out)

    def _that_fit(self, documents: list[Document], asked: list[bool], step: int) -> Iterator[tuple[Document, bool]]:
        """Those whose longest answers fit, taken by chance; told row by row, so that micro-batches play no part."""
        changing = {own.row for own, drawn in zip(documents, asked, strict=True) if drawn}
        room: defaultdict[int, int] = defaultdict(lambda: self.max_length)
        staying = []
        for number in sorted(range(len(documents)), key=lambda number: documents[number].hash(self.seed, step, 2)):
            own = documents[number]
            length = own.prompt_length + self._limit(own) if asked[number] else own.length
            if length <= room[own.row] or own.row not in changing:
                room[own.row] -= length
                staying.append(number)
        return ((documents[number], asked[number]) for number in sorted(staying))

    def _lengthen(self, row: list[Document], most: int) -> None:
        """Give the longest row a length that `multiple` divides, or `most`, by a document of padding."""
        missing = min(-_length(row) % self.multiple, most - _length(row))
        if missing > 0 and all(document.teacher_ids is None and document.route is None for document in row):
            row.append(Document([0] * missing, [IGNORE_INDEX] * missing, row[0].row))

    def _limit(self, document: Document) -> int:
        return min(self.max_new_tokens, self.max_length - document.prompt_length)

    def _drawn(self, document: Document, step: int) -> bool:
        return int.from_bytes(document.hash(self.seed, step, 0)[:8], "little") < self.fraction * 2.0**64

    def _seed_of(self, document: Document, step: int) -> int:
        return int.from_bytes(document.hash(self.seed, step, 1)[:8], "little", signed=True)


def _length(row: Sequence[Document]) -> int:
    return sum(document.length for document in row)


def repeats_itself(tokens: Sequence[int], length: int = 4) -> bool:
    """Whether more than half of an answer's runs of `length` tokens have stood in it before."""
    runs = list(zip(*(tokens[at:] for at in range(length)), strict=False))
    return 2 * len(set(runs)) < len(runs)


class _Plan(NamedTuple):
    """A micro-batch's documents, which of them are answered anew, rows to pack them into, how many did not fit."""

    documents: list[Document]
    drawn: list[bool]
    limit: int | None
    left_out: int = 0

    @property
    def asked(self) -> list[Document]:
        return [document for document, drawn in zip(self.documents, self.drawn, strict=True) if drawn]

    @property
    def changes(self) -> bool:
        return any(self.drawn) or self.left_out > 0

    def rows(self, answers: Any, max_length: int, one_row: bool) -> list[list[Document]]:
        """The documents, `answers` in place of those that were asked: in one row, or packed if they were before."""
        documents = [next(answers) if drawn else own for own, drawn in zip(self.documents, self.drawn, strict=True)]
        if one_row:
            return [documents] * bool(documents)
        if self.limit is None:
            return [[document] for document in documents]
        groups = best_fit(np.array([document.length for document in documents]), max_length)
        if len(groups) > self.limit:  # answers of one row and sample fit into one
            order = sorted(documents, key=lambda own: (own.row, own.sample))
            return [list(group) for _, group in itertools.groupby(order, key=lambda own: (own.row, own.sample))]
        return [[documents[number] for number in group] for group in groups]


class _Epoch(Iterator[Collated]):
    """An epoch's micro-batches, of which the next may be looked at."""

    def __init__(self, batches: Iterator[Collated]) -> None:
        self.batches, self._coming = batches, deque[Collated]()

    def __next__(self) -> Collated:
        return self._coming.popleft() if self._coming else next(self.batches)

    def look(self, count: int) -> list[Collated]:
        """The next `count`, or as many as there are."""
        self._coming.extend(itertools.islice(self.batches, max(0, count - len(self._coming))))
        return list(self._coming)[:count]


class _StepBatches(NamedTuple):
    """A step's micro-batches with answers in their place, and what they add to `OnPolicy._sums`."""

    batches: list[Collated]
    figures: np.ndarray


class _Step(NamedTuple):
    """The micro-batches of a step, the plan of each, and both put together, once that is done."""

    batches: Batches
    plans: list[_Plan]
    result: _StepBatches | None = None


class _Answer(NamedTuple):
    """What a prompt was answered; `step`: optimizer steps done when it was, `seconds`: its share of the time."""

    tokens: list[int]
    truncated: bool
    log_probs: list[float]
    step: int
    seconds: float
