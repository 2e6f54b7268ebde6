"""Rows that nobody reads are not computed in the last layer, and nothing that is read changes."""

import pytest
import torch
from packed_chats import packed_chats
from tiny import tiny_model

from distill.data.collator import Collator
from distill.models import output_rows
from distill.models.flops import count_flops
from distill.models.graphs import _GraphedDecoder
from distill.models.head import decoder_of, last_hidden
from distill.models.patch.patching import patch, unpatch
from distill.teachers.objective import DistillationObjective
from scripts.bench.step_variants import compile_layers

KINDS = ("llama", "qwen2", "qwen3", "gemma2")


@pytest.fixture(autouse=True)
def narrow_layers_too(without):
    without.setattr(output_rows, "WIDE", 0)


def batch_of(packed, device, learned=0.4):
    draw, rows = torch.Generator().manual_seed(1), []
    for length in (23, 17):
        ids = torch.randint(3, 250, (length,), generator=draw)
        labels = torch.where(torch.rand(length, generator=draw) < learned, ids, -100)
        cut = 9 if packed else 0
        rows.append(
            {"input_ids": ids.tolist(), "labels": labels.tolist(), "position_ids": [*range(cut), *range(length - cut)]}
        )
    collated = Collator(0, omit_plain_positions=not packed)(rows)
    return {name: tensor.to(device) for name, tensor in collated.items()}


def models(kind, device):
    teacher, student = tiny_model(kind=kind, seed=3, layers=3).to(device), tiny_model(kind=kind, seed=4).to(device)
    for model, role in ((teacher, "teacher"), (student, "student")):
        patch(model, role, log_it=False)
    return teacher, student


def lora(student):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)
    return get_peft_model(student, settings)


def learn(teacher, student, batches):
    """The loss, its statistics and every gradient, of one or several micro-batches."""
    objective = DistillationObjective(teacher, student)
    items = sum(len(batch["valid_rows"]) for batch in batches)
    student.zero_grad()
    outputs = [student(**objective.student_inputs(batch, items)) for batch in batches]
    for output in outputs:
        output["loss"].backward()
    objective.detach()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.requires_grad}
    figures = torch.stack([torch.cat([o["loss"].detach()[None].float(), o["statistics"]]) for o in outputs]).sum(0)
    return outputs[0]["loss"].detach(), figures, gradients


def rows_seen(model):
    """Return the rows of each call of the last layer's MLP, without the calls of four tokens that verify a head."""
    seen = []

    def count(module, inputs, output):
        if (rows := inputs[0][..., 0].numel()) != 4:
            seen.append(rows)

    decoder_of(model).layers[-1].mlp.register_forward_hook(count)
    return seen


@pytest.mark.plain("-packed", "reentrant-padded", "accumulation-padded")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("change", ["", "checkpointing", "reentrant", "lora", "accumulation"])
def test_loss_and_gradients_are_exact(change, packed, without):
    teacher, student = (model.double() for model in models("llama", "cpu"))
    if change in ("checkpointing", "reentrant"):
        student.train().gradient_checkpointing_enable({"use_reentrant": change == "reentrant"})
    if change == "lora":
        student = lora(student).double()
    batches = [batch_of(packed, "cpu"), batch_of(packed, "cpu", 0.2)][: 2 if change == "accumulation" else 1]
    seen = rows_seen(teacher), rows_seen(student)
    loss, figures, gradients = learn(teacher, student, batches)
    counts = [len(batch["valid_rows"]) for batch in batches]
    assert seen[0] == counts and set(seen[1]) == set(counts)
    without.setattr(output_rows, "MOST", 0)
    whole, others, expected = learn(teacher, student, batches)
    assert seen[0][-1] == batches[-1]["input_ids"].numel()
    assert loss.dtype == torch.float64 and abs(loss - whole) <= 1e-12 * whole
    torch.testing.assert_close(figures, others, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm().clamp_min(1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_form_gives_what_is_read(kind, device):
    teacher, _ = models(kind, device)
    batch = batch_of(True, device)
    seen = rows_seen(teacher)
    rows, some = batch["valid_rows"], last_hidden(teacher, batch).flatten(0, 1)
    whole = last_hidden(teacher, {**batch, "valid_rows": None}).flatten(0, 1)
    assert seen == [len(rows), len(whole)]
    torch.testing.assert_close(some[rows], whole[rows], rtol=1e-5, atol=1e-5 * whole.abs().max().item())
    rest = torch.ones(len(whole), dtype=torch.bool).index_fill_(0, rows.cpu(), False)
    assert not some[rest.to(device)].any()


def test_where_all_rows_are_computed(without):
    teacher, student = models("llama", "cpu")
    decoder, batch = decoder_of(teacher), batch_of(True, "cpu")
    rows, tokens = batch["valid_rows"], batch["input_ids"].numel()
    assert output_rows.output_rows(decoder, rows, tokens)
    for none in (None, rows[:0], torch.arange(tokens)):
        assert output_rows.output_rows(decoder, none, tokens) == {}
    compile_layers(student)
    assert output_rows.output_rows(decoder_of(student), rows, tokens) == {}
    unpatch(teacher)
    assert output_rows.output_rows(decoder, rows, tokens) == {}
    narrow = tiny_model()
    without.setattr(output_rows, "WIDE", 40e6)
    patch(narrow, log_it=False)
    assert output_rows.output_rows(decoder_of(narrow), rows, tokens) == {}


def test_a_graph_is_never_given_rows():
    """The number of rows is a shape, which a graph fixes."""
    calls = []
    graphed = _GraphedDecoder.__new__(_GraphedDecoder)
    graphed.graphs, graphed._captures, graphed.launched = None, True, lambda **inputs: calls.append(inputs)
    graphed(input_ids=1, **{output_rows.NAME: 2})
    assert calls == [{"input_ids": 1}]


def test_work_is_counted_where_it_is_done():
    model = tiny_model()
    before = count_flops(model, trains=True)
    patch(model, log_it=False)
    after = count_flops(model, trains=True)
    moved = 6 * sum(p.numel() for p in output_rows.row_parameters(decoder_of(model).layers[-1]))
    assert (after.token, after.trained) == (before.token - moved, before.trained + moved)


@pytest.mark.gpu
def test_in_bf16_the_loss_differs_by_rounding(without):
    """Two layers of an 8B teacher's and a 1B student's width, each twice: with some rows and with all."""
    teacher, student = (
        tiny_model(
            hidden=hidden,
            layers=2,
            dtype=torch.bfloat16,
            seed=seed,
            intermediate_size=inner,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=hidden // 32,
            vocab_size=32_000,
            initializer_range=0.02,
        ).cuda()
        for hidden, inner, seed in ((4096, 14336, 0), (2048, 8192, 1))
    )
    batch = {name: tensor.cuda() for name, tensor in packed_chats(32_000, 2, 2048).items()}
    for model, role in ((teacher, "teacher"), (student, "student")):
        patch(model, role)
    seen = rows_seen(student)
    loss, _, gradients = learn(teacher, student, [batch])
    without.setattr(output_rows, "MOST", 0)
    whole, _, expected = learn(teacher, student, [batch])
    assert seen == [len(batch["valid_rows"]), batch["input_ids"].numel()]
    assert abs(loss - whole) <= 2e-3 * abs(whole)
    for name, gradient in gradients.items():
        assert (gradient.float() - expected[name].float()).norm() <= 2e-2 * expected[name].float().norm(), name
