"""Packed folders against real readers: vLLM on CPUs, and the package compressed-tensors through transformers.

`python -m scripts.engines install vllm` puts both there; without it these tests are skipped.
"""

import subprocess
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe.quantise import Quantise
from distill.reports.packed_folder import PACKED, pack_folder
from scripts.engines import vllm

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not vllm.installed(), reason="python -m scripts.engines install vllm"),
]


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    """Folders of students by layout and format, packed, and their log-probabilities [S, V] before."""
    place, found = tmp_path_factory.mktemp("packed"), {}
    tokenizer = tiny_tokenizer(300)
    ids = torch.randint(3, 300, (64,), generator=torch.Generator().manual_seed(0))
    torch.save(ids, place / "ids.pt")
    for layout, name in [*(("compressed-tensors", name) for name in PACKED), ("awq", "int4_g32")]:
        model = tiny_model(tokenizer, seed=2, hidden=128, vocab_size=320, layers=3)  # heads of 32, as vLLM wants
        model = model.eval()
        if name == "nvfp4":  # beyond what the scales of blocks reach without the global one of the matrix
            model.model.layers[1].mlp.up_proj.weight.data *= 200
        weights = quantise_student(model, formats_of(model, Quantise(format=name)), learned=True)
        weights.scales.values.mul_(0.85)
        weights.round()
        if name == "int4_g32":
            assert 0.2 < float((weights.scales.values < 0).float().mean()) < 0.8, "scales of both signs"
        folder = save_tiny(place / f"{layout}-{name}", model, tokenizer)
        weights.saved().write(folder)
        with torch.no_grad():
            found[folder.name] = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        pack_folder(folder, layout=layout)
    return place, found


def kl_of(students, reader, names):
    """Return KL(student || folder as the reader computes it), nats per token, by folder."""
    place, found = students
    command = [vllm.python(), Path(__file__).with_name("engine_packed.py"), reader, place / "ids.pt", place / "out.pt"]
    environment = vllm.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [*command, *(place / name for name in names)], env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = torch.load(place / "out.pt")
    return {name: float((found[name].exp() * (found[name] - read[name])).sum(-1).mean()) for name in names}


def test_compressed_tensors_decodes_the_trained_weights(students):
    """The rest is bfloat16 of the embedding and of norms."""
    names = [f"compressed-tensors-{name}" for name in PACKED]
    for name, kl in kl_of(students, "transformers", names).items():
        print(f"{name}: KL {kl:.1e}")
        assert 0 <= kl < 5e-4, name


@pytest.mark.parametrize("name", ["compressed-tensors-int4_g32", "awq-int4_g32"])
def test_vllm_computes_as_the_trained_student_does(students, name):
    """Scales have both signs; int8, fp8 and nvfp4 have no kernel for CPUs there."""
    (kl,) = kl_of(students, "vllm", [name]).values()
    print(f"{name}: KL {kl:.1e}")
    assert 0 <= kl < 5e-4
