"""Private names of torch, Triton and transformers: where they may stand, and what happens in a release without one."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# names that torch's and transformers' guides for extensions document, underscore or not, or that pickles and hooks have
# always had; a name that is none of them goes through distill_kernels/torch_internals.py
DOCUMENTED = {
    "torch._C.DisableTorchFunctionSubclass": "guide Extending PyTorch",
    "torch._C._disabled_torch_function_impl": "guide Extending PyTorch",
    "torch.Tensor._make_wrapper_subclass": "guide Extending PyTorch",
}
# where a private name is read with a fallback beside it
GUARDED = {
    "kernels/distill_kernels/torch_internals.py": {
        *("torch._C", "torch._C._dynamo", "torch._C._functorch", "torch.utils._python_dispatch"),
    },
    # imported by kernel_op.py, which does without where a name is missing
    "kernels/distill_kernels/launch_plans.py": {"torch._C._dynamo.guards", "torch.utils._python_dispatch"},
    # captured only where torch has it
    "distill/models/graphs.py": {"torch._C", "torch._C._cuda_clearCublasWorkspaces"},
    # of a benchmark against one pinned release of Liger
    "distill/commands/bench.py": {"liger_kernel.transformers.monkey_patch._apply_liger_kernel_to_instance"},
}
OURS = ("distill", "__future__", "_thread")


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def private_names(path: Path) -> set[str]:
    """Return the private names of other packages that a file imports, or reads from torch."""
    found = set()
    tree = ast.parse(path.read_text())
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(OURS):
            found |= {node.module} if private(node.module) else set()
            found |= {f"{node.module}.{alias.name}" for alias in node.names if private(alias.name)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if private(alias.name) and not alias.name.startswith(OURS)}
        elif isinstance(node, ast.Attribute) and node not in inner:
            dotted = ast.unparse(node)
            if re.fullmatch(r"(torch|triton|transformers)(\.\w+)+", dotted) and private(dotted):
                found.add(dotted)
    return found


@pytest.mark.full
def test_private_names_are_documented_or_have_a_fallback():
    for folder in ("distill", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            strange = private_names(path) - set(DOCUMENTED) - GUARDED.get(name, set())
            assert not strange, f"{name}: {strange} may be gone in the next release: see torch_internals.py"


COMMON = """
import logging, sys, torch
class Lines(logging.Handler):
    def emit(self, record): print("LINE", record.getMessage())
logging.getLogger("distill_kernels").addHandler(Lines())
"""
COMPUTE = """
import distill_kernels as ours
from distill_kernels.kernel_op import plan_module
plan_module()  # as the first call on a GPU does
x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
w = torch.linspace(0.5, 1.5, 32).requires_grad_()
y = ours.rms_norm(x, w)
y.square().sum().backward()
head = torch.randn(50, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
loss = ours.fused_kl_loss(x, head, x.detach() * 0.5, head.detach())
loss.backward()
from distill_kernels.torch_internals import copies_of, foreach_copy_
copied = copies_of([x.detach(), w.detach()])
foreach_copy_([copied[0]], [y.detach()])
print("SUM", float(y.sum()), float(loss), float(x.grad.norm()), float(head.grad.norm()), float(copied[0].norm()))
"""
PATCH = """
import transformers
from distill.models.patch.patching import patch
config = transformers.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config)
report = patch(model)
ids = torch.arange(12).view(1, 12)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
print("PATCHED", float(loss.detach()))
"""
# what a release may lack: how it is taken away before the kernels are imported, and a word of the line that says so
MISSING = {
    "guards of compiled code": ("del torch._C._dynamo.guards.TensorGuards", "without plans"),
    "levels of function transforms": ("del torch._C._functorch.maybe_current_level", "dispatcher"),
    "whether a dispatch mode is on": (
        "import torch.utils._python_dispatch as d; del d.is_in_torch_dispatch_mode",
        "dispatcher",
    ),
    "wrapped tensors": ("del torch._C._functorch.is_functorch_wrapped_tensor", "torch.vmap"),
    "copies of lists": ("del torch._foreach_copy_", "one by one"),
    "products of lists": ("del torch._foreach_mul", "one by one"),
    "products of fp8": ("del torch._scaled_mm", "float32"),
    "Triton's hooks": ("import triton; del triton.knobs.runtime.__class__.launch_enter_hook", "without plans"),
}


# carries out each text in a fork of itself, which has imported what none of them takes away, and nothing of ours
FORKS = """
import json, os, sys, traceback, torch, transformers, triton
transformers.LlamaForCausalLM
printed = {}
for name, source in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        try:
            exec(source, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        printed[name] = lines.read().splitlines()
    os.wait()
assert not any(module.startswith("distill") for module in sys.modules)
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What the computation printed without each of `MISSING`, and with all, as `usual`."""
    texts = {name: "\n".join((COMMON, remove, COMPUTE, PATCH)) for name, (remove, _) in MISSING.items()}
    texts["usual"] = "\n".join((COMMON, COMPUTE, PATCH))
    path = os.pathsep.join(map(str, (ROOT / "kernels", ROOT)))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes = {"input": json.dumps(texts), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, timeout=200, **pipes)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout)


def figures(lines: list[str]) -> list[float]:
    return [float(word) for line in lines if line.startswith(("SUM", "PATCHED")) for word in line.split()[1:]]


@pytest.mark.full  # processes of their own; names that may go are in the table in a plain run
def test_nothing_is_missed_in_this_release(printed):
    assert [line for line in printed["usual"] if line.startswith("LINE")] == [] and len(figures(printed["usual"])) == 6


@pytest.mark.full
@pytest.mark.parametrize("name", MISSING)
def test_a_release_without_a_private_name_computes_the_same_and_says_so(printed, name):
    told = [line for line in printed[name] if line.startswith("LINE")]
    assert len(told) == 1 and MISSING[name][1] in told[0], told
    assert figures(printed[name]) == pytest.approx(figures(printed["usual"]), rel=1e-6)
