"""Callback that replays training steps from CUDA graphs: the setting `train.cuda_graph`.

    trainer.add_callback(CudaGraphCallback([("teacher", teacher), ("student", student)]))

The first steps run eagerly, so that kernels are compiled and tuned and the optimizer has its states. With `auto`
further steps are timed eagerly and as many replayed, and the faster mode is kept: a graph must win by `WINS`, since it
holds memory. Timed steps are steps of the run: a graph gives the same bits as eager launches. With `auto` a model with
wide layers stays eager: its kernels keep the GPU busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState

from distill.core import console
from distill.core.ranks import is_main_process
from distill.models.graphs import DecoderGraphs
from distill.models.head import decoder_of
from distill.models.shape import layer_sizes

WARM_UP = 3  # eager steps before anything is timed
TIMED = 4  # timed steps of each mode
CAPTURE = 3  # steps between: a shape is captured when it occurs a second time
WORTH = 40  # steps that must remain for a trial
WINS = 0.97  # largest ratio of replayed to eager step time at which graphs are kept
WIDE = 45e6  # weights of a layer from which its kernels outlast their launches: at 8B to 1B graphs gain nothing


class CudaGraphCallback(TrainerCallback):
    """Callback that captures the decoders of a trainer's models, and keeps the graphs where they are faster.

    Args:
        models: Names and models of teacher and student; the one named `student` is trained.
        always: Capture without a trial (`train.cuda_graph: true`).
        mean: Function that averages a number over the ranks, so that all decide alike.
        say: Function that prints a line; None for the console.
    """

    def __init__(
        self,
        models: Sequence[tuple[str, nn.Module]],
        *,
        always: bool = False,
        mean: Callable[[float], float] = lambda seconds: seconds,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.always = always
        self.mean = mean
        self.say = say or (lambda text: console.print_lines(f"{'graphs':<12}{text}") if is_main_process() else None)
        self.models = [pair for pair in models if always or max(layer_sizes(pair[1]), default=0) < WIDE]
        self.graphs: DecoderGraphs | None = None
        self._steps = 0  # of this process
        self._launched: list[float] = []
        self._replayed: list[float] = []
        self._decided = not self.models
        self._timed: list[float] | None = None
        self._start = 0.0

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._decided:
            return
        if self._steps == 0 and not self.always and state.max_steps - state.global_step < WORTH:
            self._decided = True
            return
        if self._steps == WARM_UP + (0 if self.always else TIMED):
            self._capture()
        self._timed = self._samples()
        if self._timed is not None:
            torch.cuda.synchronize()
            self._start = time.perf_counter()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._decided:
            return
        if self._timed is not None:
            torch.cuda.synchronize()
            self._timed.append(time.perf_counter() - self._start)
        self._steps += 1
        if self._steps == WARM_UP + CAPTURE + (TIMED if self.always else 2 * TIMED):
            self._decide()

    def _samples(self) -> list[float] | None:
        """Return the list that takes the time of the present step; None if it is not timed."""
        if self.always:
            return None
        if WARM_UP <= self._steps < WARM_UP + TIMED:
            return self._launched
        return self._replayed if self._steps >= WARM_UP + TIMED + CAPTURE else None

    def _capture(self) -> None:
        self.graphs = DecoderGraphs()
        for name, model in self.models:
            self.graphs.add(name, decoder_of(model), trains=name == "student")
        self.graphs.enabled = True

    def _decide(self) -> None:
        assert self.graphs is not None
        self._decided = True
        launched, replayed = (
            self.mean(statistics.median(times or [0.0])) * 1e3 for times in (self._launched, self._replayed)
        )  # a collective: every rank calls it before any return
        refused = "; ".join(f"the {name} runs eagerly: {why}" for name, why in self.graphs.refused.items())
        if len(self.graphs.refused) == len(self.models):
            self._end(refused)
        elif not self.graphs.replays:
            self._end("off: no batch shape occurred twice")
        elif self.always:
            self.say("the step runs from CUDA graphs" + (f"; {refused}" if refused else ""))
        else:
            times = f"{replayed:.1f} ms a step, eager {launched:.1f}" + (f"; {refused}" if refused else "")
            if replayed < WINS * launched:
                self.say(f"the step runs from CUDA graphs: {times}")
            else:
                self._end(f"off, since the gain is too small: {times}")

    def _end(self, why: str) -> None:
        assert self.graphs is not None
        self.graphs.release()
        self.graphs = None
        self.say(why)
