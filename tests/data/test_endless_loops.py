"""Loops that broken or hostile input would keep running: each ends, in one line."""

import itertools
import time
import types

import pytest
from test_slow_replies import serve  # noqa: F401  (a fixture)

from distill.core.errors import RunError, TeacherUnavailableError
from distill.generation.function_calls import _Worker
from distill.models.load.source import _chain
from distill.teachers.backends.stored import epoch


def refused(handler, after="0"):
    handler.send_response(503)
    handler.send_header("retry-after", after)
    handler.send_header("content-length", "0")
    handler.end_headers()


@pytest.mark.full
def test_a_server_that_is_full_for_ever_is_given_up(serve):  # noqa: F811
    requests = itertools.count()

    def send(handler):
        next(requests)
        refused(handler)

    before = time.monotonic()
    with pytest.raises(TeacherUnavailableError, match=r"no response within 1\.5 s .*503"):
        serve(send).fetch("GET", "/v1/x")
    assert time.monotonic() - before < 8
    assert next(requests) < 20, "requests without a pause"


@pytest.mark.full
def test_a_server_that_answers_every_other_request_is_given_up(serve):  # noqa: F811
    requests = itertools.count(1)

    def send(handler):
        if next(requests) % 2:
            refused(handler)
        else:
            handler.send_response(200)
            handler.send_header("content-length", "0")
            handler.end_headers()

    before = time.monotonic()
    with pytest.raises(TeacherUnavailableError, match=r"no response within 1\.5 s .*503"):
        serve(send).of_each("/v1/identity")
    assert time.monotonic() - before < 8


def test_lines_that_are_no_reply_do_not_hold_a_call():
    """Copies that a function forked may write for ever."""
    worker = object.__new__(_Worker)
    worker.process = types.SimpleNamespace(stdin=types.SimpleNamespace(write=lambda text: None, flush=lambda: None))
    worker.lines = types.SimpleNamespace(get=lambda timeout: '{"call": 7}')
    assert worker._reply({"call": 1}, time.monotonic() + 0.3) is None


def test_an_error_that_is_its_own_cause_is_told_once():
    one = ValueError("one")
    other = ValueError("other")
    one.__cause__ = other
    other.__cause__ = one
    assert list(_chain(one)) == [one, other]


class Stored:
    """A store of which so many documents are missing after each look."""

    folder = "stored"

    def __init__(self, *counts):
        self.counts = iter(counts)
        self.missing = [b""] * next(self.counts)

    def flush(self):
        self.missing = [b""] * next(self.counts, len(self.missing))


@pytest.mark.full
def test_processes_that_store_nothing_are_waited_for_for_so_long(limit):
    limit.setattr(epoch, "LOOK_S", 0.02)
    limit.setattr(epoch, "STALLED_S", 0.3)
    epoch._wait_for_others(Stored(3, 3, 2, 2, 0))
    epoch._wait_for_others(Stored(*range(30, -1, -1)))  # longer than that in all, but never without a document
    with pytest.raises(RunError, match="have stored nothing for 0 s, and 2 documents are missing"):
        epoch._wait_for_others(Stored(3, 2))
