"""Files of quantised students: read back equal by the gguf package and by the layout of compressed-tensors."""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from distill_kernels.quantisation.formats import FORMATS
from distill_kernels.quantisation.packed_tensors import pack_codes, unpack_codes
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, GgufConfig

from distill.cli import run_command
from distill.models.dtypes import quantised_weights
from distill.models.precision.quantised_formats import formats_of
from distill.models.precision.quantised_student import quantise_student
from distill.recipe.quantise import Quantise
from distill.reports.gguf_file import FORMAT_OF, write_gguf
from distill.reports.packed_folder import pack_folder
from distill.reports.round_weights import Rounding, quantise_model

TEXT = "The teacher explains and the student listens. "


def save_quantised(folder, name, learned=True, scale=0.85, **more):
    """Write a student as a run does, with scales that no rule of the format would choose."""
    tokenizer = tiny_tokenizer(300)
    model = tiny_model(tokenizer, seed=2, vocab_size=320, **{"hidden": 64, **more})
    weights = quantise_student(model, formats_of(model, Quantise(format=name)), learned=learned)
    weights.scales.values.mul_(scale)
    weights.round()
    save_tiny(folder, model, tokenizer)
    quantised_weights(model).saved().write(folder)
    return model


@pytest.mark.plain("q4_0-qwen2-types2")
@pytest.mark.parametrize(
    "name, kind, types",
    [
        ("q4_0", "llama", {"Q4_0", "Q8_0"}),
        ("q8_0", "llama", {"Q8_0"}),
        ("q4_0", "qwen2", {"Q4_0", "Q8_0"}),
        ("q4_k", "llama", {"Q4_K", "Q6_K", "Q5_0", "Q8_0"}),  # rows of 128 and 256: whole blocks in one of them
        ("q4_k", "qwen2", {"Q4_K", "Q6_K"}),
    ],
)
def test_a_gguf_file_holds_the_trained_blocks(tmp_path, name, kind, types):
    wide = {"hidden": 256 if kind == "qwen2" else 128, "layers": 3} if name == "q4_k" else {}
    model = save_quantised(tmp_path / "student", name, kind=kind, **wide)
    summary = write_gguf(tmp_path / "student", tmp_path / "m.gguf", {"q4_k": "q4_k_m"}.get(name, name))
    assert summary.exact and abs(summary.kl) < 1e-9, "nothing is rounded again"
    own = dict(model.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, own[key]), key
    # the package itself, without transformers: one matrix whose rows are not interleaved
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == types | {"F32"}
    down = tensors["blk.1.ffn_down.weight"]
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(values, own["model.layers.1.mlp.down_proj.weight"].detach().numpy())


def test_other_types_of_a_quantised_student_are_rounded_and_say_so(tmp_path):
    save_quantised(tmp_path / "student", "q4_0")
    summary = write_gguf(tmp_path / "student", tmp_path / "m.gguf", "q8_0")
    assert not summary.exact and 0 < summary.kl < 1e-2


@pytest.mark.plain("q4_0-64")
@pytest.mark.parametrize("type, hidden", [("q4_0", 64), ("q4_k_m", 128)])
def test_an_untrained_student_is_rounded_as_a_converter_does(tmp_path, type, hidden):
    tokenizer = tiny_tokenizer(300)
    model = tiny_model(tokenizer, seed=2, hidden=hidden, vocab_size=320)
    save_tiny(tmp_path / "student", model, tokenizer)
    summary = write_gguf(tmp_path / "student", tmp_path / "m.gguf", type)
    assert not summary.exact and 1e-4 < summary.kl < 1
    quantise_student(model, formats_of(model, Quantise(format=FORMAT_OF[type])))
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[key]), "the same rounding as in training"


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_come_back(bits):
    low = -(1 << (bits - 1))
    codes = torch.randint(low, -low, (7, 41), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (7, -(-41 * bits // 32))
    assert torch.equal(unpack_codes(packed, bits, 41), codes)
    # from the lowest bits up, offset by half the range
    first = int(packed[0, 0]) & 0xFFFFFFFF
    assert [(first >> bits * at) % (1 << bits) + low for at in range(32 // bits)] == codes[0, : 32 // bits].tolist()


RECIPE = """
teacher: {{model: ./teacher}}
student: {{model: ./student, quantise: {{format: {format}}}}}
data: {{source: rows.jsonl, max_length: 64, cache: false, validation: {{fraction: 0.1}}}}
train: {{steps: 2, batch_size: 4, tokens_per_step: 256, learning_rate: 3e-3, device: cpu}}
generate: {{prompts: []}}
"""


TEACHER = {"tokens": 300, "vocab_size": 320, "hidden": 64, "seed": 1}
pytestmark = pytest.mark.place(
    files={"rows.jsonl": [{"text": f"{TEXT * 3}{number}"} for number in range(120)]},
    teacher=TEACHER,
    student=TEACHER | {"seed": 2},
)


@pytest.fixture
def workplace(workplace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    return workplace


def train(format, *settings):
    path = f"{format}.yaml"
    with open(path, "w") as file:
        file.write(RECIPE.format(format=format))
    assert run_command(["run", path, *settings]) == 0
    return f"runs/{format}/student"


def test_export_writes_what_was_trained(workplace, tmp_path, capsys):
    student = train("q4_0")
    assert run_command(["verify", "q4_0"]) == 0
    capsys.readouterr()
    assert run_command(["check", "q4_0.yaml", f"student.model={student}"]) == 0, capsys.readouterr()
    capsys.readouterr()
    assert run_command(["export", "q4_0", "-o", "out", "--gguf", "q4_0"]) == 0
    assert re.search(r"the blocks it trained with cost a KL of -?0\.0e\+00 nats per token", capsys.readouterr().out)
    own = load_file(f"{student}/model.safetensors")
    assert all(torch.equal(value, own[key]) for key, value in load_file("out/model.safetensors").items())
    assert json.loads((tmp_path / "out" / "quantised.json").read_text())["tensors"]
    for folder in (student, "out"):  # vLLM reads the files of an index, else all, and knows no scales
        places = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert places == dict.fromkeys(own, "model.safetensors")
    for arguments, message in (
        (["--dtype", "bfloat16"], "--dtype: a quantised student's weights are its file's in float32"),
        (
            ["--format", "compressed-tensors"],
            "--format: compressed-tensors holds weights in int4_g32, int8, fp8, nvfp4, and this",
        ),
        (["--format", "zip"], "--format: expected safetensors or compressed-tensors, got 'zip'"),
        (["--format", "awq"], "--format: AutoAWQ's layout was removed; use compressed-tensors"),
        (
            ["--format", "compressed-tensors", "--gguf", "q4_0"],
            "--format: compressed-tensors and a GGUF file hold other",
        ),
    ):
        assert run_command(["export", "q4_0", "-o", "other", *arguments]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "other").exists()
    changed = load_file(f"{student}/model.safetensors")
    changed["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(changed, f"{student}/model.safetensors", metadata={"format": "pt"})
    for name in ("result.json", "manifest.json"):  # which have checksums, as runs of earlier versions do not
        (tmp_path / "runs/q4_0" / name).unlink()
    assert run_command(["export", "q4_0", "-o", "other", "--gguf", "q4_0"]) == 2
    assert "was trained in q4_0, and its weights are not" in capsys.readouterr().err


ADAPTER = (
    "student.lora={r: 4, targets: [q_proj, v_proj, down_proj]}",
    "student.quantise.modules={1.mlp.down_proj: keep}",  # an adapter on a weight that is not quantised
    "train.save_every=2",
)


@pytest.mark.full
@pytest.mark.parametrize(
    "format, arguments, reads",
    [
        ("q4_0", ["--gguf", "q4_0"], None),
        pytest.param(
            "nvfp4",
            ["--format", "compressed-tensors"],
            lambda form, found: form.unpack(found),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_checkpoint_of_an_adapter_exports_the_merged_weights_that_were_trained(
    workplace, tmp_path, format, arguments, reads, capsys
):
    """Base and adapter alone do not give them: rounding moved the base at the start, and scales were trained."""
    own = load_file(f"{train(format, *ADAPTER)}/model.safetensors")
    formats = json.loads((tmp_path / "runs" / format / "student" / "quantised.json").read_text())["tensors"]
    assert not (tmp_path / "runs" / format / "checkpoint-2" / "model.safetensors").exists()
    capsys.readouterr()
    assert run_command(["export", f"runs/{format}/checkpoint-2", "-o", "whole"]) == 0
    assert all(torch.equal(value, own[key]) for key, value in load_file("whole/model.safetensors").items())
    assert run_command(["export", f"runs/{format}/checkpoint-2", "-o", "out", *arguments]) == 0
    kl = float(re.findall(r"a KL of (\S+) nats", capsys.readouterr().out)[0])
    assert abs(kl) < (1e-6 if reads is None else 1e-3), "embedding and norms are in 16 bits outside of GGUF"
    for key in (key for key in formats if "_proj" in key and key.endswith(("down_proj.weight", "o_proj.weight"))):
        if reads is None:
            name = key.replace("model.layers", "blk").replace("mlp.down_proj", "ffn_down")
            name = name.replace("self_attn.o_proj", "attn_output")
            tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "out-q4_0.gguf").tensors}
            read = torch.from_numpy(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type))
        else:
            module = key.removesuffix("weight")
            packed = load_file("out/model.safetensors")
            tensors = {name.removeprefix(module): part for name, part in packed.items() if name.startswith(module)}
            read = reads(FORMATS[format], tensors)
        assert torch.equal(read, own[key]), key
    (tmp_path / "runs" / format / "checkpoint-2" / "quantised_codes.safetensors").unlink()
    assert run_command(["eval", f"runs/{format}/checkpoint-2", "--teacher", "./teacher", "--data", "rows.jsonl"]) == 2
    assert "expected quantised_codes.safetensors, the rounded weights" in capsys.readouterr().err


LAYOUTS = {
    "int4_g32": ("pack-quantized", 4, "int", "group", 32),
    "int8": ("pack-quantized", 8, "int", "channel", None),
    "fp8": ("float-quantized", 8, "float", "channel", None),
    "nvfp4": ("nvfp4-pack-quantized", 4, "float", "tensor_group", 16),
}


@pytest.mark.plain("fp8")
@pytest.mark.parametrize("format", LAYOUTS)
def test_packed_weights_are_those_that_were_trained(workplace, format, capsys):
    student = train(format)
    assert run_command(["export", format, "-o", "out", "--format", "compressed-tensors"]) == 0
    kl = float(re.search(r"read back and compared: a KL of (\S+) nats", capsys.readouterr().out)[1])
    assert 0 <= kl < 1e-3, "bfloat16 of the embedding and of norms"
    own, packed = load_file(f"{student}/model.safetensors"), load_file("out/model.safetensors")
    with open("out/config.json") as file:
        config = json.load(file)["quantization_config"]
    (group,) = config["config_groups"].values()
    layout, bits, kind, strategy, size = LAYOUTS[format]
    assert (config["format"], config["ignore"], group["targets"]) == (layout, ["lm_head"], ["Linear"])
    weights = group["weights"]
    assert [weights[key] for key in ("num_bits", "type", "strategy", "group_size")] == [bits, kind, strategy, size]
    layers = [key for key in own if "_proj" in key]
    assert len(layers) == 14
    for key in layers:
        module = key.removesuffix("weight")
        tensors = {name.removeprefix(module): part for name, part in packed.items() if name.startswith(module)}
        assert torch.equal(FORMATS[format].unpack(tensors), own[key])
        if layout == "pack-quantized":  # by the layout's own words
            codes = unpack_codes(tensors["weight_packed"], bits, own[key].shape[1]).float()
            scale = tensors["weight_scale"]
            assert scale.dtype == torch.bfloat16 and tensors["weight_shape"].tolist() == list(own[key].shape)
            values = codes.unflatten(-1, (scale.shape[1], -1)) * scale.float()[..., None]
            assert torch.equal(values.flatten(-2), own[key]) and key not in packed


@pytest.mark.full
def test_rounding_without_training_is_judged_like_a_student(workplace, tmp_path, capsys):
    found = {}
    for method in ("nearest", "importance", "gptq"):
        data = [] if method == "nearest" else ["--data", "rows.jsonl", "--max-length", "64"]
        named = "rtn" if method == "nearest" else method  # round to nearest, as papers call it
        assert run_command(["quantise", "./student", "-o", method, "--method", named, *data]) == 0
        assert f"wrote {method}: 15 matrices rounded to q4_0, {15 if method == 'nearest' else 14} by {method}" in (
            capsys.readouterr().out
        )
        judge = ["eval", method, "--teacher", "./student", "--data", "rows.jsonl", "--max-rows", "64", "--json"]
        assert run_command(judge) == 0
        found[method] = json.loads(capsys.readouterr().out)["figures"]["forward_kl"]["value"]
    assert found["gptq"] < 0.5 * min(found["nearest"], found["importance"]), found
    assert run_command(["quantise", "./student", "-o", "packed", "--data", "rows.jsonl", "--pack"]) == 0
    assert "packed as packed/packed-q4_0.gguf, read back and equal: a KL of" in capsys.readouterr().out
    assert (tmp_path / "packed" / "packed-q4_0.gguf").is_file()
    for arguments, message in (
        (["-f", "q5_1"], "--format: expected one of q4_0, q5_0, q8_0, q4_k, q6_k, int4_g32, int8, fp8, nvfp4, got 'q"),
        (["--method", "hqq"], "--method: expected one of nearest, rtn, importance, gptq, got 'hqq'"),
        (["--method", "awq"], "--method: awq was removed; use gptq"),
        ([], "--data: required for a model with --method gptq; only a run has training rows"),
        *(
            (["-f", form, "--method", method], f"{method} rounds layers in less than 8 bits; expected nearest with")
            for form in ("q8_0", "int8", "fp8")
            for method in ("importance", "gptq")
        ),
        (["--method", "nearest", "--data", "rows.jsonl"], "--data: nearest calibrates on nothing"),
        (["--max-length", "9"], "--max-length: expected together with --data"),
    ):
        assert run_command(["quantise", "./student", "-o", "other", *arguments]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "other").exists()
    assert run_command(["quantise", "./student", "-o", "gptq", "--method", "nearest"]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("methods", [[None], pytest.param(["importance", "nearest"], marks=pytest.mark.full)])
def test_every_format_is_rounded_by_every_method_that_it_has(tmp_path, monkeypatch, methods, capsys):
    """And packed where there is a file of it; what cannot be is refused in the test above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    tokenizer = tiny_tokenizer(300)
    model = tiny_model(tokenizer, seed=2, hidden=64, layers=1, vocab_size=320)
    save_tiny(tmp_path / "narrow", model, tokenizer)
    shape = {"hidden": 256, "intermediate_size": 256, "layers": 1, "vocab_size": 320}
    save_tiny(tmp_path / "wide", tiny_model(tokenizer, seed=2, **shape), tokenizer)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"{TEXT * 3}{n}"}) for n in range(24)))
    rows = ["--data", "rows.jsonl", "--max-length", "64", "--tokens", "128"]
    for name, form in FORMATS.items():
        folder = "wide" if name in ("q4_k", "q6_k") else "narrow"
        for method in methods if form.is_learned else [None]:
            data = rows * (form.is_learned and method != "nearest")
            output = f"{name}-{method}"
            arguments = ["-f", name, *(["--method", method] if method else []), *data, "--pack"]
            assert run_command(["quantise", folder, "-o", output, *arguments]) == 0, output
            printed = capsys.readouterr().out
            assert f"matrices rounded to {name}" in printed and f" 0 by {method}" not in printed, printed
            assert float(re.search(r"a KL of (\S+) nats", printed)[1]) < 1e-3, printed
    assert list(tmp_path.glob("q4_k-*/*q4_k_m.gguf"))


def test_a_file_that_cannot_be_written_is_refused_before_the_rounding(tmp_path):
    """GPTQ without rows would be the next refusal."""
    tokenizer = tiny_tokenizer(300)
    model = tiny_model(tokenizer, hidden=64, kind="gemma2")
    with pytest.raises(ValueError, match="--gguf: not supported: models of type 'gemma2'"):
        quantise_model(model, tokenizer, tmp_path / "out", Rounding(Quantise(format="q4_0"), "gptq", []), pack=True)
    with pytest.raises(ValueError, match="gptq needs rows"):
        quantise_model(model, tokenizer, tmp_path / "out", Rounding(Quantise(format="q4_0"), "gptq", []))


def test_a_rounded_folder_is_exported_like_a_run(workplace, tmp_path, capsys):
    assert run_command(["quantise", "./student", "-o", "rounded", "--method", "rtn", "-f", "int4_g32"]) == 0
    capsys.readouterr()
    assert run_command(["export", "rounded", "-o", "packed", "--format", "compressed-tensors"]) == 0
    assert float(re.search(r"read back and compared: a KL of (\S+) nats", capsys.readouterr().out)[1]) < 1e-3
    own, packed = load_file("rounded/model.safetensors"), load_file("packed/model.safetensors")
    module = "model.layers.1.mlp.up_proj."
    tensors = {name.removeprefix(module): part for name, part in packed.items() if name.startswith(module)}
    assert torch.equal(FORMATS["int4_g32"].unpack(tensors), own[f"{module}weight"])
    assert run_command(["export", "student", "-o", "whole", "--gguf", "q4_0"]) == 0, "a model's folder, too"
    assert "rounding its weights to q4_0 costs a KL of" in capsys.readouterr().out
    assert run_command(["export", "packed", "-o", "again"]) == 2
    assert "is quantised (compressed-tensors)" in capsys.readouterr().err


def test_a_packed_mixture_of_experts_keeps_the_names_of_its_files(tmp_path):
    """Readers find experts and routers in 16 bits: by the names that they have in files, which the model joins."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    save_quantised(tmp_path / "m", "int4_g32", kind="mixtral", **experts)
    before = load_file(tmp_path / "m" / "model.safetensors")
    assert pack_folder(tmp_path / "m") < 1e-2
    after = load_file(tmp_path / "m" / "model.safetensors")
    kept = {name for name in before if "experts" in name or name.endswith("gate.weight")}
    assert len(kept) == 2 * (4 * 3 + 1) and all(torch.equal(after[name], before[name].bfloat16()) for name in kept)
    assert {name.rpartition(".")[2] for name in after.keys() - before.keys()} == {
        "weight_packed",
        "weight_scale",
        "weight_shape",
    }
    others = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name in kept} | {"lm_head"} <= set(others)


@pytest.mark.full
def test_a_run_is_rounded_on_its_own_rows(workplace, capsys):
    train("int4_g32")
    capsys.readouterr()
    assert (
        run_command(["quantise", "int4_g32", "-o", "out", "-f", "int4_g32", "--tokens", "256", "--pack", "--json"]) == 0
    )
    written = json.loads(capsys.readouterr().out)
    assert (written["matrices"], written["by_method"], written["file"]) == (14, 14, "out") and written["kl"] < 1e-3
