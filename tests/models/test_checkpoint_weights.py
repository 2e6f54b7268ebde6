"""Resuming models whose files name their weights otherwise than their modules do: equal to the bit, or refused."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_trainer import arguments, rows
from tiny import save_tiny, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from distill.cli import run_command
from distill.core.errors import RunError
from distill.models.load.fingerprint import fingerprint
from distill.training.checkpoints import load_weights
from distill.training.trainer import DistillationTrainer

COMMON = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.15,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "deepseek_v2": ROUTED
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "deepseek_v3": ROUTED
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": ROUTED,
    "olmoe": EXPERTS,
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "minimax_m2": EXPERTS | {"rotary_dim": 8},
    "granitemoehybrid": EXPERTS | MAMBA | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
    },
    "nemotron_h": ROUTED
    | {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": LINEAR,
    "gpt_neox": {},
}


def made(kind):
    """A tiny model with random weights."""
    if kind == "gemma3 with vision":
        text = COMMON | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
        config = AutoConfig.for_model("gemma3", text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    else:
        config = AutoConfig.for_model(kind, **(COMMON | FAMILIES[kind]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trainer(folder, kind, lora=None, **settings):
    """A student and a teacher that differs from it a little."""
    student, teacher = made(kind), made(kind)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.05)
    if lora is not None:
        student = get_peft_model(student, LoraConfig(r=2, target_modules=lora, init_lora_weights="gaussian"))
    return DistillationTrainer(
        student, teacher, arguments(folder, **settings), train_dataset=rows(ragged=False), eval_dataset=rows(4, seed=1)
    )


@pytest.mark.plain("mixtral")
@pytest.mark.parametrize("kind", [*FAMILIES, "gemma3 with vision"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind):
    whole = trainer(tmp_path / "whole", kind, save_strategy="steps", save_steps=2)
    begun = fingerprint(whole.model)
    whole.train()
    names = set(load_file(tmp_path / "whole/checkpoint-2/model.safetensors"))
    assert names - set(whole.model.state_dict()), "this family's files name weights as its modules do"
    resumed = trainer(tmp_path / "resumed", kind)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert begun != fingerprint(resumed.model) == fingerprint(whole.model)


RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, save_every: 2, device: cpu}
generate: {prompts: []}
"""


@pytest.mark.full
def test_a_run_of_a_mixture_of_experts_from_start_to_export(tmp_path, monkeypatch, capsys):
    """Stopped half way, resumed, verified and exported: the weights of a run that went through."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "teacher", made("mixtral"))
    student = made("mixtral")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(0.9)
    save_tiny(tmp_path / "student", student)
    text = "\n".join(f"The teacher explains line {line} and the student listens to it." for line in range(40))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert run_command(["run", "r.yaml", "--name", "whole"]) == 0
    shutil.copytree("runs/whole", "runs/again")
    for name in ("checkpoint-4", "student"):
        shutil.rmtree(f"runs/again/{name}")
    (tmp_path / "runs/again/result.json").unlink()
    assert run_command(["run", "r.yaml", "--name", "again", "--resume"]) == 0
    assert run_command(["verify", "again"]) == 0, capsys.readouterr().out
    assert run_command(["export", "again", "-o", "out"]) == 0
    ours, theirs = (load_file(f"{place}/model.safetensors") for place in ("out", "runs/whole/student"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    lost = theirs.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")
    assert lost.isfinite().all()
    (tmp_path / "runs/again/result.json").unlink()
    save_file(theirs, "runs/again/student/model.safetensors", {"format": "pt"})
    assert run_command(["verify", "again"]) == 1
    assert "model.layers.1.mlp.experts.down_proj: expected the shape" in " ".join(capsys.readouterr().out.split())


def test_an_adapter_of_a_mixture_of_experts_resumes_to_the_bit(tmp_path):
    whole = trainer(tmp_path / "whole", "mixtral", ["q_proj", "o_proj"], save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer(tmp_path / "resumed", "mixtral", ["q_proj", "o_proj"])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert fingerprint(resumed.model) == fingerprint(whole.model)


def test_weights_of_two_dtypes_are_not_rounded(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    model.model.norm.weight.data = torch.rand(32) / 3
    model.save_pretrained(tmp_path)
    again = tiny_model(dtype=torch.bfloat16, seed=9)
    again.model.norm.weight.data = torch.zeros(32)
    load_weights(again, tmp_path)
    assert fingerprint(again) == fingerprint(model)


def test_the_best_checkpoint_is_loaded_by_the_models_own_names(tmp_path):
    run = trainer(
        tmp_path / "run",
        "mixtral",
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    run.train()
    best = tmp_path / "run" / run.state.best_model_checkpoint.rpartition("/")[2]
    expected = made("mixtral")
    load_weights(expected, best)
    assert run.state.best_model_checkpoint.endswith("checkpoint-1")
    assert fingerprint(run.model) == fingerprint(expected)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda found: found.pop("model.layers.0.block_sparse_moe.experts.3.w2.weight"),
            r"model\.layers\.0\.mlp\.experts\.down_proj: expected the shape \[4, 32, 64\]",
        ),
        (lambda found: found.pop("model.norm.weight"), r"its files lack model\.norm\.weight"),
        (lambda found: found.update({"model.extra.weight": torch.ones(2)}), r"its files hold model\.extra\.weight"),
    ],
    ids=["an expert", "a norm", "one too many"],
)
def test_a_checkpoint_of_other_weights_is_refused(tmp_path, change, said):
    made("mixtral").save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    change(found)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=rf"^--resume: .*{said}.*; move the folder away to use an older checkpoint$"):
        load_weights(made("mixtral"), tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda found, name: found.pop(name), "{} is missing in its files"),
        (
            lambda found, name: found.update({name: torch.ones(4, 32)}),
            "{} is not a weight of this student's adapter, or",
        ),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(tmp_path, change, said):
    student = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    student.save_pretrained(tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    change(found, name)
    save_file(found, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RunError) as raised:
        load_weights(student, tmp_path)
    assert said.format(name) in str(raised.value)
