"""Files of on-policy rollouts of some steps, with their rewards and log-probabilities per token.

`<run>/rollouts/step-00000100.parquet`, one row per rollout. Files are written atomically, and a resumed run overwrites
the file of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerState

from distill.core.files import atomic_path
from distill.core.labels import IGNORE_INDEX
from distill.core.manifest import add_to_manifest
from distill.core.ranks import is_main_process
from distill.generation.documents import RolloutDocument, documents_of
from distill.objectives.losses import STATISTICS
from distill.objectives.targets import Batch, LossResult
from distill.training.listeners import StepListener

FOLDER = "rollouts"


class StoredRollouts(StepListener):
    """Listener that writes the rollouts of every `every`-th optimizer step.

    Args:
        every: Steps from one file to the next.
    """

    def __init__(self, folder: Path, every: int, tokenizer: Any, routes: Sequence[str]) -> None:
        self.folder = folder / FOLDER
        self.every = every
        self.tokenizer = tokenizer
        self.routes = routes
        self.is_open = False  # whether the current step's rollouts are recorded
        self._rows: list[dict[str, object]] = []

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self.is_open = (state.global_step + 1) % self.every == 0

    def loss_computed(self, batch: Batch, result: LossResult) -> None:
        if self.is_open and isinstance(result, tuple):
            self.add(batch, torch.stack(tuple(result[1])).detach())

    def add(self, batch: Mapping[str, torch.Tensor], statistics: torch.Tensor) -> None:
        """Record the rollouts of a micro-batch.

        Args:
            batch: Collated batch; `sampled_log_p` holds log-probabilities of sampled tokens, NaN elsewhere. With a
                reward function `rewards` and `advantages` hold those of each token's response.
            statistics: Statistics in the order of `STATISTICS`: [K, B * S], of each position's next token, or [K, M],
                of each aligned span.
        """
        if "sampled_log_p" not in batch:
            return
        at = batch["valid_rows"]
        drawn = batch["sampled_log_p"].flatten()[at + 1].tolist()
        if statistics.shape[1] != len(at):
            statistics = statistics[:, at]
        named = dict(zip(STATISTICS, statistics.tolist(), strict=False))
        scores = [
            batch[name].flatten()[at + 1].tolist() if name in batch else None for name in ("rewards", "advantages")
        ]
        begin = 0
        for document in documents_of(batch):
            end = begin + len(document.labels) - document.labels.count(IGNORE_INDEX)
            mine = slice(begin, end)
            begin = end
            if drawn[mine.start] != drawn[mine.start]:  # NaN: a response of the data set, not sampled
                continue
            reward, advantage = (None if each is None else each[mine.start] for each in scores)
            self._rows.append(
                {
                    "route": None if document.route is None else self.routes[document.route],
                    "reward": reward,
                    "advantage": advantage,
                    **self._read(document),
                    "sampled_log_p": drawn[mine],
                    "student_log_p": named["student_label_logprob"][mine],
                    "teacher_log_p": named["teacher_label_logprob"][mine],
                    "divergence": named["divergence"][mine],
                }
            )
        assert begin == len(drawn)

    def _read(self, document: RolloutDocument) -> dict[str, object]:
        """Return a rollout's prompt, which ends before the first token that the student sampled, and its answer."""
        begin = document.rollout_start
        prompt = document.ids[:begin]
        answer = document.ids[begin:]
        labels = document.labels[begin:]
        positions = [at for at, label in enumerate(labels) if label != IGNORE_INDEX]
        is_own = [document.starts is not None or label != IGNORE_INDEX for label in labels]
        stretches = [
            [at for at, _ in group] for _, group in itertools.groupby(enumerate(is_own), key=lambda own: own[1])
        ]
        turns = [
            {"by_student": is_own[at[0]], "text": self.tokenizer.decode(answer[at[0] : at[-1] + 1])} for at in stretches
        ]
        texts = {"prompt": self.tokenizer.decode(prompt), "answer": self.tokenizer.decode(answer)}
        return texts | {"turns": turns, "prompt_ids": prompt, "answer_ids": answer, "positions": positions}

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if not self.is_open:
            return
        rows = gather_object(self._rows)
        self._rows = []
        self.is_open = False
        if is_main_process():
            write(self.folder, state.global_step, rows)
            add_to_manifest(self.folder.parent, f"{FOLDER}/{name_of(state.global_step)}")


def write(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    ids = pyarrow.list_(pyarrow.int32())
    figures = pyarrow.list_(pyarrow.float32())
    text = dict.fromkeys(("route", "prompt", "answer"), pyarrow.string())
    schema = {"step": pyarrow.int64(), "reward": pyarrow.float32(), "advantage": pyarrow.float32(), **text}
    turn = pyarrow.struct({"by_student": pyarrow.bool_(), "text": pyarrow.string()})
    schema |= {"turns": pyarrow.list_(turn), "prompt_ids": ids, "answer_ids": ids, "positions": ids}
    schema |= dict.fromkeys(("sampled_log_p", "student_log_p", "teacher_log_p", "divergence"), figures)
    rows = sorted(({"step": step, **row} for row in rows), key=lambda row: (row["prompt_ids"], row["answer_ids"]))
    folder.mkdir(exist_ok=True)
    with atomic_path(folder / name_of(step)) as place:
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(schema)), place)


def name_of(step: int) -> str:
    return f"step-{step:08}.parquet"


def files(run: Path) -> list[Path]:
    return sorted((run / FOLDER).glob("step-*.parquet"))


def read(file: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(file).to_pylist()


def divergences_of(row: Mapping[str, Any]) -> list[float | None]:
    """Return the divergence at each token of a stored answer, in nats; None at tokens that are not trained on."""
    found: list[float | None] = [None] * len(row["answer_ids"])
    for at, value in zip(row["positions"], row["divergence"], strict=True):
        found[at] = value
    return found
