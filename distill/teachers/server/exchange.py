"""How rows of tokens become a question to servers, and their answer tensors; one exchange a protocol."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch

from distill.core.errors import TeacherUnavailableError
from distill.recipe import Recipe, Teacher
from distill.teachers.cache.settings import default_tail
from distill.teachers.server.client import Servers, with_query
from distill.teachers.server.wire import TargetRequest, WireError, hidden_of, tensors_of, unpack_ids

TargetTensors = dict[str, torch.Tensor]


class TargetSpec(NamedTuple):
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
    def by(recipe: Recipe, columns: int, hidden: int, dtype: torch.dtype) -> TargetSpec:
        """What a recipe asks for."""
        section: Teacher = recipe.teacher
        return TargetSpec(
            section.top_k, columns, hidden, dtype, default_tail(recipe.loss), recipe.loss.temperature,
            section.send, section.deterministic,
        )  # fmt: skip

    def nothing(self) -> TargetTensors:
        """An answer of no positions."""
        if self.top_k is None:
            return {"hidden": torch.zeros(0, self.hidden, dtype=self.dtype)}
        empty = torch.zeros(0)
        return {"ids": torch.zeros(0, self.top_k, dtype=torch.int32), "logprobs": torch.zeros(0, self.top_k),
                "tail": empty, "entropy": empty, "label_logprob": empty}  # fmt: skip

    def manifest(self, scale: float, softcap: float | None) -> dict[str, object]:
        """As a cache's manifest says it, for the format of K tokens."""
        return {
            "kind": "top_k", "k": self.top_k, "tail": self.tail, "temperature": self.temperature, "scale": scale,
            "softcap": softcap, "vocabulary": self.columns, "hidden": self.hidden, "dtype": "float16",
        }  # fmt: skip


class Answer(Protocol):
    """What is under way."""

    def result(self) -> TargetTensors:
        """`hidden` [M, H]; or `ids` int32 [M, K], `logprobs`, `tail`, `entropy`, `label_logprob`, as a cache's: waited
        for.

        Raises:
            TeacherUnavailableError: it will not come, or is not that.
        """
        ...


class Exchange(Protocol):
    """Asks.

    Attributes:
        spec: of each position.
        most_logits: positions whose own logits it gives at a time; 0 where it gives none.
        field: of the recipe that names who is asked.
    """

    spec: TargetSpec
    most_logits: int = 0
    field: str = "teacher.url"

    def ask(self, query: TargetRequest) -> Answer:
        """Ask, and go on."""
        ...

    def exact(self, query: TargetRequest) -> TargetTensors:
        """`hidden` as it is, whatever `spec` says of sending it."""
        return self.ask(query).result()

    def logits(self, query: TargetRequest) -> torch.Tensor:
        """fp32 [M, V] as the model makes them by its own forward; of at most `most_logits` rows."""
        ...

    def proof(self, query: TargetRequest) -> str | None:
        """What is compared with the server's own numbers where it sends no logits, in words; None where nothing is.

        Raises:
            ValueError: they differ.
        """
        return None

    def cost(self) -> float:
        """Bytes that have come for a learned token."""
        ...

    def close(self) -> None:
        """Ask no more."""
        return


class ServerExchange(Exchange):
    """Over HTTP.

    Attributes:
        servers: that are asked.
    """

    servers: Servers

    def logits(self, query: TargetRequest) -> torch.Tensor:
        return tensors_of(self.servers.fetch("POST", "/v1/logits", query.body()))["logits"]

    def cost(self) -> float:
        return self.servers.received / max(self.servers.positions, 1)

    def close(self) -> None:
        self.servers.close()


class DistillExchange(ServerExchange):
    """With `distill serve`."""

    def __init__(self, servers: Servers, spec: TargetSpec, most_logits: int) -> None:
        self.servers, self.spec, self.most_logits = servers, spec, most_logits

    def exact(self, query: TargetRequest) -> TargetTensors:
        return DistillExchange(self.servers, self.spec._replace(send="auto", deterministic=True), 0).ask(query).result()

    def ask(self, query: TargetRequest) -> Future[TargetTensors]:
        spec = self.spec
        params = {"dtype": spec.send} if spec.top_k is None else {
            "top_k": spec.top_k, "columns": spec.columns, "tail": spec.tail, "temperature": spec.temperature
        }  # fmt: skip
        path = with_query("/v1/targets", deterministic=int(spec.deterministic), **params)
        return self.servers.submit(path, query.body(), len(query.rows), lambda body: self.read(body, query))

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        """The tensors in an answer's body.

        Raises:
            TeacherUnavailableError: they are not what was asked for.
        """
        spec = self.spec
        try:
            answer = tensors_of(body)
            if spec.top_k is None:
                values = {"hidden": hidden_of(answer, spec.dtype)}
            else:
                values = {"ids": unpack_ids(answer, spec.columns)} | {
                    name: answer[name] for name in ("logprobs", "tail", "entropy", "label_logprob")
                }
        except (WireError, KeyError, RuntimeError, ValueError) as error:
            raise TeacherUnavailableError(
                f"teacher.url: an answer that is none: {type(error).__name__}: {error}"
            ) from None
        return require_sound(values, len(query.rows), spec)


def require_sound(
    values: TargetTensors, positions: int, spec: TargetSpec, field: str = Exchange.field
) -> TargetTensors:
    """An answer that has the shapes that were asked for, and is finite where it must be.

    Raises:
        TeacherUnavailableError: naming what is not.
    """
    k = spec.top_k
    shapes: Mapping[str, tuple[int, ...]] = (
        {"hidden": (positions, spec.hidden)}
        if k is None
        else {"ids": (positions, k), "logprobs": (positions, k), "tail": (positions,), "entropy": (positions,),
              "label_logprob": (positions,)}
    )  # fmt: skip
    for name, shape in shapes.items():
        if tuple(values[name].shape) != shape:
            raise TeacherUnavailableError(
                f"{field}: an answer's {name}: expected {shape}, got {tuple(values[name].shape)}"
            )
        value = values[name]
        # one pass over the memory tells of most answers that they are fine
        if not value.is_floating_point() or bool(value.sum().isfinite()):
            continue
        # a probability may be 0, and its logarithm -inf
        fine = value.isfinite() | (value == -torch.inf) if k is not None else value.isfinite()
        if not bool(fine.all()):
            raise TeacherUnavailableError(
                f"{field}: an answer's {name} is NaN or infinite at {int((~fine).sum())} places"
            )
    if k is not None and positions and not 0 <= int(values["ids"].min()) <= int(values["ids"].max()) < spec.columns:
        raise TeacherUnavailableError(f"{field}: an answer's ids: expected 0 to {spec.columns - 1}")
    return values
