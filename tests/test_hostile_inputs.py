"""Files that others wrote: nobody is called, nothing runs or fills the memory, every fault is one line."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def test_local_data_of_every_format_call_nobody(tmp_path):
    """In a process of its own, where nothing has switched the hub off."""
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
    environment |= {"HF_HOME": str(tmp_path.parent / "hf"),
                    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(sources)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    called, rows = json.loads(done.stdout.splitlines()[-1])
    assert not called, called
    assert all(made == rows["a.jsonl"] and len(made) == len(ROWS) for made in rows.values())
