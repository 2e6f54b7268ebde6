"""Start of a command: imports without garbage collection, and compiled modules that are kept."""

import gc
import json
import os
import subprocess
import sys

import pytest

from distill.core.startup import paused_collection

MOST_MODULES = 3700  # of all packages, with the versions of constraints.txt
# what Python prints of a package that `keep_bytecode` was called with, after it is imported
KEPT = """
import json, os, sys
from distill.core.startup import keep_bytecode
keep_bytecode("some_package")
import some_package
print(json.dumps([some_package.__cached__, sys.pycache_prefix, os.environ.get("PYTHONDONTWRITEBYTECODE")]))
"""
FIRST_IMPORTS = """
import gc, sys
from distill.core.startup import paused_collection
with paused_collection():
    import distill.run
print(gc.get_stats()[2]["collections"], gc.isenabled(), gc.get_freeze_count() > 100_000, len(sys.modules))
"""


@pytest.fixture
def thawed():
    yield
    gc.unfreeze()


def test_collection_is_paused_and_what_was_imported_is_left_out_of_later_ones(thawed, tmp_path, monkeypatch):
    (tmp_path / "imported_once.py").write_text("A = [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    counts = []
    for _ in range(2):
        before = gc.get_freeze_count()
        with paused_collection():
            assert not gc.isenabled()
            import imported_once  # noqa: F401
        assert gc.isenabled()
        counts.append(gc.get_freeze_count() - before)
    assert counts[0] > 0 >= counts[1], "the second import is none"  # what was left out may have gone since


def test_collection_goes_on_after_an_import_that_fails_and_stays_off_where_it_was_off(thawed):
    with pytest.raises(ImportError), paused_collection():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_run_is_imported_without_a_full_collection():
    done = subprocess.run([sys.executable, "-c", FIRST_IMPORTS], capture_output=True, text=True, check=True)
    collections, enabled, frozen, modules = done.stdout.split()
    assert (collections, enabled, frozen) == ("0", "True", "True")
    assert int(modules) <= MOST_MODULES


@pytest.fixture
def place(tmp_path):
    (tmp_path / "site/some_package").mkdir(parents=True)
    (tmp_path / "site/some_package/__init__.py").write_text("A = 1\n")
    return tmp_path


def start(place, **variables):
    """Import the package in a process with these environment variables; return what `KEPT` prints."""
    removed = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    paths = os.pathsep.join([str(place / "site"), *sys.path])
    environment |= {"PYTHONPATH": paths, "DISTILL_CACHE": str(place / "cache"), **variables}
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def test_bytecode_is_kept_in_the_cache_folder_where_none_may_be_written(place):
    for _ in range(2):
        cached, prefix, forbidden = start(place, PYTHONDONTWRITEBYTECODE="1")
        assert prefix == str(place / "cache/bytecode") and forbidden is None
        assert cached.startswith(prefix) and os.path.isfile(cached)
    assert not (place / "site/some_package/__pycache__").exists()


def test_bytecode_beside_the_sources_is_used(place):
    cached, prefix, _ = start(place)  # Python may write it
    assert prefix is None and os.path.isfile(cached) and cached.startswith(str(place / "site"))
    assert start(place, PYTHONDONTWRITEBYTECODE="1") == [cached, None, "1"]
    assert not (place / "cache").exists()


def test_a_folder_that_the_user_names_and_one_that_cannot_be_made_change_nothing(place):
    own = str(place / "own")
    assert start(place, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=own)[1:] == [own, "1"]
    (place / "cache").write_text("no folder")
    assert start(place, PYTHONDONTWRITEBYTECODE="1")[1:] == [None, "1"]
