"""A whole run with both models in shards over two gloo processes ends as the same run in one process.

The file is also the program of the two processes, which make all runs in one start.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from grids import chosen
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from two_ranks import run_as_two

from distill.core.ranks import exit_process

RECIPE = """
name: tiny
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
loss: {terms: [{type: jsd}, {type: cross_entropy, weight: 0.5}]}
train: {steps: 3, batch_size: 1, tokens_per_step: 64, learning_rate: 3e-3, warmup: 0, log_every: 1}
generate: {prompts: [], max_new_tokens: 4}
"""
ON = {
    "cpu": ["train.device=cpu"],
    "cuda": ["train.device=cuda", "train.precision=float32", "train.deterministic=true"],
}
SHARDED = ["parallel.strategy=fsdp", "parallel.teacher=sharded"]
# two processes: one micro-batch each for 64 tokens, four for 256
CASES = {
    "tied": ["generate.prompts=[The teacher]", "train.save_every=2"],
    "untied": [
        "student.model=untied",
        "teacher.model=untied-teacher",
        "train.tokens_per_step=256",
        "train.gradient_checkpointing=true",
    ],
    "lora": ["student.lora={r: 4, head: true}", "train.tokens_per_step=256"],
    "bf16": ["student.dtype=bfloat16"],
}


def recipe(*overrides):
    from distill.recipe import parse

    return parse(RECIPE, overrides)


def both(folder, device, *cases):
    """Body of each of the two processes."""
    from accelerate.state import AcceleratorState, PartialState

    from distill.run import run
    from distill.run_results import RunResults

    save = RunResults.save

    def save_shards(self, *more):
        sharded = self.recipe.parallel.strategy == "fsdp"
        # the head may still be gathered from the last forward
        for model in (*self.pair.teacher.models.values(), self.trainer.model):
            layers = [p for name, p in model.named_parameters() if ".layers." in name]
            assert all(isinstance(p, DTensor) == sharded for p in layers), "not as asked"
        save(self, *more)

    RunResults.save = save_shards
    os.chdir(folder)
    torch.set_num_threads(1)
    on = ON[device]
    ways = {name: [*CASES[name], *SHARDED] for name in ("tied", *cases)}
    copied = [name for name in cases if device == "cuda" or name == "untied"]  # in a process that has had shards
    ways |= {f"{name}-ddp": [*CASES[name], "parallel.strategy=ddp"] for name in copied}
    for name, overrides in ways.items():
        run(recipe(*overrides, *on), name=name)
        AcceleratorState._reset_state()
        PartialState._shared_state.clear()
    if torch.distributed.get_rank() == 0:  # as if it had been killed after step 2
        shutil.copytree("runs/tied", "runs/again")
        shutil.rmtree("runs/again/student")
        shutil.rmtree("runs/again/checkpoint-3", ignore_errors=True)  # what transformers saves at the end
        (Path("runs/again/result.json")).unlink()
    torch.distributed.barrier()
    run(recipe(*CASES["tied"], *SHARDED, *on), name="again", resume=True)


def made_by_two(folder, device, cases):
    """The folder in which two processes have made all runs."""
    from tiny import save_models, save_tiny, tiny_model

    tokenizer = save_models(folder, teacher={"layers": 3, "hidden": 48, "seed": 1}, student={"seed": 2})
    save_tiny(folder / "untied-teacher", tiny_model(tokenizer, seed=3, tie=False), tokenizer)
    save_tiny(folder / "untied", tiny_model(tokenizer, seed=4, tie=False), tokenizer)
    (folder / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(80)))
    (folder / "out.txt").write_text(run_as_two(__file__, folder, device, *cases, device=device, timeout=500))
    return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, request):
    return made_by_two(tmp_path_factory.mktemp("sharded"), "cpu", chosen(request, "case"))


@pytest.fixture(scope="module")
def workplace_on_gpus(tmp_path_factory):
    return made_by_two(tmp_path_factory.mktemp("sharded"), "cuda", CASES)


def weights(folder):
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}["model.safetensors"]


def hold_against_one(name, case, device, exact):
    """The run `name` of two processes against the case in one; `exact` is the tolerance in float32."""
    from transformers import AutoModelForCausalLM

    from distill.run import run

    alone = run(recipe(*CASES[case], *ON[device]), name=f"{name}-alone")
    found = json.loads(Path(f"runs/{name}/result.json").read_text())
    loose = 2e-2 if case == "bf16" else exact
    assert found["before"] == pytest.approx(alone.before._asdict(), rel=loose / 10)
    assert found["after"] == pytest.approx(alone.after._asdict(), rel=loose)
    assert alone.after.forward_kl < 0.999 * alone.before.forward_kl
    ours, theirs = weights(Path(f"runs/{name}/student")), weights(Path(f"runs/{name}-alone/student"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype == (torch.bfloat16 if case == "bf16" else torch.float32)
        torch.testing.assert_close(ours[key], value, rtol=loose, atol=loose, msg=key)
    AutoModelForCausalLM.from_pretrained(f"runs/{name}/student")
    if case == "lora":
        assert Path(f"runs/{name}/adapter/adapter_model.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_shards_end_as_one_process_does(workplace, monkeypatch, case):
    monkeypatch.chdir(workplace)
    hold_against_one(case, case, "cpu", 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("case", ["untied"])
def test_copies_after_shards_end_as_one_process_does(workplace, monkeypatch, case):
    monkeypatch.chdir(workplace)
    hold_against_one(f"{case}-ddp", case, "cpu", 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["", "-ddp"])
def test_two_gpus_end_as_one_does(workplace_on_gpus, monkeypatch, case, way):
    monkeypatch.chdir(workplace_on_gpus)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hold_against_one(case + way, case, "cuda", 1e-3)


@pytest.mark.full
@pytest.mark.parametrize("made", ["workplace", pytest.param("workplace_on_gpus", marks=pytest.mark.gpu)])
def test_resumed_shards_end_as_shards_left_alone(request, made):
    folder = request.getfixturevalue(made)
    ours, theirs = weights(folder / "runs/again/student"), weights(folder / "runs/tied/student")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


@pytest.mark.full
def test_one_process_logs_and_names_the_sharded_models(workplace, request):
    text = (workplace / "out.txt").read_text()
    made = {"tied", *chosen(request, "case")}
    assert text.count("devices     student sharded (FSDP2), teacher sharded (FSDP2)") == len(made) + 1
    kept = json.loads((workplace / "runs/tied/result.json").read_text())
    assert set(kept["answers"]) == {"teacher", "before", "after"}


if __name__ == "__main__":
    both(*sys.argv[1:])
    torch.distributed.destroy_process_group()
    exit_process(0)
