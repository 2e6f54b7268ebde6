"""The time that `distill check` works out for a step, beside what an H200 took: rows of scripts/bench/results."""

import json

import pytest
from packed_chats import packed_chats

from distill.planning.devices import find_device
from distill.planning.preflight import device_plan
from distill.planning.step_time import StepTokens, step_time
from distill.planning.teacher_server import choose_teacher_server, training_gpus
from distill.recipe import Parallel, load
from distill.teachers.backends.stored.format import MANIFEST
from scripts.bench import many_gpus, small

ROWS = [json.loads(line) for line in (many_gpus.ROOT / "scripts/bench/results/nvidia-h200.jsonl").open()]
BOUND = 0.1
# rows of the same cases that the arithmetic is not of: the host sets their pace, kernels of rank 16 on a small model
# last as long as they take to start (it says 0.85 of what they took), or something else than a step was timed
OTHERS = ("launched", "LoRA", "compiled layers", "write ", "served from", "keep")
COPIED = ["parallel.strategy=ddp", "parallel.teacher=copied"]
CACHED = ["teacher.type=cache", "teacher.init=pretrained"]
PAIR = small.PAIRS["smollm2"]
SMALL = [
    f"teacher.config={PAIR.teacher}",
    f"student.config={PAIR.student}",
    f"train.batch_size={PAIR.batch}",
    f"data.max_length={PAIR.length}",
]
SERVED = ["parallel.teacher=served", "parallel.teacher_gpus=1"]
FULL = ["recipes/llama3-8b-to-1b.yaml", "student.dtype=bfloat16"]
LORA = [
    "recipes/llama3-8b-to-1b-lora.yaml",
    "student.dtype=bfloat16",
    "train.gradient_checkpointing=false",
    "train.batch_size=2",
    "data.max_length=4096",
]
FP8, BOTH_FP8 = ["teacher.dtype=fp8"], ["teacher.dtype=fp8", "student.compute=fp8"]
# case, how its shape begins, candidate: GPUs, overrides
MEASURED = {
    ("step", "llama-3.1-8b to", "ours"): (1, []),
    ("step", "llama-3.1-8b to", "ours, fp8 teacher"): (1, FP8),
    ("fp8_step", "", "ours"): (1, []),
    ("fp8_step", "", "ours, fp8 teacher"): (1, FP8),
    ("fp8_step", "", "ours, fp8 teacher and student"): (1, BOTH_FP8),
    ("chat_step", "", "ours"): (1, []),
    ("chat_step", "", "ours, all rows of the last layers"): (1, []),
    ("busy", "", "full"): (1, FULL),
    ("busy", "", "lora"): (1, LORA),
    ("teacher_cache", "", "online"): (1, []),
    ("teacher_cache", "", "top-64 from disk"): (1, CACHED),
    ("teacher_cache", "", "hidden states from disk"): (1, CACHED),
    ("small", "smollm2-135m to smollm2-135m", "ours"): (1, SMALL),
    ("small", "smollm2-135m to smollm2-135m", "ours, packed, fp32 weights"): (1, [*SMALL, small.FP32]),
    ("small", "llama-3.1-8b to llama-3.2-1b", "ours, graphed"): (1, small.OURS["ours, graphed"]),
    ("many_gpus", "flagship", "ours, 1 GPUs"): (1, many_gpus.SHAPES["flagship"]),
    ("many_gpus", "flagship", "ours, 4 GPUs"): (4, many_gpus.SHAPES["flagship"]),
    ("many_gpus", "large", "ours, 4 GPUs"): (4, many_gpus.SHAPES["large"]),
    ("elsewhere", "8B to 1B", "both on each GPU, DDP"): (2, COPIED),
    ("elsewhere", "8B to 1B", "1 rank trains, 1 teaches"): (2, SERVED),
}


def row_of(case, shape, candidate):
    """The newest."""
    return [r for r in ROWS if (r["case"], r["candidate"]) == (case, candidate) and r["shape"].startswith(shape)][-1]


def planned(gpus, overrides, case="", folder=None, hidden=False):
    """Tokens a second on so many H200."""
    path = many_gpus.RECIPE
    if overrides and overrides[0].endswith(".yaml"):
        path, *overrides = many_gpus.ROOT / overrides[0], *overrides[1:]
    words = [*many_gpus.DRY, *overrides]
    if "teacher.type=cache" in overrides:
        words += [f"teacher.path={folder}"]
        (folder / MANIFEST).write_text(
            json.dumps({"dtype": "float16", "kind": "hidden" if hidden else "top_k", "k": 64})
        )
    recipe = load(path, words)
    device, data = find_device("H200"), recipe.data
    plan = device_plan(recipe, device, training_gpus(recipe, gpus))
    tokens = recipe.train.batch_size * data.max_length * plan.accumulation * plan.world
    learned, pairs = tokens, tokens * (data.max_length + 1) / 2
    if case == "chat_step":
        batch = packed_chats(1000, 2, 4096)
        learned, pairs = batch["valid_rows"].numel(), float((batch["position_ids"] + 1).sum())
    return tokens / step_time(plan, StepTokens(tokens, learned, pairs)).seconds


@pytest.mark.parametrize("key", MEASURED, ids=", ".join)
def test_estimates_agree_with_measurements(key, tmp_path):
    gpus, overrides = MEASURED[key]
    told = planned(gpus, overrides, key[0], tmp_path, hidden="hidden" in key[2])
    assert told == pytest.approx(row_of(*key)["tokens_per_s"], rel=BOUND)


def test_no_row_of_ours_is_left_out():
    cases, keys = {case for case, _, _ in MEASURED}, {(case, candidate) for case, _, candidate in MEASURED}
    rivals = ("plain", "compile", "liger", "torchao", "bare products")
    rows = {(row["case"], row["candidate"]) for row in ROWS if row["case"] in cases}
    left = {key for key in rows - keys if not key[1].startswith(rivals)}
    assert {key for key in left if not any(word in key[1] for word in OTHERS)} == set()


def test_auto_takes_what_was_the_faster_on_two_gpus():
    rows = [row_of("elsewhere", "8B to 1B", name) for name in ("both on each GPU, DDP", "1 rank trains, 1 teaches")]
    both, apart = (row["tokens_per_s"] for row in rows)
    recipe = load(many_gpus.RECIPE, many_gpus.DRY).model_copy(update={"parallel": Parallel()})
    device = find_device("H200")
    chosen = choose_teacher_server(device_plan(recipe, device, 2))
    assert both > apart and chosen.parallel.teacher_gpus is None
