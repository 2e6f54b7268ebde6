"""Caches of teachers that are held in other ways: offloaded, in 8 bits, quantised on disk."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from distill_kernels import swap_linears_for_fp8
from test_quantised import BITNET, saved
from tiny import tiny_model, tiny_tokenizer
from torch.nn import functional as F

from distill.commands.cache_epoch import load, make_cache
from distill.generation.engines import greedy_responses
from distill.models.layers import is_offloaded
from distill.models.loading import load_teacher
from distill.models.quantised_checkpoints import is_quantised
from distill.recipe import LocalTeacherConfig, parse
from distill.run import run
from distill.teachers.backends.stored import format as layout
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Store

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, packing: false, cache: false, validation: {fraction: 0.2}}
train: {steps: 2, batch_size: 1, tokens_per_step: 64, learning_rate: 3e-3, warmup: 0, log_every: 1}
generate: {prompts: [The teacher], max_new_tokens: 5}
"""
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


pytestmark = pytest.mark.place(
    text="\n".join(f"The teacher explains line {n} once more." for n in range(12)),
    teacher={"layers": 3, "hidden": 64, "seed": 1},
    student={"seed": 2},
)


@contextlib.contextmanager
def silent(total):
    yield lambda positions: None


def cached(device, folder, *overrides, **settings):
    """The cache of every token's log-probability, unless told otherwise, and what it was made by."""
    recipe = parse(RECIPE, [f"train.device={device}", "train.deterministic=true", *overrides], name="tiny")
    loaded = load(recipe)
    made = CacheOptions(**({"k": 250, "dtype": "float32"} | settings)).checked()
    make_cache(loaded, Path(folder), made, say=lambda line: None, progress=silent)
    return loaded, Store(folder)


def contents(cache):
    return {path.name: path.read_bytes() for path in sorted(cache.folder.iterdir()) if path.is_file()}


def hold_to(teacher, loaded, cache):
    """Every stored number is the log-probability that `teacher` gives, document by document."""
    for row in loaded.splits.train:
        ids = torch.tensor([row["input_ids"]], device=teacher.device)
        with torch.no_grad():
            hidden = teacher.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            logp = F.linear(hidden[0, :-1].float(), teacher.lm_head.weight.float()).log_softmax(-1)
        learned = torch.tensor(row["labels"])[1:] != -100
        said = cache.look_up([row])
        wanted = logp.cpu()[learned].gather(-1, said["cached_ids"].long())
        torch.testing.assert_close(said["cached_logprobs"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.plain("{'hidden': True}-cpu")
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("kind", [{"tail": "sampled", "k": 16}, {"hidden": True}])
def test_an_offloaded_teacher_equals_a_resident_one(workplace, device, kind):
    _, resident = cached(device, "resident", **kind)
    loaded, offloaded = cached(device, "offloaded", "teacher.offload=cpu", **kind)
    assert is_offloaded(loaded.pair.teacher.model)
    assert contents(offloaded) == contents(resident)


@pytest.mark.parametrize("device", PLACES)
def test_an_fp8_teacher_is_cached_in_fp8(workplace, device):
    loaded, cache = cached(device, "fp8", "teacher.dtype=fp8", "train.precision=float32")
    assert is_quantised(loaded.pair.teacher.model)
    assert cache.manifest["teacher"]["dtype"] == "fp8"
    if device == "cpu":  # there the layers are not swapped for other kernels
        teacher = load_teacher(LocalTeacherConfig(model="teacher"), dtype=torch.bfloat16)
        with pytest.raises(AssertionError):
            hold_to(teacher, loaded, cache)
        swap_linears_for_fp8(teacher)
        hold_to(teacher, loaded, cache)
        prompts = ["The teacher"]
        answers = greedy_responses(teacher, loaded.pair.tokenizer, prompts, 5)
        assert layout.read_store_json(cache.folder / layout.ANSWERS)["answers"] == dict(
            zip(prompts, answers, strict=True)
        )


def test_a_cache_in_fp8_is_not_finished_in_bfloat16(workplace):
    _, cache = cached("cpu", "begun", "teacher.dtype=fp8")
    (cache.folder / layout.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"--out: begun .* teacher\.dtype was 'fp8', now 'bfloat16'"):
        cached("cpu", "begun", "teacher.dtype=bfloat16")
    with pytest.raises(ValueError, match=r"--out: begun .* teacher\.dtype was 'fp8', now 'fp8 but 0\.mlp'"):
        cached("cpu", "begun", "teacher.dtype=fp8", "teacher.fp8_skip=[0.mlp]")


def test_a_run_trains_on_cached_outputs_of_an_fp8_teacher(workplace):
    cached("cpu", "fp8", "teacher.dtype=fp8")
    result = run(parse(RECIPE, ["teacher={type: cache, path: fp8, model: teacher}", "train.device=cpu"], name="tiny"))
    assert result.after.forward_kl < result.before.forward_kl


def test_a_checkpoint_that_is_quantised_is_cached_as_it_is(workplace):
    config = BITNET | {"modules_to_not_convert": ["lm_head"]}
    saved(workplace / "bitnet", config, tiny_model(layers=3, hidden=64, seed=1, tie=False))
    tiny_tokenizer().save_pretrained(workplace / "bitnet")
    with torch.compiler.set_stance("force_eager"):  # its layers compile their rounding
        loaded, cache = cached("cpu", "quantised", "teacher.model=bitnet")
        assert loaded.pair.teacher.model.is_quantized
        hold_to(load_teacher(LocalTeacherConfig(model="bitnet"), dtype=torch.float32), loaded, cache)
    assert json.loads((workplace / "bitnet/config.json").read_text())["quantization_config"]["quant_method"] == "bitnet"


@pytest.mark.gpu
def test_an_int8_teacher_is_cached_in_int8(workplace):
    pytest.importorskip("bitsandbytes")
    loaded, cache = cached("cuda", "int8", "teacher.dtype=int8", "train.precision=bfloat16")
    assert type(loaded.pair.teacher.model.model.layers[0].mlp.gate_proj).__name__ == "Linear8bitLt"
    assert cache.manifest["teacher"]["dtype"] == "int8"
    _, plain = cached("cuda", "plain", "teacher.dtype=bfloat16", "train.precision=bfloat16")
    row = loaded.splits.train[0]
    eight, whole = (which.look_up([row]) for which in (cache, plain))
    moved = (eight["cached_entropy"] - whole["cached_entropy"]).abs().mean()
    assert 0 < moved < 0.1 * whole["cached_entropy"].abs().mean()
