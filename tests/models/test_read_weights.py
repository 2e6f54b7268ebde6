"""Files that are not the model's weights: what is absent, what nothing reads, what has another shape is named."""

import json
import re
import shutil

import gguf
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_quantised import BITNET
from test_quantised import saved as quantised
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from distill.cli import run_command
from distill.evaluation.targets import find_target, load_merged
from distill.models.loading import load_student, load_teacher
from distill.models.meta_models import weights_problem
from distill.recipe import LocalTeacherConfig, Student
from distill.reports.gguf_file import write_gguf
from distill.teachers.backends.served.vllm_hidden import load_ends

MOE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 2,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LOST = "model.layers.1.self_attn.q_proj.weight"
RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 1, batch_size: 2, warmup: 0, device: cpu}
generate: {prompts: []}
"""


def edit(folder, change):
    """Have `change` edit the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def saved(folder, kind="llama", **more):
    torch.manual_seed(0)
    if kind == "mixtral":
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MOE)).save_pretrained(folder)
        return folder
    return save_tiny(folder, tiny_model(kind=kind, **more))


def fault(folder):
    """Return the reason for refusing a folder: the same as a teacher, as a student, and by the headers alone."""
    said = []
    for load, section in ((load_teacher, LocalTeacherConfig), (load_student, Student)):
        with pytest.raises(ValueError) as raised:
            load(section(model=str(folder)))
        said.append(str(raised.value))
    assert said[1] == said[0].replace("teacher.model", "student.model") and "\n" not in said[0]
    assert weights_problem(LocalTeacherConfig(model=str(folder)), "teacher") == said[0]
    return said[0].partition(": cannot load ")[2].partition(": ")[2]


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


def test_a_tensor_that_the_files_lack_is_named(tmp_path):
    assert fault(edit(saved(tmp_path / "m"), drop(LOST))).startswith(f"its files lack {LOST}, which would be drawn at")
    folder = saved(tmp_path / "many", tie=False)
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    lacking = "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj"
    assert fault(folder).startswith(f"its files lack {lacking}.weight and 6 other tensors, which")
    assert fault(edit(saved(tmp_path / "head", tie=False), drop("lm_head.weight"))).startswith("its files lack lm_head")


def test_a_tensor_in_a_file_of_several_is_missed_too(tmp_path):
    folder = tmp_path / "m"
    tiny_model(seed=1).save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"].pop(LOST)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(path)
    del tensors[LOST]
    save_file(tensors, path, metadata={"format": "pt"})
    assert fault(folder).startswith(f"its files lack {LOST}, ")


def test_files_beside_the_weights_are_not_held_against_the_model(tmp_path):
    """Scales of a quantised student lie in such a file, and the original layout of some models."""
    one, several = saved(tmp_path / "one"), tmp_path / "several"
    tiny_model(seed=1).save_pretrained(several, max_shard_size="20KB")
    for folder in (one, several):
        save_file({f"{LOST}:scale": torch.ones(32)}, folder / "quantised_scales.safetensors")
        save_file({"layers.0.attention.wq.weight": torch.ones(32)}, folder / "consolidated.safetensors")
        assert weights_problem(LocalTeacherConfig(model=str(folder)), "teacher") is None
    edit(one, drop(LOST))
    assert LOST in (weights_problem(LocalTeacherConfig(model=str(one)), "teacher") or "")


def test_what_the_model_does_not_have_is_named(tmp_path):
    foreign = "model.layers.1.self_attn.q_proj.bias"
    said = fault(edit(saved(tmp_path / "m"), put(foreign, 32)))
    assert said.startswith(f"its files hold {foreign}, which a LlamaForCausalLM does not have; ")
    assert "model.layers.2.mlp.up_proj.weight" in fault(
        edit(saved(tmp_path / "n"), put("model.layers.2.mlp.up_proj.weight", 64, 32))
    )


def test_a_different_shape_is_reported_with_both_shapes(tmp_path):
    said = fault(edit(saved(tmp_path / "m"), put(LOST, 16, 32)))
    assert said == f"{LOST}: expected the shape [32, 32] of config.json, got [16, 32] in its files"


@pytest.mark.parametrize(
    "change, said",
    [
        (
            drop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
            "model.layers.0.mlp.experts.down_proj: expected the shape [4, 32, 32] of config.json, got [3, 32, 32] in",
        ),
        (
            drop("model.layers.1.block_sparse_moe.experts.2.w1.weight"),
            "model.layers.1.mlp.experts.gate_up_proj: the tensors in its files do not make it up",
        ),
        (
            put("model.layers.0.block_sparse_moe.experts.4.w9.weight", 4),
            "its files hold model.layers.0.mlp.experts.4.w9.weight, which a MixtralForCausalLM",
        ),
    ],
    ids=["an expert's", "half an expert's", "an unknown one"],
)
def test_weights_that_are_made_of_several_tensors(tmp_path, change, said):
    folder = saved(tmp_path / "m", "mixtral")
    assert weights_problem(Student(model=str(folder)), "student") is None
    assert fault(edit(folder, change)).startswith(said)


def test_tied_heads_buffers_and_masks_may_be_absent_or_there(tmp_path, caplog):
    """Published checkpoints have them either way: a tied head, rotary frequencies, causal masks of early GPT-2."""
    plain = tiny_model(seed=1)
    for number, tensors in enumerate(
        (
            {"lm_head.weight": plain.lm_head.weight.detach().clone()},
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        )
    ):
        folder = edit(save_tiny(tmp_path / str(number), plain), lambda found, tensors=tensors: found.update(tensors))
        loaded = load_teacher(LocalTeacherConfig(model=str(folder)))
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())
        assert weights_problem(LocalTeacherConfig(model=str(folder)), "teacher") is None
    early = edit(saved(tmp_path / "gpt2", "gpt2"), put("h.0.attn.bias", 1, 1, 512, 512))
    load_student(Student(model=str(early)))
    assert weights_problem(Student(model=str(early)), "student") is None
    assert not caplog.text


def test_heads_for_later_tokens_stay_unread_with_a_line(tmp_path, caplog):
    more = {"num_nextn_predict_layers": 1}
    folder = edit(saved(tmp_path / "m", **more), put("model.layers.2.eh_proj.weight", 32, 64))
    load_teacher(LocalTeacherConfig(model=str(folder)))
    assert "teacher.model: not read: model.layers.2.eh_proj.weight (heads for several tokens at once)" in caplog.text
    assert "model.layers.3.eh_proj.weight" in fault(edit(folder, put("model.layers.3.eh_proj.weight", 32, 64)))


def multimodal(folder):
    """A checkpoint of a vision and a language model of which AutoModelForCausalLM makes the language model."""
    text = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 2,
    }
    vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    text_alone = AutoModelForCausalLM.from_config(config)
    text_alone.save_pretrained(folder)
    config.save_pretrained(folder)
    return folder, text_alone


def test_other_modalities_stay_unread_where_text_is_loaded_alone(tmp_path, caplog):
    folder, alone = multimodal(tmp_path / "m")
    edit(folder, put("audio_tower.layers.0.weight", 4))
    loaded = load_teacher(LocalTeacherConfig(model=str(folder)))
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert "not read: audio_tower.layers.0.weight (other modalities; the model is loaded for text alone)" in caplog.text
    name = "model.layers.0.mlp.extra_proj.weight"
    assert f"its files hold {name}, " in fault(edit(folder, put(name, 4)))
    edit(folder, drop(name))
    assert "its files lack" in fault(edit(folder, drop("model.layers.0.mlp.up_proj.weight")))


def test_more_figures_of_a_quantised_checkpoint_stay_unread_with_a_line(tmp_path, caplog):
    folder = quantised(tmp_path / "m", BITNET | {"modules_to_not_convert": ["lm_head"]})
    edit(tmp_path / "m", put("model.layers.0.self_attn.k_proj.k_scale", 1))
    load_teacher(LocalTeacherConfig(model=folder))
    assert "not read: model.layers.0.self_attn.k_proj.k_scale (scales and the like" in caplog.text
    edit(tmp_path / "m", put("model.layers.0.self_attn.r_proj.weight", 4))
    with pytest.raises(ValueError, match=r"its files hold model\.layers\.0\.self_attn\.r_proj\.weight, which a"):
        load_teacher(LocalTeacherConfig(model=folder))
    edit(tmp_path / "m", drop("model.layers.0.self_attn.r_proj.weight"))
    edit(tmp_path / "m", drop(LOST))
    with pytest.raises(ValueError, match=rf"its files lack {re.escape(LOST)}, which would be drawn"):
        load_teacher(LocalTeacherConfig(model=folder))


def gguf_with(folder, change):
    """A GGUF file of a tiny model whose tensors `change` has edited."""
    tokenizer = tiny_tokenizer(300)
    write_gguf(save_tiny(folder / "m", tiny_model(tokenizer), tokenizer), folder / "whole.gguf", "f32")
    reader = gguf.GGUFReader(folder / "whole.gguf")
    writer = gguf.GGUFWriter(folder / "edited.gguf", "llama")
    for key, part in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, part.contents(), part.types[0], part.types[-1] if len(part.types) > 1 else None)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    change(tensors)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "edited.gguf"


def test_a_gguf_file_is_held_to_the_model(tmp_path, caplog):
    def load(name, change):
        (tmp_path / name).mkdir()
        return load_teacher(LocalTeacherConfig(model=str(gguf_with(tmp_path / name, change))))

    load("whole", lambda tensors: None)
    with pytest.raises(ValueError, match=rf"its files lack {re.escape(LOST)}, which would be drawn at random"):
        load("absent", drop("blk.1.attn_q.weight"))
    with pytest.raises(ValueError, match=r"the file holds blk\.1\.attn_q_norm, which transformers does not read"):
        load("more", lambda tensors: tensors.update({"blk.1.attn_q_norm.weight": tensors["blk.0.attn_norm.weight"]}))
    assert "does not read" not in caplog.text
    load("rope", lambda tensors: tensors.update({"rope_freqs.weight": tensors["blk.0.attn_norm.weight"][:4]}))
    assert "teacher.model: transformers does not read rope_freqs of a GGUF file" in caplog.text


def test_every_place_that_loads_a_model_refuses(tmp_path, monkeypatch, capsys):
    """A run, its check, doctor and server, as teacher and as student; evaluation and export; the ends for vLLM."""
    monkeypatch.chdir(tmp_path)
    save_models(
        tmp_path,
        text="The teacher explains and the student listens to it.\n" * 40,
        teacher={"seed": 1},
        student={"layers": 1},
    )
    (tmp_path / "r.yaml").write_text(RECIPE)
    shutil.copytree("teacher", "whole")
    edit(tmp_path / "teacher", drop(LOST))

    def refused(*arguments):
        assert run_command(list(arguments)) in (1, 2)
        return capsys.readouterr()

    said = f"cannot load teacher: its files lack {LOST}, "
    assert f"teacher.model: {said}" in refused("run", "r.yaml").err
    assert not (tmp_path / "runs/r").exists()
    assert f"teacher.model: {said}" in "".join(refused("check", "r.yaml")).replace("\n", " ")
    assert said in "".join(refused("doctor", "r.yaml"))
    assert said in "".join(refused("serve", "teacher", "--port", "18431"))
    assert said in "".join(refused("eval", "student", "--teacher", "teacher", "--data", "text.txt"))
    turned = ("teacher.model=whole", "student.model=teacher")
    assert f"student.model: {said}" in refused("run", "r.yaml", *turned).err
    assert f"student.model: {said}" in "".join(refused("check", "r.yaml", *turned)).replace("\n", " ")
    with pytest.raises(ValueError, match="its files lack"):
        load_merged(find_target("teacher"), "cpu", None)
    edit(tmp_path / "teacher", drop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"its files lack model\.norm\.weight"):
        load_ends(LocalTeacherConfig(model="teacher"), torch.float32)


def test_an_adapter_that_lacks_a_weight_is_refused(tmp_path):
    base = saved(tmp_path / "base")
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop("base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"teacher\.adapter: .* does not fit its base model: .*layers\.1\.self_attn"):
        load_teacher(LocalTeacherConfig(model=str(base), adapter=str(tmp_path / "adapter")))
