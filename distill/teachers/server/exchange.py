"""How rows of tokens become a question to servers, and their answer tensors; one exchange a protocol."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch

from distill.core.faults import TeacherGone
from distill.recipe import Recipe, Teacher
from distill.teachers.cache.settings import default_tail
from distill.teachers.server.client import Servers
from distill.teachers.server.wire import Asked, WireError, hidden_of, tensors_of, unpack_ids

Said = dict[str, torch.Tensor]


class Wanted(NamedTuple):
    """What is to be said of each position.

    Attributes:
        top_k: tokens of its distribution; None for hidden states.
        columns: that the tokens are taken from, all rows of the head for hidden states.
        hidden: width of the states.
        dtype: of states and head.
        tail: how K tokens are chosen and read.
        temperature: of their probabilities.
        send: what states travel in.
        deterministic: whether each request is computed alone.
    """

    top_k: int | None
    columns: int
    hidden: int
    dtype: torch.dtype
    tail: str
    temperature: float
    send: str
    deterministic: bool

    @staticmethod
    def by(recipe: Recipe, columns: int, hidden: int, dtype: torch.dtype) -> Wanted:
        """What a recipe asks for."""
        section: Teacher = recipe.teacher
        return Wanted(
            section.top_k, columns, hidden, dtype, default_tail(recipe.loss), recipe.loss.temperature,
            section.send, section.deterministic,
        )  # fmt: skip

    def manifest(self, scale: float, softcap: float | None) -> dict[str, Any]:
        """As a cache's manifest says it, for the format of K tokens."""
        return {
            "kind": "top_k", "k": self.top_k, "tail": self.tail, "temperature": self.temperature, "scale": scale,
            "softcap": softcap, "vocabulary": self.columns, "hidden": self.hidden, "dtype": "float16",
        }  # fmt: skip


class Exchange(Protocol):
    """Asks, and reads what comes.

    Attributes:
        servers: that are asked.
        wanted: of each position.
        most_logits: positions whose own logits it gives at a time; 0 where it gives none.
    """

    servers: Servers
    wanted: Wanted
    most_logits: int = 0

    def ask(self, asked: Asked) -> Future[bytes]:
        """Ask in a thread."""
        ...

    def read(self, body: bytes, asked: Asked) -> Said:
        """`hidden` [M, H]; or `ids` int32 [M, K], `logprobs`, `tail`, `entropy`, `label_logprob`, as a cache's.

        Raises:
            TeacherGone: it is not that.
        """
        ...


class DistillExchange(Exchange):
    """With `distill serve`."""

    def __init__(self, servers: Servers, wanted: Wanted, most_logits: int) -> None:
        self.servers, self.wanted, self.most_logits = servers, wanted, most_logits

    def ask(self, asked: Asked) -> Future[bytes]:
        wanted, params = self.wanted, {"deterministic": int(self.wanted.deterministic)}  # type: Wanted, dict[str, Any]
        if wanted.top_k is None:
            params["dtype"] = wanted.send
        else:
            params |= {"top_k": wanted.top_k, "columns": wanted.columns, "tail": wanted.tail,
                       "temperature": wanted.temperature}  # fmt: skip
        return self.servers.submit("/v1/targets", asked.body(), params, len(asked.rows))

    def read(self, body: bytes, asked: Asked) -> Said:
        wanted = self.wanted
        try:
            answer = tensors_of(body)
            if wanted.top_k is None:
                said = {"hidden": hidden_of(answer, wanted.dtype)}
            else:
                said = {"ids": unpack_ids(answer, wanted.columns)} | {
                    name: answer[name] for name in ("logprobs", "tail", "entropy", "label_logprob")
                }
        except (WireError, KeyError, RuntimeError, ValueError) as error:
            raise TeacherGone(f"teacher.url: an answer that is none: {type(error).__name__}: {error}") from None
        return require_sound(said, len(asked.rows), wanted)


def require_sound(said: Said, positions: int, wanted: Wanted) -> Said:
    """An answer that has the shapes that were asked for, and is finite where it must be.

    Raises:
        TeacherGone: naming what is not.
    """
    k = wanted.top_k
    shapes: Mapping[str, tuple[int, ...]] = (
        {"hidden": (positions, wanted.hidden)}
        if k is None
        else {"ids": (positions, k), "logprobs": (positions, k), "tail": (positions,), "entropy": (positions,),
              "label_logprob": (positions,)}
    )  # fmt: skip
    for name, shape in shapes.items():
        if tuple(said[name].shape) != shape:
            raise TeacherGone(f"teacher.url: an answer's {name}: expected {shape}, got {tuple(said[name].shape)}")
        value = said[name]
        # a probability may be 0, and its logarithm -inf
        fine = value.isfinite() | (value == -torch.inf) if k is not None else value.isfinite()
        if value.is_floating_point() and not bool(fine.all()):
            raise TeacherGone(f"teacher.url: an answer's {name} is NaN or infinite at {int((~fine).sum())} places")
    if k is not None and positions and not 0 <= int(said["ids"].min()) <= int(said["ids"].max()) < wanted.columns:
        raise TeacherGone(f"teacher.url: an answer's ids: expected 0 to {wanted.columns - 1}")
    return said
