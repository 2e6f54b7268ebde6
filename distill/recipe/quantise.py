"""The `student.quantise` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distill.core.errors import Section

WeightFormat = Literal["q4_0", "q5_0", "q8_0", "q4_k", "q6_k", "int4_g32", "int8", "fp8", "nvfp4"]
GGUF_FILES = {"q8_0": "q8_0", "q6_k": "q6_k", "q5_0": "q5_0", "q4_0": "q4_0", "q4_k": "q4_k_m"}  # format -> file's type
FORMATS_OF_GGUF = tuple(GGUF_FILES)
SEARCHED = ("q4_k", "q6_k")  # formats whose scales a plain converter searches
EIGHT_BIT_FORMATS = ("q8_0", "int8", "fp8")  # whose scales follow from the largest weight


class Quantise(Section):
    """Quantisation-aware training: the student is trained with the quantised weights of the file it is exported to.

    The optimizer updates float32 weights; after each step they are rounded to the blocks of the format, and these
    values are what forward and backward passes use. Gradients pass through the rounding (straight-through estimator).

    Attributes:
        format: format of the decoder's linear layers. `q4_0`, `q5_0`, `q8_0` (blocks of 32 weights), `q4_k` and `q6_k`
            (blocks of 256) are those of GGUF files (`distill export --gguf`); with `q4_k` the layers that llama.cpp's
            `q4_k_m` holds in 6 bits are `q6_k`, and rows that are not whole blocks are `q5_0` and `q8_0` instead.
            `int4_g32` (groups of 32 weights), `int8` and `fp8` (rows) and `nvfp4` (groups of 16) are those of
            compressed-tensors (`distill export --format compressed-tensors`), which vLLM reads.
        embeddings: format of the embedding, and of a head that shares its weights: a format or `keep`. `auto` is q8_0
            for the formats of GGUF (q6_k for q4_k and q6_k), and `keep` for the others.
        head: format of a head with weights of its own; `auto` as for `embeddings`.
        modules: formats of single linear layers, or `keep` (not quantised): by decoder layer counted from 0 (`29`), by
            a part of one (`29.mlp`), or by the last part of modules' names (`down_proj`).
        scales: block scales of formats below 8 bits: `learned` trains them with the weights (Esser et al., 2020);
            `absmax` computes them from each block's largest weight, as round-to-nearest converters do.
        start: initial quantised weights of formats below 8 bits: `gptq` is error-compensated rounding on rows of the
            training data (Frantar et al., 2022), which chooses its own scales; `nearest` rounds each weight to the
            nearest value. `auto` is gptq with learned scales, and nearest with absmax. The metrics before training are
            those of this post-training quantisation.
        calibration_tokens: number of training tokens that `gptq` calibrates on.
    """

    format: WeightFormat
    embeddings: Literal["auto", "keep", WeightFormat] = "auto"
    head: Literal["auto", "keep", WeightFormat] = "auto"
    modules: dict[str, Literal["keep", WeightFormat]] = Field(default_factory=dict)
    scales: Literal["learned", "absmax"] = "learned"
    start: Literal["auto", "gptq", "nearest"] = "auto"
    calibration_tokens: Annotated[int, Field(ge=1)] = 65_536

    @property
    def outside(self) -> tuple[str, str]:
        """The formats of embedding and head, `auto` resolved."""
        auto = "q6_k" if self.format in SEARCHED else "q8_0" if self.format in FORMATS_OF_GGUF else "keep"
        return (
            auto if self.embeddings == "auto" else self.embeddings,
            auto if self.head == "auto" else self.head,
        )

    @property
    def starts_from_gptq(self) -> bool:
        """Return whether weights in less than 8 bits start from GPTQ's rounding."""
        return self.start == "gptq" or (self.start == "auto" and self.scales == "learned")

    @model_validator(mode="after")
    def _keeps_the_scales_of_its_start(self) -> Self:
        if self.start == "gptq" and self.scales == "absmax":
            raise ValueError(
                "start: gptq chooses scales that absmax would replace; expected scales: learned, got absmax"
            )
        if self.scales == "absmax" and (searched := next((f for f in self._every_format if f in SEARCHED), None)):
            raise ValueError(f"scales: expected learned with {searched}, whose scales are searched, got absmax")
        return self

    @property
    def _every_format(self) -> tuple[str, ...]:
        return (self.format, *self.outside, *self.modules.values())

    @model_validator(mode="after")
    def _is_one_file(self) -> Self:
        gguf = self.format in FORMATS_OF_GGUF
        for field, found in (("embeddings", self.outside[0]), ("head", self.outside[1]), *self.modules.items()):
            if found != "keep" and (found in FORMATS_OF_GGUF) != gguf:
                raise ValueError(f"{field}: expected keep or a format of the same file as {self.format}, got {found}")
        if not gguf and self.outside != ("keep", "keep"):
            raise ValueError(
                "embeddings and head: expected keep with the formats of compressed-tensors, whose readers quantise "
                f"linear layers alone; got {' and '.join(self.outside)}"
            )
        return self
