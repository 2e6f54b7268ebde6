"""Check of a privileged context: the same response after both prompts, and nothing private in the student's."""

from __future__ import annotations

from difflib import SequenceMatcher

from distill.core.labels import document_bounds
from distill.doctor.rows import first_trained
from distill.objectives.targets import Batch

FEW = 4  # tokens; a shorter context may occur in a prompt by chance


def context_verdict(batch: Batch) -> tuple[bool, str]:
    """Compare the tokens of responses in both inputs, and find context that leaks into the student's prompt."""
    more = 0
    for row in range(len(batch["labels"])):
        own, positions, other, other_positions = (
            batch[f"{who}{name}"][row].tolist() for who in ("", "teacher_") for name in ("input_ids", "position_ids")
        )
        labels = batch["labels"][row].tolist()
        for (a, b), (c, d) in zip(document_bounds(positions), document_bounds(other_positions), strict=False):
            document = {"labels": labels[a:b]}
            if (first := first_trained(document)) is None:
                continue
            answer, prompt = own[a + first : b], own[a : a + first]
            if other[d - len(answer) : d] != answer:
                return False, "a response has other tokens in the teacher's input"
            private = _only_in(other[c : d - len(answer)], prompt)
            if not private:
                return False, "the teacher has no context that the student lacks"
            leaked = SequenceMatcher(None, prompt, private, autojunk=False).find_longest_match().size
            if leaked >= max(FEW, len(private) / 2):
                return False, f"{leaked} tokens of the teacher's context are in the student's prompt"
            more += len(private)
    return True, f"responses have the same tokens in both inputs; {more} tokens before them are context"


def _only_in(longer: list[int], shorter: list[int]) -> list[int]:
    """Return a prompt without the beginning and the end that it shares with another."""
    start = next((at for at, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]), len(shorter))
    most = len(shorter) - start
    backwards = zip(longer[::-1], shorter[::-1], strict=False)
    end = next((at for at, pair in enumerate(backwards) if pair[0] != pair[1]), len(shorter))
    return longer[start : len(longer) - min(end, most)]
