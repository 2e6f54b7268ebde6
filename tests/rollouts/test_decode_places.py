"""Places that answers leave to those who wait, and steps that are replayed: the same tokens as one by one."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_decode_loop import KINDS, PROMPTS, theirs
from tiny import tiny_model
from torch.nn.modules.module import register_module_forward_pre_hook

from distill.generation.decode_loop import STEPS_PER_REPLAY, DecodeLoop, EngineSettings
from distill.generation.sampling import GREEDY, Sampling
from distill.models.head import decoder_of
from distill.models.patch.attention import use_fused_attention

ROOT = Path(__file__).resolve().parents[2]


class Replayed(DecodeLoop):
    """Replays as a GPU does, by running what a graph would hold."""

    def __init__(self, *args):
        super().__init__(*args)
        self.replays = True

    def _capture(self, slots, sampling):
        def replay():
            for _ in range(STEPS_PER_REPLAY):
                self._step(slots, sampling)

        slots.graph = SimpleNamespace(replay=replay)


@pytest.mark.plain("1")
@pytest.mark.parametrize("limit", [1, STEPS_PER_REPLAY + 1, 4 * STEPS_PER_REPLAY - 1])
def test_replays_of_several_tokens_end_where_single_ones_do(limit):
    """Without a token that ends answers all of them reach their limits, which no replay needs to end at."""
    model = tiny_model(dtype=torch.float64)
    for ends in ([], [0]):
        settings = EngineSettings(2, ends, log_probs=True)
        limits = [limit, 1, limit, 0, 1]
        one, several = (
            way(model, settings).generate(PROMPTS, max_new_tokens=limits, sampling=Sampling(1.0), seeds=[4, 5, 6, 7, 8])
            for way in (DecodeLoop, Replayed)
        )
        assert several.tokens == one.tokens and several.truncated == one.truncated
        assert several.log_probs == [pytest.approx(each, abs=1e-9) for each in one.log_probs]


@pytest.fixture
def steps():
    """Widths of the batches of one token a sequence that models compute."""
    widths = []

    def note(module, args):
        if isinstance(module, torch.nn.Embedding) and args[0].shape[0] > 1 == args[0].shape[1]:
            widths.append(len(args[0]))

    watched = register_module_forward_pre_hook(note)
    yield widths
    watched.remove()


def in_batches(prompts, tokens, size):
    """Return the steps that it takes to end batch after batch, prompts of similar lengths together."""
    lengths = [len(tokens) for _, tokens in sorted(zip(map(len, prompts), tokens, strict=True)) if tokens]
    return sum(max(lengths[at : at + size]) for at in range(0, len(lengths), size))


MANY = [[(7 * n + k) % 259 for k in range(1 + 5 * n % 11)] for n in range(13)]
LIMITS = [3, 20, 1, 6, 17, 0, 9, 2, 4, 11, 1, 5, 8]


@pytest.mark.plain("DecodeLoop")
@pytest.mark.parametrize("way", [DecodeLoop, "replayed"])
def test_finished_sequences_free_their_slots(way, steps):
    """Answers and their log-probabilities are those of each prompt alone, by fewer steps than batch after batch."""
    model = tiny_model(dtype=torch.float64)
    loop = (Replayed if way == "replayed" else way)(model, EngineSettings(2, [*range(0, 259, 13)], log_probs=True))
    seeds = [3 * n + 1 for n in range(13)]
    alone = [
        loop.generate([prompt], max_new_tokens=[limit], sampling=Sampling(1.0), seeds=[seed])
        for prompt, limit, seed in zip(MANY, LIMITS, seeds, strict=True)
    ]
    steps.clear()
    found = loop.generate(MANY, max_new_tokens=LIMITS, sampling=Sampling(1.0), seeds=seeds, batch_size=4)
    assert found.tokens == [each.tokens[0] for each in alone]
    assert found.truncated == [each.truncated[0] for each in alone] and len({*found.truncated}) == 2
    for ours, each in zip(found.log_probs, alone, strict=True):
        assert ours == pytest.approx(each.log_probs[0], abs=1e-9)
    if way is DecodeLoop:
        assert 0 < len(steps) < 0.8 * in_batches(MANY, found.tokens, 4)


@pytest.mark.full
@pytest.mark.parametrize("fused", [True, False])
def test_kernels_serve_sequences_in_reused_slots(kernel_device, fused, steps):
    model = tiny_model(dtype=torch.bfloat16 if kernel_device.type == "cuda" else torch.float32).to(kernel_device)
    use_fused_attention(model, decoder_of(model))
    loop = DecodeLoop(model, EngineSettings(2, [], log_probs=True, fused=fused))
    prompts, limits = MANY[1:6], [3, 1, 2, 1, 2]
    found = loop.generate(prompts, max_new_tokens=limits, batch_size=2)
    if not fused:  # whose steps call no module
        assert 0 < len(steps) < in_batches(prompts, found.tokens, 2)
    for prompt, limit, tokens, ours in zip(prompts, limits, found.tokens, found.log_probs, strict=True):
        alone = loop.generate([prompt, prompt], max_new_tokens=limit, batch_size=2)  # on as many slots
        assert tokens == alone.tokens[0]
        assert ours == pytest.approx(alone.log_probs[0], abs=1e-2 if kernel_device.type == "cuda" else 1e-5)
    if kernel_device.type == "cpu":
        expected = theirs(model, prompts, 3, eos_token_id=[])[0]
        assert found.tokens == [tokens[:limit] for tokens, limit in zip(expected, limits, strict=True)]


@pytest.mark.gpu
def test_a_captured_step_continues_while_slots_are_reused():
    model = tiny_model().cuda()
    loop = DecodeLoop(model, EngineSettings(2, [], log_probs=True))
    many, limits = MANY * 3, [limit + 20 for limit in LIMITS * 3]
    found = loop.generate(many, max_new_tokens=limits, batch_size=4)
    assert loop.buffers[-1].graph is not None
    expected = DecodeLoop(model.double().cpu(), EngineSettings(2, [])).generate(many, max_new_tokens=limits)
    assert found.tokens == expected.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_the_captured_step_on_the_gpu(kind):
    model = tiny_model(**KINDS[kind]).cuda()
    loop = DecodeLoop(model, EngineSettings(2, [0]))
    for change in (False, True):  # a graph that kept old weights would show
        if change:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
        expected = DecodeLoop(model.double().cpu(), EngineSettings(2, [0])).generate(PROMPTS, max_new_tokens=20)
        model.float().cuda()
        assert loop.generate(PROMPTS, max_new_tokens=20).tokens == expected.tokens
        assert loop.buffers[-1].graph is not None


class Launched(Replayed):
    def _capture(self, slots, sampling):
        super()._capture(slots, sampling)
        slots.fused = self.fused_step_factory.step_for(slots, self.ends, self.pad)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_with_cut_offs(fused):
    """Their kernels wait for nothing; and a step is captured anew where the next call draws otherwise."""
    model = tiny_model(dtype=torch.bfloat16 if fused else torch.float32).cuda()
    settings = EngineSettings(2, [], log_probs=True, fused=fused)
    loop, launched, found = DecodeLoop(model, settings), Launched(model, settings), []
    for sampling in (Sampling(1.0), Sampling(0.8, 20, 0.9, 0.02), Sampling(1.0, top_p=0.1), Sampling(1.0), GREEDY):
        asked = {"max_new_tokens": 20, "sampling": sampling, "seeds": [4, 5, 6, 7]}
        found.append(loop.generate(PROMPTS[:4], **asked).tokens)
        assert loop.replays and loop.buffers[-1].graph and (loop.buffers[-1].fused is not None) == fused
        assert found[-1] == launched.generate(PROMPTS[:4], **asked).tokens
    assert found[3] == found[0] and all(found[0] != other for other in (found[1], found[2], found[4]))


AFTER_OTHERS = """
import gc, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from distill.generation.decode_loop import DecodeLoop, EngineSettings

config = AutoConfig.from_pretrained("recipes/architectures/llama-3.2-1b", num_hidden_layers=2)
def loop(seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    return DecodeLoop(model, EngineSettings(0, []))
prompts = [list(range(3, 20 + n)) for n in range(32)]
answer = lambda loop: loop.generate(prompts, max_new_tokens=8, batch_size=32).tokens
first = loop(0)
answer(first)
second = loop(1)
right = answer(second)
assert second.buffers[-1].graph is not None
del first
gc.collect()
torch._C._cuda_clearCublasWorkspaces()  # as torch.compile's graphs do
torch.cuda.empty_cache()
taken = torch.full((1 << 28,), 3.0, device="cuda")
assert answer(second) == right
"""


@pytest.mark.gpu
def test_a_captured_step_outlives_the_workspaces_of_others():
    done = subprocess.run([sys.executable, "-c", AFTER_OTHERS], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
