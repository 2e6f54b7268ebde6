"""Stop strings: an answer ends with the first token with which its text contains one, whenever the host looks."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from tiny import save_models, tiny_model, tiny_tokenizer

from distill.evaluation.sample import AnswerSettings, sample
from distill.generation import decode_loop
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.engines import TransformersEngine
from distill.generation.sampling import GREEDY, Sampling
from distill.generation.stopping import StopStrings, truncate_at_end
from distill.recipe import parse

TEXT = "Héllo wörld, 日本語 — the end.\n\nUser: 😀😀 END of naïve text END"


def by_definition(tokenizer, strings, tokens):
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(string in text for string in strings):
            return end
    return None


@pytest.mark.plain("330")
@pytest.mark.parametrize("size", [259, 330])
def test_a_response_ends_at_a_stop_string(size):
    """Stop strings lie within tokens and across their borders, with byte-level and merged tokens, checked in parts."""
    tokenizer, chance = tiny_tokenizer(size), random.Random(0)
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"] + [1]
    ends = set()
    for _ in range(300):
        start = chance.randrange(len(TEXT))
        strings = [TEXT[start : start + chance.randint(1, 9)], "never there", "<|im_start|>"][: chance.randint(1, 3)]
        stop, expected = StopStrings(tokenizer, strings), by_definition(tokenizer, strings, tokens)
        assert stop.find_end(tokens) == expected is not None, strings
        seen, found, step = 0, None, chance.randint(1, 20)
        while found is None:
            found = stop.find_end(tokens[: seen + step], seen)
            seen += step
        assert found == expected
        ends.add(expected)
    assert StopStrings(tokenizer, ["nowhere"]).find_end(tokens) is None
    assert StopStrings(tokenizer, ["日"]).find_end([]) is None and len(ends) > 20


def test_a_partial_character_is_no_stop_string():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("aé", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3
    stop = StopStrings(tokenizer, ["é"])
    assert stop.find_end(ids[:2]) is None and stop.find_end(ids) == 3
    assert StopStrings(tokenizer, ["è"]).find_end(ids) is None, "the same first byte"


def test_what_is_decoded_grows_with_the_answer_and_not_its_square():
    decoded = 0

    class Counting:
        def decode(self, tokens, **_):
            nonlocal decoded
            decoded += len(tokens)
            return "x" * len(tokens)

    stop, costs = StopStrings(Counting(), ["END"]), []
    for length in (1000, 2000):
        decoded, tokens = 0, []
        for _ in range(0, length, 10):
            tokens += range(10)
            assert stop.find_end(tokens, len(tokens) - 10) is None
        costs.append(decoded)
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.01) and costs[1] < 2 * 2000


def test_responses_are_truncated_at_stop_strings_ends_and_limits():
    stop = StopStrings(tiny_tokenizer(), ["b"])
    ids = [tiny_tokenizer()(letter, add_special_tokens=False)["input_ids"][0] for letter in "abc"]
    a, b, c = ids
    assert truncate_at_end([a, b, c], 3, [0], stop) == ([a, b], False)
    assert truncate_at_end([a, b, c], 2, [0], stop) == ([a, b], False), "the last one allowed completes it"
    assert truncate_at_end([a, b, c], 1, [0], stop) == ([a], True)
    assert truncate_at_end([a, 0, b], 3, [0], stop) == ([a, 0], False)
    assert truncate_at_end([a, b, c], 2, [b], None) == ([a, b], False) and truncate_at_end([], 0, [b], stop) == (
        [],
        True,
    )


class Pairs:
    """Each even token is the first byte of é, each odd one the second."""

    def decode(self, tokens, **_):
        return bytes(0xA9 if token % 2 else 0xC3 for token in tokens).decode(errors="replace")


class Looks(DecodeLoop):
    """Looks every `decode_loop.STEPS_PER_REPLAY` tokens, as where a graph is replayed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.replays, self.steps = True, 0

    def _capture(self, slots, sampling):
        def replay():
            for _ in range(decode_loop.STEPS_PER_REPLAY):
                self._step(slots, sampling)

        slots.graph = SimpleNamespace(replay=replay)

    def _step(self, *args):
        self.steps += 1
        super()._step(*args)


MANY = [[(7 * n + k) % 259 for k in range(1 + 5 * n % 11)] for n in range(13)]
LIMITS = [60, 50, 1, 46, 57, 0, 80, 2, 70, 41, 1, 55, 8]


@pytest.mark.full
@pytest.mark.parametrize("strings", [["éé"], ["ééé", "nothing", "éé\ufffdé"]], ids=["one", "three"])
def test_the_loop_ends_them_whenever_it_looks(limit, strings):
    """Every answer is what the model says alone, up to the first token that completes a string; slots become free."""
    model, stop = tiny_model(dtype=torch.float64), StopStrings(Pairs(), strings)
    settings = EngineSettings(2, [*range(0, 259, 97)], log_probs=True)
    seeds = [3 * n + 1 for n in range(13)]
    asked = {"max_new_tokens": LIMITS, "sampling": Sampling(3.0, top_k=200), "seeds": seeds}
    free = DecodeLoop(model, settings).generate(MANY, **asked)
    cuts = [by_definition(Pairs(), strings, tokens) for tokens in free.tokens]
    assert 4 <= sum(cut is not None for cut in cuts) < 13
    steps = {}
    for looks in (1, 2, 5, 16):
        limit.setattr(decode_loop, "STEPS_PER_REPLAY", looks)
        for batch_size in (3, 64):
            loop = Looks(model, settings._replace(stop=stop))
            found = loop.generate(MANY, **asked, batch_size=batch_size)
            assert found.tokens == [tokens[:cut] for tokens, cut in zip(free.tokens, cuts, strict=True)]
            assert found.truncated == [was and cut is None for was, cut in zip(free.truncated, cuts, strict=True)]
            for ours, whole, cut in zip(found.log_probs, free.log_probs, cuts, strict=True):
                assert ours == pytest.approx(whole[:cut], abs=1e-9)
            steps[looks, batch_size] = loop.steps
    for looks in (1, 5):
        limit.setattr(decode_loop, "STEPS_PER_REPLAY", looks)
        plain = Looks(model, settings)
        plain.generate(MANY, **asked, batch_size=3)
        assert steps[looks, 3] < 0.9 * plain.steps, (steps, plain.steps)


def test_transformers_engine_ends_them_early():
    model, tokenizer = tiny_model(tiny_tokenizer(), dtype=torch.float64), tiny_tokenizer()
    settings = EngineSettings(2, [0], log_probs=True)
    prompts = MANY[:5]
    free = DecodeLoop(model, settings).generate(prompts, max_new_tokens=40)
    texts = [by_character(tokenizer, tokens) for tokens in free.tokens]
    strings = sorted({text[2] for text in texts if len(text) > 2})  # of each answer something that it says
    stop = StopStrings(tokenizer, strings)
    expected = [by_definition(tokenizer, strings, tokens) for tokens in free.tokens]
    assert max(expected) < 30
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    for engine in (TransformersEngine, DecodeLoop):
        calls.clear()
        found = engine(model, settings._replace(stop=stop)).generate(
            prompts, max_new_tokens=40, sampling=GREEDY, batch_size=8
        )
        assert found.tokens == [tokens[:cut] for tokens, cut in zip(free.tokens, expected, strict=True)]
        assert found.truncated == [False] * 5
        assert list(map(len, found.log_probs)) == expected
        if engine is TransformersEngine:
            assert len(calls) == max(expected)


def by_character(tokenizer, tokens):
    """Return a response's text up to its last whole character."""
    return [letter for letter in tokenizer.decode(tokens, skip_special_tokens=True) if letter != "\ufffd"]


@pytest.mark.full
def test_answers_in_a_file_end_with_it(tmp_path, monkeypatch):
    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    (tmp_path / "q.txt").write_text("\n".join(f"What is {n}?" for n in range(5)))
    monkeypatch.chdir(tmp_path)
    recipe = parse("teacher: {model: teacher}\nstudent: {model: student}\ndata: {source: x.jsonl}\ntrain: {steps: 1}")
    results = {}
    for name, stop in {"free": (), "stop": ("e", "a", "t", "o")}.items():
        out = tmp_path / f"{name}.jsonl"
        sample(recipe, "q.txt", out, "teacher", AnswerSettings(max_new_tokens=200, stop=stop))
        results[name] = [json.loads(line) for line in out.read_text().splitlines()]
    stopped = 0
    for free, row in zip(results["free"], results["stop"], strict=True):
        assert "stop" not in free["sampled"] and row["sampled"]["stop"] == ["e", "a", "t", "o"]
        text = row["completion"].rstrip("\ufffd")
        assert free["completion"].startswith(text)
        if any(letter in row["completion"] for letter in "eato"):
            stopped += 1
            assert not row["truncated"] and not any(letter in text[:-8] for letter in "eato")
    assert stopped >= 3
