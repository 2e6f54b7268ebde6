"""Our loss inside TRL's SFTTrainer: the teacher's distribution in the place of the labels. Needs trl (1.16).

python scripts/examples/trl_trainer.py
"""

import tempfile

import torch
from datasets import Dataset
from distill_kernels import FusedDistillationLoss, LossTerm
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

VOCAB = 512


class DistillationSFTTrainer(SFTTrainer):
    """SFTTrainer whose loss compares the student with a teacher; data, packing and masks stay TRL's."""

    loss_is_scaled_for_ga = True  # num_items_in_batch counts the tokens of the whole step

    def __init__(self, *args, teacher, loss_fn, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        self.loss_fn = loss_fn

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the distillation loss of one batch."""
        labels = inputs.pop("labels")[:, 1:]
        # through the model's own call, so that DDP sees it; logits of one position only
        ask = {**inputs, "output_hidden_states": True, "logits_to_keep": 1, "use_cache": False}
        outputs = model(**ask)
        with torch.no_grad():
            taught = self.teacher(**ask).hidden_states[-1][:, :-1]
        student = self.accelerator.unwrap_model(model)
        loss = self.loss_fn(
            outputs.hidden_states[-1][:, :-1],
            student.get_output_embeddings().weight,
            taught,
            self.teacher.get_output_embeddings().weight,
            labels,
            num_items=num_items_in_batch,
        )
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # which averages gradients; the count is of all ranks
        return (loss, outputs) if return_outputs else loss


def model(hidden: int) -> LlamaForCausalLM:
    """A small Llama with random weights; in a real project, AutoModelForCausalLM.from_pretrained."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def main(steps: int = 40, accumulate: int = 2) -> list[float]:
    """Train and return the logged losses."""
    torch.manual_seed(0)
    student, teacher = model(32), model(64)
    teacher.lm_head.weight.data.mul_(20.0)  # random weights alone would teach next to nothing
    words = {"<pad>": 0} | {str(i): i for i in range(1, VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="<pad>", eos_token="1"
    )
    lengths = torch.randint(8, 24, (64,)).tolist()
    rows = Dataset.from_dict({"input_ids": [torch.randint(2, VOCAB, (length,)).tolist() for length in lengths]})
    with tempfile.TemporaryDirectory() as folder:
        size = {"per_device_train_batch_size": 8 // accumulate, "gradient_accumulation_steps": accumulate}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
        arguments = SFTConfig(folder, max_steps=steps, learning_rate=1e-2, logging_steps=1, bf16=False, **size, **quiet)
        loss_fn = FusedDistillationLoss([LossTerm("forward_kl", 1.0), LossTerm("cross_entropy", 0.01)])
        ours = {"teacher": teacher, "loss_fn": loss_fn}
        trainer = DistillationSFTTrainer(student, arguments, train_dataset=rows, processing_class=tokenizer, **ours)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
