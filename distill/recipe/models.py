"""The `student:` section of a recipe, and what it shares with the teacher's (teacher_config.py)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from distill.core.errors import Section
from distill.recipe.fields import Count, Text, Usual, no_code, text_or_list
from distill.recipe.from_teacher import FromTeacher
from distill.recipe.quantise import Quantise

Weights = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8", "nf4"]
EIGHT_BITS = ("fp8", "int8")
LOW_BITS = (*EIGHT_BITS, "nf4")


class ModelSection(Section):
    """Settings that the teacher and the student have in common.

    Attributes:
        model: hub id, local folder, .gguf file, or `package:NAME/FILE.gguf` (a file inside an installed package).
        init: `pretrained` loads `model`; `random` initialises random weights in the shape of `config`, for dry runs.
        config: a config.json, its folder, or the name of a shipped architecture such as `llama-3.2-1b`; only read when
            `init` is `random`.
        dtype: dtype of the weights. `auto` is float32 for trained weights, and the compute dtype (`train.precision`)
            for frozen ones: the teacher's, and the base weights of a LoRA student. `fp8` is for teachers: bfloat16 with
            all linear layers except the head, and a mixture's experts, in fp8; the change of the teacher's outputs is
            measured and printed. `int8` is for teachers on a GPU where bitsandbytes is installed: the linear layers in
            LLM.int8() (Dettmers et al., 2022). `nf4` is for frozen weights, a teacher's or those under `student.lora`
            (QLoRA, Dettmers et al., 2023), where bitsandbytes is installed: the linear layers of the decoder's layers
            in 4 bits, everything else as with `auto`. With `auto`, a teacher whose checkpoint is quantised keeps that
            quantisation.
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


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021): the base weights are frozen and W + (alpha / r) B A is used.

    Attributes:
        r: rank of the adapters.
        alpha: scaling numerator: the adapters' output is multiplied by `alpha / r`.
        dropout: dropout probability of the adapters' input in training.
        targets: module names, or `all-linear` (every linear layer except the head).
        head: adapt the language-model head as well.
        rslora: divide `alpha` by the square root of `r` in place of `r` (rsLoRA, Kalajdzievski, 2023).
        dora: train a magnitude of each row of W + (alpha / r) B A beside its direction (DoRA, Liu et al., 2024). Layers
            are then computed by PEFT.
        init: values that adapters start from. `default`: A random, B zero. `pissa`: the `r` largest singular values and
            vectors of W, whose product is taken out of W (PiSSA, Meng et al., 2024), for faster training; the base
            weights are then the student's own.
        save: `both` writes the model with the adapter merged to `student/` of the run and the adapter alone to
            `adapter/`; `adapter` writes the adapter alone to `student/`, with the name of its base model.
    """

    r: Annotated[Count, Usual(2, 256)] = 16
    alpha: Annotated[float, Field(gt=0), Usual(1, 512)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[str | list[str], BeforeValidator(text_or_list)] = "all-linear"
    head: bool = False
    rslora: bool = False
    dora: bool = False
    init: Literal["default", "pissa"] = "default"
    save: Literal["both", "adapter"] = "both"

    @model_validator(mode="after")
    def _variants_go_together(self) -> Self:
        if self.dora and self.head:
            raise ValueError("dora: the fused loss computes plain adapters of the head; expected head: false, got true")
        if self.dora and self.init == "pissa":
            raise ValueError("init: pissa changes the weights whose rows dora measures; expected default, got pissa")
        if self.init == "pissa" and self.head:
            raise ValueError("init: pissa would change a head that may be tied; expected head: false, got true")
        if self.init == "pissa" and self.save == "adapter":
            raise ValueError("save: adapter names base weights, which init: pissa changes; expected both, got adapter")
        return self


class Student(ModelSection):
    """The student model: `model`, `from_teacher`, or `init: random` with `config`.

    `init: random` takes precedence over the other two, so that one override turns any recipe into a dry run.

    Attributes:
        from_teacher: prune the teacher, or `model` where it is given, to a student with fewer or narrower layers.
        lora: train LoRA adapters; null trains all weights.
        freeze: parts of the student that are not trained: `router`, the routers of a mixture of experts; empty for
            none.
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
    freeze: list[Literal["router"]] = Field(default_factory=list)
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
                + ", or has adapters over weights in nf4 (student.lora)"
            )
        if self.dtype == "nf4" and self.lora is None:
            raise ValueError(
                "dtype: nf4 weights cannot be trained; expected lora, whose adapters are trained over them, got none"
            )
        if self.dtype == "nf4" and self.lora is not None and self.lora.init == "pissa":
            raise ValueError(
                "lora.init: pissa computes adapters from weights of 16 or 32 bits; expected default with dtype: nf4, "
                "got pissa"
            )
        if self.dtype == "nf4" and self.compute == "fp8":
            raise ValueError("compute: fp8 quantises weights of 16 or 32 bits; expected auto with dtype: nf4, got fp8")
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
                "dora": (False, self.lora.dora),
                "init": ("default", self.lora.init),
            }
            for field, (expected, got) in wrong.items():
                if got != expected:
                    raise ValueError(
                        f"lora.{field}: the merged weights are trained as the file's; expected {expected} with "
                        f"quantise, got {got}"
                    )
        return self

    @property
    def is_whole(self) -> bool:
        """Whether each process has to hold the student whole: its weights are packed, or made of all rows of A."""
        return self.lora is not None and (self.dtype == "nf4" or self.quantise is not None or self.lora.dora)

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
