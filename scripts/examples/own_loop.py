"""Distil in one's own training loop: any two models that give hidden states, any optimizer. Needs distill_kernels only.

python scripts/examples/own_loop.py
"""

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn

VOCAB, STUDENT, TEACHER = 512, 32, 64


class Model(nn.Module):
    """Stands for a language model: tokens to hidden states, and a head that is not called."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(VOCAB, hidden), nn.Linear(hidden, hidden), nn.Tanh())
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states [..., hidden]."""
        return self.body(tokens)


def main(steps: int = 200, micro_batches: int = 2) -> list[float]:
    """Train and return each step's loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student, teacher = Model(STUDENT).to(device), Model(TEACHER).to(device).requires_grad_(False)
    teacher.lm_head.weight.mul_(8.0)  # random weights alone would teach next to nothing
    loss_fn = FusedDistillationLoss([LossTerm("forward_kl", 1.0), LossTerm("cross_entropy", 0.01)], temperature=2.0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        batches = torch.randint(VOCAB, (micro_batches, 4, 33), device=device)
        num_items = batches[..., 1:].numel()  # tokens of the whole step: micro-batches then weigh by their tokens
        total = 0.0
        for tokens in batches:
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            with torch.no_grad():
                taught = teacher(inputs)
            loss = loss_fn(
                student(inputs), student.lm_head.weight, taught, teacher.lm_head.weight, labels, num_items=num_items
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
