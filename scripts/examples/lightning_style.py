"""Our kernels in a module of the Lightning kind: `training_step` returns the model's loss. Lightning is not needed.

python scripts/examples/lightning_style.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import distill

VOCAB = 512


class LanguageModule(nn.Module):
    """Module with LightningModule's methods; in a real project derive from it and use Lightning's Trainer."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config)

    def configure_model(self) -> None:
        """Lightning's hook before training, where the model is on its device."""
        distill.patch(self.model)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the training loss of one batch."""
        return self.model(**batch).loss

    @torch.no_grad()
    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> float:
        """Return the validation loss of one batch."""
        outputs = self.model(**batch)
        labels = batch["labels"][:, 1:]
        best = outputs.logits[:, :-1].argmax(-1)  # used here, and therefore computed here, and only here
        return (best == labels)[labels != -100].float().mean().item()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main(epochs: int = 6) -> tuple[list[float], list[float]]:
    """Train; each step's loss and each epoch's accuracy on the training rows."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = LanguageModule().to(device)
    module.configure_model()
    optimizer = module.configure_optimizers()
    starts, lengths = torch.randint(2, 256, (64,)).tolist(), torch.randint(8, 24, (64,)).tolist()
    rows = [[start + 3 * step for step in range(length)] for start, length in zip(starts, lengths, strict=True)]
    loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    losses, accuracies = [], []
    for _ in range(epochs):
        module.train()
        for index, batch in enumerate(loader):
            loss = module.training_step({name: tensor.to(device) for name, tensor in batch.items()}, index)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        module.eval()
        accuracies.append(module.validation_step({k: v.to(device) for k, v in padded(rows).items()}, 0))
    return losses, accuracies


if __name__ == "__main__":
    losses, accuracies = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}, accuracy {accuracies[-1]:.2f}")
