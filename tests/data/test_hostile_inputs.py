"""Files that others wrote: nobody is called, nothing runs or fills the memory, every fault is one line."""

import gzip
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import PLACES
from tiny import save_tiny, tiny_model, tiny_tokenizer

from distill.core import console
from distill.data.load import load_data
from distill.data.rows import RowFault
from distill.data.sources import open_source
from distill.models.loading import load_config, load_teacher, load_tokenizer
from distill.recipe import Data, LocalTeacherConfig, ModelSection, parse
from distill.reports.export import export
from distill.teachers.registry import source_of

ROWS = [{"text": f"The teacher explains number {number} and the student listens."} for number in range(8)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path


# ------------------------------------------------------------------ network

WATCHED = """
import json, sys
called = []
def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto") or (
        event == "socket.connect" and isinstance(arguments[1], tuple)
    ):
        called.append([event, repr(arguments)])
sys.addaudithook(watch)
from distill.data.load import load_data
from distill.recipe import Data
from tiny import tiny_tokenizer
rows = {}
for source in json.loads(sys.argv[1]):
    splits = load_data(Data(source=source, max_length=64, cache=False, packing=False), tiny_tokenizer(), seed=0)
    rows[source] = sorted(row["input_ids"] for part in splits[:2] for row in part)
print(json.dumps([called, rows]))
"""


@pytest.mark.full
def test_local_data_of_every_format_make_no_network_requests(tmp_path):
    """The test runs in a process of its own, where the hub is not switched off."""
    import datasets
    import pyarrow

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("a.jsonl", "a.ndjson"):
        Path(name).write_text(lines)
    Path("a.json").write_text(json.dumps(ROWS))
    Path("a.csv").write_text("text\n" + "".join(row["text"] + "\n" for row in ROWS))
    Path("a.tsv").write_text("text\n" + "".join(row["text"] + "\n" for row in ROWS))
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(lines)
    for number, row in enumerate(ROWS):
        Path("texts").mkdir(exist_ok=True)
        Path(f"texts/{number}.txt").write_text(row["text"])
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet("a.parquet")
    table.save_to_disk("saved")
    arrow = pyarrow.Table.from_pylist(ROWS)
    for name, writer in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with writer(name, arrow.schema) as opened:
            opened.write_table(arrow)
    sources = [name.name for name in tmp_path.iterdir()]
    assert len(sources) == 11
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_HOME": str(tmp_path.parent / "hf"),
        "PYTHONPATH": os.pathsep.join(map(str, PLACES)),
    }
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(sources)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    called, rows = json.loads(done.stdout.splitlines()[-1])
    assert not called, called
    assert all(made == rows["a.jsonl"] and len(made) == len(ROWS) for made in rows.values())


# ------------------------------------------------------------------ configurations and weights


class Payload:
    """A pickle that touches a file when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("touched"),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = tiny_tokenizer()
    save_tiny(folder, tiny_model(tokenizer, layers=2, seed=1), tokenizer)
    return folder


@pytest.fixture
def run_folder(saved):
    """A folder that holds a student as a run does."""
    shutil.copytree(saved, "run/student")
    return Path("run")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused_everywhere(run_folder, expected):
    """Loading, planning, random weights and export say so, in one line."""
    student = str(run_folder / "student")
    random = ModelSection(init="random", config=f"{student}/config.json")
    recipe = parse(
        json.dumps(
            {
                "teacher": random.model_dump(exclude_defaults=True),
                "student": random.model_dump(exclude_defaults=True),
                "data": {"source": "synthetic"},
                "train": {"steps": 1, "batch_size": 1},
            }
        )
    )
    for attempt in (
        lambda: load_config(LocalTeacherConfig(model=student), "teacher"),
        lambda: load_teacher(LocalTeacherConfig(model=student)),
        lambda: load_teacher(LocalTeacherConfig(**random.model_dump(exclude_none=True))),
        lambda: source_of(recipe).shapes(),
        lambda: export(run_folder, Path("out")),
    ):
        with pytest.raises(ValueError, match=expected) as raised:
            attempt()
        assert "\n" not in str(raised.value) and not Path("out").exists()


@pytest.mark.plain(
    "attn_implementation-nobody/kernels",
    "_attn_implementation-nobody/kernels",
    "_attn_implementation-7",
    "experts_implementation-7",
)
@pytest.mark.parametrize("name", ["nobody/kernels", {"": "nobody/kernels"}, "flash|nobody/kernels@main:attend", 7])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_configuration_fetches_no_code(run_folder, name, key):
    edit(run_folder / "student/config.json", **{key: name})
    refused_everywhere(run_folder, "fetched as code")
    edit(run_folder / "student/config.json", **{key: None}, text_config={key: name})
    refused_everywhere(run_folder, "fetched as code")


@pytest.mark.plain(
    "{'num_hidden_layers': 1000000000}-expected at most 4,096 for num_hidden_layers",
    "{'num_attention_heads': []}-student",
    "{'num_hidden_layers': None}-student",
)
@pytest.mark.parametrize(
    "change, expected",
    [
        ({"num_hidden_layers": 10**9}, "expected at most 4,096 for num_hidden_layers"),
        ({"vision_config": {"num_layers": 10**9}}, "expected at most 4,096 for num_layers"),
        ({"hidden_size": "wide"}, "student/config.json|student"),
        ({"num_attention_heads": []}, "student"),
        ({"rope_parameters": 7}, "student"),
        ({"model_type": ["llama"]}, "student"),
        ({"num_hidden_layers": None}, "student"),
    ],
)
def test_configurations_with_hostile_values(run_folder, change, expected):
    edit(run_folder / "student/config.json", **change)
    refused_everywhere(run_folder, expected)


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"[]", "expected an object"),
        (b"{", "no usable JSON"),
        (b"[" * 100_000, "no usable JSON"),
        (None, "no plain file"),
    ],
)
def test_configurations_that_are_none(run_folder, content, expected):
    path = run_folder / "student/config.json"
    path.unlink()
    if content is None:
        os.mkfifo(path)
        with pytest.raises(ValueError, match=r"no student yet"):
            export(run_folder, Path("out"))
    else:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=expected):
            export(run_folder, Path("out"))
    with pytest.raises(ValueError, match=expected):
        load_teacher(LocalTeacherConfig(model=str(run_folder / "student")))


@pytest.mark.plain("weights.bin", "/etc/passwd", "7")
@pytest.mark.parametrize("name", ["weights.bin", "../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", 7])
def test_an_index_names_safetensors_of_its_own_folder(run_folder, saved, name):
    """Pickles behind the index of a folder with a safetensors file for show."""
    student = run_folder / "student"
    shutil.copy(saved / "model.safetensors", run_folder / "outside.safetensors")
    torch.save({"x": Payload()}, student / "weights.bin")
    (student / "model.safetensors").rename(student / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (student / "model.safetensors.index.json").write_text(json.dumps(index))
    for attempt in (
        lambda: load_teacher(LocalTeacherConfig(model=str(student))),
        lambda: export(run_folder, Path("out")),
    ):
        with pytest.raises(ValueError, match="expected safetensors files in the same folder"):
            attempt()
    assert not Path("touched").exists() and not Path("out").exists()


def test_a_pickled_student_is_not_exported(run_folder):
    (run_folder / "student/model.safetensors").unlink()
    torch.save({"x": Payload()}, run_folder / "student/pytorch_model.bin")
    with pytest.raises(ValueError, match="are pickles"):
        export(run_folder, Path("out"))
    assert not Path("touched").exists() and not Path("out").exists()


# ------------------------------------------------------------------ templates

CHATS = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in range(4)]


# ------------------------------------------------------------------ files that are no files


@pytest.mark.parametrize(
    "template, expected",
    [
        ("x" * (1 << 21), "expected at most 1,048,576 characters of template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "no trainable tokens .* unsafe"),
        ("{{ open('a.jsonl').read() }}", "no trainable tokens .* 'open' is undefined"),
        ("{% include 'a.jsonl' %}", "no trainable tokens .* the chat template refuses the row"),
    ],
    ids=["size", "depth", "attributes", "functions", "files"],
)
def test_a_template_is_bounded_and_reaches_nothing(template, expected):
    Path("t.jinja").write_text(template)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    with pytest.raises(ValueError, match=expected) as told:
        load_data(Data(source="a.jsonl", chat_template="t.jinja", max_length=64), tiny_tokenizer(), seed=0)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl", "pipe.txt", "pipe.parquet"])
def test_a_pipe_is_no_data_file(name):
    os.mkfifo(name)
    with pytest.raises(ValueError, match=r"expected a file or folder, got a pipe"):
        load_data(Data(source=f"./{name}", max_length=64), tiny_tokenizer(), seed=0)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    with pytest.raises(ValueError, match=r"data\.chat_template: .*not a regular file"):
        load_data(Data(source="a.jsonl", chat_template=f"./{name}", max_length=64), tiny_tokenizer(), seed=0)


# ------------------------------------------------------------------ terminals

ESCAPES = "\x1b[2J\x1b]0;title\x07 \x9b31m \r\x08 \u202e \udc80"


def test_no_control_character_reaches_a_stream(capsys, monkeypatch):
    expected = r"\x1b[2J\x1b]0;title\x07 \x9b31m \r\x08 \u202e \udc80"
    console.print_lines(f"one\ttwo {ESCAPES}\nthree")
    console.print_error(f"a {ESCAPES}\nb")
    console.show_table([ESCAPES, "b"], [["c", ESCAPES]])
    logging.lastResort.handle(logging.makeLogRecord({"msg": "warned %s", "args": (ESCAPES,), "levelno": 30}))
    out, err = capsys.readouterr()
    assert f"one\ttwo {expected}\nthree\n" in out and out.count(expected) == 3
    assert f"distill: a {expected}\ndistill: b\n" in err and f"warned {expected}" in err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.show_table(["a"], [[f"{ESCAPES} cell"]])
    assert "\x1b[2J" not in capsys.readouterr().out


# ------------------------------------------------------------------ traces that were one line too few


@pytest.mark.plain("jsonl", "txt")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "txt"])
def test_damaged_gzip_is_counted_or_refused(kind):
    content = {"json": json.dumps(ROWS), "csv": "text\n" + "".join(r["text"] + "\n" for r in ROWS * 500)}
    whole = gzip.compress(content.get(kind, "".join(json.dumps(row) + "\n" for row in ROWS * 500)).encode())
    seen = set()
    for at in (0, 1, 3, 9, 10, 12, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :], whole[:at] + b"\0" * 64):
            Path(f"a.{kind}.gz").write_bytes(damaged)
            try:
                seen |= {row.reason for row in open_source(f"a.{kind}.gz").rows() if isinstance(row, RowFault)}
            except ValueError as error:
                assert kind == "json" and "is not valid JSON" in str(error) and "\n" not in str(error)
    assert "file breaks off" in seen


def gguf(path, entries, *, magic=b"GGUF", version=3, tensors=0, keys=None, after=b""):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    count = len(entries) if keys is None else keys
    path.write_bytes(magic + struct.pack("<IQQ", version, tensors, count) + body + after)


NAMED = ("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
LAYERS = ("llama.block_count", 4, struct.pack("<I", 2))
HUGE = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    "entries, more, expected",
    [
        ([NAMED, LAYERS], {"magic": b"GGML"}, "does not begin with GGUF"),
        ([NAMED, LAYERS], {"version": 99}, "expected version 2 or 3"),
        ([NAMED, LAYERS], {"keys": 1 << 60}, "at most 1,048,576"),
        ([NAMED, LAYERS], {"tensors": 1 << 60}, "at most 1,048,576"),
        ([NAMED, LAYERS], {"keys": 3}, "ends within its header"),
        ([NAMED, LAYERS], {"tensors": 1}, "ends within its header"),
        ([NAMED, LAYERS, NAMED], {}, "twice"),
        ([LAYERS], {}, "name of an architecture"),
        ([NAMED], {}, "block_count"),
        ([NAMED, ("llama.block_count", 4, struct.pack("<I", 10**9))], {}, "expected 1 to 4,096"),
        ([NAMED, ("llama.block_count", 5, struct.pack("<i", -1))], {}, "expected 1 to 4,096"),
        ([NAMED, ("llama.block_count", 8, struct.pack("<Q", 1) + b"2")], {}, "expected 1 to 4,096"),
        ([NAMED, LAYERS, ("llama.context_length", 11, struct.pack("<q", -5))], {}, "context_length"),
        ([NAMED, LAYERS, ("x", 99, b"")], {}, "unknown type 99"),
        ([NAMED, LAYERS, ("x", 8, HUGE)], {}, "ends within its header"),
        ([NAMED, LAYERS, ("x", 8, struct.pack("<Q", 1) + b"\xff")], {}, "utf-8"),
        ([NAMED, LAYERS, ("x", 9, struct.pack("<I", 9) + HUGE)], {}, "list of the unknown type 9"),
        ([NAMED, LAYERS, ("x", 9, struct.pack("<I", 0) + HUGE)], {}, "ends within its header"),
        ([NAMED, LAYERS, ("x", 9, struct.pack("<I", 8) + HUGE)], {}, "ends within its header"),
        (
            [NAMED, LAYERS],
            {"tensors": 1, "after": struct.pack("<Q", 1) + b"w" + struct.pack("<I", 99)},
            "99 dimensions",
        ),
        (
            [NAMED, LAYERS],
            {"tensors": 1, "after": struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 0, 0, 0)},
            "no values",
        ),
        (
            [NAMED, LAYERS],
            {"tensors": 1, "after": struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 4, 0, 1 << 50)},
            "no values",
        ),
    ],
)
def test_hostile_gguf_headers_are_refused(entries, more, expected):
    gguf(Path("m.gguf"), entries, **more)
    section = LocalTeacherConfig(model="./m.gguf")
    for attempt in (
        lambda: load_config(section, "teacher"),
        lambda: load_tokenizer(section),
        lambda: load_teacher(section),
    ):
        with pytest.raises(ValueError, match=r"teacher\.model: ") as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert expected in str(raised.value)


def test_a_gguf_header_is_read_once_and_again_when_its_file_changes(tmp_path, watch):
    """Also right after another change, which may have the same time on a disk of coarse times."""
    from distill.models.load import config_validation

    path, read, parse_header = tmp_path / "m.gguf", [], config_validation._header
    watch.setattr(config_validation, "_header", lambda file, size: read.append(size) or parse_header(file, size))

    def layers_of(count, age):
        gguf(path, [NAMED, ("llama.block_count", 4, struct.pack("<I", count))])
        os.utime(path, ns=(0, time.time_ns() - age))
        found = [config_validation.check_gguf(path, "teacher")[0] for _ in range(2)]
        assert found == [count] * 2
        return len(read)

    hour = 3_600_000_000_000
    assert layers_of(2, hour) == 1, "read once"
    assert layers_of(3, 2 * hour) == 2, "another time"
    assert layers_of(4, -hour) == 4, "too new to tell the next change"


def test_a_tokenizer_that_panics(saved, monkeypatch):
    """The tokenizers library panics with an exception that is no Exception."""
    from transformers import PreTrainedTokenizerFast

    class PanicException(BaseException):
        pass

    def panic(*args, **kwargs):
        raise PanicException("index out of bounds: the len is 3 but the index is 7\nbacktrace")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", panic)
    with pytest.raises(ValueError, match=r"teacher\.model: cannot load .*PanicException: index out of bounds.*7$"):
        load_tokenizer(LocalTeacherConfig(model=str(saved)))
