"""The profile of a run's first minute counts its samples to functions that exist, innermost first."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import distill
from scripts.bench.sampler import PHASES, phase_of

pytestmark = pytest.mark.full  # of scripts that measure, which no run of ours imports


def test_phases_are_named_after_functions_of_ours():
    text = "".join(path.read_text() for path in Path(distill.__file__).parent.rglob("*.py"))
    assert set(PHASES) <= set(re.findall(r"def (\w+)\(", text))


def test_a_sample_counts_to_the_innermost_phase():
    def made(name, body, module="distill.anything"):
        scope = {"__name__": module, "inner": body}
        exec(f"def {name}(): return inner()", scope)
        return scope[name]

    def phase():
        return phase_of(sys._getframe())

    assert made("load_teacher", phase)() == "load teacher"
    assert made("load_teacher", made("check_packing", phase))() == "try packing"
    assert made("load_teacher", made("check_packing", phase, module="elsewhere"))() == "load teacher"
    with ThreadPoolExecutor(1) as executor:  # whose stack begins anew, where a test runner's holds imports
        assert executor.submit(made("open", phase)).result() == "other: open"
        assert executor.submit(made("open", phase, module="elsewhere")).result() == "other"
    scope = {"__name__": "distill.something", "inner": phase}
    exec(compile("found = inner()", "something.py", "exec"), scope)  # as an import does
    assert scope["found"] == "imports"
