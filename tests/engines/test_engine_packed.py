"""Packed folders against real readers: vLLM on CPUs, and the package compressed-tensors through transformers.

`python -m scripts.engines install vllm` puts both there; without it these tests are skipped.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from engine_packed import MISSING
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe.quantise import Quantise
from distill.reports.packed_folder import PACKED, pack_folder
from scripts.engines import vllm

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not vllm.installed(), reason="python -m scripts.engines install vllm"),
]


IN_VLLM = (
    "plain-int4_g32",
    "compressed-tensors-int4_g32",
    "compressed-tensors-int4_g32-experts",
    "compressed-tensors-int4_g32-whole",
)
LAYOUTS_OF_FOLDERS = ("plain", "compressed-tensors")
EXPERTS = {"kind": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 4}
EXPERTS |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
NO_KERNEL = {  # of vLLM 0.32.0 on CPUs: the schemes are recognised, and nothing computes them
    "compressed-tensors-int8": "kernel that can implement the WNA16",
    "compressed-tensors-fp8": "kernel that can implement the ScaledMM",
    "compressed-tensors-nvfp4": "Marlin FP4 not available",
}


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    """Folders of students by layout and format, and their log-probabilities [S, V] as they were trained.

    `plain` is what a run saves; `experts` is a mixture of experts, whose routers and experts stay in 16 bits (all are
    active: 16 bits move a router's choice); `whole`
    keeps the first layer and all down projections.
    """
    place, found = tmp_path_factory.mktemp("packed"), {}
    tokenizer = tiny_tokenizer(300)
    ids = torch.randint(3, 300, (64,), generator=torch.Generator().manual_seed(0))
    torch.save(ids, place / "ids.pt")
    for folder in dict.fromkeys([*(f"compressed-tensors-{name}" for name in PACKED), *IN_VLLM]):
        layout, name = next(
            (each, folder.removeprefix(f"{each}-")) for each in LAYOUTS_OF_FOLDERS if folder.startswith(each)
        )
        name, _, kind = name.partition("-")
        shape = EXPERTS if kind == "experts" else {}
        model = tiny_model(tokenizer, seed=2, hidden=128, vocab_size=320, layers=3, **shape)  # vLLM wants heads of 32
        if name == "nvfp4":  # beyond what the scales of blocks reach without the global one of the matrix
            model.model.layers[1].mlp.up_proj.weight.data *= 200
        section = Quantise(format=name, modules={"0": "keep", "down_proj": "keep"} if kind == "whole" else {})
        weights = quantise_student(model, formats_of(model, section), learned=True)
        weights.scales.values.mul_(0.85)
        weights.round()
        if name == "int4_g32":
            assert 0.2 < float((weights.scales.values < 0).float().mean()) < 0.8, "scales of both signs"
        save_tiny(place / folder, model, tokenizer)
        weights.saved().write(place / folder)
        with torch.no_grad():
            found[folder] = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        if layout != "plain":
            pack_folder(place / folder)
    return place, found


def read_by(students, reader, names):
    """Return what the reader makes of folders: KL(student || folder), nats per token, or its message; by folder."""
    place, found = students
    command = [vllm.python(), Path(__file__).with_name("engine_packed.py"), reader, place / "ids.pt", place / "out.pt"]
    environment = vllm.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [*command, *(place / name for name in names)], env=environment, capture_output=True, text=True, timeout=1100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = torch.load(place / "out.pt")
    for name in names:
        if not isinstance(read[name], str):
            read[name] = float((found[name].exp() * (found[name] - read[name])).sum(-1).mean())
    return read


def test_compressed_tensors_decodes_the_trained_weights(students):
    """The rest is bfloat16 of the embedding and of norms."""
    names = [f"compressed-tensors-{name}" for name in PACKED]
    for name, kl in read_by(students, "transformers", names).items():
        print(f"{name}: KL {kl:.1e}")
        assert 0 <= kl < 5e-4, name


@pytest.fixture(scope="module")
def found_by_vllm(students):
    """One process for all folders: most of the time is vLLM's start."""
    return read_by(students, "vllm", [*IN_VLLM, *NO_KERNEL])


@pytest.mark.parametrize("name", IN_VLLM)
def test_vllm_computes_as_the_trained_students_do(found_by_vllm, name):
    """Scales have both signs."""
    found = found_by_vllm[name]
    if found == MISSING and not torch.cpu._is_avx512_supported():
        pytest.skip(MISSING)
    print(f"{name}: KL {found}")
    assert isinstance(found, float) and 0 <= found < 5e-4


@pytest.mark.parametrize("name, message", NO_KERNEL.items())
def test_vllm_has_no_kernel_for(found_by_vllm, name, message):
    found = found_by_vllm[name]
    assert isinstance(found, str) and re.search(message, found), found
