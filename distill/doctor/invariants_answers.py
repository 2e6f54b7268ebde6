"""Invariants of what the student learns from its own answers: they are its own, and they end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator
from distill.doctor.invariants import Finding, difference
from distill.doctor.subject import Subject

CHANGE = 0.1  # of the weights between two answers, as a share of their mean size
NO_ANSWERS = "the student does not answer in training"


def answers_follow_the_weights(subject: Subject) -> Finding:
    """The engine's log-probabilities of the tokens it draws are those of the student's forward over them: as its
    weights are, and after they have changed in place, as in training."""
    rollouts = subject.rollouts
    if rollouts is None:
        return Finding("own answers", None, NO_ANSWERS)
    subject = subject.shrunk()
    own, collate = rollouts.by(subject.student, fraction=1.0, log_probs=True), Collator(rollouts.pad)
    plain = [{name: part[name] for name in ("input_ids", "labels", "position_ids")} for part in subject.documents()]
    differences = []
    with torch.no_grad(), subject.quiet():
        for step in range(2):
            (batch,) = own.replace([collate(plain)], step, collate)
            learned = batch["labels"][:, 1:] != IGNORE_INDEX
            ids = batch["input_ids"].to(subject.device)
            logits = subject.student(input_ids=ids, use_cache=False).logits[:, :-1, : rollouts.vocab_size]
            log_p = logits.double().cpu().log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            differences.append(difference({"": batch["drawn_log_p"][:, 1:][learned]}, {"": log_p[learned]}))
            generator = torch.Generator().manual_seed(1)
            for parameter in subject.student.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise, alpha=CHANGE * (parameter.abs().mean().item() + 1e-2))
    worst, allowed = max(differences), subject.tolerance
    before, after = (f"{each:.1e}" for each in differences)
    return Finding(
        "own answers", worst <= allowed,
        f"log-probabilities by the engine and by the student differ by {before}, and by {after} after its weights "
        f"changed (at most {allowed:.0e})",
    )  # fmt: skip


def answers_end(subject: Subject) -> Finding:
    """What ends an answer of the data is learned and ends the student's too, whose last token is learned unless it was
    cut off: a student that never learns to end goes on until it is."""
    rollouts = subject.rollouts
    if rollouts is None:
        return Finding("end of turn", None, NO_ANSWERS)
    missing = sum(token not in rollouts.ends for token in subject.last_tokens)
    open_ended, documents = 0, [part for row in subject.rows for part in subject.form.documents(row)]
    for document in documents:
        learned = [label for label in document["labels"] if label != IGNORE_INDEX]
        longest = max(len(document[name]) for name in ("input_ids", "teacher_input_ids") if name in document)
        cut = len(learned) == rollouts.max_new_tokens or longest == rollouts.max_length
        open_ended += not (cut or (learned[-1:] and learned[-1] in rollouts.ends))
    return Finding(
        "end of turn", not missing and not open_ended,
        f"of {len(subject.last_tokens)} whole answers of the data {missing} learn no token that ends a turn, of "
        f"{len(documents)} of the student's {open_ended} end without one before they were cut off",
    )  # fmt: skip


ANSWER_CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    answers_follow_the_weights,
    answers_end,
)
