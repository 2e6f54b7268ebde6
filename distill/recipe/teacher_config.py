"""The `teacher:` section of a recipe: one class for each `type`, with the fields of that type alone.

    model    LocalTeacherConfig     loads a model in this process
    student  StudentTeacherConfig   the student's own checkpoint, frozen or averaged
    server   ServedTeacherConfig    queries a remote teacher
    cache    StoredTeacherConfig    reads outputs that were stored
    plugin   PluginTeacherConfig    a backend that an installed package registers

`AnyTeacher` is their union by `type`, `AnyWeightedTeacher` that of the entries of `teachers:`. Code that works with
every type takes a `TeacherConfig`; code that needs the fields of one asks `isinstance`: of `LoadedTeacherConfig` for
weights in this process, of `ComputedTeacherConfig` for outputs that may be stored as they are computed.
"""

from __future__ import annotations

from string import Formatter
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, TypeAdapter, model_validator
from pydantic.fields import FieldInfo

from distill.core.errors import Missing, Section, expected_got
from distill.recipe.context_template import names_of
from distill.recipe.fields import PART, ROUTE, NotNegative, TemplateKwargs, Text, text_or_list
from distill.recipe.models import EIGHT_BITS, LOW_BITS, ModelSection


def sort_parts(parts: list[str]) -> list[str]:
    """Return parts of layers sorted by layer and name, without duplicates, so that equal choices are written alike."""
    return sorted(set(parts), key=lambda part: (int(part.partition(".")[0]), part))


LayerPart = Annotated[str, BeforeValidator(str), StringConstraints(pattern=PART)]
LayerParts = Annotated[list[LayerPart], AfterValidator(sort_parts)]
PREFETCH = 2  # micro-batches requested ahead from a server, and
TIMEOUT_S = 300.0  # seconds without a response from it: defaults, also of a server that a run starts itself
UNCHANGED = (("syntax", "columns"), ("missing", "skip"))  # values of a context of before there were others
STUDENTS_OWN = ("model", "config", "adapter", "revision")  # a teacher of `type: student` has those of the student


class Context(Section):
    """Privileged context of the teacher's prompts, such as a system prompt, a worked solution or documents.

    Attributes:
        template: the text. `{column}` stands for the value of that column of the row, a text or a list of texts; the
            student's prompts must not contain the values of these columns. With `syntax: jinja`, a Jinja template.
        syntax: `columns` for `{column}`; `jinja` for a Jinja template, which may read `row.COLUMN`, `prompt` (the
            text of the student's last user message), `messages`, and of a student-generated response (`data.on_policy`)
            the responses to the same prompt, `best`, `failed` and `rollouts` (`best.answer`, `.reward`, `.feedback`),
            its own `reward`, and `feedback` on it.
        place: `system` adds it to the system message; `before` or `after` puts it before or after the user message
            whose response is the first one trained on; `user` puts it in place of that message, and `prompt` in place
            of all messages before that response.
        missing: what becomes of a row or response for which there is no context, since it lacks what the template
            writes: `skip` leaves it out of training, `plain` has the teacher read the student's prompt.
        success: lowest reward of a successful response: `best` is the other one of the highest reward that reaches it,
            `failed` the one of the lowest reward that does not.
        room: maximum number of tokens by which the teacher's prompt may be longer for a student-generated response
            than for the row alone; rows leave room for it, and a longer context counts as missing. null for twice
            `data.on_policy.max_new_tokens`.
    """

    template: Text
    syntax: Literal["columns", "jinja"] = "columns"
    place: Literal["system", "before", "after", "user", "prompt"] = "system"
    missing: Literal["skip", "plain"] = "skip"
    success: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    room: Annotated[int, Field(ge=1, le=2**20)] | None = None

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """A template with `syntax: columns` as pieces of plain text, each with the column that follows it."""
        return [(text, column) for text, column, _, _ in Formatter().parse(self.template)]

    @property
    def columns(self) -> list[str]:
        if self.syntax == "jinja":
            return list(names_of(self.template).columns)
        return [column for _, column in self.parts if column is not None]

    @property
    def of_the_run(self) -> tuple[str, ...]:
        """Names that the template reads of a run's responses; empty where it reads rows alone."""
        return names_of(self.template).of_the_run if self.syntax == "jinja" else ()

    @property
    def only_adds(self) -> bool:
        """Whether every prompt of the teacher is the student's and a text beside it."""
        return self.syntax == "columns" and self.place in ("system", "before", "after") and self.missing == "skip"

    @property
    def of_the_row(self) -> dict[str, object]:
        """The settings that the teacher's reading of the data depends on."""
        own = self.model_dump(exclude={"success", "room"})
        # no value for what is as before these settings existed: token caches that were written then stay valid
        return {name: value for name, value in own.items() if (name, value) not in UNCHANGED}

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        if self.syntax == "jinja":
            try:
                names_of(self.template)
            except ValueError as error:
                raise ValueError(f"template: {error}") from None
            return self
        try:
            named = all(self.columns)
        except ValueError as error:
            raise ValueError(f"template: {error}; a brace of the text itself is written twice") from None
        if not named or not self.template.strip():
            raise ValueError(
                expected_got("template to be text with {column} where a row's column stands", self.template)
            )
        return self


class TeacherConfig(ModelSection):
    """The teacher model, which is never trained: the fields of every type.

    Attributes:
        type: `model` loads a model; `cache` reads the outputs that `distill cache` stored, and `server` queries a
            remote teacher: neither of these loads a teacher. A model named together with a cache must be the one that
            the cache was made with; together with a server, the served one, from whose files a student may be cut.
            `student` is the student's own checkpoint, frozen or averaged (`ema`), with a `context` that the student
            lacks, or other `chat_template_kwargs`; `plugin` is a `backend` that an installed package registers.
        context: privileged context, which the student's prompts do not have; null for the student's prompts.
        chat_template_kwargs: variables of the chat template in the teacher's prompts, in place of
            `data.chat_template_kwargs`, such as `enable_thinking: true` beside a student that does not think; null for
            the student's. A row's column `chat_template_kwargs` takes precedence.
        adapter: a PEFT LoRA (hub id or folder) of the teacher, merged into it when it is loaded (`merge_adapter`).
    """

    type: str
    context: Context | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    adapter: Text | None = None

    eight_bits_instead: ClassVar[str] = "give it to distill serve"

    @property
    def is_loaded(self) -> bool:
        """Whether the teacher's weights are loaded in this process."""
        return isinstance(self, LoadedTeacherConfig)

    @property
    def is_cached(self) -> bool:
        """Whether outputs are read from a cache, so that no teacher is loaded."""
        return isinstance(self, StoredTeacherConfig)

    @property
    def store(self) -> str | None:
        """Folder of `online_cache`; None where outputs are not stored as they are computed."""
        return self.online_cache if isinstance(self, ComputedTeacherConfig) else None

    @property
    def store_format(self) -> Literal["hidden", "hidden_fp8", "top_k"]:
        """What `online_cache` stores; `hidden` where nothing is stored."""
        return self.online_cache_format if isinstance(self, ComputedTeacherConfig) else "hidden"

    @property
    def top_tokens(self) -> int | None:
        """`top_k`, the tokens of each distribution that are trained on; None for all, or those that a cache holds."""
        return self.top_k if isinstance(self, ComputedTeacherConfig) else None

    @property
    def top_k_setting(self) -> str:
        """The setting by which K tokens of each distribution are trained on; empty where all are."""
        if self.store_format == "top_k":
            return "online_cache_format: top_k"
        return "" if self.top_tokens is None else f"top_k: {self.top_tokens}"

    @property
    def ema_decay(self) -> float | None:
        """Decay of a running average of the student; None for a teacher whose weights stay."""
        return self.ema if isinstance(self, StudentTeacherConfig) else None

    @property
    def prefetch_depth(self) -> int:
        """Micro-batches requested ahead from a server, also from one that the run starts for a loaded teacher."""
        return self.prefetch if isinstance(self, ServedTeacherConfig) else PREFETCH

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the servers, without a trailing slash; none of a teacher that is not remote."""
        return ()

    @property
    def held(self) -> str:
        """The format of the linear layers' weights, as caches and servers record it."""
        return self.dtype

    @property
    def as_read(self) -> Self:
        """The section of a teacher that is not quantised once it is loaded: one in fp8 is read in 16 bits."""
        return self.model_copy(update={"dtype": "auto"}) if self.dtype == "fp8" else self

    @property
    def places(self) -> dict[str, str]:
        """Files and folders of this machine that the section names, by field."""
        named = {name: getattr(self, name, None) for name in ("online_cache", "path", "adapter")}
        return {field: place for field, place in named.items() if place is not None}

    def without(self, *fields: str) -> Self:
        """Return the section with the defaults of these fields, of which it need not have all."""
        own = [name for name in fields if name in type(self).model_fields]
        return self.model_copy(update={name: _default(type(self).model_fields[name]) for name in own})

    @property
    def by_itself(self) -> Self:
        """The same model with the student's prompts, without a store and `top_k`, as a server computes it."""
        return self.without("context", "chat_template_kwargs", "top_k", "online_cache", "online_cache_format")

    def loaded(self) -> LocalTeacherConfig:
        """Return the section that loads the model named together with a cache or a server."""
        shared = set(LocalTeacherConfig.model_fields) - {"type", "top_k"}
        return LocalTeacherConfig.model_validate(self.model_dump(include=shared))

    @model_validator(mode="after")
    def _is_in_eight_bits_here(self) -> Self:
        if not self.is_loaded and self.dtype in LOW_BITS:
            raise ValueError(f"dtype: {self.dtype} has no meaning with type: {self.type}; {self.eight_bits_instead}")
        return self


class StoredTeacherConfig(TeacherConfig):
    """A teacher whose outputs `distill cache` stored.

    Attributes:
        path: folder of the cache that `distill cache` wrote; required with `type: cache`.
    """

    type: Literal["cache"]
    path: Annotated[Text, Missing("the folder that distill cache wrote")]

    eight_bits_instead: ClassVar[str] = "the cache was made in its own dtype"


class ComputedTeacherConfig(TeacherConfig):
    """A teacher whose outputs are computed during the run, and may be stored as they are.

    Attributes:
        top_k: number of tokens of each distribution that the student is trained on; null for the whole distribution. A
            server sends that many (in place of hidden states, from which logits are computed locally), and
            `online_cache_format: top_k` stores them (64 if none is given).
        online_cache: folder for online caching: the teacher's outputs are stored there when they are first computed or
            received from its server, and read in later epochs and evaluations, and by later runs with other losses or
            students. Once it is complete, as one of `distill cache` is, the teacher's weights are no longer loaded.
        online_cache_format: what `online_cache` stores: `hidden` states, from which every loss is exact; `hidden_fp8`,
            half the bytes, with one scale per token (the error is measured and printed); or `top_k` tokens of each
            distribution. The `top_k` tokens of a server are stored as received.
    """

    top_k: Annotated[int, Field(ge=1, le=511)] | None = None
    online_cache: Text | None = None
    online_cache_format: Literal["hidden", "hidden_fp8", "top_k"] = "hidden"

    @model_validator(mode="after")
    def _stores_somewhere(self) -> Self:
        if self.online_cache is None and self.online_cache_format != "hidden":
            given = expected_got("a folder with online_cache_format", None)
            raise ValueError(f"online_cache: {given}; online_cache_format is {self.online_cache_format}")
        return self

    def _keeps_only_the_top_k(self) -> None:
        """Refuse `top_k` beside a store of whole distributions: a server alone sends K tokens by itself."""
        if self.top_k is not None and self.online_cache_format != "top_k":
            raise ValueError(
                f"top_k: expected online_cache_format: top_k beside it, or type: server; got type: {self.type}, "
                f"online_cache_format: {self.online_cache_format}"
            )


class LoadedTeacherConfig(ComputedTeacherConfig):
    """A teacher whose weights are loaded in this process.

    Attributes:
        fp8_skip: layers that `dtype: fp8` keeps in bfloat16: decoder layers counted from 0, whole (`29`) or a part by
            the name of its module (`29.mlp`). `distill check --probe` shows which are worth it.
        offload: `cpu` keeps the decoder layers in host memory and streams them to the GPU one after another in every
            forward pass: for a teacher larger than the GPU's memory, limited by PCIe bandwidth; null for none.
        merge_adapter: true adds the adapter to the weights when the teacher is loaded; false keeps it beside them, so
            that several teachers, and a LoRA student, of one base model hold one copy of its weights. Both compute the
            same up to rounding: merged weights are rounded to the teacher's dtype, and save two small GEMMs a layer.
    """

    fp8_skip: LayerParts = Field(default_factory=list)
    offload: Literal["cpu"] | None = None
    merge_adapter: bool = True

    @property
    def held(self) -> str:
        return f"{self.dtype} but {' '.join(self.fp8_skip)}" if self.fp8_skip else self.dtype

    @model_validator(mode="after")
    def _can_be_had_in_so_few_bits(self) -> Self:
        if self.online_cache is not None:
            self._keeps_only_the_top_k()
        if self.offload is not None and self.dtype in LOW_BITS:
            raise ValueError(f"offload: cpu works with weights in 16 or 32 bits; got dtype: {self.dtype}")
        if not self.merge_adapter:
            self._keeps_its_adapter()
        if self.fp8_skip and self.dtype != "fp8":
            raise ValueError(f"fp8_skip: expected dtype: fp8, whose exceptions it lists, got dtype: {self.dtype}")
        if self.dtype == "int8" and self.init == "random":
            raise ValueError("dtype: int8 quantises a model as it is read, and init: random reads none; use fp8")
        if self.dtype == "int8" and self.adapter is not None:
            raise ValueError(
                "adapter: cannot be merged into weights in int8; merge it in bfloat16, save the model and name that"
            )
        return self

    def _keeps_its_adapter(self) -> None:
        """Refuse `merge_adapter: false` without an adapter, and weights that are laid out for merged ones alone."""
        if self.adapter is None:
            raise ValueError("merge_adapter: false keeps an adapter beside the weights; expected adapter, got none")
        if self.dtype in EIGHT_BITS or self.offload is not None:
            raise ValueError(
                f"merge_adapter: false works with weights in 16 or 32 bits on the device; got dtype: {self.dtype}, "
                f"offload: {self.offload or 'null'}; merge it"
            )


class LocalTeacherConfig(LoadedTeacherConfig):
    """A teacher model that is loaded in this process, or by `distill serve`."""

    type: Literal["model"] = "model"

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.init == "pretrained" and self.model is None:
            raise ValueError("model is missing: a hub id, a local folder, a .gguf file or package:NAME/FILE.gguf")
        return self


class StudentTeacherConfig(LoadedTeacherConfig):
    """The student's own checkpoint as its teacher, with prompts that the student does not have.

    Attributes:
        ema: with `type: student`, make the teacher an exponential moving average of the student: after each step its
            weights are `ema` times themselves plus (1 - `ema`) times the student's; with `student.lora` those of the
            adapters. null keeps it frozen.
    """

    type: Literal["student"]
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _is_the_student_itself(self) -> Self:
        given = ", ".join(name for name in STUDENTS_OWN if getattr(self, name))
        if given:
            raise ValueError(f"type: student loads the student's own checkpoint; got {given}; leave {given} out")
        if self.context is None and self.chat_template_kwargs is None:
            raise ValueError(
                "type: student needs context, or chat_template_kwargs other than the data's: without either, teacher "
                "and student output the same"
            )
        if self.ema is not None and (self.dtype in EIGHT_BITS or self.offload is not None):
            got = f"dtype: {self.dtype}, offload: {self.offload or 'null'}"
            raise ValueError(f"ema: expected weights of 16 or 32 bits and no offload; got {got}")
        return self


class ServedTeacherConfig(ComputedTeacherConfig):
    """A remote teacher: `distill serve`, or a vLLM server.

    Attributes:
        url: URL, or URLs of several servers of one teacher, such as `http://127.0.0.1:8765`; for `type: server`.
        protocol: `distill` for `distill serve`; `vllm` for the completions API of a vLLM server: `top_k` tokens, or
            hidden states through `folder`.
        folder: path on this machine of the folder that a vLLM server's ExampleHiddenStatesConnector writes to; files
            are deleted once they are read.
        prefetch: number of micro-batches requested ahead from a server; at least those of one optimizer step are.
        transfer_dtype: format in which a server sends hidden states: `auto` in their own dtype; `fp8` in half the bytes
            of bfloat16 (the error is measured and printed).
        deterministic: have the server compute each micro-batch in a forward pass of its own, so that outputs are
            bit-identical whatever else it serves; false lets it batch requests.
        timeout: seconds without a response from any server after which the run writes a checkpoint and ends.
        token_file: file with the server's bearer token; null reads the environment variable DISTILL_SERVE_TOKEN.
    """

    type: Literal["server"]
    url: Annotated[
        str | list[str],
        BeforeValidator(text_or_list),
        Missing("address of a teacher server, such as http://127.0.0.1:8765"),
    ]
    protocol: Literal["distill", "vllm"] = "distill"
    folder: Text | None = None
    prefetch: Annotated[int, Field(ge=1, le=1024)] = PREFETCH
    transfer_dtype: Literal["auto", "fp8"] = "auto"
    deterministic: bool = True
    timeout: Annotated[float, Field(gt=0, le=86_400)] = TIMEOUT_S
    token_file: Text | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        given = [self.url] if isinstance(self.url, str) else self.url
        return tuple(url.rstrip("/") for url in given)

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        for url in self.urls:
            scheme, _, place = url.partition("://")
            if scheme not in ("http", "https") or not place or "@" in place or any(c.isspace() for c in url):
                raise ValueError(f"url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url: expected each server once")
        return self

    @model_validator(mode="after")
    def _sends_one_format(self) -> Self:
        if self.top_k is not None and self.transfer_dtype == "fp8":
            raise ValueError("transfer_dtype: fp8 is for hidden states, got it with top_k")
        if self.top_k is not None and self.online_cache_format == "hidden_fp8":
            raise ValueError("online_cache_format: expected top_k, the tokens that a server sends; got hidden_fp8")
        if self.protocol == "vllm" and (self.model is None or (self.top_k is None) == (self.folder is None)):
            raise ValueError(
                "protocol: vllm needs top_k (20 unless the server allows more), or the folder that it writes hidden "
                "states to; and model for its tokenizer, norm and head"
            )
        if self.folder is not None and (self.protocol != "vllm" or self.transfer_dtype != "auto"):
            raise ValueError("folder: is for the hidden states of protocol: vllm, as they are (transfer_dtype: auto)")
        return self


class PluginTeacherConfig(ComputedTeacherConfig):
    """A teacher whose backend an installed package registers.

    Attributes:
        backend: with `type: plugin`, name under which an installed package registers a backend of its own (entry points
            of the group `distill.backends`); `model` names its tokenizer and configuration.
    """

    type: Literal["plugin"]
    backend: Annotated[Text, Missing("name under which an installed package registers a teacher backend")]

    @model_validator(mode="after")
    def _top_k_is_that_of_a_store(self) -> Self:
        self._keeps_only_the_top_k()
        return self


class Weighted(Section):
    """Part that the entries of `teachers:` have beside the fields of a teacher.

    Attributes:
        weight: mixing weight of this teacher's probabilities; weights are divided by their sum.
        route: name of a route: the teacher is used for the rows whose `data.fields.teacher` column has this value,
            alone or in a mixture with others on the same route; every teacher has a route, or none.
    """

    weight: NotNegative = 1.0
    route: Annotated[str, Field(pattern=ROUTE)] | None = None

    def alone(self) -> AnyTeacher:
        """Return the same model as the only teacher."""
        return TEACHER.validate_python(self.model_dump(exclude={"weight", "route"}))


class WeightedLocalTeacherConfig(Weighted, LocalTeacherConfig):
    """One of several teachers, loaded in this process."""


class WeightedStoredTeacherConfig(Weighted, StoredTeacherConfig):
    """One of several teachers, whose outputs `distill cache` stored."""


class WeightedServedTeacherConfig(Weighted, ServedTeacherConfig):
    """One of several teachers, on a server."""


class WeightedStudentTeacherConfig(Weighted, StudentTeacherConfig):
    """One of several teachers: the student's own checkpoint."""


class WeightedPluginTeacherConfig(Weighted, PluginTeacherConfig):
    """One of several teachers, whose backend an installed package registers."""


def _default(field: FieldInfo) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _of_its_type(section: object) -> object:
    """Return a section with its `type`, without fields of other types that have their defaults.

    `type` is `model` where a recipe does not give it. A recipe that a run or `distill validate` wrote lists the fields
    of every type; those that say nothing are left out, and the others are refused as fields of another type.
    """
    if not isinstance(section, dict):
        return section
    section = {"type": "model", **section}
    own = next((kind for kind in TYPES if section["type"] in get_args(kind.model_fields["type"].annotation)), None)
    if own is None:
        return section

    def is_said(name: str, value: object) -> bool:
        field = own.model_fields.get(name)
        if field is not None:
            return value is not None or not field.is_required()  # `path: null` is a path that is missing
        return name not in DEFAULTS or value != DEFAULTS[name]

    return {name: value for name, value in section.items() if is_said(name, value)}


AnyTeacher = Annotated[
    LocalTeacherConfig | StoredTeacherConfig | ServedTeacherConfig | StudentTeacherConfig | PluginTeacherConfig,
    Field(discriminator="type"),
    BeforeValidator(_of_its_type),
]
AnyWeightedTeacher = Annotated[
    WeightedLocalTeacherConfig
    | WeightedStoredTeacherConfig
    | WeightedServedTeacherConfig
    | WeightedStudentTeacherConfig
    | WeightedPluginTeacherConfig,
    Field(discriminator="type"),
    BeforeValidator(_of_its_type),
]
TYPES: tuple[type[TeacherConfig], ...] = get_args(get_args(AnyTeacher)[0])
TEACHER: TypeAdapter[AnyTeacher] = TypeAdapter(AnyTeacher)
WEIGHTED_TEACHER: TypeAdapter[AnyWeightedTeacher] = TypeAdapter(AnyWeightedTeacher)

# every field of any type, in the order in which `dump` writes them
FIELDS = (
    *ModelSection.model_fields,
    *("type", "backend", "path", "context", "chat_template_kwargs", "ema"),
    *("url", "protocol", "folder", "top_k", "prefetch", "transfer_dtype", "deterministic", "timeout", "token_file"),
    *("fp8_skip", "adapter", "merge_adapter", "offload", "online_cache", "online_cache_format"),
)
DEFAULTS = {name: _default(field) for kind in TYPES for name, field in kind.model_fields.items() if name != "type"}
assert {*FIELDS} == {*DEFAULTS, "type"}


def every_field(section: dict[str, object]) -> dict[str, object]:
    """Return the tree of a section with the fields of the other types too, so that all types are written alike."""
    return {name: section[name] if name in section else DEFAULTS[name] for name in FIELDS} | section
