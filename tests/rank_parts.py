"""Ranks of a cut vocabulary in one process: threads that take turns, each with its rows of the heads."""

from __future__ import annotations

import threading

import torch
from distill_kernels.losses.fused import fused_linear_divergence
from distill_kernels.losses.linear import linear_divergence, reference_linear_divergence
from distill_kernels.losses.mixture import Mixture
from distill_kernels.losses.operands import Head
from distill_kernels.losses.shards import VocabShard
from helpers import assert_as_good_as_torch

SPANS = {
    "two": ((0, 130), (130, 300)),
    "three, one without columns": ((0, 256), (256, 300), (300, 300)),
    "the first without columns": ((0, 0), (0, 130), (130, 300)),
    "tiles": ((0, 256), (256, 512)),
}
PADDING = 6  # rows of a head beyond the columns that count


class Turns:
    """Ranks as threads, of which one runs at a time; they hand tensors over where they would meet in a collective."""

    def __init__(self, size):
        self.size, self.baton, self.barrier = size, threading.Lock(), threading.Barrier(size, timeout=400)
        self.slots = [None] * size

    def run(self, work):
        """`work(ranks)` of every rank; their results in order, or the first error."""
        results, errors = [None] * self.size, []

        def one(index):
            with self.baton:
                try:
                    results[index] = work(ThreadRanks(self, index))
                except Exception as error:
                    errors.append(error)
                    self.barrier.abort()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results


class ThreadRanks:
    """The interface of `shards.Ranks` over `Turns`."""

    def __init__(self, turns, index):
        self.turns, self.index, self.size = turns, index, turns.size

    def all_gather(self, tensor):
        self.turns.slots[self.index] = tensor.clone()
        self.meet()
        joint = torch.stack(list(self.turns.slots))
        self.meet()
        return joint

    def meet(self):
        self.turns.baton.release()
        try:
            self.turns.barrier.wait()
        finally:
            self.turns.baton.acquire()

    def all_reduce_(self, tensor):
        return tensor.copy_(self.all_gather(tensor).sum(0))

    def all_reduce_async(self, tensor):
        before = tensor.clone()
        total = self.all_gather(before).sum(0)
        tensor.fill_(float("nan"))  # whoever reads it early will see
        return lambda: tensor.copy_(total)

    def all_reduce_max(self, tensor):
        return self.all_gather(tensor).amax(0)


class LeftAlone:
    """The first of two ranks, whose collectives leave everything as it is."""

    index, size = 0, 2

    def all_gather(self, tensor):
        return torch.stack([tensor, tensor])

    def all_reduce_(self, tensor):
        return tensor

    def all_reduce_async(self, tensor):
        return lambda: None


def each_head(teacher, change):
    """`change` of the head or heads of a teacher, or None."""
    if isinstance(teacher, Mixture):
        return teacher._replace(heads=tuple(map(change, teacher.heads)))
    return None if teacher is None else change(teacher)


def outcomes_of(student, teacher, batch, o, wanted, spans, dtype, path, top_of_parts=None):
    """Outcomes of one rank with everything, in `dtype` and in fp64, and of all ranks; heads have `PADDING`."""
    vocab = spans[-1][1]
    run = linear_divergence if path == "kernel" else reference_linear_divergence
    alone = run(student, teacher, batch, o, wanted, vocab=vocab, dtype=dtype)

    def wide(head):
        return Head(*(t.double() if isinstance(t, torch.Tensor) else t for t in head))

    exact = reference_linear_divergence(
        wide(student),
        each_head(teacher, wide),
        batch._replace(row_scale=batch.row_scale.double()),
        o,
        wanted,
        vocab=vocab,
        dtype=torch.float64,
    )

    def work(ranks):
        shard = VocabShard(ranks, spans)
        start, stop = spans[ranks.index]
        stop += PADDING * (stop == vocab and start < vocab)  # it lies with the last columns

        def own(head):
            cut = [None if t is None else t[start:stop].clone() for t in (head.weight, head.bias, head.lora_b)]
            return head._replace(weight=cut[0], bias=cut[1], lora_b=cut[2])

        mine = batch if batch.labels is None else batch._replace(labels=shard.local_labels(batch.labels))
        mine = mine._replace(top=top_of_parts or batch.top)
        step = fused_linear_divergence if path == "kernel" else reference_linear_divergence
        return step(
            own(student), each_head(teacher, own), mine, o, wanted, vocab=shard.columns, dtype=dtype, shard=shard
        )

    return alone, exact, Turns(len(spans)).run(work)


def check_parts(alone, exact, parts, dtype):
    """Every rank has the whole loss, statistics, dx and dA, and its rows of the rest, as good as one rank's."""
    for name in ("weight", "bias", "lora_b"):
        if getattr(alone, name) is not None:
            joint = torch.cat([getattr(part, name) for part in parts])
            assert_as_good_as_torch(joint, getattr(alone, name), getattr(exact, name), dtype, name)
    for part in parts:
        for name in ("loss", "hidden", "lora_a"):
            if getattr(alone, name) is not None:
                assert torch.equal(getattr(part, name), getattr(parts[0], name)), f"{name} differs between ranks"
                assert_as_good_as_torch(getattr(part, name), getattr(alone, name), getattr(exact, name), dtype, name)
        assert (part.stats is None) == (alone.stats is None)
        for name, mine, one, right in zip(
            alone.stats._fields if alone.stats else (),
            part.stats or (),
            alone.stats or (),
            exact.stats or (),
            strict=True,
        ):
            assert_as_good_as_torch(mine, one, right, dtype, name)


def poisoned(monkeypatch):
    """Fresh memory is NaN from here on."""
    empty = torch.empty

    def made_bad(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", made_bad)


def check_equal_bits(parts, others):
    """Two runs of all ranks gave the same."""
    for one, other in zip(parts, others, strict=True):
        for name in ("loss", "hidden", "weight"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert all(map(torch.equal, one.stats, other.stats))
