"""Distil under FSDP2 in one's own loop: every parameter sharded; `head_loss` runs the loss where the heads are whole.

torchrun --nproc-per-node 2 scripts/examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from distill_kernels import FusedDistillationLoss, LossTerm, head_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, STUDENT, TEACHER = 512, 32, 64


class Model(nn.Module):
    """Stands for a language model; given a loss, it computes it inside its own call, from its own head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh()) for _ in range(2)))
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, loss_fn=None, **against) -> torch.Tensor:
        """Return hidden states, or the loss where `loss_fn` is given."""
        hidden = self.layers(self.embed(tokens))
        return hidden if loss_fn is None else head_loss(self.lm_head, loss_fn, hidden, **against)

    def shard(self, mesh: DeviceMesh) -> "Model":
        """Shard the model with FSDP2."""
        for part in (*self.layers, self.lm_head):  # gathered one at a time, what is left with the root
            fully_shard(part, mesh=mesh)
        return fully_shard(self, mesh=mesh)


def main(steps: int = 60, micro_batches: int = 2) -> list[tuple[float, float]]:
    """Train and return each step's loss, the mean over the tokens of all ranks, and the norm of its gradient."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    student, teacher = Model(STUDENT), Model(TEACHER).requires_grad_(False)
    teacher.lm_head.weight.mul_(8.0)  # random weights alone would teach next to nothing
    mesh = init_device_mesh(device, (world,))
    student, teacher = (model.to(device).shard(mesh) for model in (student, teacher))
    loss_fn = FusedDistillationLoss([LossTerm("forward_kl", 1.0), LossTerm("cross_entropy", 0.01)], temperature=2.0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    history = []
    for _ in range(steps):
        batches = torch.randint(VOCAB, (micro_batches, 4, 33))[:, rank::world].to(device)  # this rank's rows
        num_items = torch.tensor(batches[..., 1:].numel(), device=device)
        dist.all_reduce(num_items)  # tokens of the whole step, of all ranks
        total = torch.zeros((), device=device)
        for tokens in batches:
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            with torch.no_grad():
                taught = teacher(inputs)
            loss = student(
                inputs, loss_fn, teacher_hidden=taught, teacher_head=teacher.lm_head, labels=labels, num_items=num_items
            )
            (loss * world).backward()  # FSDP2 averages gradients over ranks; the loss is a sum over num_items
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        history.append((total.item(), norm.full_tensor().item()))
    dist.destroy_process_group()
    return history


if __name__ == "__main__":
    history = main()
    if os.environ["RANK"] == "0":
        for name, (loss, norm) in (("first", history[0]), ("last", history[-1])):
            print(f"{name} step: loss {loss:.6f}, gradient norm {norm:.6f}", flush=True)
    os._exit(0)  # on CPUs a thread of gloo can outlive the interpreter, whose end then aborts the process
