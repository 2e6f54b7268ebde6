"""Chat templates that never end or fill the memory are stopped, and the limits are gone afterwards."""

import json
import re
import resource
import signal
import time
from pathlib import Path

import pytest
from test_hostile_inputs import (
    CHATS,
    own_folder,  # noqa: F401
)
from tiny import tiny_tokenizer

from distill.data import rendering
from distill.data.limits import limit_resources
from distill.data.load import load_data
from distill.recipe import Data

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


DOUBLING = "{% set n = namespace(s='x' * 1000) %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "template, expected",
    [
        (LOOPS, "takes longer than"),
        ("{{ 10 ** (10 ** 9) }}", "takes longer than|more than"),
        (
            "{% set n = namespace(x=10 ** 9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "takes longer than|more than",
        ),
        (DOUBLING, "takes longer than|more than 1,024 MiB"),
        ("{{ '%9999999999d' % 1 }}", "takes longer than|more than 1,024 MiB|too big"),
        ("{{ 'x'.center(10 ** 10) }}", "takes longer than|more than 1,024 MiB"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "takes longer than|more than 1,024 MiB"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("x" * (1 << 21), "expected at most 1,048,576 characters"),
    ],
)
def test_templates_that_never_end_or_fill_the_memory(template, expected, limit):
    if "takes longer" in expected:  # of the others the clock, which a busy machine does not stop, says nothing
        limit.setattr(rendering, "TEMPLATE_SECONDS", 0.5)
    Path("t.jinja").write_text(template)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    before = time.process_time()
    with pytest.raises(ValueError, match=r"data\.chat_template: .*") as raised:
        load_data(Data(source="a.jsonl", chat_template="t.jinja", max_length=64), tiny_tokenizer(), seed=0)
    assert re.search(expected, str(raised.value)) and "\n" not in str(raised.value)
    assert time.process_time() - before < 20


def test_limits_leave_nothing_behind():
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    left = signal.getitimer(signal.ITIMER_REAL)[0]  # of the test's own timer, if there is one
    for _ in range(2):
        with pytest.raises(TimeoutError), limit_resources(0.05, 1 << 30):
            while True:
                pass
        with pytest.raises(MemoryError), limit_resources(5, 1 << 20):
            bytearray(1 << 29)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(left)
    assert signal.getsignal(signal.SIGALRM) is handler
