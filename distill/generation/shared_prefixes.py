"""Shared prefixes of prompts: which tokens are computed, and which are copied from the KV cache.

The prompts of a conversation's turns are prefixes of each other; several responses have one prompt; and many
conversations begin with one system prompt and the same tools. In lexicographic order a prompt shares
the most with its neighbour, so that one pass over the sorted prompts finds every shared prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Tokens by which two prompts that part are worth joining: what follows them gathers its keys then. A prompt that is
# the whole beginning of another costs nothing, however short.
MIN_SHARED_TOKENS = 64

Tokens = tuple[int, ...]


class SharedPrefix(NamedTuple):
    """Prefix of a prompt that is computed for another one.

    Attributes:
        parent: the other prompt; None where nothing is shared.
        length: tokens that both begin with.
    """

    parent: Tokens | None
    length: int


class PrefixPlan(NamedTuple):
    """Plan of the tokens of some prompts: which are computed, which are copied, and what they attend to.

    Attributes:
        ids, positions: int64 [N], tokens that are computed, segment after segment.
        bounds: Start of each segment, and the end of the last.
        source, place: int64 [n]: computed token `source` goes to slot `place`, counted through all rows' slots.
        moved, moved_to: int64 [m]: what slot `moved` holds, before anything is written, is copied to slot `moved_to`.
        seen: int64 [K], the slots that the segments' tokens attend to, segment after segment; None where no segment
            attends to anything before it.
        seen_bounds: Start of each segment's keys in `seen`, and the end of the last.
    """

    ids: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray
    source: np.ndarray
    place: np.ndarray
    moved: np.ndarray
    moved_to: np.ndarray
    seen: np.ndarray | None
    seen_bounds: np.ndarray


def common_prefix(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return int((np.array(one[:length]) != np.array(other[:length])).argmax())


def shared_prefixes(prompts: Sequence[Tokens], held: Collection[Tokens] = ()) -> dict[Tokens, SharedPrefix]:
    """Return the prefix that each distinct prompt shares with another one, parents before their children.

    Args:
        prompts: token ids; equal ones count once.
        held: prompts that are known already, and have no parents.
    """
    # In this order all prompts that begin with one text are neighbours, so the longest prefix that a prompt shares with
    # an earlier one is shared with the one directly before it. A held prompt may be a parent wherever it stands: the
    # nearest one after the prompt is tried too. Parents are always earlier or held, so no two are each other's.
    found: dict[Tokens, SharedPrefix] = {prompt: SharedPrefix(None, 0) for prompt in held}
    ordered = sorted({*prompts, *held}, reverse=True)  # longer ones before those that they begin with
    held_next: list[Tokens | None] = [None]
    for prompt in reversed(ordered):
        held_next.append(prompt if prompt in found else held_next[-1])
    for before, prompt, after in zip([None, *ordered], ordered, held_next[-2::-1], strict=False):
        if prompt in found:
            continue
        pairs = [SharedPrefix(other, common_prefix(other, prompt)) for other in (before, after) if other is not None]
        best = max(pairs, key=lambda pair: pair.length, default=SharedPrefix(None, 0))
        worth = best.length >= MIN_SHARED_TOKENS or best.length == len(prompt)
        found[prompt] = best if worth else SharedPrefix(None, 0)
    return found


def order_by_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the prompts in an order in which those that share a prefix are neighbours.

    Families come by their longest prompt, the shortest family first, and in a family the longest prompt first.
    """
    whole = [tuple(prompt) for prompt in prompts]
    family: dict[Tokens, Tokens] = {}
    for prompt, (parent, _) in shared_prefixes(whole).items():
        family[prompt] = prompt if parent is None else family[parent]
    first: dict[Tokens, int] = {}
    longest: dict[Tokens, int] = {}
    for number, prompt in enumerate(whole):
        head = family[prompt]
        first.setdefault(head, number)
        longest[head] = max(longest.get(head, 0), len(prompt))

    def key(number: int) -> tuple[int, int, int, int]:
        head = family[whole[number]]
        return longest[head], first[head], -len(whole[number]), number

    return sorted(range(len(whole)), key=key)


def plan_prefixes(
    prompts: Sequence[Tokens], rows: Sequence[int], slots: int, held: Mapping[int, Tokens] | None = None
) -> PrefixPlan:
    """Plan the computation of some prompts, each shared prefix once.

    Args:
        prompts: token ids, at least one each.
        rows: the row of slots that each goes to, all different.
        slots: Number of slots of a cache row.
        held: prompts that rows hold already, by row; rows that are written to now among them.
    """
    kept = {prompt: row for row, prompt in (held or {}).items()}
    known = shared_prefixes(prompts, kept)
    # reversed, so that the first row of equal prompts is the one that remains
    first_row = dict(zip(reversed(prompts), reversed(rows), strict=True))
    computed = [prompt for prompt in first_row if prompt not in kept and known[prompt].length < len(prompt)]
    computed.reverse()  # as they were given
    lengths = np.array([len(prompt) - known[prompt].length for prompt in computed], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    begins = dict(zip(computed, bounds.tolist(), strict=False))
    # of each prompt's tokens the one that is computed, or -1 - slot where a row holds it
    # (parents come first: a child inherits the origin of every token of its prefix, wherever that came from)
    origin: dict[Tokens, np.ndarray] = {}
    for prompt, (parent, length) in known.items():
        if prompt in kept:
            origin[prompt] = -1 - (kept[prompt] * slots + np.arange(len(prompt)))
            continue
        inherited = np.zeros(0, dtype=np.int64) if parent is None else origin[parent][:length]
        own = begins.get(prompt, 0) + np.arange(len(prompt) - length)
        origin[prompt] = np.concatenate([inherited, own])
    source = np.concatenate([origin[prompt] for prompt in prompts])
    place = np.concatenate([row * slots + np.arange(len(p)) for p, row in zip(prompts, rows, strict=True)])
    here = source >= 0
    before = [known[prompt].length for prompt in computed]
    pairs = list(zip(computed, before, strict=True))
    empty = np.zeros(0, dtype=np.int64)
    return PrefixPlan(
        ids=np.concatenate([empty, *(np.array(prompt[length:], dtype=np.int64) for prompt, length in pairs)]),
        positions=np.concatenate([empty, *(np.arange(length, len(prompt)) for prompt, length in pairs)]),
        bounds=bounds,
        source=source[here],
        place=place[here],
        moved=-1 - source[~here],
        moved_to=place[~here],
        seen=np.concatenate([first_row[p] * slots + np.arange(len(p)) for p in computed]) if any(before) else None,
        seen_bounds=np.concatenate([[0], np.cumsum([len(prompt) for prompt in computed])]).astype(np.int64),
    )
