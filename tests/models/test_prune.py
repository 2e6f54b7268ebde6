"""Students cut from a teacher by width: what is cut, by what it is chosen, and what a cut changes."""

import copy

import pytest
import torch
from test_checkpoint_weights import COMMON
from tiny import tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from distill.models.head import find_head
from distill.models.loading import load_student, save_student
from distill.models.meta_models import meta_student
from distill.models.patch.patching import patch, unpatch
from distill.models.prune.importance import LayerTrial, positions_of, select_parts, shape_for
from distill.models.prune.narrow import Selection, embedding_scale
from distill.models.prune.width_layout import entries
from distill.models.prune.width_trial import verified_layout
from distill.models.prune.widths import target_widths, widths_of
from distill.recipe import FromTeacher, Student

LAYERS = 4


def made(kind="llama", **more):
    return tiny_model(layers=LAYERS, hidden=32, kind=kind, vocab_size=259, **more)


def rows(count=6, length=40, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (count, length), generator=draw).tolist()
    return [{"input_ids": row, "labels": row, "position_ids": [*range(25), *range(length - 25)]} for row in ids]


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35)[None] * 5 % 251, use_cache=False).logits


def student_of(teacher, **cut):
    """The student of a cut, and what was chosen."""
    section = Student(from_teacher=FromTeacher.model_validate(cut))
    chosen = select_parts(teacher, section.from_teacher, rows())
    return load_student(section, teacher=teacher, selection=chosen).eval(), chosen


def read_back(folder):
    """Return the model of a folder, copied, since GEMMs on a CPU round by the address at which weights begin."""
    return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder).eval())


def with_zeros(teacher, selection, layout):
    """`teacher` itself without the dropped heads and columns: what reads them has zeros there."""
    for axis in ("heads", "intermediate"):
        for name in layout.readers(teacher, axis).values():
            kept = entries(layout.dims[f"{name}.weight"][1], selection.kept(f"{name}.weight", layout))
            weight = teacher.get_submodule(name).weight
            mask = torch.zeros(weight.shape[1])
            mask[kept] = 1
            with torch.no_grad():
                weight.mul_(mask)
    return teacher


KINDS = {
    "llama": {},
    "qwen2": {},  # biases of q, k and v
    "qwen3": {"head_dim": 8},  # norms of q and k
    "gemma2": {"head_dim": 8},  # weights of norms are offsets from 1, embeddings are scaled, soft caps
    "granite": {},  # multipliers
    "mistral": {"head_dim": 16},
}


@pytest.mark.plain("llama-{'intermediate': 37}-True", "qwen3-{'kv_heads': 1}-False")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("cut", [{"intermediate": 37}, {"kv_heads": 1}, {"heads": 2, "kv_heads": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_dropped_heads_and_columns_are_as_if_they_gave_zero(kind, cut, tie, tmp_path):
    teacher = made(kind, tie=tie, **KINDS[kind])
    student, chosen = student_of(teacher, **cut)
    widths = target_widths(FromTeacher.model_validate(cut), teacher.config)
    assert widths_of(student.config) == widths != widths_of(teacher.config)
    student.config.use_cache = True
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(student))
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tie
    layout = shape_for(FromTeacher.model_validate(cut), teacher.config).layout
    before = logits(teacher)
    torch.testing.assert_close(logits(student), logits(with_zeros(teacher, chosen, layout)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(student), before, rtol=1e-2, atol=1e-2)


@pytest.mark.plain("llama-True")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_channels_that_are_zero_can_be_dropped(kind, tie):
    """A teacher whose residual stream is zero in some channels is equal to the student without them: they are found,
    norms keep the scale of what is left, and a factor on the embeddings that follows from the width is put right."""
    teacher = made(kind, tie=tie, **KINDS[kind])
    kept = sorted(torch.randperm(32, generator=torch.Generator().manual_seed(3))[:20].tolist())
    layout = verified_layout(teacher.config, ["hidden"])
    norms = {f"{name}.weight" for name, _, _ in layout.norms(teacher)}
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            for dim, blocks in enumerate(layout.dims.get(name, ())):
                if blocks and name not in norms:
                    mask = torch.zeros(parameter.shape[dim])
                    mask[kept] = 1
                    parameter.mul_(mask.view(-1, *[1] * (parameter.dim() - dim - 1)))
        for module in teacher.modules():  # the epsilon is not scaled
            for name in ("variance_epsilon", "eps"):
                if hasattr(module, name):
                    setattr(module, name, 1e-12)
    teacher.config.rms_norm_eps = 1e-12
    student, chosen = student_of(teacher, hidden=20)
    assert list(chosen.hidden) == kept
    torch.testing.assert_close(logits(student), logits(teacher), rtol=1e-3, atol=1e-4)
    plain = load_student(
        Student(from_teacher=FromTeacher(hidden=20)), teacher=teacher, selection=chosen._replace(norms={})
    ).eval()
    assert not torch.allclose(logits(plain), logits(teacher), rtol=1e-2, atol=1e-2), "norms do nothing"


def test_the_smallest_activations_go():
    """Columns, heads and channels that are planted to be unimportant are the ones that are dropped, in every layer."""
    teacher = made(initializer_range=0.1)
    quiet = {"columns": [5, 11, 40], "kv": 0, "hidden": [2, 30]}
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.mlp.up_proj.weight[quiet["columns"]] *= 1e-3
            layer.self_attn.v_proj.weight[:8] *= 1e-3
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[quiet["hidden"]] *= 1e-3
        teacher.model.norm.weight[quiet["hidden"]] *= 1e-3
    _, chosen = student_of(teacher, hidden=30, kv_heads=1, intermediate=61)
    assert sorted({*range(32)} - {*chosen.hidden}) == quiet["hidden"]
    for layer in range(LAYERS):
        assert sorted({*range(64)} - {*chosen.columns[f"model.layers.{layer}.mlp"][0]}) == quiet["columns"]
        assert list(chosen.parts["kv_heads"][layer]) == [1] and list(chosen.parts["heads"][layer]) == [2, 3]


def test_the_layers_without_which_the_loss_is_smallest_go():
    teacher = made(initializer_range=0.3)
    with torch.no_grad():
        for number in (1, 2):
            for module in (teacher.model.layers[number].self_attn.o_proj, teacher.model.layers[number].mlp.down_proj):
                module.weight *= 1e-3 if number == 2 else 1e-2
    assert student_of(teacher, layers=3, importance={})[1].layers == [0, 1, 3]
    assert student_of(teacher, layers=2, importance={})[1].layers == [0, 3]


def test_the_loss_without_a_layer_is_that_of_the_model_without_it():
    """The measured KL is that of all logits, at trained positions, and starting in the middle changes nothing."""
    teacher, row = made(), rows(1)[0]
    row["labels"] = [-100] * 20 + row["labels"][20:]
    row["position_ids"] = list(range(40))
    full = logits_of(teacher, row)
    with torch.no_grad(), LayerTrial(teacher) as trial:
        inputs = {}
        whole = trial.hidden(row, inputs=inputs)
        trial.dropped = {2}
        short = trial.hidden(row)
        assert torch.equal(trial.hidden(row, (2, inputs[2])), short)
        found = trial.divergence(short, whole, row)
    assert not any("forward" in vars(layer) for layer in teacher.model.layers)
    teacher.model.layers = nn.ModuleList([teacher.model.layers[number] for number in (0, 1, 3)])
    teacher.config.num_hidden_layers = 3
    cut = logits_of(teacher, row)
    where = positions_of(row)
    assert where == list(range(19, 39))
    expected = nn.functional.kl_div(cut.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(found, expected.sum(-1)[where].sum(), rtol=1e-4, atol=1e-6)


def logits_of(model, row):
    with torch.no_grad():
        return model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0].double()


def test_rows_without_trained_tokens_count_by_their_documents():
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100] * 4, "position_ids": [0, 1, 0, 1]}
    assert positions_of(row) == [0, 2]
    assert positions_of({"input_ids": [5, 6, 7]}) == [0, 1]


@pytest.mark.parametrize("metric", ["l2", "mean", "mean_l2"])
def test_metrics_are_what_their_names_say(metric):
    """The columns' scores are those of activations gathered by hand; of rows of unequal size `mean_l2` is neither."""
    teacher, given = made(), [*rows(2), *(row for row in rows(1, 26, 5))]
    gathered = []
    down = teacher.model.layers[1].mlp.down_proj
    handle = down.register_forward_hook(lambda module, inputs, output: gathered.append(inputs[0][0].double()))
    with torch.no_grad():
        for row in given:
            ids, at = (torch.tensor([row[name]]) for name in ("input_ids", "position_ids"))
            teacher(input_ids=ids, position_ids=at, use_cache=False)
    handle.remove()
    joined = torch.cat(gathered)
    score = {
        "l2": joined.square().mean(0).sqrt(),
        "mean": joined.abs().mean(0),
        "mean_l2": torch.stack([each.abs().mean(0) for each in gathered]).square().mean(0).sqrt(),
    }[metric]
    cut = FromTeacher.model_validate({"intermediate": 20, "importance": {"metric": metric}})
    (chosen,) = select_parts(teacher, cut, given).columns["model.layers.1.mlp"]
    assert chosen == sorted(score.topk(20).indices.tolist())


def test_parts_of_everything_at_once_and_twice_the_same():
    teacher = made("qwen3", head_dim=8)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    cut = {"layers": 3, "hidden": 24, "heads": 2, "kv_heads": 1, "intermediate": 48}
    student, chosen = student_of(teacher, **cut)
    again, same = student_of(teacher, **cut)
    assert chosen == same and Selection.from_json(chosen.to_json()) == chosen
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    mine = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in student.parameters()}, "weights are shared"
    section = Student(from_teacher=FromTeacher.model_validate(cut))
    planned = meta_student(section, teacher.config).shape
    assert planned.parameters == sum(parameter.numel() for parameter in student.parameters())
    assert (student.config.head_dim, student.config.hidden_size, student.config.num_hidden_layers) == (8, 24, 3)


def test_a_narrow_student_takes_adapters_and_merges_them(tmp_path):
    teacher = made()
    section = Student(from_teacher=FromTeacher(hidden=24, intermediate=32), lora={"r": 2})
    chosen = select_parts(teacher, section.from_teacher, rows())
    student = load_student(section, teacher=teacher, selection=chosen)
    plain = load_student(section.model_copy(update={"lora": None}), teacher=teacher, selection=chosen).eval()
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    assert 0 < sum(parameter.numel() for parameter in trained) < 8000
    torch.testing.assert_close(logits(student.eval()), logits(plain))
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.01)
    save_student(student, None, tmp_path / "student")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    torch.testing.assert_close(logits(merged), logits(student), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(merged), logits(plain), rtol=1e-2, atol=1e-3)


def test_a_patched_teacher_is_refused():
    teacher = made()
    patch(teacher, "teacher", attention=None, log_it=False)
    with pytest.raises(ValueError, match=r"from_teacher: expected an unpatched teacher"):
        load_student(Student(from_teacher=FromTeacher(layers=2)), teacher=teacher)
    unpatch(teacher)
    assert load_student(Student(from_teacher=FromTeacher(layers=2)), teacher=teacher).config.num_hidden_layers == 2


def test_a_factor_on_embeddings_is_read_from_the_first_layer():
    assert embedding_scale(made("gemma2", head_dim=8)) == pytest.approx(32**0.5, rel=1e-3)
    assert embedding_scale(made()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "kind, cut, said",
    [
        ("llama", {"hidden": 33}, "from_teacher.hidden: expected 1 to 32, as many as the teacher has, got 33"),
        ("llama", {"heads": 3}, "from_teacher.heads: expected a multiple of 2, the heads that share a key and value"),
        ("llama", {"heads": 3, "kv_heads": 2}, "from_teacher.heads: expected 2 (kv_heads) times 1 to 2"),
        ("llama", {"layers": 9, "hidden": 16}, "from_teacher.layers: expected 1 to 4"),
        ("gemma2", {"hidden": 30}, "cannot be cut to 4 layers and Widths(hidden=30"),
        ("cohere", {"hidden": 16}, "expected RMSNorms over what is cut, got model.layers.0.input_layernorm (CohereLay"),
        ("gpt2", {"hidden": 16}, "expected a configuration with one width of all layers to cut widths, got GPT2Config"),
        (
            "llama",
            {"moe_intermediate": 8},
            "moe_intermediate: LlamaConfig has no moe_intermediate_size; its columns are",
        ),
        ("llama", {"shared_expert_intermediate": 8}, "shared_expert_intermediate: LlamaConfig has none for all layers"),
    ],
)
def test_what_cannot_be_cut_is_told_in_a_line(kind, cut, said):
    with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
        student_of(made(kind), **cut)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "kind, cut, said",
    [
        (
            "mixtral",
            {"intermediate": 30},
            "intermediate: expected a multiple of 8, since grouped GEMMs of experts take",
        ),
        ("mixtral", {"hidden": 28}, "hidden: expected a multiple of 8, since grouped GEMMs of experts take rows"),
        (
            "mixtral",
            {"moe_intermediate": 8},
            "MixtralConfig has no moe_intermediate_size; its columns are those of inter",
        ),
        ("qwen3_moe", {"moe_intermediate": 17}, "moe_intermediate: expected a multiple of 8"),
        (
            "qwen3_moe",
            {"intermediate": 17},
            "Qwen3MoeForCausalLM has no parameter whose size follows from intermediate",
        ),
        ("qwen3_moe", {"shared_expert_intermediate": 8}, "shared_expert_intermediate: Qwen3MoeConfig has none for all"),
        ("olmo", {"hidden": 16}, "a small OlmoConfig that is cut along hidden differs from the same with zeros there"),
    ],
)
def test_families_whose_modules_cannot_be_cut_name_them(kind, cut, said):
    config = AutoConfig.for_model(kind, **COMMON)
    with pytest.raises(ValueError, match=r"^student\.from_teacher") as raised:
        shape_for(FromTeacher.model_validate(cut), config)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_without_rows_nothing_is_chosen():
    teacher, section = made(), Student(from_teacher=FromTeacher(hidden=16))
    with pytest.raises(ValueError, match="expected rows of training data, by which parts are chosen"):
        select_parts(teacher, section.from_teacher, [])
    with pytest.raises(ValueError, match="chosen by rows of the training data, which are not read here"):
        load_student(section, teacher=teacher)


@pytest.mark.parametrize("vocabulary", [5, 30, 99])
def test_teachers_of_few_tokens_are_cut(vocabulary):
    teacher = tiny_model(layers=LAYERS, hidden=32, vocab_size=vocabulary)
    cut = FromTeacher(layers=2, hidden=24, intermediate=40)
    row = {"input_ids": [1, 2, 4], "labels": [1, 2, 4], "position_ids": [0, 1, 2]}
    empty = {"input_ids": [], "labels": [], "position_ids": []}
    chosen = select_parts(teacher, cut, [empty, row])
    student = load_student(Student(from_teacher=cut), teacher=teacher, selection=chosen)
    assert logits_of(student, row).shape == (3, vocabulary)
    with pytest.raises(ValueError, match="expected rows of training data, by which parts are chosen, got none"):
        select_parts(teacher, cut, [empty])


@pytest.mark.parametrize("cut", [{"hidden": 24}, {"layers": 2, "importance": {"rows": 2}}])
def test_a_teacher_of_hardly_any_token_is_refused(cut):
    teacher = tiny_model(layers=LAYERS, hidden=32, vocab_size=4)
    with pytest.raises(
        ValueError, match=r"^student\.from_teacher: expected a teacher with a vocabulary of at least 5 .* 4$"
    ):
        select_parts(teacher, FromTeacher.model_validate(cut), [{"input_ids": [1, 2, 3]}])


def test_the_head_and_every_norm_of_a_narrow_student_have_its_width():
    student, _ = student_of(made("gemma2", head_dim=8), hidden=24)
    assert find_head(student).linear.weight.shape == (259, 24)
    wide = [name for name, parameter in student.named_parameters() if 32 in parameter.shape and "proj" not in name]
    assert wide == []
