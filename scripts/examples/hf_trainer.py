"""Our kernels in a script of transformers' Trainer: the line marked below is all that is added.

python scripts/examples/hf_trainer.py
"""

import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import distill

VOCAB = 512


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right as a tokenizer's collator does it."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in fills.items()
    }


def rows(count: int = 64) -> Dataset:
    """Counting: each token is the one before plus three. The prompt, the first four tokens, is not learned."""
    made = []
    for start, length in torch.stack([torch.randint(2, 256, (count,)), torch.randint(8, 24, (count,))], 1).tolist():
        ids = [start + 3 * step for step in range(length)]
        made.append({"input_ids": ids, "labels": [-100] * 4 + ids[4:], "attention_mask": [1] * length})
    return Dataset.from_list(made)


def main(steps: int = 40, patched: bool = True) -> list[float]:
    """Train and return the logged losses, the evaluation's last."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    if patched:
        distill.patch(model)  # or AutoFusedModelForCausalLM.from_pretrained in place of AutoModelForCausalLM's
        # what the head gives out: no columns of logits, in training or in evaluation
        model.lm_head.register_forward_hook(lambda head, given, logits: check(logits.shape[-1] == 0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            prediction_loss_only=True,
        )
        data = rows()
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=padded)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated]


def check(right: bool) -> None:
    """Also under python -O."""
    if not right:
        raise AssertionError("logits were made")


if __name__ == "__main__":
    losses = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-2]:.4f}, evaluated {losses[-1]:.4f}")
