"""Online caching of a served teacher: its servers are queried once for a document, and the store is read."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from served import engine_in, from_server, recipe_in, serving, write_models
from transformers import AutoModelForCausalLM

from distill.cli import run_command
from distill.core.errors import RunError
from distill.recipe import dump, parse
from distill.run import run
from distill.training.progress import read_metrics

SENT = {
    "hidden states": [],
    "hidden states in fp8": ["teacher.transfer_dtype=fp8"],
    "top k": ["teacher.top_k=8", "loss.terms.0.type=reverse_kl"],
}
TWO_EPOCHS = ["train={epochs: 2, batch_size: 1, tokens_per_step: 96, device: cpu, log_every: 1, save_every: 5}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_models(tmp_path_factory.mktemp("served"))
    (folder / "text.txt").write_text("\n".join((folder / "text.txt").read_text().splitlines()[:24]))
    return folder


@pytest.fixture(scope="module")
def url(place):
    with serving(engine_in(place)) as address:
        yield address


@pytest.fixture
def asked(teacher_batches):
    """Batches that the server's model computed; the runs' own models are trained."""
    return teacher_batches


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(place, url, *more):
    return recipe_in(place, *from_server(url), *TWO_EPOCHS, "output_dir=runs", *more)


def losses(result):
    return [row["loss"] for row in read_metrics(result.folder / "metrics.jsonl") if "loss" in row]


def weights(result):
    return AutoModelForCausalLM.from_pretrained(result.folder / "student").state_dict()


def hold_same(a, b):
    assert losses(a) == losses(b)
    assert repr((a.before, a.after)) == repr((b.before, b.after))  # NaN for what drawn tokens do not tell
    first, second = weights(a), weights(b)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@pytest.mark.parametrize("sent", SENT)
def test_a_run_is_the_one_without_keep_and_asks_once(place, url, here, asked, sent):
    """Over two epochs, to the bit; then a run from the full folder asks nothing at all."""
    plain = run(recipe(place, url, *SENT[sent]), name="plain")
    both = len(asked)
    kept = run(recipe(place, url, *SENT[sent], "teacher.online_cache=kept"), name="kept")
    hold_same(plain, kept)
    manifest = json.loads(Path("kept/manifest.json").read_text())
    assert manifest["kind"] == ("hidden" if sent.startswith("hidden") else "top_k")
    assert manifest["teacher"]["files_sha256"] and manifest["weights"]
    first = asked[both:]
    assert len(first) < 0.6 * both
    asked.clear()
    again = run(recipe(place, url, *SENT[sent], "teacher.online_cache=kept"), name="again")
    hold_same(again, kept)
    assert not asked and run_command(["verify", "kept"]) == 0


@pytest.mark.full
def test_sampled_tokens_are_those_of_the_first_request(place, url, here, asked):
    """Sampled tokens depend on the rows that share a request."""
    drawn = ["teacher.top_k=8", "teacher.online_cache=kept"]
    first = run(recipe(place, url, *drawn), name="first")
    asked.clear()
    hold_same(first, run(recipe(place, url, *drawn), name="again"))
    assert not asked


@pytest.mark.full
def test_the_second_epoch_asks_nothing(place, url, here, asked, at_step):
    counts = []
    at_step(range(1000), lambda arguments: counts.append(len(asked)))
    result = run(recipe(place, url, "teacher.online_cache=kept"), name="kept")
    rows = sum("loss" in row for row in read_metrics(result.folder / "metrics.jsonl"))
    assert len(counts) == rows and 0 < counts[1] < counts[rows // 2] == counts[-1]
    # the held-out rows are asked for after training, once for the trained and the untrained student
    held_out = len(asked) - counts[-1]
    asked_before = len(asked)
    run(recipe(place, url, "teacher.online_cache=kept"), name="again")
    assert 0 < held_out < counts[-1] and len(asked) == asked_before


@pytest.mark.full
@pytest.mark.parametrize("sent", ["hidden states", "top k"])
def test_a_run_that_is_killed_and_resumed_is_the_whole_one(place, url, here, interrupted, sent):
    more = [*SENT[sent], "train.save_every=3"]
    whole = run(recipe(place, url, *more, "teacher.online_cache=whole"), name="whole")
    interrupted(lambda: run(recipe(place, url, *more, "teacher.online_cache=kept"), name="parts"), step=5)
    parts = run(recipe(place, url, *more, "teacher.online_cache=kept"), name="parts", resume=True)
    assert parts.after == whole.after and losses(parts)[-5:] == losses(whole)[-5:]
    first, second = weights(parts), weights(whole)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert run_command(["verify", "kept"]) == 0


@pytest.mark.full
def test_a_damaged_shard_is_refused_and_computed_again(place, url, here, asked):
    short = ["train={steps: 4, batch_size: 1, device: cpu, log_every: 1}", "teacher.online_cache=kept"]
    whole, count = run(recipe(place, url, *short), name="some"), len(asked)
    part = sorted(Path("kept").glob("shard-part-*"))[-1]
    content = bytearray(part.read_bytes())
    content[-200] ^= 1
    part.write_bytes(content)
    # a held-out document, which is read once training is over
    with pytest.raises(RunError, match=r"shard-part-\S+ is damaged.*delete the file, and manifest\.json where"):
        run(recipe(place, url, *short), name="damaged")
    part.unlink()
    asked.clear()
    again = run(recipe(place, url, *short), name="again")
    assert 0 < len(asked) < count and losses(again) == losses(whole)


@pytest.mark.full
def test_the_folder_of_a_loaded_teacher_is_that_of_its_server(place, url, here, asked):
    """Weights and files are the same: what one has stored, the other reads."""
    run(recipe_in(place, *TWO_EPOCHS, "output_dir=runs", "teacher.online_cache=kept"), name="loaded")
    asked.clear()
    run(recipe(place, url, "teacher.online_cache=kept"), name="served")
    assert not asked


@pytest.mark.plain(
    "['teacher.top_k=8']-teacher\\\\.online_cache: kept was begun with other settings: kind was 'hidden', now 'top_k'"
)
@pytest.mark.parametrize(
    "more, message",
    [
        (
            ["teacher.top_k=8"],
            r"teacher\.online_cache: kept was begun with other settings: kind was 'hidden', now 'top_k'",
        ),
        (
            ["teacher.transfer_dtype=fp8"],
            r"kept was begun with other settings: teacher\.dtype was 'float32', now .*sent in fp8",
        ),
        (
            ["teacher.online_cache_format=hidden_fp8"],
            r"kept was begun with other settings: dtype was 'float32', now 'fp8'",
        ),
    ],
)
def test_outputs_stored_under_other_settings_are_not_mixed_in(place, url, here, more, message):
    run(recipe(place, url, "teacher.online_cache=kept", "train={steps: 2, batch_size: 1, device: cpu}"), name="begun")
    with pytest.raises(ValueError, match=message) as error:
        run(recipe(place, url, "teacher.online_cache=kept", *more), name="refused")
    assert len(str(error.value).splitlines()) == 1 and not Path("runs/refused").exists()


@pytest.mark.full
def test_another_teacher_behind_the_address_is_refused(place, url, here, tmp_path_factory):
    run(
        recipe(
            place,
            url,
            "teacher.model=null",
            "teacher.online_cache=kept",
            "train={steps: 2, batch_size: 1, device: cpu}",
        ),
        name="begun",
    )
    other = write_models(tmp_path_factory.mktemp("other"), seed=7)
    with (
        serving(engine_in(other)) as address,
        pytest.raises(ValueError, match=r"teacher\.model: the model's files differ: the cache kept was made by"),
    ):
        run(recipe(place, address, "teacher.model=null", "teacher.online_cache=kept"), name="refused")


@pytest.mark.full
def test_hidden_states_of_a_server_may_be_stored_as_fewer(place, url, here, asked, capsys):
    stored = ["teacher.online_cache=kept", "teacher.online_cache_format=hidden_fp8"]
    first = run(recipe(place, url, *stored), name="first")
    asked.clear()
    hold_same(first, run(recipe(place, url, *stored), name="again"))
    assert not asked
    assert re.search(
        r"keep +hidden states in fp8: on one batch KL\(teacher, what is stored\) \S+", capsys.readouterr().out
    )


def test_a_servers_tokens_are_not_stored_in_fp8():
    with pytest.raises(ValueError, match=r"online_cache_format: expected top_k, the tokens that a server sends"):
        parse(
            dump(recipe(Path("x"), "http://h:1")),
            ["teacher.top_k=8", "teacher.online_cache=k", "teacher.online_cache_format=hidden_fp8"],
        )


def test_check_prints_the_bytes_per_stored_token(place, url, here, capsys):
    Path("kept.yaml").write_text(dump(recipe(place, url, "teacher.online_cache=kept")))
    assert run_command(["check", "kept.yaml"]) == 0
    assert re.search(r"online_cache: kept, 256 bytes per trained token", capsys.readouterr().out)
    assert run_command(["check", "kept.yaml", "teacher.top_k=8"]) == 0
    assert re.search(r"online_cache: kept, 38 bytes per trained token", capsys.readouterr().out)
    shutil.rmtree("kept", ignore_errors=True)
