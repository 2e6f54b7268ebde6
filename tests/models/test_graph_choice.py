"""The choice between eager and replayed steps, without a GPU."""

import pytest
import torch
from tiny import tiny_model

from distill.training.cuda_graphs import CAPTURE, TIMED, WARM_UP, CudaGraphCallback


class Clock:
    """The state of a training, for a callback that is tried without a GPU."""

    def __init__(self, steps):
        self.global_step, self.max_steps = 0, steps


@pytest.mark.parametrize(("replayed", "kept"), [(0.02, True), (0.05, False)])
def test_the_faster_way_is_kept(monkeypatch, hardware, replayed, kept):
    """A clock of our own: launched steps take 50 ms."""
    now = [0.0]

    class Stand:
        def __init__(self):
            self.refused, self.replays, self.enabled, self.released = {}, 1, False, False

        def add(self, *args, **kwargs):
            pass

        def release(self):
            self.released = True

    hardware.setattr("distill.training.cuda_graphs.DecoderGraphs", Stand)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    said = []
    steps, state = CudaGraphCallback([("student", tiny_model())], say=said.append), Clock(100)
    for _ in range(WARM_UP + CAPTURE + 2 * TIMED):
        steps.on_step_begin(None, state, None)
        now[0] += replayed if steps.graphs is not None else 0.05
        steps.on_step_end(None, state, None)
        state.global_step += 1
    assert (steps.graphs is not None) == kept
    expected = "the step runs from CUDA graphs: 20.0 ms" if kept else "off, since the gain is too small: 50.0 ms"
    assert said[0].startswith(expected)


def test_a_wide_model_is_not_captured_by_default(limit):
    small, wide = tiny_model(), tiny_model(intermediate_size=512)
    limit.setattr("distill.training.cuda_graphs.WIDE", 20_000)
    assert [name for name, _ in CudaGraphCallback([("teacher", wide), ("student", small)]).models] == ["student"]
    assert CudaGraphCallback([("student", wide)])._decided
    assert len(CudaGraphCallback([("teacher", wide), ("student", small)], always=True).models) == 2


def test_a_short_run_tries_nothing():
    said = []
    steps, state = CudaGraphCallback([("student", tiny_model())], say=said.append), Clock(20)
    for _ in range(20):
        steps.on_step_begin(None, state, None)
        steps.on_step_end(None, state, None)
    assert steps.graphs is None and not said
