"""Tokenizers that others wrote: one that never ends, or fills the memory, is one line that names it."""

import json
import resource

import pytest
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.core import tokenizer_limits
from distill.models.loading import load_tokenizer
from distill.recipe import LocalTeacherConfig

ROWS = [{"text": f"The teacher explains number {number} and the student listens."} for number in range(8)]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "model", tiny_model(tokenizer, seed=1), tokenizer)
    return tmp_path / "model"


def with_normalizer(folder, normalizer, pre_tokenizer=None):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = normalizer
    if pre_tokenizer is not None:
        content["pre_tokenizer"] = pre_tokenizer
    path.write_text(json.dumps(content))


def growing(pattern, times=8):
    first = {"type": "Replace", "pattern": {"String": pattern}, "content": "a" * 90}
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 90}
    return {"type": "Sequence", "normalizers": [first, *[more] * times]}


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["n", "a word that no other text holds"])
def test_a_normalizer_that_makes_endless_text_is_refused_before_it_is_used_here(saved, pattern):
    with_normalizer(saved, growing(pattern))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(
        ValueError, match=r"^teacher\.model: the tokenizer of .* takes more than 4 GiB of memory"
    ) as told:
        load_tokenizer(LocalTeacherConfig(model=str(saved)))
    assert "\n" not in str(told.value)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 5 << 20), "KiB"


def test_a_tokenizer_that_takes_too_long_is_ended(saved, limit):
    limit.setattr(tokenizer_limits, "MOST_SECONDS", 0.01)
    search = {"type": "Split", "pattern": {"Regex": "(a|aa)+"}, "behavior": "Isolated", "invert": False}
    with_normalizer(saved, None, {"type": "Sequence", "pretokenizers": [search, BYTES]})
    with pytest.raises(ValueError, match=r"^teacher\.model: the tokenizer of .* takes more than 0.01 s"):
        load_tokenizer(LocalTeacherConfig(model=str(saved)))


@pytest.mark.parametrize(
    "normalizer, grows",
    [
        (None, False),
        ({"type": "NFC"}, False),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "Lowercase"}]}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "x" * 17}, True),
        ({"type": "Sequence", "normalizers": [{"type": "Replace", "content": "abc"}] * 3}, True),
        ({"type": "Precompiled", "precompiled_charsmap": ""}, True),
    ],
)
def test_normalizers_that_expand_text_are_known(normalizer, grows):
    assert tokenizer_limits.may_grow(normalizer) == grows
