"""The `teacher:` and `student:` sections of a recipe."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from distill.core.errors import Section, expected_got
from distill.recipe.fields import PART, ROUTE, Count, NotNegative, TemplateKwargs, Text, Usual, no_code, text_or_list
from distill.recipe.from_teacher import FromTeacher
from distill.recipe.quantise import Quantise

Weights = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
EIGHT_BITS = ("fp8", "int8")


def sort_parts(parts: list[str]) -> list[str]:
    """Return parts of layers sorted by layer and name, without duplicates, so that equal choices are written alike."""
    return sorted(set(parts), key=lambda part: (int(part.partition(".")[0]), part))


Part = Annotated[str, BeforeValidator(str), StringConstraints(pattern=PART)]
Parts = Annotated[list[Part], AfterValidator(sort_parts)]
SERVED = ("url", "protocol", "folder", "top_k", "prefetch", "transfer_dtype", "deterministic", "timeout", "token_file")


class ModelSection(Section):
    """Settings that the teacher and the student have in common.

    Attributes:
        model: hub id, local folder, .gguf file, or `package:NAME/FILE.gguf` (a file inside an installed package).
        init: `pretrained` loads `model`; `random` initialises random weights in the shape of `config`, for dry runs.
        config: a config.json, its folder, or the name of a shipped architecture such as `llama-3.2-1b`; only read when
            `init` is `random`.
        dtype: dtype of the weights. `auto` is float32 for trained weights, and the compute dtype (`train.precision`)
            for frozen ones: the teacher's, and the base weights of a LoRA student. `fp8` is for teachers: bfloat16 with
            all linear layers except the head in fp8; the change of the teacher's outputs is measured and printed.
            `int8` is for teachers on a GPU where bitsandbytes is installed: the same layers in LLM.int8() (Dettmers et
            al., 2022). With `auto`, a teacher whose checkpoint is quantised keeps that quantisation.
        revision: branch, tag or commit of a hub model; null for the hub's default branch.
        trust_remote_code: run the Python code that comes with a hub model.
        attention: name of a transformers attention implementation, such as `sdpa`; `auto` uses the built-in attention
            kernel where it supports the model, and transformers' choice elsewhere.
    """

    model: Text | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    config: Text | None = None
    dtype: Weights = "auto"
    revision: Text | None = None
    trust_remote_code: bool = False
    attention: Annotated[Text, AfterValidator(no_code)] = "auto"

    @model_validator(mode="after")
    def _random_needs_a_shape(self) -> Self:
        if self.init == "random" and self.config is None:
            raise ValueError("init: random needs config: a config.json or a shipped architecture such as llama-3.2-1b")
        return self


class Context(Section):
    """Privileged context of the teacher's prompts, such as a system prompt, a worked solution or documents.

    Attributes:
        template: the text. `{column}` stands for the value of that column of the row, a text or a list of texts; the
            student's prompts must not contain the values of these columns.
        place: `system` adds it to the system message; `before` or `after` puts it before or after the user message
            whose response is the first one trained on.
    """

    template: Text
    place: Literal["system", "before", "after"] = "system"

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """The template as pieces of plain text, each with the column that follows it."""
        return [(text, column) for text, column, _, _ in Formatter().parse(self.template)]

    @property
    def columns(self) -> list[str]:
        return [column for _, column in self.parts if column is not None]

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        try:
            named = all(self.columns)
        except ValueError as error:
            raise ValueError(f"template: {error}; a brace of the text itself is written twice") from None
        if not named or not self.template.strip():
            raise ValueError(
                expected_got("template to be text with {column} where a row's column stands", self.template)
            )
        return self


class Teacher(ModelSection):
    """The teacher model, which is never trained.

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
        ema: with `type: student`, make the teacher an exponential moving average of the student: after each step its
            weights are `ema` times themselves plus (1 - `ema`) times the student's. null keeps it frozen.
        backend: with `type: plugin`, name under which an installed package registers a backend of its own (entry points
            of the group `distill.backends`); `model` names its tokenizer and configuration.
        path: folder of the cache that `distill cache` wrote; required with `type: cache`.
        url: URL, or URLs of several servers of one teacher, such as `http://127.0.0.1:8765`; for `type: server`.
        protocol: `distill` for `distill serve`; `vllm` for the completions API of a vLLM server: `top_k` tokens, or
            hidden states through `folder`.
        folder: path on this machine of the folder that a vLLM server's ExampleHiddenStatesConnector writes to; files
            are deleted once they are read.
        top_k: number of tokens of each distribution that the student is trained on; null for the whole distribution. A
            server sends that many (in place of hidden states, from which logits are computed locally), and
            `online_cache_format: top_k` stores them (64 if none is given).
        prefetch: number of micro-batches requested ahead from a server; at least those of one optimizer step are.
        transfer_dtype: format in which a server sends hidden states: `auto` in their own dtype; `fp8` in half the bytes
            of bfloat16 (the error is measured and printed).
        deterministic: have the server compute each micro-batch in a forward pass of its own, so that outputs are
            bit-identical whatever else it serves; false lets it batch requests.
        timeout: seconds without a response from any server after which the run writes a checkpoint and ends.
        token_file: file with the server's bearer token; null reads the environment variable DISTILL_SERVE_TOKEN.
        fp8_skip: layers that `dtype: fp8` keeps in bfloat16: decoder layers counted from 0, whole (`29`) or a part by
            the name of its module (`29.mlp`). `distill check --probe` shows which are worth it.
        adapter: a PEFT LoRA (hub id or folder) that is merged into the teacher when it is loaded.
        offload: `cpu` keeps the decoder layers in host memory and streams them to the GPU one after another in every
            forward pass: for a teacher larger than the GPU's memory, limited by PCIe bandwidth; null for none.
        online_cache: folder for online caching: the teacher's outputs are stored there when they are first computed or
            received from its server, and read in later epochs and evaluations, and by later runs with other losses or
            students. Once it is complete, as one of `distill cache` is, the teacher's weights are no longer loaded.
        online_cache_format: what `online_cache` stores: `hidden` states, from which every loss is exact; `hidden_fp8`,
            half the bytes, with one scale per token (the error is measured and printed); or `top_k` tokens of each
            distribution. The `top_k` tokens of a server are stored as received.
    """

    type: Literal["model", "cache", "server", "student", "plugin"] = "model"
    backend: Text | None = None
    path: Text | None = None
    context: Context | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    url: Annotated[str | list[str] | None, BeforeValidator(lambda value: value and text_or_list(value))] = None
    protocol: Literal["distill", "vllm"] = "distill"
    folder: Text | None = None
    top_k: Annotated[int, Field(ge=1, le=511)] | None = None
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    transfer_dtype: Literal["auto", "fp8"] = "auto"
    deterministic: bool = True
    timeout: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    token_file: Text | None = None
    fp8_skip: Parts = Field(default_factory=list)
    adapter: Text | None = None
    offload: Literal["cpu"] | None = None
    online_cache: Text | None = None
    online_cache_format: Literal["hidden", "hidden_fp8", "top_k"] = "hidden"

    @property
    def is_cached(self) -> bool:
        """Return whether outputs are read from a cache, so that no teacher is loaded."""
        return self.type == "cache"

    @property
    def is_loaded(self) -> bool:
        """Return whether the teacher's weights are loaded in this process."""
        return self.type in ("model", "student")

    @property
    def held(self) -> str:
        """The format of the linear layers' weights, as caches and servers record it."""
        return f"{self.dtype} but {' '.join(self.fp8_skip)}" if self.fp8_skip else self.dtype

    @property
    def as_read(self) -> Teacher:
        """The section of a teacher that is not quantised once it is loaded: one in fp8 is read in 16 bits."""
        return self.model_copy(update={"dtype": "auto"}) if self.dtype == "fp8" else self

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the servers, without a trailing slash."""
        given = self.url or []
        return tuple(url.rstrip("/") for url in ([given] if isinstance(given, str) else given))

    @property
    def places(self) -> dict[str, str]:
        """Files and folders of this machine that the section names, by field."""
        named = {"online_cache": self.online_cache, "path": self.path, "adapter": self.adapter}
        return {field: place for field, place in named.items() if place is not None}

    @property
    def by_itself(self) -> Teacher:
        """The same model with the student's prompts, without `online_cache` and `top_k`, as a server computes it."""
        names = ("context", "chat_template_kwargs", "top_k", "online_cache")
        left_out = {**dict.fromkeys(names), "online_cache_format": "hidden"}
        return self.model_copy(update=left_out)

    def loaded(self) -> Teacher:
        """Return the section that loads the model named together with a cache or a server."""
        return Teacher.model_validate(self.model_dump(exclude={"type", "path", "backend", *SERVED}))

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.is_cached != (self.path is not None):
            if self.is_cached:
                raise ValueError("path is missing: the folder that distill cache wrote")
            raise ValueError("path belongs to type: cache; a model is named by model")
        if self.type == "plugin" and self.backend is None:
            raise ValueError("backend is missing: name under which an installed package registers a teacher backend")
        if self.type != "plugin" and self.backend is not None:
            raise ValueError(f"backend belongs to type: plugin; got type: {self.type}")
        if not self.is_loaded and self.dtype in EIGHT_BITS:
            why = "the cache was made in its own dtype" if self.is_cached else "give it to distill serve"
            raise ValueError(f"dtype: {self.dtype} has no meaning with type: {self.type}; {why}")
        if not self.is_loaded and self.offload is not None:
            raise ValueError(f"offload: cpu has no meaning with type: {self.type}; no teacher is loaded")
        if self.online_cache is not None and self.is_cached:
            raise ValueError("online_cache: expected none with type: cache, whose outputs are stored; leave it out")
        if self.online_cache_format == "hidden_fp8" and self.urls and self.top_k is not None:
            raise ValueError("online_cache_format: expected top_k, the tokens that a server sends; got hidden_fp8")
        if self.online_cache is None and self.online_cache_format != "hidden":
            given = expected_got("a folder with online_cache_format", None)
            raise ValueError(f"online_cache: {given}; online_cache_format is {self.online_cache_format}")
        if self.init == "pretrained" and self.model is None and self.type == "model":
            raise ValueError("model is missing: a hub id, a local folder, a .gguf file or package:NAME/FILE.gguf")
        return self

    @model_validator(mode="after")
    def _is_the_student_itself(self) -> Self:
        itself = self.type == "student"
        if itself and (self.model or self.config or self.adapter or self.revision):
            given = ", ".join(name for name in ("model", "config", "adapter", "revision") if getattr(self, name))
            raise ValueError(f"type: student loads the student's own checkpoint; got {given}; leave {given} out")
        if itself and self.context is None and self.chat_template_kwargs is None:
            raise ValueError(
                "type: student needs context, or chat_template_kwargs other than the data's: without either, teacher "
                "and student output the same"
            )
        if self.ema is not None and (not itself or self.dtype in EIGHT_BITS or self.offload is not None):
            given = f"type: {self.type}, dtype: {self.dtype}, offload: {self.offload or 'null'}"
            raise ValueError(f"ema: expected type: student, weights of 16 or 32 bits and no offload; got {given}")
        return self

    @model_validator(mode="after")
    def _is_served_somewhere(self) -> Self:
        if self.type != "server":
            whole = self.online_cache is not None and self.online_cache_format != "top_k"
            served = [name for name in SERVED if name != "top_k" or whole or not self.is_loaded]
            given = next(
                (
                    name
                    for name in served
                    if name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default
                ),
                None,
            )
            if given:
                raise ValueError(f"{given}: belongs to type: server; got type: {self.type}")
            return self
        if not self.urls:
            raise ValueError("url is missing: address of a teacher server, such as http://127.0.0.1:8765")
        for url in self.urls:
            scheme, _, place = url.partition("://")
            if scheme not in ("http", "https") or not place or "@" in place or any(c.isspace() for c in url):
                raise ValueError(f"url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url: expected each server once")
        if self.top_k is not None and self.transfer_dtype == "fp8":
            raise ValueError("transfer_dtype: fp8 is for hidden states, got it with top_k")
        if self.protocol == "vllm" and (self.model is None or (self.top_k is None) == (self.folder is None)):
            raise ValueError(
                "protocol: vllm needs top_k (20 unless the server allows more), or the folder that it writes hidden "
                "states to; and model for its tokenizer, norm and head"
            )
        if self.folder is not None and (self.protocol != "vllm" or self.transfer_dtype != "auto"):
            raise ValueError("folder: is for the hidden states of protocol: vllm, as they are (transfer_dtype: auto)")
        return self

    @model_validator(mode="after")
    def _can_be_had_in_so_few_bits(self) -> Self:
        if self.offload is not None and self.dtype in EIGHT_BITS:
            raise ValueError(f"offload: cpu works with weights in 16 or 32 bits; got dtype: {self.dtype}")
        if self.fp8_skip and self.dtype != "fp8":
            raise ValueError(f"fp8_skip: expected dtype: fp8, whose exceptions it lists, got dtype: {self.dtype}")
        if self.dtype == "int8" and self.init == "random":
            raise ValueError("dtype: int8 quantises a model as it is read, and init: random reads none; use fp8")
        if self.dtype == "int8" and self.adapter is not None:
            raise ValueError(
                "adapter: cannot be merged into weights in int8; merge it in bfloat16, save the model and name that"
            )
        return self


class WeightedTeacher(Teacher):
    """One of several teachers.

    Attributes:
        weight: mixing weight of this teacher's probabilities; weights are divided by their sum.
        route: name of a route: the teacher is used for the rows whose `data.fields.teacher` column has this value,
            alone or in a mixture with others on the same route; every teacher has a route, or none.
    """

    weight: NotNegative = 1.0
    route: Annotated[str, Field(pattern=ROUTE)] | None = None

    def alone(self) -> Teacher:
        """Return the same model as the only teacher."""
        return Teacher.model_validate(self.model_dump(exclude={"weight", "route"}))


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021): the base weights are frozen and W + (alpha / r) B A is used.

    Attributes:
        r: rank of the adapters.
        alpha: scaling numerator: the adapters' output is multiplied by `alpha / r`.
        dropout: dropout probability of the adapters' input in training.
        targets: module names, or `all-linear` (every linear layer except the head).
        head: adapt the language-model head as well.
        save: `both` writes the model with the adapter merged to `student/` of the run and the adapter alone to
            `adapter/`; `adapter` writes the adapter alone to `student/`, with the name of its base model.
    """

    r: Annotated[Count, Usual(2, 256)] = 16
    alpha: Annotated[float, Field(gt=0), Usual(1, 512)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[str | list[str], BeforeValidator(text_or_list)] = "all-linear"
    head: bool = False
    save: Literal["both", "adapter"] = "both"


class Student(ModelSection):
    """The student model: `model`, `from_teacher`, or `init: random` with `config`.

    `init: random` takes precedence over the other two, so that one override turns any recipe into a dry run.

    Attributes:
        from_teacher: prune the teacher, or `model` where it is given, to a student with fewer or narrower layers.
        lora: train LoRA adapters; null trains all weights.
        vocabulary: `keep` leaves the vocabulary as it is; `extend` adds the tokens that only the teacher has; `cross`
            is for a student whose tokenizer is not the teacher's: both models are compared wherever their tokens end at
            the same byte.
        compute: compute dtype of training. `fp8` runs the GEMMs of all linear layers except the head in fp8, forward
            and backward, on a GPU that supports it: weights keep their dtype, and evaluation and generation do not use
            fp8. The change of the loss and of the gradients is measured on one batch and printed. `auto` is
            `train.precision`.
        quantise: quantisation-aware training: the weights that are trained are those of the exported file, in 4 to 8
            bits; null for none.
    """

    from_teacher: FromTeacher | None = None
    lora: Lora | None = None
    vocabulary: Literal["keep", "extend", "cross"] = "keep"
    compute: Literal["auto", "fp8"] = "auto"
    quantise: Quantise | None = None

    @property
    def cut(self) -> FromTeacher | None:
        """Return the parts that the student is cut to; None for one that stays whole."""
        return self.from_teacher if self.init == "pretrained" else None

    @property
    def is_cut(self) -> bool:
        """Return whether the student is a copy of the teacher with fewer or narrower layers."""
        return self.cut is not None and self.model is None

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the student has a checkpoint of its own, which comes with a tokenizer."""
        return self.init == "pretrained" and self.model is not None

    @model_validator(mode="after")
    def _trains_in_a_dtype_with_gradients(self) -> Self:
        if self.dtype in EIGHT_BITS:
            raise ValueError(
                f"dtype: {self.dtype} is for teachers; a student is trained in float32, bfloat16 or float16"
                + ", and may compute in fp8 (student.compute)" * (self.dtype == "fp8")
            )
        if self.dtype == "float16" and self.lora is None:
            raise ValueError("dtype: float16 weights cannot be trained; use float32 with train.precision: float16")
        return self

    @model_validator(mode="after")
    def _quantises_float32(self) -> Self:
        if self.quantise is not None and self.dtype not in ("auto", "float32"):
            raise ValueError(
                f"quantise: needs weights in float32, which 16 bits would move off the file's values; expected dtype: "
                f"auto or float32, got {self.dtype}"
            )
        if self.quantise is not None and self.lora is not None:
            wrong = {
                "dropout": (0.0, self.lora.dropout),
                "head": (False, self.lora.head),
                "save": ("both", self.lora.save),
            }
            for field, (expected, got) in wrong.items():
                if got != expected:
                    raise ValueError(
                        f"lora.{field}: the merged weights are trained as the file's; expected {expected} with "
                        f"quantise, got {got}"
                    )
        return self

    @property
    def starts_as_named(self) -> bool:
        """Whether training starts from the weights of `model` as its files are, which an adapter can name."""
        return (
            self.cut is None
            and self.has_tokenizer
            and not (self.model or "").endswith(".gguf")
            and self.vocabulary != "extend"
        )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.init == "pretrained" and self.model is None and self.from_teacher is None:
            raise ValueError("give one of model, from_teacher, and init: random with config; got none")
        if self.vocabulary == "cross" and self.model is None:
            raise ValueError("vocabulary: cross needs a student.model, whose tokenizer is its own")
        if self.lora is not None and self.lora.save == "adapter" and not self.starts_as_named:
            raise ValueError(
                "lora.save: adapter names the model it belongs to: expected student.model, a hub id or a folder, and "
                "vocabulary: keep or cross; set lora.save: both"
            )
        return self
