"""The command `quantise`: round a model's weights to a 4- or 8-bit file without training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from distill.commands.arguments import AsJson, TargetArgument, print_json
from distill.core import console

if TYPE_CHECKING:
    from distill.models.precision.gptq import Method


def quantise(
    target: TargetArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder.")],
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="NAME", help="A format of student.quantise, such as q4_k or fp8.")
    ] = "q4_0",
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="gptq, importance, or nearest (rtn).", show_default="gptq; nearest in 8 bits"
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Data to calibrate on; default: the run's training rows.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to calibrate on.")] = 65_536,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens per row of --data.", show_default="1024")
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack", help="Also write the quantised file: GGUF or compressed-tensors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantise a model's weights after training (PTQ), the baseline of student.quantise.

    Writes a folder with the dequantised weights in float32, which distill eval compares with the model.

    \b
    distill quantise support-bot -o control --pack           # GGUF, q4_0, by GPTQ
    distill quantise ./student -o out -f int4_g32 --data chats.jsonl --pack
    distill quantise ./student -o nearest --method nearest
    distill eval control --teacher ./student --data held-out.jsonl
    """
    from typing import get_args

    from distill.recipe.quantise import EIGHT_BIT_FORMATS, Quantise, WeightFormat

    if format not in get_args(WeightFormat):
        raise ValueError(f"--format: expected one of {', '.join(get_args(WeightFormat))}, got {format!r}")
    methods = ("nearest", "rtn", "importance", "gptq")
    if method is None:
        method = "nearest" if format in EIGHT_BIT_FORMATS else "gptq"
    if method == "awq":
        raise ValueError("--method: awq was removed; use gptq, the default")
    if method not in methods:
        raise ValueError(f"--method: expected one of {', '.join(methods)}, got {method!r}")
    method = "nearest" if method == "rtn" else method
    if method != "nearest" and format in EIGHT_BIT_FORMATS:
        raise ValueError(
            f"--method: {method} rounds layers in less than 8 bits; expected nearest with {format}, got {method}"
        )
    if data is None and max_length is not None:
        raise ValueError("--max-length: expected together with --data; got no --data")
    if data is not None and method == "nearest":
        raise ValueError(f"--data: nearest calibrates on nothing; expected no data, got {data!r}")
    import torch

    from distill.evaluation import targets
    from distill.reports.round_weights import Rounding, quantise_model

    chosen = cast("Method", method)
    found = targets.find_target(target)
    if chosen != "nearest" and data is None and found.recipe is None:
        raise ValueError(f"--data: required for a model with --method {method}; only a run has training rows")
    section = Quantise.model_validate({"format": format, "calibration_tokens": tokens})
    with console.spinner("loading model and data"):
        tokenizer = targets.tokenizer_of(found)
        rows = (
            [] if chosen == "nearest" else targets.calibration_rows(found, data, tokenizer, tokens, max_length or 1024)
        )
        model = targets.load_merged(found, targets.default_device(), torch.float32)
    with console.spinner(f"rounding by {method}"):
        result = quantise_model(model, tokenizer, output, Rounding(section, chosen, rows), pack=pack)
    if as_json:
        print_json(result._asdict())
        return
    console.print_lines(
        f"wrote {output}: {result.matrices} matrices rounded to {format}, {result.by_method} by {method}"
    )
    if result.note:
        console.print_lines(result.note)
    if result.file is not None:
        console.print_lines(f"packed as {result.file}, read back and equal: a KL of {result.kl:.1e} nats per token")
    else:
        whose = shlex.quote(target)
        console.print_lines(f"compare it: distill eval {shlex.quote(str(output))} --teacher {whose} --data SOURCE")
