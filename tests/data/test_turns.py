"""Every assistant turn of a logged chat answered anew (`data.on_policy.turns: all`): shared prefixes, rows, runs."""

import numpy as np
import pytest
import torch
from test_decode_loop import KINDS
from tiny import save_models, tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from distill.data.chat import load_template
from distill.data.collator import Collator
from distill.data.load import load_data
from distill.data.mixing import MixedRows, epoch_mix
from distill.data.packing import BLOCK, shuffle_into_rows
from distill.generation import shared_prefixes
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.documents import documents_of
from distill.generation.engines import settings_for
from distill.generation.sampling import Sampling
from distill.models.head import decoder_of
from distill.models.patch.attention import keep_soft_cap, use_fused_attention
from distill.recipe import parse
from distill.run import run
from distill.training.progress import read_metrics
from distill.training.samplers import BlockSampler

# a system line, a tool call before its result, an answer: what agents' logs look like
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def chat(number, turns=4):
    messages = [{"role": "system", "content": f"You are clerk {number}."}]
    for turn in range(turns):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": number, "b": turn}}}
        if turn % 2 == 0:
            messages.append({"role": "user", "content": f"Add {turn} to {number}."})
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            messages.append({"role": "tool", "content": str(number + turn - 1)})
            messages.append({"role": "assistant", "content": f"It is {number + turn - 1}."})
    return {"messages": messages, "tools": [TOOL]}


def conversations(count=3, turns=4, step=9, seed=0, opening=()):
    """Token ids of chats, a prompt a turn: each is the beginning of the next."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        ids = list(opening)
        for _ in range(turns):
            ids = ids + torch.randint(3, 259, (step,), generator=generator).tolist()
            prompts.append(ids)
    return prompts


def counted(model):
    """The numbers of tokens in the decoder's calls, as they come."""
    seen = []
    decoder_of(model).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def apart(without):
    """Have every prompt computed by itself from now on."""
    without.setattr(
        shared_prefixes,
        "shared_prefixes",
        lambda prompts, held=(): {prompt: shared_prefixes.SharedPrefix(None, 0) for prompt in [*held, *prompts]},
    )


@pytest.mark.plain("llama-1", "gpt2-64")
@pytest.mark.parametrize("batch_size", [64, 5, 1])
@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_answers_are_those_of_prompts_computed_alone(kind, batch_size, without):
    """Turns of chats, chats with one opening, the same prompt again; in fewer sequence slots than prompts."""
    model = tiny_model(**KINDS[kind], dtype=torch.float32 if kind == "gemma2" else torch.float64)
    keep_soft_cap(model)
    opening = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(9)).tolist()
    prompts = [*conversations(2), *conversations(2, seed=1, opening=opening), conversations(1)[2], [7]]
    more = {"max_new_tokens": 6, "sampling": Sampling(1.0), "batch_size": batch_size}
    loop = DecodeLoop(model, EngineSettings(2, [0], log_probs=True))
    shared = loop.generate(prompts, **more)
    apart(without)
    alone = loop.generate(prompts, **more)
    assert shared.tokens == alone.tokens and len(set(map(tuple, shared.tokens))) > 10
    for one, other in zip(shared.log_probs, alone.log_probs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_each_token_of_a_prefix_is_computed_once():
    model = tiny_model(dtype=torch.float64)
    opening = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(9)).tolist()
    loop, seen = DecodeLoop(model, EngineSettings(2, [])), counted(model)
    loop.generate(conversations(3), max_new_tokens=1)
    assert seen[0] == 3 * (4 * 9 - 1)
    seen.clear()
    loop.generate(conversations(3, opening=opening), max_new_tokens=1)
    assert seen[0] == 70 + 3 * (4 * 9 - 1), "one opening for all chats"
    seen.clear()
    loop.generate(conversations(3, opening=opening[:20]), max_new_tokens=1)
    assert seen[0] == 3 * (20 + 4 * 9 - 1), "too short to be worth it"


def test_a_prefix_that_a_seat_holds_is_not_computed_again():
    model = tiny_model(dtype=torch.float64)
    loop, seen = DecodeLoop(model, EngineSettings(2, [])), counted(model)
    loop.generate(conversations(1, turns=6), max_new_tokens=2, batch_size=2)
    assert [count for count in seen if count > 1] == [6 * 9 - 1], "the longest; the others reuse its sequence slot"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mistral-window", "llama"])
def test_kernels_attend_to_shared_prefixes(kernel_device, kind, limit):
    limit.setattr(shared_prefixes, "MIN_SHARED_TOKENS", 5)
    prompts = conversations(2, turns=2, step=6, opening=[5, 6, 7, 8, 9, 10, 11])
    model = tiny_model(**KINDS[kind])
    expected = DecodeLoop(model, EngineSettings(2, [])).generate(prompts, max_new_tokens=3)
    model = model.to(kernel_device)
    use_fused_attention(model, decoder_of(model))
    assert DecodeLoop(model, EngineSettings(2, [])).generate(prompts, max_new_tokens=3).tokens == expected.tokens


@pytest.mark.parametrize("packing", [True, False])
def test_documents_that_belong_together_have_neighbouring_rows(packing):
    random = np.random.default_rng(0)
    families = np.repeat(np.arange(40), random.integers(1, 6, 40))
    lengths, chosen = random.integers(5, 60, len(families)), np.flatnonzero(families % 7)
    made = shuffle_into_rows(lengths, chosen, packing=packing, capacity=100, seed=1, together=families)
    assert sorted(np.concatenate(made.groups).tolist()) == chosen.tolist()
    assert max(int(lengths[group].sum()) for group in made.groups) <= 100
    home = {
        int(families[document]): block
        for group, block in zip(made.groups, made.blocks, strict=True)
        for document in group
    }
    for group, block in zip(made.groups, made.blocks, strict=True):
        assert {home[int(families[document])] for document in group} == {block}, "a family has one block"
    assert (np.diff(made.blocks) >= 0).all()
    other = shuffle_into_rows(lengths, chosen, packing=packing, capacity=100, seed=2, together=families)
    assert [group.tolist() for group in made.groups] != [group.tolist() for group in other.groups]
    if packing:
        fewest = len(shuffle_into_rows(lengths, chosen, packing=True, capacity=100, seed=1).groups)
        assert len(made.groups) <= 1.25 * fewest


def test_blocks_of_rows_are_shuffled_whole():
    from datasets import Dataset

    rows = Dataset.from_dict({BLOCK: [[0], [0], [1], [2], [2], [2]], "input_ids": [[n] for n in range(6)]})
    sampler = BlockSampler(rows, seed=3)
    orders = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        text = "".join(map(str, orders[-1]))
        assert sorted(orders[-1]) == list(range(6)) and "01" in text and "345" in text
    assert len(set(map(tuple, orders))) > 2 and len(sampler) == 6
    sampler.set_epoch(0)
    assert list(sampler) == orders[0]
    mixed = MixedRows(rows, epoch_mix([6], [1.0]))
    assert sorted(BlockSampler(mixed, 1)) == list(range(6))


# ------------------------------------------------------------------ runs

RECIPE = (
    "teacher: {model: teacher}\nstudent: {model: student}\nloss: {terms: [{type: reverse_kl}]}\n"
    "data:\n  source: chats.jsonl\n  chat_template: t.jinja\n  max_length: 400\n  cache: false\n"
    "  validation: {fraction: 0.1}\n  on_policy: {turns: all, max_new_tokens: 8, store_every: 1}\n"
    "train: {steps: 3, log_every: 1, batch_size: 4, learning_rate: 1e-2}\ngenerate: {prompts: []}\n"
)


pytestmark = pytest.mark.place(
    files={"t.jinja": TEMPLATE, "chats.jsonl": [chat(n) for n in range(20)]}, student={"seed": 0}, teacher={"seed": 1}
)


def test_every_turn_is_a_place_to_answer(workplace):
    """Prompts are the log up to there, tools and their results included, and nothing else."""
    data = parse(RECIPE).data
    splits = load_data(data, tiny_tokenizer(), seed=0)
    template = load_template("t.jinja", tiny_tokenizer())
    expected = {
        template.prompt(row["messages"][:turn], row["tools"])
        for row in map(chat, range(20))
        for turn, message in enumerate(row["messages"])
        if message["role"] == "assistant"
    }
    documents = documents_of(Collator(2)([*splits.train, *splits.validation]))
    prompts = [tiny_tokenizer().decode(document.prompt) for document in documents]
    assert len(prompts) == 80 and set(prompts) == expected
    assert any("tools\n" in prompt and prompt.count("<|start|>tool\n") == 2 for prompt in prompts)
    last = load_data(parse(RECIPE, ["data.on_policy.turns=last"]).data, tiny_tokenizer(), seed=0)
    assert len(documents_of(Collator(2)([*last.train, *last.validation]))) == 20 and BLOCK not in last.train[0]


@pytest.mark.plain("()")
@pytest.mark.parametrize("more", [(), ("data.packing=false",), ("data.on_policy.engine=transformers",)])
def test_a_run_answers_all_turns_and_computes_what_they_share_once(workplace, more, watch):
    calls = []
    whole = DecodeLoop.run

    def noted(self, request):
        seen = counted(self.model)
        result = whole(self, request)
        calls.append((sum(map(len, request.prompts)), next((count for count in seen if count > 1), 0)))
        return result

    watch.setattr(DecodeLoop, "run", noted)
    result = run(parse(RECIPE, more))
    metrics = read_metrics(result.folder / "metrics.jsonl")
    assert all(row["rollouts"] >= 4 and 0 <= row["rollout_gap"] < 1e-5 for row in metrics)
    assert ("data.on_policy.engine=transformers" in more) == (not calls)
    assert all(2 * computed < given for given, computed in calls), calls


@pytest.mark.full
def test_a_rollout_ends_at_its_tool_call(tmp_path):
    """The token that closes a turn with calls ends it, where that is another one than closes words."""
    closes = "{% if message.tool_calls %}<|pad|>{% else %}<|end|>{% endif %}"
    save_models(tmp_path, student={})
    (tmp_path / "student" / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    tokenizer.chat_template = TEMPLATE.replace("{% endfor %}<|end|>", "{% endfor %}" + closes)
    model = tiny_model(dtype=torch.float64)
    settings = settings_for(model, tokenizer, load_template("tokenizer", tokenizer))
    calls, words = tokenizer.convert_tokens_to_ids(["<|pad|>", "<|end|>"])
    assert set(settings.ends) == {calls, words}
    answers = DecodeLoop(model, settings).generate(
        conversations(12), max_new_tokens=400, sampling=Sampling(3.0), batch_size=48
    )
    ended = [tokens for tokens, cut in zip(answers.tokens, answers.truncated, strict=True) if not cut]
    assert {tokens[-1] for tokens in ended} == {calls, words}
    assert not any({calls, words} & set(tokens[:-1]) for tokens in answers.tokens)
