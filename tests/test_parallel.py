"""Who is copied and who is sharded; a sharded teacher on two gloo processes gives one process's loss and gradients.

The file is also the program of the two processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
KINDS = ["tied", "untied"]


@pytest.mark.parametrize(
    "asked, teacher, world, expected",
    [
        ("auto", 15, 4, ("ddp", False, True)),
        ("auto", 90, 4, ("fsdp", False, True)),  # 90 + 48 does not fit, 90 + 30 does
        ("auto", 132, 4, ("fsdp", True, True)),
        ("auto", 800, 4, ("fsdp", True, False)),
        ("ddp", 132, 4, ("ddp", True, True)),
        ("fsdp", 15, 4, ("fsdp", False, True)),
        ("auto", 132, 1, ("ddp", False, False)),
    ],
)
def test_the_first_way_that_fits_is_taken(asked, teacher, world, expected):
    from distill.training.parallel import choose_sharing

    found = choose_sharing(
        asked, teacher=teacher * GIB, gathered=4 * GIB, copied=48 * GIB, sharded=30 * GIB, usable=130 * GIB, world=world
    )
    assert found == expected


def gradients(kind, sharded):
    from tiny import tiny_model

    from distill.data.collator import Collator
    from distill.training.objective import DistillationObjective
    from distill.training.parallel import shard_teacher

    student = tiny_model(dtype=torch.float64, seed=0)
    teacher = tiny_model(dtype=torch.float64, hidden=64, seed=1, layers=3, tie=kind == "tied")
    if sharded:
        from torch.distributed.tensor import DTensor

        shard_teacher(teacher)
        assert all(isinstance(p, DTensor) for p in teacher.parameters()), "not sharded"
    objective = DistillationObjective(teacher, student, {"terms": [{"type": "jsd"}]})
    ids = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(5)).tolist()
    batch = Collator(2)([{"input_ids": row, "labels": row, "position_ids": list(range(9))} for row in ids])
    for _ in range(2):  # the second step gathers again what the first one let go
        student.zero_grad()
        loss = student(**objective.compare(batch))["loss"]
        loss.backward()
    if sharded:
        assert all(isinstance(p, DTensor) for p in teacher.parameters()), "left whole after the step"
    return {"loss": loss.detach()} | {name: p.grad for name, p in student.named_parameters()}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
               "--rdzv-endpoint=localhost:0", __file__, str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return torch.load(folder / "results.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_teacher_teaches_the_same(two_processes, kind):
    expected = gradients(kind, sharded=False)
    assert two_processes[kind].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(two_processes[kind][name], value, rtol=1e-10, atol=1e-12, msg=name)


if __name__ == "__main__":
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {kind: gradients(kind, sharded=True) for kind in KINDS}
    if dist.get_rank() == 0:
        torch.save(results, Path(sys.argv[1]) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()
