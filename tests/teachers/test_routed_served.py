"""Routed teachers of which some are served or cached: the same bits as with all of them loaded."""

import contextlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import opened, serving
from subjects import Silent
from tiny import save_models

from distill.commands.cache_epoch import load, make_cache
from distill.commands.validate import path_notes
from distill.core.errors import RunError
from distill.data.collator import Collator
from distill.doctor.examine import examine
from distill.recipe import RecipeError, dump, parse
from distill.run import run
from distill.serving.open import open_engine
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.registry import source_of
from distill.training.lock_file import read_lock

TEACHERS = ("math", "talk")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed")
    save_models(folder, **{name: {"seed": n, "hidden": 32 + 16 * n} for n, name in enumerate(("student", *TEACHERS))})
    lines = (
        f'{{"prompt": "Say {n}?", "completion": "It is {"so " * (n % 5)}{n}.", "domain": "{TEACHERS[n % 3 // 2]}"}}'
        for n in range(36)
    )
    lines = list(lines)
    (folder / "rows.jsonl").write_text("\n".join(lines))
    (folder / "talk.jsonl").write_text("\n".join(line for line in lines if "talk" in line))
    return folder


def engine_of(place, name):
    """Return the engine of one of the teachers."""
    recipe = parse(
        f"{{teacher: {{model: {place}/{name}}}, student: {{model: {place}/student}}, "
        f"data: {{source: {place}/rows.jsonl}}, train: {{steps: 1, device: cpu}}}}"
    )
    return open_engine(recipe, 4096)


@pytest.fixture(scope="module")
def urls(place):
    one = [engine_of(place, name) for name in TEACHERS]
    with serving(one[0]) as math, serving(one[1]) as talk:
        yield {"math": math, "talk": talk}


def recipe_of(place, elsewhere, *overrides):
    """Both teachers by their routes, some of them elsewhere: at an address, or as spelled."""
    where = {name: f"model: {place}/{name}" for name in TEACHERS} | {
        name: f"type: server, url: '{at}', timeout: 5" if at.startswith("http") else at
        for name, at in elsewhere.items()
    }
    return parse(
        f"""
        teachers: [{{{where["math"]}, route: math}}, {{{where["talk"]}, route: talk}}]
        student: {{model: {place}/student}}
        data: {{source: {place}/rows.jsonl, max_length: 96, packing: true, cache: false, fields: {{teacher: domain}}}}
        train: {{steps: 4, batch_size: 2, tokens_per_step: 384, device: cpu, log_every: 1}}
        loss: {{terms: [{{type: forward_kl}}, {{type: cross_entropy, weight: 0.1}}]}}
        generate: {{prompts: []}}
        output_dir: {place}/runs
        """,
        overrides,
        name="routed-served",
    )


def trained(recipe, name, **more):
    result = run(recipe, name=name, **more)
    return load_file(result.folder / "student" / "model.safetensors"), result


@pytest.fixture(scope="module")
def loaded(place):
    return trained(recipe_of(place, {}), "loaded")


@pytest.mark.full
@pytest.mark.parametrize("served", [("talk",), TEACHERS], ids=" and ".join)
def test_served_routes_train_bit_identically(place, urls, loaded, served):
    recipe = recipe_of(place, {name: urls[name] for name in served})
    assert parse(dump(recipe)) == recipe
    weights, result = trained(recipe, "-".join(served))
    assert result.after == loaded[1].after and weights.keys() == loaded[0].keys()
    assert all(torch.equal(value, loaded[0][name]) for name, value in weights.items())
    teacher = read_lock(result.folder / "lock.yaml")["teacher"]
    assert [name for name in teacher if name.startswith("route ")] == [f"route {name}" for name in served]
    assert all(len(teacher[f"route {name}"]["server"]) == 32 for name in served)


@pytest.fixture(scope="module")
def cache(place):
    """Second teacher's cached outputs for its own rows."""
    recipe = parse(
        f"{{teacher: {{model: {place}/talk}}, student: {{model: {place}/student}}, train: {{steps: 1, device: cpu}}, "
        f"data: {{source: {place}/talk.jsonl, max_length: 96, cache: false}}, generate: {{prompts: []}}}}"
    )
    settings = CacheOptions(hidden=True, dtype="float32").checked()
    make_cache(load(recipe), place / "cache", settings, say=lambda line: None, progress=Silent)
    return place / "cache"


def cached(place, cache, *overrides):
    return recipe_of(place, {"talk": f"type: cache, path: {cache}"}, *overrides)


def test_a_cached_route_is_the_loaded_one(place, cache, loaded):
    """Up to rounding: the cache was made of other batches."""
    weights, result = trained(cached(place, cache), "cached")
    assert result.after.forward_kl == pytest.approx(loaded[1].after.forward_kl, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(value, loaded[0][name], rtol=1e-6, atol=1e-6)


def test_documents_that_a_cached_route_lacks_are_named(place, cache):
    recipe = cached(place, cache)
    rows = (place / "rows.jsonl").read_text().replace("It is so", "It was so")
    (place / "other.jsonl").write_text(rows)
    with pytest.raises(ValueError, match=r"teachers\.1\.path: .* lacks \d+ of the \d+ documents"):
        trained(parse(dump(recipe), [f"data.source={place}/other.jsonl"], name="lacks"), "lacks")
    with pytest.raises(RecipeError, match=r"rows it has not seen; got teachers\.1\.type: cache"):
        cached(
            place, cache, "data.on_policy={max_new_tokens: 4}", "loss.terms=[{type: reverse_kl}]", "data.packing=false"
        )


@pytest.mark.full
def test_rollouts_are_scored_by_the_teacher_of_their_route(place, urls):
    own = ["loss.terms=[{type: reverse_kl}]", "data.packing=false", "data.on_policy={fraction: 0.5, max_new_tokens: 6}"]
    one, other = (
        trained(recipe_of(place, served, *own), name)[0] for served, name in (({}, "own"), (urls, "own-served"))
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.plain("8")
@pytest.mark.parametrize("shift", [0, 8])
def test_a_single_learned_row_has_the_same_bits_wherever_a_file_has_the_head(place, urls, tmp_path, shift):
    """A micro-batch of which a route learns one row is a product of a vector: its bits follow the head's alignment."""
    for name in TEACHERS:
        folder = shutil.copytree(place / name, tmp_path / name)
        weights, at = load_file(folder / "model.safetensors"), -1
        padding = 0
        while at % 16 != shift:
            padding += 1
            save_file(weights, folder / "model.safetensors", {"format": "pt", "padding": " " * padding})
            at = head_begins(folder / "model.safetensors")
    own = [
        "loss.terms=[{type: reverse_kl}]",
        "data.packing=false",
        "data.on_policy={fraction: 1, max_new_tokens: 1}",
        "train.batch_size=1",
        "train.tokens_per_step=96",
    ]
    for name in TEACHERS:
        own.append(f"teachers.{TEACHERS.index(name)}.model={tmp_path / name}")
    loaded, _ = trained(recipe_of(place, {}, *own), f"one-row-{shift}")
    served, _ = trained(recipe_of(place, urls, *own[:-2]), f"one-row-served-{shift}")
    assert all(torch.equal(value, served[name]) for name, value in loaded.items())


def head_begins(path):
    """Return the offset of a tied head's weights in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size + json.loads(file.read(size))["model.embed_tokens.weight"]["data_offsets"][0]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["server", "cache"])
def test_doctor_passes_on_served_routes(place, urls, cache, forked_ranks, kind):
    talk = urls["talk"] if kind == "server" else f"type: cache, path: {cache}"
    findings = list(examine(recipe_of(place, {"talk": talk}, "train.steps=2")))
    assert len(findings) > 8 and not [finding for finding in findings if not finding.passed]


def test_a_served_route_is_prefetched_and_passes_the_parity_check(place, urls):
    """`submit` requests the rows that `targets` reads; a wrong head is found by the first batch."""
    recipe = recipe_of(place, urls)
    teacher, vocabulary = opened(recipe)
    rows = vocabulary.read(recipe.data, 0).train
    batch = Collator(0, columns=teacher.columns)([rows[number] for number in range(4)])
    counts = [member.client.servers.positions for member in teacher.members]
    teacher.prefetch(batch)
    assert teacher.prefetch_depth == 2 and teacher.prefetch_error([batch]) is None
    asked = [member.client.servers.positions for member in teacher.members]
    assert all(after > before for before, after in zip(counts, asked, strict=True))
    assert set(teacher.targets(batch)) == {0, 1}
    assert [member.client.servers.positions for member in teacher.members] == asked
    assert sum("log-probabilities of" in line for line in teacher.validate_first_batch(batch, None, None)) == 2
    teacher.members[1].stored_head.weights.weight.mul_(1.5)
    with pytest.raises(ValueError, match="log-probabilities made here are off by"):
        teacher.validate_first_batch(batch, None, None)
    teacher.close()


@pytest.mark.parametrize("name", ["path", "adapter"])
def test_validate_looks_at_the_paths_of_every_route(place, tmp_path, name):
    """Also of the second one."""
    (tmp_path / "cachet").mkdir()
    given = "type: cache, path" if name == "path" else f"model: {place}/talk, adapter"
    notes = path_notes(recipe_of(place, {"talk": f"{given}: {tmp_path}/cache"}))
    assert [note for note in notes if note.startswith(f"teachers.1.{name}: ")], notes


@pytest.mark.full
def test_a_server_that_is_gone_ends_the_run_in_a_line(place, urls, at_step):
    """The run goes on with another server of that route's teacher."""
    source = source_of(recipe_of(place, urls))
    assert source.title().count("(served)") == 2 and not source.sections
    with contextlib.ExitStack() as server:
        url = server.enter_context(serving(engine_of(place, "talk")))
        at_step(2, lambda arguments: server.close())
        with pytest.raises(RunError, match="no response within 1 s"):
            trained(recipe_of(place, {"talk": url}, "train.steps=40", "teachers.1.timeout=1"), "dies")
    assert list((place / "runs" / "dies").glob("checkpoint-*/manifest.json"))
    recipe = recipe_of(place, {"talk": urls["talk"]}, "train.steps=40")
    with pytest.raises(ValueError, match=r"--resume: teachers\.0\.weight differs .*expected 1\.0, got 2\.0"):
        run(parse(dump(recipe), ["teachers.0.weight=2"]), name="dies", resume=True)
    assert trained(recipe, "dies", resume=True)[1].steps == 40
    assert f"# teachers.1.url: '{url}' up to step" in (place / "runs" / "dies" / "recipe.yaml").read_text()


def test_a_recipe_names_the_field_of_the_server(place, urls):
    source = source_of(recipe_of(place, urls, "teachers.1.model=" + str(place / "math")))
    (problem,) = source.problems(cuda=False, sharded=False)
    assert problem.startswith("teachers.1.model: the server's files_sha256 is")
