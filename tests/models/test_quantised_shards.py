"""A quantised student in FSDP2 shards over two or three gloo processes trains, saves and resumes as in one process.

The file is also the program of the processes, which make all runs in one start.
"""

import os
import shutil
import sys
from pathlib import Path

import gguf
import pytest
import torch
import torch.distributed as dist
from grids import chosen
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import run_as_two

from distill.cli import run_command
from distill.core.ranks import exit_process
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import parse
from distill.recipe.quantise import Quantise
from distill.run import run

RECIPE = """
teacher: {model: teacher}
student: {model: student, quantise: {format: q4_0, calibration_tokens: 512}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 4, batch_size: 1, tokens_per_step: 64, learning_rate: 3e-3, warmup: 0, log_every: 2, device: cpu,
        save_every: 2, max_grad_norm: 0}
generate: {prompts: []}
"""
# gradients of two processes with a micro-batch each add up to the bits of one process's; those of three do not
CASES = {
    "q4_0": [],
    "nvfp4": ["student.quantise.format=nvfp4", "student.model=untied", "train.gradient_checkpointing=true"],
    "q4_k": ["student.quantise.format=q4_k", "student.model=wide"],
    "int8": ["student.quantise.format=int8"],
}
THREE = ["student.model=narrow", "train.tokens_per_step=96", "train.max_grad_norm=0.01"]
NARROW = {"hidden": 64, "head_dim": 2, "seed": 5}  # four rows of keys: three processes hold two, two and none
STATE = "quantised.safetensors"
FILES = ("model.safetensors", "quantised_scales.safetensors", STATE)


def each(folder, *names):
    """Body of each of the processes."""
    from accelerate.state import AcceleratorState, PartialState

    from distill.run_results import RunResults

    save = RunResults.save

    def save_shards(self, *more):
        layers = [p for name, p in self.trainer.model.named_parameters() if ".layers." in name]
        assert all(isinstance(p, DTensor) for p in layers), "not as asked"
        save(self, *more)

    def end():
        dist.barrier()
        AcceleratorState._reset_state()
        PartialState._shared_state.clear()

    RunResults.save = save_shards
    os.chdir(folder)
    torch.set_num_threads(1)
    for name in names:
        recipe = parse(RECIPE, [*CASES.get(name, THREE), "parallel.strategy=fsdp"])
        run(recipe, name=name)
        if dist.get_rank() == 0:  # as if it had been killed after step 2
            shutil.copytree(f"runs/{name}", f"runs/{name}-again")
            shutil.rmtree(f"runs/{name}-again/checkpoint-4")
            shutil.rmtree(f"runs/{name}-again/student")
            Path(f"runs/{name}-again/result.json").unlink()
        end()
        run(recipe, name=f"{name}-again", resume=True)
        end()


def narrow_student(*, sharded=False):
    model = tiny_model(**NARROW)
    return model, quantise_student(model, formats_of(model, Quantise(format="q4_0")), learned=True, sharded=sharded)


@torch.no_grad()
def states_of_three(folder):
    """Body of each of three processes: write the state of a student's rows, and that of a file that one has written."""
    model, weights = narrow_student(sharded=True)
    fully_shard(model)
    weights.use_shards(model)
    is_first = dist.get_rank() == 0
    keys = [matrix for name, matrix in weights.matrices.items() if name.endswith("k_proj.weight")]
    assert [len(matrix.base) for matrix in keys] == [[2, 2], [2, 2], [0, 0]][dist.get_rank()]
    for matrix in weights.matrices.values():
        matrix.parameter.grad = torch.ones_like(matrix.parameter)
    if is_first:
        keys[0].parameter.grad.to_local()[0, 0] = torch.nan
    before = weights.scales.values.clone()
    weights.before_step(0.1)
    weights.after_step()
    assert torch.equal(weights.scales.values, before), "what is not finite in one process counts in all"
    for name in ("of-three", "back"):
        (Path(folder) / name).mkdir(exist_ok=True)
        weights.save(Path(folder) / name if is_first else None)
        weights.restore(Path(folder) / "of-one")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, request):
    """The folder in which processes have made all runs in shards."""
    folder, tokenizer = tmp_path_factory.mktemp("shards"), tiny_tokenizer(300)
    for name, more in {
        "teacher": {"seed": 1},
        "student": {"seed": 2},
        "untied": {"seed": 3, "tie": False},
        "wide": {"seed": 4, "hidden": 128},
        "narrow": NARROW,
    }.items():
        save_tiny(folder / name, tiny_model(tokenizer, **{"hidden": 64, "vocab_size": 320} | more), tokenizer)
    lines = [f"{n * 7919 % 997} {'so ' * (n % 4)}the teacher explains {n * 31337 % 9973}" for n in range(60)]
    (folder / "text.txt").write_text("\n".join(lines))
    run_as_two(__file__, folder, "q4_0", *(name for name in chosen(request, "case") if name != "q4_0"), timeout=500)
    return folder


def alone(name):
    """The folder of the same run in one process."""
    folder = Path(f"runs/{name}-alone")
    if not folder.exists():
        run(parse(RECIPE, CASES.get(name, THREE)), name=folder.name)
    return folder


def tensors(folder):
    """All weights, scales and states of a student's or a checkpoint's folder, by file and name."""
    files = [folder / name for name in FILES if (folder / name).is_file()]
    found = {(file.name, key): tensor for file in files for key, tensor in load_file(file).items()}
    if folder.name != "student":  # checkpoints of shards hold tied weights twice
        found.pop(("model.safetensors", "lm_head.weight"), None)
    return found


def differing(ours, theirs):
    """The tensors of two folders that do not have the same bits."""
    ours, theirs = tensors(ours), tensors(theirs)
    assert ours.keys() == theirs.keys()
    return [key for key, value in theirs.items() if not torch.equal(ours[key], value)]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_shards_hold_the_bits_of_one_process(workplace, monkeypatch, case):
    monkeypatch.chdir(workplace)
    whole, shards = alone(case), Path(f"runs/{case}")
    for part in ("checkpoint-2", "checkpoint-4", "student"):
        assert differing(shards / part, whole / part) == []
    trained = {key for key in differing(shards / "checkpoint-2", shards / "checkpoint-4") if key[0] == STATE}
    assert trained >= {key for key in tensors(whole / "checkpoint-4") if key[1].startswith("master.")}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_resumed_shards_end_with_the_same_bits(workplace, case):
    for part in ("checkpoint-4", "student"):
        assert differing(workplace / f"runs/{case}-again" / part, workplace / f"runs/{case}" / part) == []


def values_of(folder):
    """The tensors of an exported folder: those of its GGUF file, else of its packed weights."""
    if paths := list(folder.glob("*.gguf")):
        return {each.name: (each.tensor_type, each.data.tobytes()) for each in gguf.GGUFReader(paths[0]).tensors}
    packed = load_file(folder / "model.safetensors")
    return {name: (each.dtype, each.contiguous().view(torch.uint8).tolist()) for name, each in packed.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    "case, source, how, tensor",
    [
        ("q4_0", "student", ["--gguf", "q4_0"], "blk.1.attn_q.weight"),
        ("q4_0", "checkpoint-4", ["--gguf", "q4_0"], "blk.1.attn_q.weight"),
        ("nvfp4", "student", ["--format", "compressed-tensors"], "model.layers.1.self_attn.q_proj.weight_packed"),
    ],
)
def test_shards_export_the_file_of_one_process(workplace, monkeypatch, case, source, how, tensor):
    monkeypatch.chdir(workplace)
    alone(case)
    for name in (case, f"{case}-alone"):
        target = name if source == "student" else f"runs/{name}/{source}"
        assert run_command(["export", target, "-o", f"{source}-{name}", *how]) == 0
    ours, theirs = values_of(Path(f"{source}-{case}")), values_of(Path(f"{source}-{case}-alone"))
    assert ours == theirs and tensor in theirs


@pytest.mark.full
def test_rows_that_three_processes_share_unevenly_end_as_one_process(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    run_as_two(__file__, workplace, "three", timeout=500, processes=3)
    assert differing(Path("runs/three-again/student"), Path("runs/three/student")) == []
    ours, theirs = (load_file(folder / "checkpoint-4" / STATE) for folder in (Path("runs/three"), alone("three")))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_states_are_written_and_read_by_any_number_of_processes(tmp_path):
    (tmp_path / "of-one").mkdir()
    _, weights = narrow_student()
    weights.save(tmp_path / "of-one")
    start = load_file(tmp_path / "of-one" / STATE)
    weights.scales.values.mul_(0.9)
    for matrix in weights.matrices.values():
        matrix.base.mul_(1.1)
    weights.save(tmp_path / "of-one")
    changed = load_file(tmp_path / "of-one" / STATE)
    run_as_two(__file__, tmp_path, "states", processes=3)
    for name, expected in (("of-three", start), ("back", changed)):
        found = load_file(tmp_path / name / STATE)
        assert found.keys() == expected.keys()
        for key in ("scales", *(key for key in expected if key.startswith("master."))):
            assert torch.equal(found[key], expected[key]), (name, key)


@pytest.mark.full
@pytest.mark.parametrize(
    "adapters, expected", [("null", "fsdp"), pytest.param("{r: 16}", "ddp", marks=pytest.mark.full)]
)
def test_a_student_that_does_not_fit_is_sharded_unless_it_has_adapters(adapters, expected):
    llama = "{config: llama-3.1-8b, init: random"
    recipe = parse(
        f"teacher: {llama}, dtype: bfloat16}}\nstudent: {llama}, lora: {adapters}, quantise: {{format: q4_k}}}}\n"
        "data: {source: synthetic, max_length: 2048}\ntrain: {steps: 1, batch_size: 1, precision: bfloat16}"
    )
    report = check_run(recipe, find_device("H100"), gpus=8, read_data=False)
    assert report.strategy.partition(",")[0] == expected and report.fits is (expected == "fsdp")


if __name__ == "__main__":
    if sys.argv[2] == "states":
        dist.init_process_group("gloo")
        states_of_three(sys.argv[1])
    else:
        each(*sys.argv[1:])
    dist.destroy_process_group()
    exit_process(0)
