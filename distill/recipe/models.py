"""The `teacher:` and `student:` sections of a recipe."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from distill.core.errors import Section, refuse
from distill.recipe.fields import Count, NotNegative, Text, Usual, no_code, text_or_list

Weights = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
EIGHT_BITS = ("fp8", "int8")


def in_order(parts: list[str]) -> list[str]:
    """Parts of layers by layer and name, each once, so that the same choice is always written alike."""
    return sorted(set(parts), key=lambda part: (int(part.partition(".")[0]), part))


# of a model's layers: `29`, or a module inside one, `29.mlp`
Part = Annotated[str, BeforeValidator(str), StringConstraints(pattern=r"^\d{1,5}(\.\w+)*$")]
Parts = Annotated[list[Part], AfterValidator(in_order)]
SERVED = ("url", "protocol", "folder", "top_k", "prefetch", "send", "deterministic", "wait", "token_file")


class ModelSection(Section):
    """What teacher and student have in common.

    Attributes:
        model: hub id, local folder, .gguf file, or `package:NAME/FILE.gguf` (a file an installed package carries).
        init: `pretrained` reads `model`; `random` makes random weights in the shape of `config`, for dry runs.
        config: a config.json, its folder, or the name of a shipped architecture such as `llama-3.2-1b`; only read
            when `init` is `random`.
        dtype: what the weights are kept in; `auto` is float32 for weights that are trained, and what is computed in
            (`train.precision`) for frozen ones: the teacher's, and a LoRA student's. `fp8` is for teachers: bfloat16
            with the linear layers but the head in fp8; by how much that moves the teacher is measured and printed.
            `int8` is for teachers on a GPU where bitsandbytes is installed: the same layers in LLM.int8() (Dettmers et
            al., 2022). A teacher whose checkpoint is quantised already stays as it is with `auto`.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run the Python code a hub model brings.
        attention: `auto`, or a transformers attention implementation.
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
    """What the teacher alone reads before it judges an answer: a system prompt, a worked solution, documents.

    Attributes:
        template: the text. `{column}` stands for what that column of the row holds, text or a list of texts; the
            columns named so are what no prompt of the student's may hold.
        place: `system` adds it to the system message; `before` or `after` beside the question whose answer is
            learned first.
    """

    template: Text
    place: Literal["system", "before", "after"] = "system"

    @property
    def parts(self) -> list[tuple[str, str | None]]:
        """The template as plain text, each piece with the column that follows it."""
        return [(text, column) for text, column, _, _ in Formatter().parse(self.template)]

    @property
    def columns(self) -> list[str]:
        """The columns that it names."""
        return [column for _, column in self.parts if column is not None]

    @model_validator(mode="after")
    def _names_columns(self) -> Self:
        try:
            named = all(self.columns)
        except ValueError as error:
            raise ValueError(f"template: {error}; a brace of the text itself is written twice") from None
        if not named or not self.template.strip():
            raise ValueError(refuse("template to be text with {column} where a row's column stands", self.template))
        return self


class Teacher(ModelSection):
    """The large model, never trained.

    Attributes:
        type: `model` loads it; `cache` reads what it said, as `distill cache` wrote it, and `server` asks a process
            elsewhere: neither loads a teacher. A model that is named beside a cache must be the one that made it;
            beside a server, the one that is served, out of whose files a student may be cut. `student` is the
            student's own checkpoint, frozen, which knows more than the student by its `context` alone.
        context: what it reads that the student does not.
        ema: with `type: student`, follow the student: after each step the teacher is `ema` times itself plus the rest
            of the student.
        path: the cache's folder.
        url: of one or several servers of the same teacher, such as `http://127.0.0.1:8765`.
        protocol: `distill` for `distill serve`; `vllm` for the completions of a vLLM server: `top_k` tokens, or hidden
            states by way of a `folder`.
        folder: that a vLLM server's ExampleHiddenStatesConnector writes to, as it is reached here; what is read is
            deleted.
        top_k: tokens of each distribution that a server sends (none for hidden states, from which logits are made
            here) or that `keep_as: top_k` stores (64 if none is given).
        prefetch: micro-batches to ask for ahead of the one that is trained, at least an optimizer step's.
        send: what hidden states are sent in: `auto` as they are; `fp8` in half the bytes, at a cost that is printed.
        deterministic: have each micro-batch computed alone, so that its bits depend on nobody else's.
        wait: seconds without an answer after which the run ends, with a checkpoint.
        token_file: holds the bearer token; without it the variable DISTILL_SERVE_TOKEN.
        fp8_skip: what `dtype: fp8` leaves in bfloat16: layers counted from 0, whole (`29`) or a part by the name of its
            module (`29.mlp`). `distill check --probe` says which are worth it.
        adapter: a PEFT LoRA (hub id or folder) merged into the teacher when it is loaded.
        offload: `cpu` keeps the decoder layers in host memory, to travel to the GPU one after another in every forward
            pass: for a teacher larger than the GPU, at the speed of the bus.
        keep: a folder in which the teacher's outputs are stored as they are first computed, or come from its server,
            and from then on read: in later epochs and evaluations, and by later runs with other losses or students. A
            full one is what `distill cache` writes, and the teacher's weights are not loaded any more.
        keep_as: what `keep` stores: `hidden` states, from which every loss is exact; `hidden_fp8`, half of the bytes,
            with a scale a token (what that costs is measured and printed); or `top_k` tokens of each distribution. Of a
            server that sends `top_k`, these are stored as they come.
    """

    type: Literal["model", "cache", "server", "student"] = "model"
    path: Text | None = None
    context: Context | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    url: Annotated[str | list[str] | None, BeforeValidator(lambda value: value and text_or_list(value))] = None
    protocol: Literal["distill", "vllm"] = "distill"
    folder: Text | None = None
    top_k: Annotated[int, Field(ge=1, le=511)] | None = None
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    send: Literal["auto", "fp8"] = "auto"
    deterministic: bool = True
    wait: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    token_file: Text | None = None
    fp8_skip: Parts = Field(default_factory=list)
    adapter: Text | None = None
    offload: Literal["cpu"] | None = None
    keep: Text | None = None
    keep_as: Literal["hidden", "hidden_fp8", "top_k"] = "hidden"

    @property
    def is_cached(self) -> bool:
        """Whether no teacher is loaded: what it said lies on disk."""
        return self.type == "cache"

    @property
    def is_loaded(self) -> bool:
        """Whether its weights are in this process."""
        return self.type in ("model", "student")

    @property
    def held(self) -> str:
        """What its linear layers are kept in, as caches and servers name it."""
        return f"{self.dtype} but {' '.join(self.fp8_skip)}" if self.fp8_skip else self.dtype

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers, without a slash at the end."""
        given = self.url or []
        return tuple(url.rstrip("/") for url in ([given] if isinstance(given, str) else given))

    @property
    def by_itself(self) -> Teacher:
        """The same model without a context and a store: what a server of it computes."""
        return self.model_copy(update={"context": None, "keep": None, "keep_as": "hidden"})

    def loaded(self) -> Teacher:
        """The model that is named beside a cache or a server, to be loaded."""
        return Teacher.model_validate(self.model_dump(exclude={"type", "path", *SERVED}))

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.is_cached != (self.path is not None):
            if self.is_cached:
                raise ValueError("path is missing: the folder that distill cache wrote")
            raise ValueError("path belongs to type: cache; a model is named by model")
        if not self.is_loaded and self.dtype in EIGHT_BITS:
            why = "the cache was made in its own dtype" if self.is_cached else "give it to distill serve"
            raise ValueError(f"dtype: {self.dtype} has no meaning with type: {self.type}; {why}")
        if not self.is_loaded and self.offload is not None:
            raise ValueError(f"offload: cpu has no meaning with type: {self.type}; no teacher is loaded")
        if self.keep is not None and self.is_cached:
            raise ValueError("keep: stores a teacher's outputs, and with type: cache they are stored; leave it out")
        if self.keep_as == "hidden_fp8" and self.urls and self.top_k is not None:
            raise ValueError("keep_as: expected top_k with a server's top_k, whose tokens are stored; got hidden_fp8")
        if self.keep is None and self.keep_as != "hidden":
            raise ValueError(f"keep_as: {self.keep_as} says what keep stores, and there is no keep; give it a folder")
        if self.init == "pretrained" and self.model is None and self.type == "model":
            raise ValueError("model is missing: a hub id, a local folder, a .gguf file or package:NAME/FILE.gguf")
        return self

    @model_validator(mode="after")
    def _is_the_student_itself(self) -> Self:
        itself = self.type == "student"
        if itself and (self.model or self.config or self.adapter or self.revision):
            raise ValueError("type: student is the student's own checkpoint: leave model, config and adapter out")
        if itself and self.context is None:
            raise ValueError("type: student needs context: a copy of the student that reads the same teaches nothing")
        if self.ema is not None and (not itself or self.dtype in EIGHT_BITS or self.offload is not None):
            raise ValueError("ema: a running average needs type: student, weights of 16 or 32 bits and no offload")
        return self

    @model_validator(mode="after")
    def _is_served_somewhere(self) -> Self:
        if self.type != "server":
            served = [name for name in SERVED if name != "top_k" or self.keep_as != "top_k"]
            if given := next((name for name in served if name in self.model_fields_set and
                              getattr(self, name) != type(self).model_fields[name].default), None):  # fmt: skip
                raise ValueError(f"{given}: belongs to type: server")
            return self
        if not self.urls:
            raise ValueError("url is missing: of a distill serve, such as http://127.0.0.1:8765")
        for url in self.urls:
            scheme, _, place = url.partition("://")
            if scheme not in ("http", "https") or not place or "@" in place or any(c.isspace() for c in url):
                raise ValueError(f"url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("url: expected each server once")
        if self.top_k is not None and self.send == "fp8":
            raise ValueError("send: fp8 is for hidden states, got it with top_k")
        if self.protocol == "vllm" and (self.model is None or (self.top_k is None) == (self.folder is None)):
            raise ValueError(
                "protocol: vllm needs top_k (20 unless the server allows more), or the folder that it writes hidden "
                "states to; and model for its tokenizer, norm and head"
            )
        if self.folder is not None and (self.protocol != "vllm" or self.send != "auto"):
            raise ValueError("folder: is for the hidden states of protocol: vllm, as they are (send: auto)")
        return self

    @model_validator(mode="after")
    def _can_be_had_in_so_few_bits(self) -> Self:
        if self.offload is not None and self.dtype in EIGHT_BITS:
            raise ValueError(f"offload: cpu works with weights in 16 or 32 bits; got dtype: {self.dtype}")
        if self.fp8_skip and self.dtype != "fp8":
            raise ValueError(f"fp8_skip: says what dtype: fp8 leaves in bfloat16; got it with dtype: {self.dtype}")
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
        weight: this teacher's share of the mixture of probabilities; weights are divided by their sum.
        route: it teaches the rows whose `data.fields.teacher` column says this, alone or in a mixture with others of
            the same route; every teacher has one, or none.
    """

    weight: NotNegative = 1.0
    route: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] | None = None

    def alone(self) -> Teacher:
        """The same model as the only teacher."""
        return Teacher.model_validate(self.model_dump(exclude={"weight", "route"}))


class FromTeacher(Section):
    """A student cut from the teacher: exactly one of the two fields.

    Attributes:
        layers: how many of the teacher's layers to keep.
        keep: which layers to keep, counted from 0, ascending.
    """

    layers: Count | None = None
    keep: list[Annotated[int, Field(ge=0, le=2**31)]] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.layers is None) == (self.keep is None):
            raise ValueError("give exactly one of layers (how many to keep) and keep (which, counted from 0)")
        if self.keep is not None and (not self.keep or sorted(set(self.keep)) != self.keep):
            raise ValueError(refuse("keep to be an ascending list of layer numbers, none twice", self.keep))
        return self


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021): the base weights stay as they are and W + (alpha / r) B A is used.

    Attributes:
        r: rank of the adapters.
        alpha: the adapters' scale is alpha / r.
        dropout: share of the adapters' input that is dropped in training.
        targets: module names, or `all-linear` (every linear layer but the head).
        head: adapt the language-model head as well.
        save: `both`: `student/` of the run is the model with the adapter merged, `adapter/` the adapter alone;
            `adapter`: `student/` is the adapter alone, which names its base model.
    """

    r: Annotated[Count, Usual(2, 256)] = 16
    alpha: Annotated[float, Field(gt=0), Usual(1, 512)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[str | list[str], BeforeValidator(text_or_list)] = "all-linear"
    head: bool = False
    save: Literal["both", "adapter"] = "both"


class Student(ModelSection):
    """The small model: exactly one of `model`, `from_teacher`, and `init: random` with `config`.

    `init: random` overrules the other two, so that one override turns any recipe into a dry run.

    Attributes:
        from_teacher: a copy of the teacher with fewer layers.
        lora: train adapters instead of all weights.
        vocabulary: `keep`; `extend` by the tokens that only the teacher has; or `cross`: the student keeps a tokenizer
            that is not the teacher's, and both are compared wherever their tokens end at the same byte.
        compute: `fp8` for the products of the linear layers but the head while it trains, forward and backward, on a
            GPU that has them: weights keep their dtype, evaluations and answers are not in fp8. What it does to the
            loss and to the gradients is measured on one batch and printed. `auto` is `train.precision`.
    """

    from_teacher: FromTeacher | None = None
    lora: Lora | None = None
    vocabulary: Literal["keep", "extend", "cross"] = "keep"
    compute: Literal["auto", "fp8"] = "auto"

    @property
    def is_cut(self) -> bool:
        """Whether it is a copy of the teacher with fewer layers."""
        return self.init == "pretrained" and self.from_teacher is not None

    @property
    def has_tokenizer(self) -> bool:
        """Whether it is a model of its own, which comes with a tokenizer."""
        return self.init == "pretrained" and self.from_teacher is None

    @model_validator(mode="after")
    def _trains_in_a_dtype_with_gradients(self) -> Self:
        if self.dtype in EIGHT_BITS:
            raise ValueError(
                f"dtype: {self.dtype} is for teachers; a student is trained in float32, bfloat16 or float16"
                + ", and may compute in fp8 (student.compute)" * (self.dtype == "fp8")
            )
        return self

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.init == "pretrained" and (self.model is None) == (self.from_teacher is None):
            came = "none" if self.model is None else "both model and from_teacher"
            raise ValueError(f"give exactly one of model, from_teacher, and init: random with config; got {came}")
        if self.vocabulary == "cross" and self.model is None:
            raise ValueError("vocabulary: cross needs a student.model, whose tokenizer is its own")
        nameless = not self.has_tokenizer or (self.model or "").endswith(".gguf") or self.vocabulary == "extend"
        if self.lora is not None and self.lora.save == "adapter" and nameless:
            raise ValueError(
                "lora.save: adapter names the model it belongs to: expected student.model, a hub id or a folder, and "
                "vocabulary: keep or cross; set lora.save: both"
            )
        return self
