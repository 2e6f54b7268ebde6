"""Kernels compile on threads before any of them runs, without a trace in models, plans or tuning.

The file is run as a program by its tests: Triton's compiler for an H100 with no GPU behind it, so that a launch raises.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

FEW = ("local", "filled while read")
MANY = (
    "retokenised, on-policy",
    "routed",
    "routed with all",
    "mixture",
    "top k of the student",
    "lora",
    "policy gradient",
    "running average",
)


def program(tmp_path, *arguments):
    """Run this file; return what it prints at last."""
    from forked import clean_environment, run

    environment = clean_environment(TRITON_CACHE_DIR=str(tmp_path), DISTILL_TUNE="1")
    made = run([__file__, *arguments], cwd=os.getcwd(), env=environment)
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return program(tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("names", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
def test_whole_runs_have_the_figures_that_they_have_without(names, tmp_path):
    """Memory that no kernel wrote holds NaN and the largest integers: as an index they would raise."""
    for name, (same, kernels, failed) in program(tmp_path, *names).items():
        assert same and kernels > 5 and not failed, (name, failed)


def test_kernels_are_those_that_a_launch_would_have_compiled(found):
    assert found["ahead"] == found["launched"] and len(found["ahead"]) >= 4
    assert found["counts"] == [[1, len(found["ahead"])]] * len(found["ahead"])


def test_a_kernel_that_fails_to_compile_says_so_at_its_launch(found):
    assert "never compiles" in found["failure"]


def test_nothing_is_planned_or_tuned(found):
    assert not found["planned"] and found["tuned"] == "first"
    assert found["tried"] == ["first", "second"]


def test_a_pass_over_patching_and_a_micro_batch_leaves_no_trace(found):
    assert found["kernels of a step"] > 20
    assert {"losses.row_kernel._row_kernel", "attention.key_gradient._key_gradient_kernel"} <= set(found["names"])
    for same in ("weights", "forwards", "random numbers", "training", "batch"):
        assert found[same], same
    assert found["gradients"] == 0


def test_a_second_run_finds_them_compiled(found):
    assert found["kernels of a second run"] == 0


@contextlib.contextmanager
def taken_for_a_gpu():
    """Inside, kernels are compiled for an H100, and the CPU's memory is taken for its."""
    import torch
    import triton
    from compile_for_gpu import Driver
    from distill_kernels.launch import FAMILIES, DeviceFacts, interpreted

    facts = DeviceFacts(132, "sm_90", FAMILIES["sm_90"].shared_bytes, 50 << 20, 80 << 30)
    triton.runtime.driver.set_active(Driver("sm_90", 32))
    stand_ins = [(torch.cuda, "reset_peak_memory_stats", lambda: None)]
    for name, module in list(sys.modules.items()):
        if name.startswith(("distill_kernels.", "distill.")) and hasattr(module, "device_facts"):
            stand_ins.append((module, "device_facts", lambda device: facts))
    fork_rng = torch.random.fork_rng
    stand_ins.append((torch.random, "fork_rng", lambda devices=(), **more: fork_rng([], **more)))
    if kernels := sys.modules.get("distill.training.compile_kernels"):
        stand_ins.append((kernels, "runs_our_kernels", lambda device: True))
    with contextlib.ExitStack() as stack:
        for module, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(interpreted())
        yield facts


def main():
    import torch
    import triton
    from distill_kernels import compile_ahead, rms_norm, swiglu, tuning
    from triton.runtime.jit import JITFunction

    found, counts = {}, []

    def functions():
        ours = [module for name, module in sys.modules.items() if name.startswith("distill_kernels.")]
        return {value for module in ours for value in vars(module).values() if isinstance(value, JITFunction)}

    def layers():
        x, w = torch.ones(16, 128, requires_grad=True), torch.ones(128, requires_grad=True)
        (rms_norm(x, w) + swiglu(x, x * 1)).sum().backward()

    def hashes():
        caches = [function.device_caches for function in functions()]
        return sorted(kernel.hash for cache in caches for kernel in (cache[0][0].values() if cache else ()))

    with taken_for_a_gpu() as facts, compile_ahead.compiling_ahead(lambda *count: counts.append(count)):
        layers(), layers(), layers()
        found["planned"] = any(plan.replay for plan in rms_norm.__globals__["_forward_op"].planned.plans())
        tried, slow = [], facts._replace(family="sm_80")
        with mock.patch.object(tuning, "device_facts", lambda device: slow):
            candidates = [("first",), ("second",)]
            found["tuned"] = tuning.autotune("k", (1,), candidates, lambda c: tried.append(c[0]), None)[0]
        found["tried"] = tried
    found["ahead"], found["counts"] = hashes(), counts
    for function in functions():
        function.device_caches.clear()
    os.environ["TRITON_CACHE_DIR"] += "-launched"
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **more: (
        run(self, *args, grid=grid, warmup=True, **more) and None
    )
    with taken_for_a_gpu():
        layers()
    found["launched"] = hashes()

    @triton.jit
    def _never_kernel(x_ptr):
        triton.language.static_assert(False, "never compiles")

    with compile_ahead.compiling_ahead():
        _never_kernel[(1,)](torch.ones(1))
    try:
        _never_kernel[(1,)](torch.ones(1))
    except Exception as error:
        found["failure"] = str(error)
    JITFunction.run = run
    print(json.dumps(found | pair_of_models()))


def pair_of_models():
    import torch
    from distill_kernels import compile_ahead
    from tiny import tiny_model
    from transformers import TrainingArguments

    from distill.models.patch.attention_choice import AttentionChoices
    from distill.recipe import load
    from distill.teachers.opening import ModelPair
    from distill.training import compile_kernels
    from distill.training.trainer import DistillationTrainer

    recipe = load("recipes/llama3-8b-to-1b.yaml")
    teacher, student = (tiny_model(hidden=256, seed=seed).bfloat16() for seed in (0, 1))
    arguments = TrainingArguments(os.environ["TRITON_CACHE_DIR"] + "-run", use_cpu=True, report_to="none")
    trainer = DistillationTrainer(student, teacher, arguments, loss="forward_kl", train_dataset=[{"input_ids": [1]}])
    pair = ModelPair(trainer.objective.teacher, student, None, None, "", None)
    ids = torch.arange(64).view(1, 64)
    batch, names = {"input_ids": ids, "labels": ids.clone()}, []
    tensors = [tensor for model in (teacher, student) for tensor in model.state_dict().values()]
    before = [tensor.clone() for tensor in tensors]
    forwards = [[(m, m.__dict__.get("forward")) for m in model.modules()] for model in (teacher, student)]
    random = torch.get_rng_state()
    compiled = compile_ahead._compile

    def noted(function, form):
        names.append(function._fn_name.removeprefix("distill_kernels."))
        return compiled(function, form)

    compile_ahead._compile = noted
    found = {}
    for turn in ("kernels of a step", "kernels of a second run"):
        names.clear() if turn.endswith("run") else None
        with taken_for_a_gpu(), contextlib.redirect_stdout(sys.stderr):
            compile_kernels.compile_kernels(trainer, pair, AttentionChoices(recipe), batch, "recipe")
        found[turn] = len(names)
        found.setdefault("names", list(names))
    found["weights"] = all(map(torch.equal, tensors, before))
    found["forwards"] = forwards == [
        [(m, m.__dict__.get("forward")) for m in model.modules()] for model in (teacher, student)
    ]
    found["random numbers"] = torch.equal(torch.get_rng_state(), random)
    found["training"] = not student.training
    found["batch"] = not any(value.__dict__ for value in batch.values())
    found["gradients"] = sum(parameter.grad is not None for parameter in student.parameters())
    return found


def golden_runs(names):
    """Make golden runs, each after a pass over its kernels; print whether they are as recorded, and what failed."""
    import tempfile

    import test_golden_runs
    import torch
    from distill_kernels import compile_ahead

    from distill.run import Run
    from distill.training import compile_kernels

    recorded, results = json.loads(test_golden_runs.RECORDED.read_text()), {}
    equal_machine = recorded["machine"] == test_golden_runs.machine()
    kernels, failed = set(), []
    prepare_models = Run._prepare_models

    def refuse(function, form):
        kernels.add(function._fn_name)
        raise RuntimeError("it is not compiled here")

    def after_a_pass(run, prepared, pair, trainer):
        rows = list(prepared.splits.validation)[: trainer.args.per_device_eval_batch_size]
        batch = trainer._prepare_inputs(trainer.data_collator(rows))
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
        with taken_for_a_gpu():
            recipe = os.getcwd()
            compile_kernels.compile_kernels(trainer, pair, prepared.context.attention, batch, recipe)
        torch.use_deterministic_algorithms(False)
        return prepare_models(run, prepared, pair, trainer)

    compile_ahead._compile = refuse
    compile_kernels.log.info = lambda *message: failed.append(str(message))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        place = test_golden_runs.write_place(Path(folder))
        with test_golden_runs.teacher_served(place) as url:
            for name in names:
                Run._prepare_models = prepare_models
                expected = recorded["runs"][name] if equal_machine else test_golden_runs.make(name, place, url)
                kernels.clear(), failed.clear()
                Run._prepare_models = after_a_pass
                figures = test_golden_runs.make(name, place, url)
                results[name] = figures == expected, len(kernels), list(failed)
    print(json.dumps(results))


if __name__ == "__main__":
    golden_runs(sys.argv[1:]) if sys.argv[1:] else main()
