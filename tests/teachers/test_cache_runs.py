"""`distill cache` and runs without a loaded teacher: as online where nothing is lost, refused where data differ."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from distill.cli import run_command
from distill.commands.cache_epoch import load as load_for_cache
from distill.data.collator import Collator
from distill.models.loading import load_teacher
from distill.recipe import dump, parse
from distill.run import run
from distill.teachers.backends.stored import format as layout
from distill.teachers.backends.stored.maker import maker_section
from distill.teachers.backends.stored.store import Store
from distill.training.progress import read_metrics

TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 2}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1}}
train: {steps: 4, batch_size: 2, tokens_per_step: 128, learning_rate: 3e-3, warmup: 0, log_every: 1, device: cpu}
generate: {prompts: [Hello], max_new_tokens: 5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, data, and a cache of every token's probability with the student cut from the teacher."""
    place = tmp_path_factory.mktemp("place")
    save_models(place, teacher={"layers": 4, "seed": 1}, student={"seed": 2}, other={"layers": 4, "seed": 3})
    save_tiny(place / "small", tiny_model(vocab_size=258), tiny_tokenizer())
    (place / "text.txt").write_text(TEXT)
    (place / "more.txt").write_text(TEXT + "\nAnd one line more than there was.")
    (place / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        command = "cache tiny.yaml --top-k 259 --tail bucket --dtype float32 --out exact --json"
        assert run_command(command.split()) == 0
    return place


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def recipe(*overrides):
    return parse(RECIPE, overrides, name="tiny")


def cached(path, *overrides):
    return recipe(f"teacher={{type: cache, path: {path}}}", *overrides)


def figures(result):
    names = ("step", "loss", "kl", "agreement", "teacher_entropy", "teacher_cross_entropy", "student_entropy")
    return [[row[name] for name in names] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]


def test_a_run_from_a_cache_is_the_online_run(here, capsys):
    online, ours = run(recipe(), name="online"), run(cached("exact"), name="cached")
    out = capsys.readouterr().out.split("online")[-1]
    for a, b in zip(figures(ours), figures(online), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=1e-5)
    for before in (True, False):
        a, b = (r.before if before else r.after for r in (ours, online))
        assert list(a) == pytest.approx(list(b), rel=2e-4, abs=1e-5)
    assert ours.after.forward_kl < ours.before.forward_kl
    for expected in (
        "teacher     teacher (cached), ",
        "259 likeliest of 259 tokens",
        "layers 0, 3",
        "at most the full div",
        "reduction   ",
    ):
        assert expected in out, expected
    a, b = (json.loads((r.folder / "result.json").read_text())["answers"] for r in (ours, online))
    assert a["teacher"] == b["teacher"] and a["before"] == b["before"]
    assert r"teacher \(cached\)" in (ours.folder / "student" / "README.md").read_text()
    assert "cache_sha256" in (ours.folder / "lock.yaml").read_text()
    assert AutoModelForCausalLM.from_pretrained(ours.folder / "student").config.num_hidden_layers == 2
    assert "  kl over 260 outcomes " in out and "KL over 260 outcomes to teacher" in out, (
        "the 259 and all others as one"
    )
    assert "| forward KL over 260 outcomes |" in (ours.folder / "student" / "README.md").read_text()
    assert run_command(["report", "cached"]) == 0
    page = (ours.folder / "report.html").read_text()
    assert "reverse KL over 260 outcomes" in page and "KL over 260 outcomes to teacher (nats a token)" in page
    kept = json.loads((ours.folder / "result.json").read_text())
    assert kept["measure"] == {"name": "KL over 260 outcomes", "unit": "token", "key": "kl"}
    assert kept["after"]["forward_kl"] == ours.after.forward_kl
    assert run_command(["compare", "online", "cached"]) == 0
    out = capsys.readouterr().out
    assert "measure" in out and "another measure" in out and "KL over 260 outcomes" in out


@pytest.mark.full
def test_hidden_states_take_every_divergence(here, capsys):
    assert run_command(["cache", "tiny.yaml", "--hidden", "--dtype", "float32", "--out", "states"]) == 0
    assert "128 bytes each" in capsys.readouterr().out
    loss = "loss={temperature: 2.0, terms: [{type: jsd, beta: 0.3}, {type: cross_entropy, weight: 0.2}]}"
    online, ours = run(recipe(loss), name="jsd-online"), run(cached("states", loss), name="jsd-cached")
    assert list(ours.after) == pytest.approx(list(online.after), rel=2e-4, abs=1e-5)
    losses = [
        [row["loss"] for row in read_metrics(r.folder / "metrics.jsonl") if "loss" in row] for r in (ours, online)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    kept = json.loads((ours.folder / "result.json").read_text())
    assert kept["measure"]["name"] == "KL", "hidden states lose no outcome"


@pytest.mark.full
def test_hidden_states_of_a_teacher_whose_head_is_padded_further(here):
    """The larger models of some families have more rows behind their vocabulary than the smaller ones."""
    save_tiny(here / "wide", tiny_model(layers=4, seed=1, vocab_size=288), tiny_tokenizer())
    both = ("student={model: student}", "teacher.model=wide")
    assert run_command(["cache", "tiny.yaml", *both, "--hidden", "--dtype", "float32", "--out", "wide-states"]) == 0
    online, ours = run(recipe(*both), name="wide-online"), run(cached("wide-states", both[0]), name="wide-cached")
    for a, b in zip(figures(ours), figures(online), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=1e-5)
    assert list(ours.after) == pytest.approx(list(online.after), rel=2e-4, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("tail, loss", [("sampled", "forward_kl"), ("renormalize", "reverse_kl")])
def test_few_tokens_teach_another_student_with_lora(here, tail, loss):
    assert run_command(["cache", "tiny.yaml", "--top-k", "12", "--tail", tail, "--out", tail]) == 0
    student = "student={model: student, lora: {r: 4, alpha: 8, head: true}}"
    result = run(cached(tail, student, "train.learning_rate=2e-2", f"loss.terms.0.type={loss}"), name=f"lora-{tail}")
    assert result.after.forward_kl < result.before.forward_kl
    assert (result.before.reverse_kl != result.before.reverse_kl) == (tail == "sampled")  # NaN: not known
    card = (result.folder / "student" / "README.md").read_text()
    name = {"sampled": "estimated KL", "renormalize": "KL over 12 tokens"}[tail]
    assert f"| forward {name} |" in card and ("| unknown |" in card) == (tail == "sampled") and "nan" not in card
    # resumed, the figures from before training are read back
    assert run_command(["report", result.folder.name, "--json"]) == 0


@pytest.mark.parametrize("vocabulary", [259, pytest.param(70_000, marks=pytest.mark.full)])
def test_random_tokens_need_no_tokenizer(here, vocabulary):
    """A vocabulary beyond 65,536 tokens is stored in more than 16 bits an id."""
    names = {"big": 3, "little": 1}
    for name, layers in names.items():
        tiny_model(layers=layers, hidden=16, vocab_size=vocabulary).config.save_pretrained(
            here / f"{name}-{vocabulary}"
        )
    more = [f"student={{init: random, config: little-{vocabulary}}}", "data.source=synthetic", "data.max_rows=16"]
    out = f"random-{vocabulary}"
    teacher = f"teacher={{init: random, config: big-{vocabulary}}}"
    assert run_command(["cache", "tiny.yaml", teacher, *more, "--top-k", "8", "--out", out]) == 0
    assert run(cached(out, *more), name=out).steps == 4
    ids = [layout.map_tensors(path) for path in (here / out).glob("shard-*")]
    assert any(shard["ids_high"].any() for shard in ids) if vocabulary > 1 << 16 else "ids_high" not in ids[0]


@pytest.mark.full
def test_the_command_prints_the_size_and_the_error(here, capsys):
    before = sorted(here.iterdir())
    assert run_command(["cache", "tiny.yaml", "--report"]) == 0
    out = capsys.readouterr().out
    assert "seen" in out and "renormalize" in out and "held-out positions" in out
    assert sorted(here.iterdir()) == before, "--report writes nothing"
    assert run_command(["cache", "tiny.yaml", "--top-k", "20", "--out", "tiny.yaml"]) == 2
    assert "--out: expected a folder, got 'tiny.yaml': tiny.yaml is a file" in capsys.readouterr().err
    assert run_command(["cache", "tiny.yaml", "--top-k", "20", "--out", "sized", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache"]["tail"] == "sampled", "the default where the loss is the forward KL"
    assert {row["k"] for row in found["errors"]} == {8, 16, 20, 32, 64, 128, 256}
    size = sum(path.stat().st_size for path in (here / "sized").glob("shard-*"))
    assert found["cache"]["positions"] * (20 * 4 + 6) < size < found["cache"]["positions"] * (20 * 4 + 6) * 1.1 + 4096
    assert run_command(["cache", "tiny.yaml", "--top-k", "20", "--out", "sized"]) == 0
    assert "complete already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.source=more.txt"], r"lacks \d+ of the \d+ documents of the .* data\.source was 'text.txt' when"),
        (["data.max_length=16"], r"data\.max_length was 32 when the cache was made and is 16 here"),
        (["loss.temperature=2.0"], r"loss\.temperature: .* at temperature 1, the recipe's loss is at 2"),
        (["loss.terms.0.type=tvd"], r"loss\.terms: expected forward_kl or reverse_kl, .* got 1 tvd"),
        (["student={from_teacher: {layers: 3}}"], r"student\.from_teacher: .* holds the student of layers \[0, 3\]"),
        (["student={model: small}"], "vocabular|token by token"),
        (["teacher.model=other"], r"teacher\.model: the model's files differ: .* made by 'teacher', the recipe names"),
        (["teacher.path=nowhere"], r"teacher\.path: no cache in nowhere"),
        (["teacher.model=teacher", "teacher.adapter=x"], r"teacher\.adapter: the cache exact was made by None"),
    ],
)
def test_whatever_differs_is_one_error_and_leaves_nothing(here, overrides, message):
    before = sorted(here.iterdir())
    with pytest.raises(ValueError, match=message) as error:
        run(cached("exact", *overrides))
    assert len(str(error.value).splitlines()) == 1
    assert sorted(here.iterdir()) == before


def test_another_template_or_tokenizer_is_refused(here):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(20)
    ]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("other.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}")
    chats = "data={source: chats.jsonl, max_length: 64, cache: false, validation: {fraction: 0.2}}"
    assert run_command(["cache", "tiny.yaml", chats, "--top-k", "8", "--out", "chats"]) == 0
    with pytest.raises(ValueError, match=r"data\.chat_template: expected the template of the cache chats, got another"):
        run(cached("chats", chats, "data.chat_template=other.jinja"))
    with pytest.raises(ValueError, match=r"lacks .* data\.train_on was 'all'"):
        two = [{"messages": row["messages"] * 2} for row in rows]
        Path("chats.jsonl").write_text("\n".join(map(json.dumps, two)))
        run(cached("chats", chats, "data.train_on=last"))


def test_features_that_need_weights_take_the_model_that_made_the_cache(here, capsys):
    made, teacher = load_teacher(maker_section(cached("exact"))), load_teacher(recipe().teacher)
    for (name, a), b in zip(made.state_dict().items(), teacher.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ValueError, match=r"requires a model to run over the data; got teacher\.type: cache"):
        load_for_cache(cached("exact"))
    Path("cached.yaml").write_text(dump(cached("exact")))
    for command, expected in (
        ("check cached.yaml", "teacher     not loaded: exact, 0.00 GiB on disk"),
        ("inspect cached.yaml --rows 1", "=== row 1: 32 tokens"),
    ):
        assert run_command(command.split()) == 0
        assert expected in capsys.readouterr().out
    assert run_command(["inspect", "cached.yaml", "--shade", "entropy"]) == 2
    assert run_command(["check", "cached.yaml", "data.source=more.txt"]) == 1
    assert "lacks" in capsys.readouterr().out


@pytest.mark.full
def test_interrupted_and_resumed_equals_uninterrupted(here, interrupted):
    whole = run(cached("exact", "train.save_every=2"), name="whole")
    interrupted(lambda: run(cached("exact", "train.save_every=2"), name="parts"), step=3, micro_batches=1)
    parts = run(cached("exact", "train.save_every=2"), name="parts", resume=True)
    assert parts.after == whole.after
    a, b = (AutoModelForCausalLM.from_pretrained(r.folder / "student").state_dict() for r in (parts, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.full
def test_the_error_of_fp8_hidden_states_is_printed(here, capsys):
    assert run_command(["cache", "tiny.yaml", "--hidden", "--dtype", "fp8", "--out", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "36 bytes each" in out, "a byte for each of 32 numbers and a scale of 4 bytes"
    said = float(re.search(r"hidden states in fp8: KL\(teacher, stored\) (\S+) nats", out)[1])
    teacher, cache = load_teacher(recipe().teacher), Store("fp8")
    rows = load_for_cache(recipe()).splits.validation
    rows = [rows[number] for number in range(len(rows))]
    batch = Collator(0)(rows) | cache.look_up(rows)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    exact = teacher(**inputs).logits.flatten(0, 1)[batch["valid_rows"]].double().log_softmax(-1)
    stored = batch["cached_hidden"].double() * batch["cached_hidden_scale"][:, None]
    read = (stored @ teacher.get_output_embeddings().weight.double().T).log_softmax(-1)
    kl = float((exact.exp() * (exact - read)).sum(-1).mean())
    assert 0 < kl < 1e-2 and said == pytest.approx(kl, rel=0.06)  # two digits are printed
    result = run(cached("fp8"), name="fp8")
    assert result.after.forward_kl < result.before.forward_kl
    assert run_command(["verify", "fp8"]) == 0


@pytest.mark.parametrize(
    "override, message",
    [
        ("loss.terms=[{type: reverse_kl}]", "expected forward_kl, alone or with cross_entropy, since the cache holds"),
        ("loss.terms=[{type: forward_kl, clip: {token: 1}}]", "expected clip null over sampled tokens"),
        ("loss.temperature={teacher: 2, student: 1}", "the cache's probabilities are at temperature 1"),
        ("loss.schedule=[{setting: temperature, steps: [0, 2], values: [1, 2]}]", "the recipe's loss is at 2"),
        ("student={model: student, vocabulary: cross}", "compares whole distributions; expected hidden states"),
    ],
)
def test_check_and_the_run_refuse_a_loss_that_stored_tokens_do_not_allow(here, capsys, override, message):
    if not (here / "drawn").exists():
        assert run_command(["cache", "tiny.yaml", "student={model: student}", "--top-k", "12", "--out", "drawn"]) == 0
    settings = ["tiny.yaml", "teacher={type: cache, path: drawn}", "student={model: student}", override]
    capsys.readouterr()
    assert run_command(["check", *settings]) == 1
    assert message in " ".join(capsys.readouterr().out.split())
    assert run_command(["run", *settings, "--name", "refused"]) == 2
    assert message in capsys.readouterr().err
