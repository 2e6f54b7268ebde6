"""Our kernels under LoRA adapters of PEFT, on the head as well; patched before or after they are added.

python scripts/examples/peft_lora.py
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import distill

VOCAB = 512


def base() -> LlamaForCausalLM:
    """A small Llama with random weights; in a real project, AutoModelForCausalLM.from_pretrained."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )


def main(steps: int = 60, patch_first: bool = True) -> tuple[list[float], float]:
    """Train the adapters, save and load them; each step's loss, and the loss of what was loaded."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = base().to(device)
    if patch_first:
        distill.patch(model)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"])
    adapted = get_peft_model(model, config)
    if not patch_first:
        distill.patch(adapted)
    # what the head with its adapter gives out: no columns of logits
    model.lm_head.register_forward_hook(lambda head, given, logits: check(logits.shape[-1] == 0))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-2)
    ids = (torch.randint(2, 256, (16, 1)) + 3 * torch.arange(20)).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    losses = []
    for _ in range(steps):
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        adapted.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base(), folder).to(device)
        return [*losses, adapted.eval()(**batch).loss.item()], loaded.eval()(**batch).loss.item()


def check(right: bool) -> None:
    """Also under python -O."""
    if not right:
        raise AssertionError("logits were made")


if __name__ == "__main__":
    losses, loaded = main()
    print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}, loaded again {loaded:.4f}")
