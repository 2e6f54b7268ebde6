"""Plan of a served teacher: which servers, what they serve, and how the run opens them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from distill.core.errors import TeacherUnavailableError
from distill.data.load import Splits
from distill.data.token_cache import cached_folder
from distill.models.flops import head_flops
from distill.models.head import HeadWeights, LogitTransform
from distill.models.meta_models import meta_config, meta_student
from distill.objectives.measure import KL, DivergenceUnit, cache_measure
from distill.objectives.row_packing import hidden_bytes
from distill.recipe import ModelSection, Recipe, ServedTeacherConfig
from distill.recipe.models import LOW_BITS
from distill.teachers.backends.served.client import ServerConfig, Servers, token_of
from distill.teachers.backends.served.protocol import FILES, Identity, head_hash, tensors_of
from distill.teachers.backends.served.teacher import ServerTeacher
from distill.teachers.backends.served.teacher_client import DistillProtocol, TargetSpec, TeacherClient
from distill.teachers.backends.served.vllm import VllmLogprobs, length_problems, served_model
from distill.teachers.backends.served.vllm_hidden import VllmHiddenStates, load_ends
from distill.teachers.backends.stored.format import TEACHER, bytes_a_token
from distill.teachers.backends.stored.identity import text_hashes
from distill.teachers.backends.stored.settings import default_tail
from distill.teachers.base import TeacherPlan
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.identity import model_name, teacher_identity
from distill.teachers.load_context import LoadContext
from distill.teachers.vocabulary import Vocabulary

CONFIG = "config.json"


class ServerPlan(TeacherPlan):
    """The plan of the servers that the recipe's `teacher.url` names; their identity is queried on first use."""

    shardable = False
    section: ServedTeacherConfig

    def __init__(self, recipe: Recipe, section: ServedTeacherConfig | None = None, field: str = "teacher") -> None:
        super().__init__(recipe, section, field)
        self.is_vllm = self.section.protocol == "vllm"

    @functools.cached_property
    def servers(self) -> Servers:
        return connect(self.section)

    @functools.cached_property
    def identity(self) -> Identity:
        return self.servers.identity()

    @functools.cached_property
    def vllm_model(self) -> dict[str, object]:
        """Model that vLLM serves: id, root and max_model_len."""
        return served_model(self.servers)

    @functools.cached_property
    def folder(self) -> str:
        """Local folder with tokenizer and, in `teacher/`, configuration of a `distill serve`; written once."""
        return str(
            cached_folder(f"served-{self.identity.files[:32]}", self._write_files, cache=self.recipe.data.cache)[0]
        )

    def _write_files(self, folder: Path) -> None:
        files = json.loads(self.servers.ask("GET", "/v1/files"))
        (folder / TEACHER).mkdir()
        for name in FILES:  # and no other, whatever a server calls its files
            if isinstance(text := files.get(name), str):
                (folder / TEACHER / name if name == CONFIG else folder / name).write_text(text, encoding="utf-8")

    def maker(self) -> dict[str, object]:
        """The identity has the dtype of the layers, too."""
        if self.is_vllm:
            unnamed = dict.fromkeys(("revision", "adapter", "config", "files_sha256"))
            return {**unnamed, "model": self.vllm_model["id"], "init": "pretrained"}
        identity = self.identity
        in_fp8 = self.section.transfer_dtype == "fp8" and self.section.top_k is None
        dtype = identity.held if identity.held.startswith(LOW_BITS) else identity.dtype
        return {**identity.source, "dtype": dtype + ", sent in fp8" * in_fp8}

    def stored_dtype(self) -> str:
        k_tokens, hidden = ("float32", "bfloat16") if self.is_vllm else ("float16", self.identity.dtype)
        return hidden if self.section.top_k is None else k_tokens

    def config_section(self) -> ModelSection:
        if self.is_vllm:
            return self.section.loaded()
        return ModelSection(init="random", config=f"{self.folder}/{TEACHER}")

    def tokenizer_section(self) -> ModelSection:
        return self.section.loaded() if self.is_vllm else ModelSection(model=self.folder)

    def copy_cached_state(self, other: TeacherPlan) -> None:
        if isinstance(other, ServerPlan) and other.section == self.section:  # the same servers, asked already
            self.__dict__ |= {
                name: other.__dict__[name] for name in ("servers", "identity", "vllm_model") if name in other.__dict__
            }

    def vocabulary(self) -> Vocabulary:
        section = self.config_section() if self.recipe.data.is_synthetic else self.tokenizer_section()
        return Vocabulary(self.recipe, section, top_k=self.section.top_k is not None)

    def measure(self) -> DivergenceUnit:
        section = self.section
        loss = self.recipe.loss
        if section.top_k is None:
            return KL
        tail = default_tail(loss)
        return cache_measure(
            {
                "k": section.top_k,
                "tail": "bucket" if self.is_vllm and tail == "sampled" else tail,
                "temperature": loss.temperatures.teacher,
            }
        )

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        recipe = self.recipe
        if self.is_vllm:
            if recipe.loss.temperatures.teacher != 1.0 and self.section.top_k is not None:
                return ["loss.temperature: expected 1 with vLLM's top_k, which has no other probabilities"]
            # a document's last token is not sent where only states are read, which makes room for the generated one
            extra = int(self.section.folder is None)
            return length_problems(self.vllm_model, recipe.data.max_length, extra)
        identity = self.identity
        problems = []
        most = identity.limits["tokens"]
        tokens = recipe.train.batch_size * recipe.data.max_length
        if most is not None and tokens > most:
            problems.append(
                f"train.batch_size: expected at most {most} tokens a micro-batch, as the server was started "
                f"(--max-tokens), got {recipe.train.batch_size} x data.max_length {recipe.data.max_length}"
            )
        if self.section.model is not None or self.section.init == "random":
            here = teacher_identity(self.section.loaded())
            there = identity.source
            by_files = bool(here["files_sha256"] and there["files_sha256"])
            names = ("files_sha256", "adapter") if by_files else ("init", "config", "model", "revision", "adapter")
            other = next((name for name in names if here[name] != there.get(name)), None)
            if other is not None:
                problems.append(
                    f"teacher.{'model' if by_files else other}: the server's {other} is {there.get(other)!r}, of the "
                    f"recipe's it is {here[other]!r}; leave it out to take what is served"
                )
        return problems

    def data_problems(self, splits: Splits) -> list[str]:
        if self.is_vllm or splits.report.format.startswith("text") or self.recipe.data.is_synthetic:
            return []
        here = text_hashes(self.recipe, self.vocabulary().tokenizer)["template"]
        if here == self.identity.template:
            return []
        return ["data.chat_template: the template differs from the server's; start distill serve with this recipe"]

    def footprint(self, context: FootprintContext) -> Footprint:
        shape = self.shapes()[0]
        k = self.section.top_k
        if k is not None:
            return Footprint(token_bytes=k * (6 + 8), logits=False)
        number = context.precision.teacher.itemsize if self.is_vllm else getattr(torch, self.identity.dtype).itemsize
        return Footprint(float(shape.head * number), token_bytes=2 * number * shape.hidden, flops=head_flops(shape))

    def title(self) -> str:
        known: Identity | None = self.__dict__.get("identity")  # reports are written after the server has ended, too
        own = model_name(self.section) if self.section.model else ", ".join(self.section.urls)
        return f"{known.model if known else own} (served)"

    def size_text(self) -> str:
        shape = self.shapes()[0]
        plan = {"kind": "hidden", "hidden": shape.hidden, "dtype": "bfloat16" if self.is_vllm else self.identity.dtype}
        if self.section.top_k is not None:
            plan = {"kind": "top_k", "k": self.section.top_k, "vocabulary": shape.vocabulary, "dtype": "float16"}
        each = hidden_bytes(shape.hidden, "fp8") if self.section.transfer_dtype == "fp8" else bytes_a_token(plan)
        return f"not loaded: {', '.join(self.section.urls)}; {each:,} bytes per trained token come from there"

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> ServerTeacher:
        """Fetch the head, once for all runs on this machine, and return the teacher.

        Raises:
            ValueError: the servers are not one teacher.
            TeacherUnavailableError: none answers.
        """
        student = meta_student(self.recipe.student, meta_config(self.config_section(), "teacher")).shape
        if self.is_vllm:
            shape = self.shapes()[0]
            columns = min(shape.vocabulary, student.vocabulary)
            spec = TargetSpec.by(self.recipe, columns, shape.hidden, torch.float32)
            cut = context.precision.teacher
            if self.section.folder is None:
                logprobs = VllmLogprobs(spec)
                identity = logprobs.identity(self.servers)
                client = TeacherClient(self.servers, logprobs)
                return ServerTeacher(client, identity, LogitTransform(), None, self.section, cut)
            ends = load_ends(self.section.loaded(), cut)
            states = VllmHiddenStates(self.servers, spec._replace(dtype=cut), Path(self.section.folder), ends)
            identity = states.identity(self.servers) | {"ends": ends.fingerprint}
            client = TeacherClient(self.servers, states)
            teacher = ServerTeacher(client, identity, ends.transform, ends.head, self.section, cut)
            teacher.move_to(context.device)
            return teacher
        served = self.identity
        dtype = getattr(torch, served.dtype)
        extends = self.recipe.student.vocabulary == "extend"
        columns = served.rows if self.section.top_k is None or extends else min(served.rows, student.vocabulary)
        spec = TargetSpec.by(self.recipe, columns, served.hidden, dtype)
        return _opened(self.section, self.servers, served, spec, context.device, context.precision.teacher)


def reconnected(section_values: Mapping[str, Any], spec_values: Mapping[str, Any]) -> ServerTeacher:
    """Return the teacher of a `distill serve` from the values of `ServerTeacher.constructor`."""
    section = ServedTeacherConfig.model_validate(section_values)
    servers = connect(section)
    identity = servers.identity()
    dtype = getattr(torch, spec_values["dtype"])
    spec = TargetSpec(**{**spec_values, "dtype": dtype})
    return _opened(section, servers, identity, spec, torch.device("cpu"), dtype)


def connect(section: ServedTeacherConfig) -> Servers:
    """Return a client of the servers of a recipe's teacher; nothing is sent yet."""
    token = token_of(section.token_file)
    sums = section.protocol != "vllm"
    return Servers(ServerConfig(section.urls, token, section.timeout, section.prefetch, sums))


def _opened(
    section: ServedTeacherConfig,
    servers: Servers,
    identity: Identity,
    spec: TargetSpec,
    device: torch.device,
    cut: torch.dtype,
) -> ServerTeacher:
    """Return the teacher of a `distill serve`, its head on `device`; `cut` is the dtype of a student that is cut."""
    head = None if spec.top_k is not None else _head(servers, identity, device)
    named = {
        "model": identity.model,
        **identity.fingerprint,
        "dtype": identity.dtype,
        "held": identity.held,
        "scale": identity.scale,
        "softcap": identity.softcap,
        "server": identity.hash,
    }
    client = TeacherClient(servers, DistillProtocol(spec, identity.limits["logits"] or 1))
    return ServerTeacher(client, named, LogitTransform(identity.scale, identity.softcap), head, section, cut)


def _head(servers: Servers, identity: Identity, device: torch.device) -> HeadWeights:
    """Return the head, from this machine's cache where it was fetched before."""

    def fetch(folder: Path) -> None:
        (folder / "head.safetensors").write_bytes(servers.ask("GET", "/v1/head"))

    folder, found = cached_folder(f"head-{identity.head[:32]}", fetch, cache=True)
    tensors = load_file(folder / "head.safetensors")
    if head_hash(tensors) != identity.head and found:  # damaged here: fetched again
        tensors = tensors_of(servers.ask("GET", "/v1/head"))
    if head_hash(tensors) != identity.head:
        raise TeacherUnavailableError("teacher.url: expected the head of its identity, got another; restart the server")
    bias = tensors.get("bias")
    return HeadWeights(tensors["weight"].to(device), None if bias is None else bias.to(device), None)
