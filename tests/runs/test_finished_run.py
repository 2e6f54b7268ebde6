"""The one reading of result.json: whether a run is finished, and whether its student is as it was saved."""

import json

import pytest

from distill.core.finished_run import finished_result, require_finished_student, student_error
from distill.core.manifest import add_to_manifest, file_checksums


@pytest.fixture
def folder(tmp_path):
    """A finished run: its student, result.json with the student's checksums, manifest.json with that of result.json."""
    (tmp_path / "student").mkdir()
    (tmp_path / "student/model.safetensors").write_bytes(b"weights")
    result = {"before": {}, "after": {}, "files": file_checksums(tmp_path / "student")}
    (tmp_path / "result.json").write_text(json.dumps(result))
    add_to_manifest(tmp_path, "result.json")
    return tmp_path


def test_an_undamaged_run_is_finished(folder):
    assert finished_result(folder)["after"] == {}
    assert student_error(folder) is None
    require_finished_student(folder)


def test_a_damaged_student_is_named(folder):
    (folder / "student/model.safetensors").write_bytes(b"weighty")
    assert student_error(folder).startswith("student: model.safetensors is damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*; the next stage would start from it"):
        require_finished_student(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 200_000])
def test_a_damaged_result_is_of_no_finished_run(folder, content):
    (folder / "result.json").write_text(content)
    assert finished_result(folder) is None
    assert "result.json is damaged" in student_error(folder)
    with pytest.raises(ValueError, match=r"result\.json is damaged; the next stage"):
        require_finished_student(folder)


def test_a_lost_result_is_named_where_the_manifest_has_it(folder):
    (folder / "result.json").unlink()
    assert finished_result(folder) is None
    assert student_error(folder) == "result.json is missing"
