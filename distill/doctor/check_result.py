"""Results of `distill doctor`: lines on the machine, and checks that passed, failed or do not apply."""

from __future__ import annotations

from typing import NamedTuple


class CheckLine(NamedTuple):
    """Property of this machine: name, whether it is fine, value, and advice."""

    name: str
    fine: bool
    detail: str

    def __str__(self) -> str:
        return f"{'fine' if self.fine else 'LOOK'}  {self.name}: {self.detail}"


class CheckResult(NamedTuple):
    """Result of one check.

    Attributes:
        passed: Whether it passed; None where it does not apply.
        detail: What was compared, with the difference; the reason where it does not apply.
        seconds: Duration; None where not measured.
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float | None = None

    def __str__(self) -> str:
        if self.passed is None:
            return f"skip  {self.name}: skipped: {self.detail}"
        took = "" if self.seconds is None else f" [{self.seconds:.0f} s]"
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}{took}"
