"""Students with some of their teacher's experts, over the families of mixtures that transformers has."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_prune import read_back, rows, student_of
from tiny import save_models, tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from distill.cli import run_command
from distill.models.prune.importance import select_parts, shape_for
from distill.models.prune_candidates import candidates, parameters_share
from distill.models.routing import experts_field
from distill.recipe import FromTeacher, parse
from distill.run import run
from scripts.families.configs import tiny_config

# families whose routers' weights are a softmax, which without some experts is one over those that stay
SOFTMAX = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss", "granitemoe", "granitemoeshared"),
    "granitemoehybrid",
    *("granitemoe_swa", "phimoe", "ernie4_5_moe", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "jamba"),
    *("cohere2_moe", "flex_olmo", "hunyuan_v1_moe", "mellum", "minimax"),
)
# families whose routers score each expert by itself, mostly by a sigmoid: what stays keeps its score
SIGMOID = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1", "exaone_moe", "afmoe"),
    *("minimax_m2", "minimax_m3_vl_text", "nemotron_h", "lfm2_moe", "kimi_linear", "laguna", "hy_v3", "hy_v4"),
    *("inkling2_text", "mimo_v2_flash", "solar_open", "axk1", "axk2", "bailing_hybrid", "beam", "kolibri1", "flint"),
    "dots3_note_text",
)


def drawn(family, **more):
    """A tiny model of a family with 8 experts a layer, whose routers prefer some, by their biases as well."""
    config = tiny_config(family, **more)
    if not more:
        setattr(config, experts_field(config), 8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter.detach(), 0, parameter.shape[-1] ** -0.5)
        for name, tensor in model.state_dict().items():
            if "bias" in name and tensor.dim() in (1, 2) and "experts" not in name.rpartition(".")[0]:
                tensor.uniform_(-0.1, 0.1)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35)[None] * 5 % 251, use_cache=False).logits


def without_experts(model, kept, monkeypatch):
    """Logits of `model` itself where the dropped experts' router logits, and the biases of choosing, are -inf."""
    count = next(tensor.shape[0] for name, tensor in model.named_parameters() if "expert" in name and tensor.dim() == 3)
    columns = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        leaf = name.removeprefix(f"model.layers.{layer}.")
        if layer not in kept or any(word in leaf for word in ("experts.", "attn", "mamba")):
            continue
        if not any(word in leaf for word in ("gate", "router", "bias")):
            continue
        gone = sorted({*range(count)} - {*kept[layer]})
        if tensor.dim() == 2 and tensor.shape[0] == count and tensor.shape[1] == model.config.hidden_size:
            columns[id(tensor)] = gone
        elif "bias" in leaf and tensor.numel() == count:
            with torch.no_grad():
                tensor[..., gone] = -torch.inf
    assert len(columns) == len(kept)
    plain = F.linear

    def linear(given, weight, bias=None):
        output = plain(given, weight, bias)
        if id(weight) in columns:
            output[..., columns[id(weight)]] = -torch.inf
        return output

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", linear)
        return logits(model)


@pytest.mark.plain("mixtral")
@pytest.mark.parametrize("family", [*SOFTMAX, *SIGMOID])
def test_dropped_experts_are_as_if_no_token_were_routed_to_them(family, tmp_path, monkeypatch):
    teacher = drawn(family)
    before = logits(teacher)
    whole, _ = student_of(teacher, experts=8)
    assert torch.equal(logits(whole), before), "with all experts"
    student, chosen = student_of(teacher, experts=5)
    assert {len(kept) for kept in chosen.parts["experts"].values()} == {5}
    student.save_pretrained(tmp_path)
    again = read_back(tmp_path)
    assert torch.equal(logits(again), logits(student))
    expected = without_experts(teacher, chosen.parts["experts"], monkeypatch)
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)
    assert (logits(student) - before).norm() > 100 * (logits(student) - expected).norm(), "nothing was dropped"
    routed = sum(parameter.numel() for name, parameter in teacher.named_parameters() if ".experts." in name)
    fewer = sum(parameter.numel() for parameter in teacher.parameters()) - sum(p.numel() for p in student.parameters())
    assert fewer >= routed * 3 / 8


def test_the_experts_with_the_largest_router_weights_stay():
    """Scores are the mean of the weights that tokens give their experts, by a gate computed here by hand."""
    teacher = drawn("mixtral", num_local_experts=8)
    layer, read = teacher.model.layers[2].mlp, []
    handle = layer.gate.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].flatten(0, -2)))
    given = rows(5)
    with torch.no_grad():
        for row in given:
            ids, at = (torch.tensor([row[name]]) for name in ("input_ids", "position_ids"))
            teacher(input_ids=ids, position_ids=at, use_cache=False)
    handle.remove()
    best = (torch.cat(read) @ layer.gate.weight.T).softmax(-1).topk(2)
    score = torch.zeros(8)
    for weights, experts in zip(best.values / best.values.sum(-1, keepdim=True), best.indices, strict=True):
        score[experts] += weights.detach()
    cut = FromTeacher.model_validate({"experts": 5, "importance": {"rows": 5}})
    chosen = select_parts(teacher, cut, given).parts["experts"]
    assert chosen[2] == sorted(score.topk(5).indices.tolist())
    assert len({tuple(kept) for kept in chosen.values()}) > 1, "each layer by its own router"


@pytest.mark.plain("glm4_moe")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_each_group_keeps_as_many_experts(family, monkeypatch):
    """Groups are neighbours: a student's groups are what stays of its teacher's."""
    teacher = drawn(family, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3)
    student, chosen = student_of(teacher, experts=8)
    for kept in chosen.parts["experts"].values():
        assert [sum(index // 4 == group for index in kept) for group in range(4)] == [2] * 4
    expected = without_experts(teacher, chosen.parts["experts"], monkeypatch)
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)


def test_experts_go_with_layers_channels_and_heads(tmp_path):
    teacher = drawn("qwen3_moe")
    student, chosen = student_of(teacher, layers=3, hidden=24, kv_heads=1, experts=2)
    config = student.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (3, 24, 1)
    assert config.num_experts == 2 == student.model.layers[0].mlp.experts.down_proj.shape[0]
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(read_back(tmp_path)), logits(student))
    theirs = dict(teacher.named_parameters())
    kept = torch.tensor(chosen.parts["experts"][chosen.layers[1]])
    router = theirs[f"model.layers.{chosen.layers[1]}.mlp.gate.weight"][kept][:, list(chosen.hidden)]
    assert torch.equal(student.model.layers[1].mlp.gate.weight, router)


@pytest.mark.parametrize(
    "family, said",
    [
        ("llama4_text", "expected experts that follow transformers' use_experts_implementation, got model.layers.0"),
        ("jetmoe", "expected one router and one module of experts in layer 0 of JetMoeForCausalLM"),
        ("inkling_text", "mlp.gate.weight of InklingForCausalLM to follow from experts alone, got 5"),
        ("longcat_flash", "of LongcatFlashForCausalLM to follow from experts alone, got 8"),
        ("zaya", "of ZayaForCausalLM to follow from experts alone, got 5"),
        (
            "deepseek_v4",
            "a small DeepseekV4Config that is cut along experts differs from the same with no token routed",
        ),
        ("doge", "DogeForCausalLM has no parameter whose size follows from the number of experts"),
        ("llama", "expected a mixture of experts with one number of experts in all layers, got LlamaConfig"),
    ],
)
def test_families_whose_experts_cannot_be_cut_are_named(family, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
        shape_for(FromTeacher(experts=3), tiny_config(family))
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "count, more, said",
    [
        (1, {}, "experts: expected 2 to 4 (2 experts per token), got 1"),
        (5, {}, "experts: expected 2 to 4 (2 experts per token), got 5"),
        (6, {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}, "expected 8 to 8 (2 experts per token, 4 groups"),
        (9, {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}, "experts: expected a multiple of 4, the groups"),
    ],
)
def test_numbers_that_routing_does_not_allow_are_refused(count, more, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher\.experts: ") as raised:
        shape_for(FromTeacher(experts=count), tiny_config("deepseek_v3", **more))
    assert said in str(raised.value) and "\n" not in str(raised.value)


LINES = (f"The teacher explains line {n} {'so ' * (n % 4)}and hears {n * 31337 % 997}." for n in range(80))
TEXT = "\n".join(LINES)
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 3, experts: 3, intermediate: 24, importance: {rows: 8, layer_rows: 2}}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, save_every: 2, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
    save_models(tmp_path, text=TEXT, teacher={"layers": 6, "seed": 1, "kind": "mixtral", **experts})
    Path("tiny.yaml").write_text(RECIPE)
    return tmp_path


def weights(name):
    return AutoModelForCausalLM.from_pretrained(Path("runs", name, "student")).state_dict()


@pytest.mark.full
def test_a_mixture_is_pruned_and_trained_and_resumed_to_the_bit(place, capsys):
    whole = run(parse(RECIPE, [], name="tiny"), name="whole")
    assert "experts 3" in capsys.readouterr().out
    assert whole.after.forward_kl < whole.before.forward_kl
    parts = shutil.copytree("runs/whole", "runs/parts")
    for name in ("student", "checkpoint-4"):  # as it was after two of four steps
        shutil.rmtree(Path(parts, name), ignore_errors=True)
    Path(parts, "result.json").unlink()
    run(parse(RECIPE, [], name="tiny"), name="parts", resume=True)
    assert "continuing from runs/parts/checkpoint-2" in capsys.readouterr().out
    first, second = weights("whole"), weights("parts")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert first["model.layers.0.mlp.experts.gate_up_proj"].shape[:2] == (3, 48)


@pytest.mark.full
def test_shapes_are_proposed_with_fewer_experts_and_columns(place, capsys):
    assert run_command(["prune", "tiny.yaml", "--to", "0.6", "--json"]) == 0
    found = {each["name"]: each["from_teacher"] for each in json.loads(capsys.readouterr().out)}
    assert found["experts"]["experts"] == 4
    assert {"layers": 5, "experts": 5}.items() <= found["depth and experts"].items()
    assert found["MLP columns"]["intermediate"] == 16


AXES = {
    "nemotron_h": ("intermediate", "moe_intermediate", "shared_expert_intermediate"),
    "qwen3_moe": ("moe_intermediate",),
}


@pytest.mark.full
def test_all_columns_of_a_mixture_shrink_alike():
    """Those of dense layers, experts and shared experts; a field that no module is made by is left as it is."""
    wide = {"intermediate_size": 2048, "moe_intermediate_size": 1024}
    for family, shared, axes in (
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 512, "n_routed_experts": 64}, [1024, 512, 256]),
        ("qwen3_moe", {"num_local_experts": 64}, [512]),
    ):
        config = tiny_config(family, **wide, **shared)
        shares = parameters_share(config)
        share = shares(FromTeacher(**dict(zip(AXES[family], axes, strict=True)))) + 1e-6
        found = {each.name: each.cut for each in candidates(config, share, shares)}
        assert [getattr(found["MLP columns"], axis) for axis in AXES[family]] == axes
        assert family == "nemotron_h" or found["MLP columns"].intermediate is None
        both = found["experts and their columns"]
        assert both.experts < 64 and axes[-1] < getattr(both, AXES[family][-1])


@pytest.mark.full
def test_a_shape_that_a_family_cannot_be_cut_to_is_left_out_with_a_line(place, capsys, caplog):
    save_models(place, text=TEXT, teacher={"layers": 6, "seed": 1, "kind": "cohere"})
    overrides = ["student.from_teacher={layers: 2, importance: {rows: 4, layer_rows: 2}}"]
    assert run_command(["prune", "tiny.yaml", "--to", "0.7", "--json", *overrides]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)]
    assert "depth and MLP columns" in names and "width" not in names
    assert "shape 'width' is left out: student.from_teacher.hidden: expected RMSNorms over what is cut" in caplog.text


def test_dense_teachers_are_offered_no_experts():
    config = tiny_model(layers=8, hidden=64).config
    assert not [each for each in candidates(config, 0.6, parameters_share(config)) if "experts" in each.name]
