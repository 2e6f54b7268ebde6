"""`distill sample`: a model's responses to a file of prompts, written line by line, so that it can be resumed.

Each line is a row of `data.source`: `prompt` and `completion`, or `messages`; beside them `truncated` (the response
was cut off) and `sampled` (its model and settings). The tokens sampled for a prompt follow from the seed and the
prompt's number.

A teacher that fits no GPU is sharded over several processes, which generate together; the first of them writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accelerate import PartialState

from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.data.chat import load_template
from distill.generation.decode_loop import Engine
from distill.generation.engines import CollectiveEngine, TransformersEngine, engine_for, settings_for
from distill.generation.prompts import Prompt, read_prompts
from distill.generation.sampling import Sampling
from distill.models.gpu_specs import runs_our_kernels
from distill.models.head import bare
from distill.models.load.loading import load_config, load_student, load_teacher, load_tokenizer
from distill.models.patch.patching import patch
from distill.models.precision.dtypes import resolve_device, resolve_precision
from distill.planning.cache_memory import shards_for_queries
from distill.recipe import Recipe
from distill.recipe.compatibility import require_command
from distill.teachers.backends.sharded import load_sharded_teacher
from distill.teachers.backends.stored.teacher import maker_section
from distill.teachers.registry import source_of
from distill.teachers.source_capabilities import files_of

log = logging.getLogger(__name__)


@dataclass
class Sampled:
    """Result of `sample`.

    Attributes:
        found: lines that were there already.
        made: lines written now.
        tokens: of the responses made now.
        truncated: responses made now that were cut off.
        seconds: of generation.
        dropped: reason to number of rows of the prompts that cannot be used.
    """

    found: int
    made: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0
    dropped: dict[str, int] | None = None


class AnswerSettings(NamedTuple):
    """Settings of the generation of responses.

    Attributes:
        engine: See `engine_for`.
        batch_size: Prompts at once.
        max_new_tokens: The most a response may have.
        sampling: Temperature and truncation of the distribution that is sampled.
        seed: Of the sampled tokens.
        stop: Texts that end a response.
    """

    engine: str = "distill"
    batch_size: int = 32
    max_new_tokens: int = 512
    sampling: Sampling = Sampling(1.0)
    seed: int = 0
    stop: tuple[str, ...] = ()


def sample(
    recipe: Recipe,
    prompts: str,
    out: Path,
    who: Literal["teacher", "student"],
    settings: AnswerSettings,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sampled:
    """Generate a response of the recipe's teacher or student to every prompt.

    Args:
        recipe: Names the models, the chat template and the columns.
        prompts: See `read_prompts`.
        out: A .jsonl file; if it exists, its complete lines are kept and the rest is added.
        who: The model that generates.
        settings: Of the generation.
        progress: Called with the lines done and their number in all.

    With several processes, which must all call this, the teacher is sharded.

    Raises:
        ValueError: prompts or model cannot be read, or `out` holds something else.
    """
    if who == "teacher":
        require_command(recipe, "sample --from teacher")
    section: Any = recipe.teacher if who == "teacher" else recipe.student
    own = who == "student" and recipe.student.has_tokenizer
    answering = recipe.student if own else files_of(source_of(recipe)).tokenizer_section()
    tokenizer = load_tokenizer(answering, "student" if own else "teacher")
    template = load_template(recipe.data.chat_template, tokenizer)
    longest, most, batch_size = _positions(recipe, who), settings.max_new_tokens, settings.batch_size
    usable = read_prompts(prompts, tokenizer, template, recipe.data.fields, max_length=longest - 1)
    drawn = settings.sampling._asdict().items()
    made_by = {
        "by": section.model or who,
        "max_new_tokens": most,
        "seed": settings.seed,
        **{name: value for name, value in drawn if value != Sampling._field_defaults.get(name)},
    }
    made_by |= {"revision": section.revision} if section.revision else {}
    made_by |= {"stop": list(settings.stop)} if settings.stop else {}
    processes = _processes(recipe, who, settings)

    done = broadcast_from_rank0(lambda: _finished(out, usable.prompts, made_by))
    result = Sampled(done, dropped=dict(usable.dropped))
    progress(done, len(usable.prompts))
    if done == len(usable.prompts):
        return result
    model = _load(recipe, who, in_shards=processes > 1)
    widest = max(len(prompt.ids) for prompt in usable.prompts)
    made_for = settings_for(
        model, tokenizer, template, settings.stop, vocab_size=len(tokenizer), max_length=min(longest, widest + most)
    )
    engine: Engine
    if processes > 1:
        engine = CollectiveEngine(TransformersEngine(model, made_for, collective=True))
    else:
        engine = engine_for(settings.engine, model, made_for, tokenizer=tokenizer, field="--engine")
    start = time.perf_counter()
    with (out if is_main_process() else Path(os.devnull)).open("a", encoding="utf-8") as file:
        for first in range(done, len(usable.prompts), batch_size * processes):
            group = usable.prompts[first : first + batch_size * processes]
            answers = engine.generate(
                [prompt.ids for prompt in group],
                max_new_tokens=[min(most, longest - len(prompt.ids)) for prompt in group],
                sampling=settings.sampling,
                seeds=[_seed(settings.seed, first + number) for number in range(len(group))],
                batch_size=batch_size,
            )
            for prompt, tokens, cut in zip(group, answers.tokens, answers.truncated, strict=True):
                row = prompt.with_response(str(tokenizer.decode(tokens, skip_special_tokens=True)))
                file.write(json.dumps(row | {"truncated": cut, "sampled": made_by}, ensure_ascii=False) + "\n")
                result.made += 1
                result.tokens += len(tokens)
                result.truncated += cut
            file.flush()
            if is_main_process():
                os.fsync(file.fileno())
            progress(done + result.made, len(usable.prompts))
    result.seconds = time.perf_counter() - start
    return result


def _seed(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed},{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _finished(out: Path, prompts: list[Prompt], settings: dict[str, Any]) -> int:
    """Count the lines of `out`, which must answer these prompts; an incomplete last line is removed."""
    if out.suffix != ".jsonl":
        raise ValueError(f"--out: expected a file that ends in .jsonl, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out: the folder {out.parent} does not exist")
    if not out.exists():
        return 0
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.splitlines()
    if len(lines) > len(prompts):
        raise ValueError(f"--out: {out} holds {len(lines):,} lines, more than there are prompts; give another file")
    for number, (line, prompt) in enumerate(zip(lines, prompts, strict=False), 1):
        row: Any = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if not prompt.matches(row):
            raise ValueError(f"--out: line {number} of {out} is not a response to prompt {number}; give another file")
        if row.get("sampled") != settings:
            raise ValueError(
                f"--out: line {number} of {out} was made with {row.get('sampled')}, and now it is {settings}; "
                "give another file"
            )
    if len(whole) < len(content):
        log.warning("%s: its last line was cut short and is made again", out)
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


def _positions(recipe: Recipe, who: str) -> int:
    """Return the number of positions that the model supports."""
    of_teacher = who == "teacher" or recipe.student.is_cut
    section = files_of(source_of(recipe)).config_section() if of_teacher else recipe.student
    config = load_config(section, "teacher" if of_teacher else "student").get_text_config()
    return getattr(config, "max_position_embeddings", None) or 2**20


def answers_in_shards(recipe: Recipe, processes: int, batch_size: int, max_new_tokens: int) -> bool:
    """Return whether that many processes generate with a sharded teacher; prompts count as `data.max_length`."""
    cached_tokens = batch_size * (recipe.data.max_length + max_new_tokens)
    device = resolve_device(recipe.train)
    return shards_for_queries(recipe, device, processes, batch_size=batch_size, cached_tokens=cached_tokens, alone=True)


def _processes(recipe: Recipe, who: str, settings: AnswerSettings) -> int:
    """Return how many processes generate: one, or those that the teacher is sharded over, once they are connected."""
    world = world_size()
    if world == 1:
        return 1
    if who == "student" or not answers_in_shards(recipe, world, settings.batch_size, settings.max_new_tokens):
        raise ValueError(
            f"parallel.teacher: {world} processes generate together only with a sharded teacher (--from "
            "teacher); start distill sample without a launcher"
        )
    if settings.engine == "vllm":
        raise ValueError(
            "--engine: vllm loads the teacher whole, and parallel.teacher holds it in shards; leave it out"
        )
    PartialState(cpu=resolve_device(recipe.train).type == "cpu")
    if is_main_process():
        log.warning("generating with transformers: our decode loop cannot serve a teacher in shards (parallel.teacher)")
    return world


def _load(recipe: Recipe, who: str, *, in_shards: bool = False) -> Any:
    """Return the model in a run's compute dtype; with our layers on a GPU, unless it is sharded."""
    device = resolve_device(recipe.train)
    dtype = resolve_precision(recipe, device).compute
    if in_shards:
        return load_sharded_teacher(recipe.teacher, device=device, dtype=dtype)[0]
    needs_teacher = who == "teacher" or recipe.student.is_cut
    teacher = load_teacher(maker_section(recipe), device=device, dtype=dtype) if needs_teacher else None
    model: Any = teacher
    if who == "student":
        section = recipe.student.model_copy(update={"lora": None})
        model = load_student(section, teacher=teacher, device=device, dtype=dtype)
    if runs_our_kernels(device):
        patch(model, "teacher", attention=None)
    return bare(model).eval()
