"""Commands that use or hand over a student: `generate`, `export`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from distill.commands.arguments import (
    AsJson,
    MaxNewTokens,
    RunArgument,
    TargetArgument,
    TeacherModel,
    Temperature,
    WithTeacher,
    load_models,
    print_json,
)
from distill.core import console


def generate(
    target: TargetArgument,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt; may be repeated.")],
    teacher: TeacherModel = None,
    with_teacher: WithTeacher = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    kernels: Annotated[
        str, typer.Option(metavar="NAME", help="auto, or triton: Triton kernels alone (sm_90 or later).")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate responses with a student and, if requested, its teacher, streamed.

    \b
    distill generate support-bot --prompt "How do I reset my password?"
    distill generate support-bot -p "Why is the sky blue?" --with-teacher
    distill generate ./student -p "1, 2, 3," \\
      --teacher HuggingFaceTB/SmolLM2-135M-Instruct
    distill generate support-bot -p "Why is the sky blue?" --kernels triton
    """
    from distill.evaluation.generate import TritonGenerator, stream

    if kernels not in ("auto", "triton"):
        raise ValueError(f"--kernels: expected auto or triton, got {kernels!r}")
    models, tokenizers = load_models(target, teacher, with_teacher)
    answerers = {
        name: TritonGenerator(model, tokenizers[name])
        if kernels == "triton"
        else partial(stream, model, tokenizers[name])
        for name, model in models.items()
    }
    answers: list[dict[str, str]] = []
    for text in prompt:
        answers.append({"prompt": text})
        for name, answer in answerers.items():
            if not as_json:
                console.print_lines(f"--- {name}" if len(prompt) == 1 else f"--- {name}: {text}")
            write = (lambda piece: None) if as_json else _write
            answers[-1][name] = answer(text, write, max_new_tokens=max_new_tokens, temperature=temperature)
            if not as_json:
                console.print_lines("")
    if as_json:
        print_json(answers)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def export(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Output folder.")],
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16.")] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a file.")] = "5GB",
    gguf: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Also write a GGUF file: f32, f16, bf16, q8_0, q6_k, q5_0, q4_0, q4_k_m."),
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="NAME", help="safetensors, or of a quantised student compressed-tensors.")
    ] = "safetensors",
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload to the hub, as private.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a repository created by --push public.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's student to a folder: adapters merged, one dtype, tokenizer, model card and recipe; then verify it.

    \b
    distill export support-bot -o support-bot-1b --dtype bfloat16
    distill export support-bot -o out --gguf q8_0     # out/out-q8_0.gguf
    distill export support-bot -o out --format compressed-tensors   # for vLLM
    distill export runs/support-bot/checkpoint-200 -o step-200
    distill export control -o out --format compressed-tensors     # of quantise
    distill export support-bot -o out --dtype bfloat16 --push me/support-bot-1b
    """
    from distill.reports.export import check_repository
    from distill.reports.export import export as write
    from distill.reports.export import push as upload
    from distill.reports.gguf_file import check_type
    from distill.reports.report import find_run
    from distill.training.checkpoints import STATE

    if gguf is not None:
        check_type(gguf)
    if format == "awq":
        raise ValueError("--format: AutoAWQ's layout was removed; use compressed-tensors, which vLLM reads as well")
    if format not in ("safetensors", "compressed-tensors"):
        raise ValueError(f"--format: expected safetensors or compressed-tensors, got {format!r}")
    packed = format == "compressed-tensors"
    if packed and gguf is not None:
        raise ValueError(f"--format: {format} and a GGUF file hold other blocks; got --gguf {gguf} as well")
    if public and push is None:
        raise ValueError("--public: expected together with --push; got no --push")
    if push is not None:
        check_repository(push)
    with console.spinner("exporting"):
        is_folder = any((Path(run) / name).is_file() for name in (STATE, "config.json"))
        folder = Path(run) if is_folder else find_run(run)
        written = write(folder, output, dtype=dtype, shard_size=shard_size, gguf=gguf, packed=packed)
        if push is not None:
            written["address"] = upload(output, push, private=not public)
    if as_json:
        print_json(written)
        return
    console.print_lines(
        f"wrote {output}: {written['parameters'] / 1e6:,.1f} M parameters in {written['dtype']}, "
        f"{written['bytes'] / 1e6:,.0f} MB, read back and equal"
    )
    if gguf is not None:
        file = written["gguf"]
        blocks = "the blocks it trained with cost" if file.exact else f"rounding its weights to {gguf} costs"
        console.print_lines(
            f"wrote {file.path}: {file.bytes / 1e6:,.0f} MB, read back and compared; {blocks} a KL of {file.kl:.1e} "
            "nats per token" + (f"; {file.note}" if file.note else "")
        )
    if packed:
        console.print_lines(
            f"packed its weights, read back and compared: a KL of {written['packed']:.1e} nats per token"
        )
    if push is not None:
        console.print_lines(f"pushed to {written['address']}")
