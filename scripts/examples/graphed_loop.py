"""Both models' decoders replayed from CUDA graphs in one's own loop; on a CPU the same loop runs launched.

python scripts/examples/graphed_loop.py
"""

import torch
from distill_kernels.optim.adamw import FusedAdamW
from transformers import LlamaConfig, LlamaForCausalLM

from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of
from distill.models.patch.patching import patch
from distill.teachers.objective import DistillationObjective


def model(seed: int, layers: int) -> LlamaForCausalLM:
    """A small Llama of random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def main(steps: int = 30, graphed: bool = True) -> tuple[list[float], int]:
    """Train; each step's loss, and how many calls were replays."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    teacher = model(0, 4).to(device, dtype).eval().requires_grad_(False)
    student = model(1, 2).to(device, dtype).train()
    graphs = None
    if cuda:
        patch(teacher, "teacher")
        patch(student, "student")
    objective = DistillationObjective(teacher, student, "forward_kl")
    optimizer = FusedAdamW(student.parameters(), lr=1e-3, stochastic_rounding=cuda, max_grad_norm=1.0)
    if cuda and graphed:
        graphs = DecoderGraphs()
        graphs.add("teacher", decoder_of(teacher), trains=False)
        graphs.add("student", decoder_of(student), trains=True)
    draw = torch.Generator().manual_seed(2)
    losses = []
    for step in range(steps):
        if graphs is not None and step == 3:  # by then kernels are compiled and the optimizer has its states
            graphs.enabled = True
        ids = torch.randint(512, (4, 64), generator=draw).to(device)
        loss = student(**objective.student_inputs({"input_ids": ids, "labels": ids}))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), 0 if graphs is None else graphs.replays


if __name__ == "__main__":
    losses, replays = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}, {replays} replays")
