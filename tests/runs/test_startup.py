"""Start of a command: imports without garbage collection."""

import gc
import subprocess
import sys

import pytest

from distill.core.startup import paused_collection

FIRST_IMPORTS = """
import gc
from distill.core.startup import paused_collection
with paused_collection():
    import distill.run
print(gc.get_stats()[2]["collections"], gc.isenabled(), gc.get_freeze_count() > 100_000)
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


@pytest.mark.full
def test_a_run_is_imported_without_a_full_collection():
    done = subprocess.run([sys.executable, "-c", FIRST_IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]
