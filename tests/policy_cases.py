"""Cases of policy-gradient losses: settings, inputs, and the definition over full logits, for autograd."""

import torch
from helpers import realistic_heads, round_gradient
from torch.nn import functional as F

N, V, H = 23, 300, 32
PLAIN = {}
CLIPPED = {"clip": 0.1, "clip_high": 0.3}
PENALTY = {"clip": 0.2, "kl_weight": 0.4, "kl_estimator": "k3"}
SQUARED = {"kl_weight": 0.4, "kl_estimator": "k2", "entropy_weight": 0.05}
REWARDED = {"kl_weight": 1.0, "kl_estimator": "reward"}
EVERYTHING = {
    **CLIPPED,
    "kl_weight": 0.3,
    "entropy_weight": 0.1,
    "temperature": 1.5,
    "student_logit_scale": 0.7,
    "student_softcap": 9.0,
}
SETTINGS = {
    "plain": PLAIN,
    "clipped": CLIPPED,
    "k3": PENALTY,
    "k2 and entropy": SQUARED,
    "reward": REWARDED,
    "everything": EVERYTHING,
}


def draw(device, dtype=torch.float32, rows=N, vocab=V, hidden=H):
    """Hidden states, weight, bias; labels of which some are ignored; advantages, old and reference log-probabilities.

    Ratios lie on either side of every clipping range, and none within 1e-2 of its ends.
    """
    x, w, x_other, w_other = realistic_heads(rows, vocab, hidden, hidden, dtype=dtype, device=device, std=2.0)
    generator = torch.Generator(device=device).manual_seed(1)
    bias = torch.randn(vocab, device=device, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, (rows,), device=device, generator=generator)
    advantages = torch.randn(rows, device=device, generator=generator)
    reference = F.log_softmax((x_other.double() @ w_other.double().T), -1).gather(-1, labels[:, None])[:, 0].float()
    return [x, w, bias], labels, advantages, reference


def old_of(tensors, labels, **settings):
    """Log-probabilities whose ratio to the present ones is one of a few."""
    ratios = torch.tensor([0.6, 0.8 + 0.05, 1.0, 1.05, 1.25, 1.6], device=labels.device, dtype=torch.float64)
    log_p = logits_of([t.double() for t in tensors], **settings).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return (log_p - ratios[torch.arange(len(labels), device=labels.device) % len(ratios)].log()).float()


def logits_of(
    tensors, temperature=1.0, student_logit_scale=1.0, student_softcap=None, gradient_dtype=torch.float64, **_
):
    z = round_gradient(F.linear(*tensors), gradient_dtype) * student_logit_scale
    z = z if student_softcap is None else student_softcap * torch.tanh(z / student_softcap)
    return z / temperature


def dense(
    z,
    labels,
    advantages,
    old,
    reference,
    *,
    clip=None,
    clip_high=None,
    kl_weight=0.0,
    kl_estimator="k3",
    entropy_weight=0.0,
    **_,
):
    """Row losses from logits over the temperature, by the definition, for autograd to differentiate."""
    all_log_p = z.log_softmax(-1)
    log_p = all_log_p.gather(-1, labels[:, None])[:, 0]
    advantages, old, reference = (None if t is None else t.to(z.dtype) for t in (advantages, old, reference))
    gain = torch.zeros_like(log_p) if advantages is None else advantages
    if kl_weight and kl_estimator == "reward":
        gain = gain + kl_weight * (reference - log_p.detach())
    ratio = (log_p - (log_p.detach() if old is None else old)).exp()
    loss = -ratio * gain
    if clip is not None:
        loss = torch.maximum(loss, -ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high)) * gain)
    if kl_weight and kl_estimator == "k2":
        loss = loss + kl_weight * (reference - log_p).square() / 2
    if kl_weight and kl_estimator == "k3":
        loss = loss + kl_weight * ((reference - log_p).exp() - (reference - log_p) - 1)
    return loss + entropy_weight * (all_log_p.exp() * all_log_p).sum(-1)


def expected_of(tensors, labels, given, dtype, kept, upstream=2.0, **settings):
    """Mean over `kept` rows and its gradients times `upstream`, from full logits in `dtype`.

    With `gradient_dtype` among the settings, the gradient for the logits is rounded to it.
    """
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in tensors]
    rows = dense(logits_of(leaves, **settings), labels.clamp_min(0), *given, **settings)
    rows = torch.where(kept, rows, 0.0) / kept.sum()
    (rows.sum() * upstream).backward()
    return [rows.detach(), *(leaf.grad for leaf in leaves)]


def given_of(tensors, labels, advantages, reference, settings):
    old = old_of(tensors, labels, **settings) if "clip" in settings else None
    return advantages, old, reference if "kl_weight" in settings else None
