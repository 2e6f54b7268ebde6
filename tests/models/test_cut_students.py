"""Students cut from families whose layers depend on each other: they compute as saved, or one line says why not."""

import pytest
import torch
from test_checkpoint_weights import COMMON, FAMILIES
from test_prune import read_back
from transformers import AutoConfig, AutoModelForCausalLM

from distill.models.head import decoder_of
from distill.models.meta_models import meta_student
from distill.models.prune.importance import LayerTrial
from distill.models.prune.pruning import cut_layers
from distill.recipe import Student
from scripts.families.configs import tiny_config

SLIDING = ["sliding_attention", "full_attention"]
GEMMA = {
    "num_hidden_layers": 6,
    "layer_types": SLIDING * 3,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 259,
    "sliding_window": 16,
}
KINDS = {
    "gemma3n_text": GEMMA
    | {"laurel_rank": 8, "intermediate_size": [64, 32] * 3, "activation_sparsity_pattern": [0.0, 0.5] * 3},
    "gemma4_text": GEMMA | {"global_head_dim": 8, "use_double_wide_mlp": True},
    "olmo_hybrid": FAMILIES["olmo_hybrid"]
    | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "llama4_text": {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [],
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
        "attention_chunk_size": 64,
    },
    "rwkv": {"attention_hidden_size": 32},
}


def made(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(COMMON | KINDS[kind]))).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35)[None], use_cache=False).logits


@pytest.mark.plain("gemma3n_text-[2, 3, 5]", "gemma4_text-[0, 2, 3, 4, 5]")
@pytest.mark.parametrize(
    "kind, keep",
    [
        ("gemma3n_text", [2, 3]),
        ("gemma3n_text", [2, 3, 5]),
        ("gemma4_text", [2, 3, 5]),
        ("gemma4_text", [1, 3]),
        ("gemma4_text", [0, 2, 3, 4, 5]),
        ("olmo_hybrid", [0, 3]),
        ("llama4_text", [0, 1, 3]),
    ],
)
def test_a_cut_student_is_the_kept_layers_and_saves_as_it_is(tmp_path, kind, keep):
    teacher = made(kind)
    student = cut_layers(teacher, keep)
    theirs = dict(teacher.named_parameters())
    for name, value in student.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(keep[int(parts[at])])
        expected = theirs[".".join(parts)]
        if "embed_tokens_per_layer" in name:
            expected = torch.cat([expected[:, 8 * number : 8 * number + 8] for number in keep], dim=1)
        if "per_layer_model_projection" in name:
            expected = torch.cat([expected[8 * number : 8 * number + 8] for number in keep])
        assert torch.equal(value, expected), name
    student.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(student))
    section = Student.model_validate({"from_teacher": {"keep": keep}})
    planned = meta_student(section, teacher.config).shape
    assert planned.parameters == sum(parameter.numel() for parameter in student.parameters())


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_dropped_layers_that_do_nothing_leave_the_outputs_as_they_were(kind):
    """A student without layers that add nothing to their input computes the teacher's outputs."""
    teacher, drop = made(kind), (0, 1)
    keep = [2, 3, 4, 5]
    with torch.no_grad():
        for number in drop:
            layer = teacher.model.layers[number]
            if kind == "gemma3n_text":
                layer.forward = lambda hidden, *args, **kwargs: hidden
            else:
                for module in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.per_layer_projection):
                    module.weight.zero_()
    torch.testing.assert_close(logits(cut_layers(teacher, keep)), logits(teacher), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind, keep, said",
    [
        ("olmo_hybrid", [0, 2], "OlmoHybridConfig cannot be cut to the layers [0, 2]: OLMoHybrid expects at least one"),
        ("gemma4_text", [0, 1, 2], "read back, its configuration has another layer_types; choose other layers"),
        (
            "gemma3n_text",
            [0, 1, 4, 5],
            "layer 4 takes keys and values of layer 2, which is not kept; keep 2 too, or no",
        ),
        ("gemma4_text", [0, 1, 5], "layer 5 takes keys and values of layer 3, which is not kept; keep 3 too, or no"),
        ("rwkv", [1], "RwkvForCausalLM cannot be cut to the layers [1]: ZeroDivisionError: division by zero"),
    ],
)
def test_an_impossible_cut_is_a_one_line_error(kind, keep, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher: ") as raised:
        cut_layers(made(kind), keep)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def drawn(family, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(tiny_config(family, **more)).eval()


@pytest.mark.plain(
    "gemma4_text-[0, 2, 3]-{}",
    "lfm2_moe-[2, 3]-{}",
    "glm_moe_dsa-[2, 3]-{'indexer_types': ['full', 'shared', 'full', 'shared']}",
    "minicpm3-[0, 2, 3]-{}",
)
@pytest.mark.parametrize(
    "family, keep, more",
    [
        ("gemma4_text", [1, 3], {}),  # heads of another width in full attention, by `per_layer_config`
        ("gemma4_text", [0, 2, 3], {}),
        pytest.param("dots3_note_text", [0, 2], {}, marks=pytest.mark.full),
        ("deepseek_v3", [1, 3], {}),  # numbers of dense layers before those with experts
        ("glm4_moe", [2], {}),
        ("lfm2_moe", [2, 3], {}),
        ("afmoe", [0, 3], {}),
        ("ernie4_5_moe", [1, 2], {}),
        ("glm_moe_dsa", [2, 3], {"indexer_types": ["full", "shared", "full", "shared"]}),
        ("bamba", [1, 3], {}),  # layers return more than hidden states
        ("zaya", [0, 1, 3], {}),
        ("minicpm3", [0, 2, 3], {}),  # residuals are scaled by the number of layers
    ],
)
def test_what_is_set_for_single_layers_goes_with_them(family, keep, more, tmp_path):
    """A student computes what its teacher does without the dropped layers, also as it is read back."""
    teacher, ids = drawn(family, **more), list(range(3, 35))
    student = cut_layers(teacher, keep)
    with torch.no_grad(), LayerTrial(teacher) as trial:
        inputs = {}
        whole = trial.hidden({"input_ids": ids}, inputs=inputs)
        assert torch.equal(trial.hidden({"input_ids": ids}, (2, inputs[2])), whole), "from the middle on"
        trial.dropped = {*range(4)} - {*keep}
        expected = trial.hidden({"input_ids": ids})
        got = decoder_of(student)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, whole, rtol=1e-2, atol=1e-2)
    student.save_pretrained(tmp_path)
    assert torch.equal(logits(read_back(tmp_path)), logits(student))


@pytest.mark.parametrize(
    "family, keep, said",
    [
        ("beam", [0, 2], "layer 2 has attn_residual_add_idx=6 in the teacher and 4 in its new position"),
        ("hy_v4", [2, 3], "layer 2 attends to tokens that an earlier layer's indexer selects; keep one with an"),
        ("jamba", [1, 2, 3], "they have other parts in their new positions (model.layers.0.feed_forward.down_proj"),
    ],
)
def test_layers_that_would_behave_otherwise_are_named(family, keep, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher: ") as raised:
        cut_layers(drawn(family), keep)
    assert said in str(raised.value) and "\n" not in str(raised.value)
