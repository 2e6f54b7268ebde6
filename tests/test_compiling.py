"""torch.compile of decoder layers: the same results with and without our kernels, one graph for all layers."""

import pytest
import torch
from tiny import save_models, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend

from distill.data.collator import Collator
from distill.models.patch.compiling import compile_layers, uncompiled
from distill.models.patch.patching import patch
from distill.recipe import parse
from distill.teachers.objective import DistillationObjective

LAYERS = 10  # more than torch.compile's limit of recompilations, where it would give up


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch():
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(2):
        ids = torch.randint(3, 259, (12,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]], "position_ids": [*range(5), *range(7)]})
    return Collator(2)(rows)


def step(*, compiled, patched, checkpointed=False, kind="llama", layers=2):
    """Loss and gradients of two steps; the layers' graphs that were compiled."""
    student, teacher = tiny_model(kind=kind, layers=layers), tiny_model(kind=kind, layers=layers, seed=1)
    student.train()
    objective = DistillationObjective(teacher, student)
    counter = CompileCounterWithBackend(compiled or "eager")
    for model, role in ((teacher, "teacher"), (student, "student")):
        if patched:
            patch(model, role)
        if compiled:
            assert compile_layers(model, backend=counter, fullgraph=True) == layers
    if checkpointed:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = []
    for _ in range(2):
        output = student(**objective.compare(batch()))
        output["loss"].backward()
        losses.append(output["loss"].detach())
    return {"loss": torch.stack(losses)} | {n: p.grad for n, p in student.named_parameters()}, counter.frame_count


@pytest.mark.few(1)
@pytest.mark.parametrize("patched, checkpointed", [(False, False), (True, False), (True, True)])
def test_compiled_layers_compute_the_same(patched, checkpointed):
    plain, _ = step(compiled=None, patched=patched)
    compiled, graphs = step(compiled="aot_eager", patched=patched, checkpointed=checkpointed)
    assert graphs > 0 and plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.full
def test_all_layers_share_their_graphs():
    _, few = step(compiled="eager", patched=True, layers=2)
    torch._dynamo.reset()
    _, many = step(compiled="eager", patched=True, layers=LAYERS)
    assert many == few <= 3  # the teacher's, the student's


@pytest.mark.full
def test_answers_are_not_compiled():
    model, counter = tiny_model(), CompileCounterWithBackend("eager")
    ids = torch.arange(3, 9)[None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    compile_layers(model, backend=counter)
    with uncompiled():
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert counter.frame_count == 0
    model(input_ids=ids)
    assert counter.frame_count > 0


@pytest.mark.full
def test_a_run_may_compile(tmp_path, monkeypatch, capsys):
    from distill.models.patch import compiling
    from distill.run import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiling.compile_layers, "__defaults__", ("aot_eager",))
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    (tmp_path / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(60)))
    text = """
        teacher: {model: teacher}
        student: {model: student, lora: {r: 2}}
        data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
        train: {steps: 2, learning_rate: 3e-3, warmup: 0, device: cpu, gradient_checkpointing: true}
        generate: {prompts: [The], max_new_tokens: 3}
    """
    results = [run(parse(text, [f"train.compile={on}", f"name=compiled-{on}"])) for on in ("true", "false")]
    out = capsys.readouterr().out
    assert out.count("compile     3 layers of the teacher, 2 layers of the student") == 1
    assert results[0].after == pytest.approx(results[1].after, rel=1e-5)
    assert results[0].after != results[0].before
