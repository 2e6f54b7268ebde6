"""Kernels compile on threads before any of them runs, without a trace in models, plans or tuning.

The file is run as a program by its tests: Triton's compiler for an H100 with no GPU behind it, so that a launch raises.
"""

import contextlib
import json
import os
import sys

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from forked import clean_environment, run

    cache = str(tmp_path_factory.mktemp("triton"))
    made = run([__file__], cwd=os.getcwd(), env=clean_environment(TRITON_CACHE_DIR=cache, DISTILL_TUNE="1"))
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


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


def main():
    import torch
    import triton
    from compile_for_gpu import Driver
    from distill_kernels import compile_ahead, rms_norm, swiglu, tuning
    from distill_kernels.launch import FAMILIES, DeviceFacts, interpreted
    from triton.runtime.jit import JITFunction
    from triton.runtime.jit import _triton_jit_function_registry as functions

    facts = DeviceFacts(132, "sm_90", FAMILIES["sm_90"].shared_bytes, 50 << 20, 80 << 30)
    triton.runtime.driver.set_active(Driver("sm_90", 32))
    found, counts = {}, []

    def patch_facts():
        for name, module in list(sys.modules.items()):
            if name.startswith(("distill_kernels.", "distill.")) and hasattr(module, "device_facts"):
                module.device_facts = lambda device: facts

    def layers():
        x, w = torch.ones(16, 128, requires_grad=True), torch.ones(128, requires_grad=True)
        (rms_norm(x, w) + swiglu(x, x * 1)).sum().backward()

    def hashes():
        caches = [function.device_caches for function in functions.values()]
        return sorted(kernel.hash for cache in caches for kernel in (cache[0][0].values() if cache else ()))

    patch_facts()
    with interpreted(), compile_ahead.compiling_ahead(lambda *count: counts.append(count)):
        layers(), layers(), layers()
        found["planned"] = any(plan.replay for plan in rms_norm.__globals__["_forward_op"].planned.plans())
        tried, slow = [], facts._replace(family="sm_80")
        tuning.device_facts = lambda device: slow
        found["tuned"] = tuning.autotune("k", (1,), [("first",), ("second",)], lambda c: tried.append(c[0]), None)[0]
        tuning.device_facts, found["tried"] = (lambda device: facts), tried
    found["ahead"], found["counts"] = hashes(), counts
    for function in functions.values():
        function.device_caches.clear()
    os.environ["TRITON_CACHE_DIR"] += "-launched"
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **more: (
        run(self, *args, grid=grid, warmup=True, **more) and None
    )
    with interpreted():
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
    found |= pair_of_models(patch_facts)
    print(json.dumps(found))


def pair_of_models(patch_facts):
    import torch
    from distill_kernels import compile_ahead
    from distill_kernels.launch import interpreted
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
    compile_kernels.runs_our_kernels = lambda device: True
    fork_rng = torch.random.fork_rng
    torch.random.fork_rng = lambda devices: fork_rng([])
    patch_facts()
    found = {}
    for turn in ("kernels of a step", "kernels of a second run"):
        names.clear() if turn.endswith("run") else None
        with interpreted(), contextlib.redirect_stdout(sys.stderr):
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


if __name__ == "__main__":
    main()
