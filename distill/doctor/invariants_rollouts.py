"""Invariants of on-policy training: rollouts come from the current weights, and they end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator
from distill.doctor.check_result import CheckResult
from distill.doctor.check_setup import CheckSetup
from distill.doctor.invariants import difference

CHANGE = 0.1  # change of the weights between two rollouts, relative to their mean magnitude
NOT_ON_POLICY = "the recipe does not train on-policy"


def rollouts_follow_the_weights(subject: CheckSetup) -> CheckResult:
    """Check that the engine's log-probabilities of sampled tokens equal those of the student's forward.

    Once with the initial weights, and again after an in-place change, as in training.
    """
    rollouts = subject.rollouts
    if rollouts is None:
        return CheckResult("rollouts", None, NOT_ON_POLICY)
    subject = subject.truncated()
    own = rollouts.by(subject.student, fraction=1.0, log_probs=True)
    collate = Collator(rollouts.pad)
    plain = [{name: part[name] for name in ("input_ids", "labels", "position_ids")} for part in subject.documents()]
    differences = []
    with torch.no_grad(), subject.in_eval_mode():
        for step in range(2):
            (batch,) = own.replace([collate(plain)], step, collate)
            learned = batch["labels"][:, 1:] != IGNORE_INDEX
            ids = batch["input_ids"].to(subject.device)
            logits = subject.student(input_ids=ids, use_cache=False).logits[:, :-1, : rollouts.vocab_size]
            log_p = logits.double().cpu().log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            differences.append(difference({"": batch["sampled_log_p"][:, 1:][learned]}, {"": log_p[learned]}))
            generator = torch.Generator().manual_seed(1)
            for parameter in subject.student.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise, alpha=CHANGE * (parameter.abs().mean().item() + 1e-2))
    worst = max(differences)
    allowed = subject.tolerance
    before, after = (f"{each:.1e}" for each in differences)
    return CheckResult(
        "rollouts",
        worst <= allowed,
        f"log-probabilities of the engine and the student differ by {before}, and by {after} after its weights "
        f"changed (bound {allowed:.0e})",
    )


def rollouts_end(subject: CheckSetup) -> CheckResult:
    """Check that end-of-turn tokens are trained on, in the data's responses and in rollouts that are not truncated.

    A student that never learns to end a turn generates until it is cut off. A base student has to learn it from the
    data's responses, of which none are left where every response is a rollout.
    """
    rollouts = subject.rollouts
    if rollouts is None:
        return CheckResult("end of turn", None, NOT_ON_POLICY)
    missing = sum(token not in rollouts.ends for token in subject.last_tokens)
    open_ended = 0
    documents = subject.documents()
    for document in documents:
        learned = [label for label in document["labels"] if label != IGNORE_INDEX]
        starts = document.get("answer_starts")
        if starts:  # labels at the begins of spans alone
            learned = document["input_ids"][starts[-2] :]
        longest = max(len(document[name]) for name in ("input_ids", "teacher_input_ids") if name in document)
        cut = len(learned) == rollouts.max_new_tokens or longest == rollouts.max_length
        open_ended += not (cut or (learned[-1:] and learned[-1] in rollouts.ends))
    base = subject.turn_end_problem
    return CheckResult(
        "end of turn",
        not missing and not open_ended and (base is None or rollouts.fraction < 1),
        f"{missing} of {len(subject.last_tokens)} complete responses of the data have no trained end-of-turn token; "
        f"{open_ended} of {len(documents)} rollouts end without one although they were not truncated"
        + ("" if base is None else f"; {base}"),
    )


ROLLOUT_CHECKS: tuple[Callable[[CheckSetup], CheckResult], ...] = (
    rollouts_follow_the_weights,
    rollouts_end,
)
