"""Our kernels and loss in TRL's SFTTrainer (1.16), which reads no logits then. Needs trl.

TRL 1.16 computes loss, entropy and accuracy of each step from hidden states with kernels of its own (`fused_lm_head`):
a patched model that is handed to a plain SFTTrainer has our layers and attention and TRL's loss, and makes no logits
either. `FusedSFTTrainer` below has our loss as well, and does not log TRL's entropy and accuracy.

python scripts/examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

import distill

VOCAB = 512


class FusedSFTTrainer(SFTTrainer):
    """SFTTrainer with the loss that the model itself computes; data, packing and masks stay TRL's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the fused loss of one batch."""
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)


def main(steps: int = 40, trainer_class: type[SFTTrainer] = FusedSFTTrainer, patched: bool = True) -> list[float]:
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
    words = {"<pad>": 0} | {str(i): i for i in range(1, VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="<pad>", eos_token="1"
    )
    starts, lengths = torch.randint(2, 256, (64,)).tolist(), torch.randint(8, 24, (64,)).tolist()
    counting = [[start + 3 * step for step in range(length)] for start, length in zip(starts, lengths, strict=True)]
    data = Dataset.from_dict({"input_ids": counting})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
            dataloader_pin_memory=False,
            prediction_loss_only=True,
        )
        trainer = trainer_class(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
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
