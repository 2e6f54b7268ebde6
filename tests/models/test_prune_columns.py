"""Students with fewer columns in their experts, over the families of mixtures that transformers has; REAP's scores."""

import copy

import pytest
import torch
from test_prune import read_back, rows, student_of
from test_prune_experts import SIGMOID, SOFTMAX, drawn, logits
from torch import nn
from torch.nn import functional as F

from distill.models.prune.importance import select_parts, shape_for
from distill.models.prune.narrow import Selection
from distill.models.prune.widths import widths_of
from distill.recipe import FromTeacher
from scripts.families.configs import tiny_config

# families whose experts' columns are `intermediate_size`: also those of dense layers (Jamba) and of shared experts
BY_INTERMEDIATE = (
    *("mixtral", "olmoe", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoe_swa", "phimoe", "jamba"),
    *("cohere2_moe", "flex_olmo", "hunyuan_v1_moe", "minimax", "minimax_m2", "minimax_m3_vl_text", "granitemoehybrid"),
)
OWN_SHARED = (
    *("qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text", "granitemoeshared", "granitemoe_swa"),
    *("minimax_m3_vl_text", "nemotron_h", "laguna", "kolibri1", "flint", "granitemoehybrid", "dots3_note_text"),
)


def without_columns(model, columns):
    """Set the weights of `model` that read the dropped columns to zero, by the names of its modules."""
    with torch.no_grad():
        for name, of_experts in columns.items():
            module = model.get_submodule(name)
            down = next(getattr(module, leaf) for leaf in ("down_proj", "output_linear", "w2") if hasattr(module, leaf))
            if isinstance(down, nn.Linear):
                down = down.weight[None]
            elif module.is_transposed:
                down = down.transpose(1, 2)
            for expert, kept in enumerate(of_experts):
                gone = sorted({*range(down.shape[-1])} - {*kept})
                assert gone and len(of_experts) == len(down)
                down[expert][:, gone] = 0
    return model


@pytest.mark.plain("mixtral")
@pytest.mark.parametrize("family", [*SOFTMAX, *SIGMOID])
def test_dropped_columns_of_experts_are_as_if_they_were_zero(family, tmp_path):
    teacher = drawn(family)
    axis = "intermediate" if family in BY_INTERMEDIATE else "moe_intermediate"
    total = getattr(widths_of(teacher.config), axis)
    before = logits(teacher)
    whole, _ = student_of(teacher, **{axis: total})
    assert torch.equal(logits(whole), before), "with all columns"
    student, chosen = student_of(teacher, **{axis: total // 2})
    assert getattr(widths_of(student.config), axis) == total // 2
    experts = {name: kept for name, kept in chosen.columns.items() if len(kept) == 8}
    assert experts and all(len({*map(tuple, kept)}) > 1 for kept in experts.values()), "each expert has its own"
    assert {len(kept) for of in experts.values() for kept in of} == {total // 2}
    student.save_pretrained(tmp_path)
    again = read_back(tmp_path)
    assert torch.equal(logits(again), logits(student))
    assert getattr(widths_of(again.config), axis) == total // 2
    expected = logits(without_columns(copy.deepcopy(teacher), chosen.columns))
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)
    assert (logits(student) - before).norm() > 100 * (logits(student) - expected).norm(), "nothing was dropped"
    assert torch.equal(logits(teacher), before), "the teacher was changed"


@pytest.mark.plain("granitemoeshared")
@pytest.mark.parametrize("family", OWN_SHARED)
def test_shared_experts_with_columns_of_their_own_lose_those_alone(family, tmp_path):
    teacher = drawn(family)
    student, chosen = student_of(teacher, shared_expert_intermediate=9)
    full, cut = widths_of(teacher.config), widths_of(student.config)
    assert cut == full._replace(shared_expert_intermediate=9)
    assert {len(kept) for kept in chosen.columns.values()} == {1}
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(read_back(tmp_path)), logits(student))
    expected = logits(without_columns(teacher, chosen.columns))
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_shared_experts_whose_width_follows_are_cut_with_the_routed_ones(family):
    """Two shared experts are one MLP of twice the columns, of which the largest stay."""
    shared = {"n_shared_experts": 2} if family == "deepseek_v3" else {"moe_num_shared_experts": 2}
    teacher = drawn(family, **shared)
    student, chosen = student_of(teacher, moe_intermediate=8)
    module = student.model.layers[-1].mlp.shared_experts
    assert (module.down_proj.in_features, module.up_proj.out_features) == (16, 16)
    name = f"model.layers.{len(student.model.layers) - 1}.mlp.shared_experts"
    assert sum(column < 16 for column in chosen.columns[name][0]) != 8, "half of each by chance alone"
    expected = logits(without_columns(teacher, chosen.columns))
    torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)


def routed(teacher, number, given):
    """Return weights of the router, inputs of the down projection and outputs by row and expert of a Mixtral layer."""
    layer, read = teacher.model.layers[number].mlp, []
    handle = layer.gate.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        for row in given:
            ids, at = (torch.tensor([row[name]]) for name in ("input_ids", "position_ids"))
            teacher(input_ids=ids, position_ids=at, use_cache=False)
    handle.remove()
    found = [[] for _ in given]
    with torch.no_grad():
        for states, of_row in zip(read, found, strict=True):
            values, chosen = (states @ layer.gate.weight.T).softmax(-1).topk(2)
            values = values / values.sum(-1, keepdim=True)
            for expert in range(8):
                token, place = torch.where(chosen == expert)
                gate, up = (states[token] @ layer.experts.gate_up_proj[expert].T).chunk(2, dim=-1)
                inner = F.silu(gate) * up
                of_row.append((values[token, place], inner, inner @ layer.experts.down_proj[expert].T))
    return found


def mixtral():
    return drawn("mixtral", num_local_experts=8)


@pytest.mark.parametrize("metric", ["l2", "mean", "mean_l2"])
def test_columns_are_chosen_by_what_routed_tokens_give_the_down_projection(metric):
    teacher, given = mixtral(), [*rows(3), *rows(2, 26, 5)]
    found = routed(teacher, 2, given)
    cut = FromTeacher.model_validate({"intermediate": 24, "importance": {"rows": 5, "metric": metric}})
    chosen = select_parts(teacher, cut, given).columns["model.layers.2.mlp.experts"]
    for expert, kept in enumerate(chosen):
        each = [(inner * weight[:, None]).double() for weight, inner, _ in (of_row[expert] for of_row in found)]
        each = [read for read in each if len(read)]
        score = {
            "l2": torch.cat(each).square().mean(0),
            "mean": torch.cat(each).abs().mean(0),
            "mean_l2": torch.stack([read.abs().mean(0) for read in each]).square().mean(0),
        }[metric]
        assert kept == sorted(score.topk(24).indices.tolist())


def test_reap_is_the_mean_of_weighted_norms_over_routed_tokens():
    teacher, given = mixtral(), rows(5)
    with torch.no_grad():
        for layer in teacher.model.layers:  # one expert with large weights, whose outputs are next to nothing
            layer.mlp.gate.weight[3] *= 3
            layer.mlp.experts.down_proj[3] *= 1e-3
    found = routed(teacher, 2, given)
    score = torch.zeros(8)
    for expert in range(8):
        weights, _, outputs = (torch.cat(each) for each in zip(*(of_row[expert] for of_row in found), strict=True))
        score[expert] = (weights * outputs.norm(dim=-1)).mean() if len(weights) else 0
    chosen = {
        kind: select_parts(
            teacher, FromTeacher.model_validate({"experts": 5, "importance": {"rows": 5, "experts": kind}}), given
        ).parts["experts"]
        for kind in ("router_weight", "reap")
    }
    assert chosen["reap"][2] == sorted(score.topk(5).indices.tolist())
    assert all(3 in kept for kept in chosen["router_weight"].values())
    assert all(3 not in kept for kept in chosen["reap"].values())


@pytest.mark.plain("reap")
@pytest.mark.parametrize("kind", ["router_weight", "reap"])
def test_experts_and_their_columns_go_with_layers_channels_and_heads(kind, tmp_path):
    teacher = drawn("qwen2_moe")
    cut = {"layers": 3, "hidden": 24, "kv_heads": 1, "experts": 3, "moe_intermediate": 8}
    student, chosen = student_of(teacher, **cut, shared_expert_intermediate=5, importance={"experts": kind})
    full = widths_of(student.config)
    assert (full.hidden, full.experts, full.moe_intermediate, full.shared_expert_intermediate) == (24, 3, 8, 5)
    assert chosen.columns.keys() == {
        f"model.layers.{n}.mlp.{part}" for n in chosen.layers for part in ("experts", "shared_expert")
    }
    assert Selection.from_json(chosen.to_json()) == chosen
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(read_back(tmp_path)), logits(student))
    number = chosen.layers[1]
    expert = chosen.parts["experts"][number][2]
    columns = torch.tensor(chosen.columns[f"model.layers.{number}.mlp.experts"][expert])
    theirs, mine = (model.model.layers[n].mlp.experts for model, n in ((teacher, number), (student, 1)))
    gate_up = theirs.gate_up_proj[expert][torch.cat([columns, 16 + columns])][:, list(chosen.hidden)]
    assert torch.equal(mine.gate_up_proj[2], gate_up)
    assert torch.equal(mine.down_proj[2], theirs.down_proj[expert][list(chosen.hidden)][:, columns])


GEMMA4 = {
    "mixture": {"enable_moe_block": True, "top_k_experts": 2, "num_experts": 8},
    "shared keys": {
        "num_kv_shared_layers": 2,  # whose MLPs are twice as wide
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
    },
}


@pytest.mark.plain("mixture-{'moe_intermediate': 8}")
@pytest.mark.parametrize(
    "kind, cut",
    [
        ("mixture", {"hidden": 24, "intermediate": 40, "moe_intermediate": 8, "experts": 5}),
        ("mixture", {"moe_intermediate": 8}),
        ("shared keys", {"hidden": 24, "intermediate": 40}),
        ("shared keys", {"intermediate": 40}),
    ],
)
def test_families_whose_layers_have_heads_of_several_widths_are_cut_elsewhere(kind, cut, tmp_path):
    teacher = drawn("gemma4_text", **GEMMA4[kind])
    assert "head_dim" in teacher.config.per_layer_attributes
    student, chosen = student_of(teacher, **cut)
    student.save_pretrained(tmp_path)
    again = read_back(tmp_path)
    assert torch.equal(logits(again), logits(student))
    assert widths_of(again.config) == widths_of(teacher.config)._replace(**cut)
    assert again.config.per_layer_config[3].head_dim == teacher.config.per_layer_config[3].head_dim
    if len(cut) == 1:
        expected = logits(without_columns(teacher, chosen.columns))
        torch.testing.assert_close(logits(student), expected, rtol=1e-3, atol=1e-4)
    wide = 2 if kind == "shared keys" else 1
    assert again.model.layers[3].mlp.down_proj.in_features == wide * cut.get("intermediate", 64)


def test_heads_of_several_widths_are_not_cut():
    with pytest.raises(
        ValueError, match=r"kv_heads: expected one width of all layers, got Gemma4TextConfig, some of wh"
    ):
        shape_for(FromTeacher(kv_heads=1), tiny_config("gemma4_text"))


def test_columns_of_gates_and_ups_are_taken_in_their_order():
    """gpt-oss stores `[gate, up]` of each column in turn, with biases, and inputs before outputs."""
    teacher = drawn("gpt_oss")
    student, chosen = student_of(teacher, intermediate=40)
    theirs, mine = (model.model.layers[1].mlp.experts for model in (teacher, student))
    for expert, kept in enumerate(chosen.columns["model.layers.1.mlp.experts"]):
        both = [entry for column in kept for entry in (2 * column, 2 * column + 1)]
        assert torch.equal(mine.gate_up_proj[expert], theirs.gate_up_proj[expert][:, both])
        assert torch.equal(mine.gate_up_proj_bias[expert], theirs.gate_up_proj_bias[expert][both])
        assert torch.equal(mine.down_proj[expert], theirs.down_proj[expert][kept])
        assert torch.equal(mine.down_proj_bias[expert], theirs.down_proj_bias[expert])


def test_experts_that_no_token_reaches_are_told_of(caplog):
    teacher = mixtral()
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.mlp.gate.weight.zero_()  # equal logits: all tokens go to the same two
    cut = FromTeacher(intermediate=32)
    chosen = select_parts(teacher, cut, rows())
    for of_experts in chosen.columns.values():
        assert sum(kept == list(range(32)) for kept in of_experts) == 6
    assert f"no token of the calibration rows reaches {6 * len(teacher.model.layers)} of the experts" in caplog.text
    caplog.clear()
    select_parts(teacher, FromTeacher(intermediate=32, experts=2), rows())
    assert "no token" not in caplog.text, "those that stay are reached"


@pytest.mark.parametrize(
    "family, cut, said",
    [
        ("llama4_text", {"intermediate": 8}, "expected experts that follow transformers' use_experts_implementation"),
        ("jetmoe", {"intermediate": 8}, "expected experts that follow transformers' use_experts_implementation"),
        ("longcat_flash", {"moe_intermediate": 8}, "student.from_teacher"),
    ],
)
def test_families_whose_experts_columns_cannot_be_cut_are_named(family, cut, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
        shape_for(FromTeacher.model_validate(cut), tiny_config(family))
    assert said in str(raised.value) and "\n" not in str(raised.value)
