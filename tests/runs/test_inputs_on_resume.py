"""Files that a run read beside its data, changed between stop and resume: the line names the file."""

import shutil
from pathlib import Path

import pytest
from test_resume import RECIPE, TEXT
from tiny import save_models

from distill.cli import run_command
from distill.core.imported_files import hash_imported_files

FILES = {
    "mine.py": "import os, numpy, helper\nfrom parts import scale\n\n\ndef reward(prompt, answer, row):\n"
    "    from later import LENGTH\n    return len(answer) / LENGTH\n\n\n"
    "def gap(student_logits, teacher_logits, labels):\n"
    "    return helper.gap(student_logits, teacher_logits) * scale.SCALE\n\n\nTERMS = {'gap': gap}\n",
    "helper.py": "import second\ngap = second.gap\n",
    "second.py": "def gap(s, t):\n    return (t.log_softmax(-1) - s.log_softmax(-1)).abs().sum(-1)\n",
    "later.py": "LENGTH = 100\n",
    "parts/__init__.py": "NAME = 'parts'\n",
    "parts/scale.py": "from . import basis\nSCALE = basis.ONE\n",
    "parts/basis.py": "ONE = 1.0\n",
    "unused.py": "ONE = 1.0\n",
    "numpy_like/__init__.py": "",
}
IMPORTED = ["helper.py", "later.py", "parts/__init__.py", "parts/basis.py", "parts/scale.py", "second.py"]
HELD_OUT = "".join(f"Nobody knows {n} things about {n * 7919 % 991}.\n" for n in range(20))


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_file_is_hashed_with_what_it_imports_from_its_folder(tmp_path):
    write_files(tmp_path)
    file = tmp_path / "mine.py"
    found = hash_imported_files(file, file.read_bytes())
    assert list(found) == IMPORTED
    for name in FILES:
        (tmp_path / name).write_text(FILES[name] + "# changed\n")
        changed = hash_imported_files(file, FILES["mine.py"].encode())
        assert {key for key in found if changed[key] != found[key]} == {name} & set(IMPORTED)
        (tmp_path / name).write_text(FILES[name])


def test_files_that_import_each_other_or_are_broken_are_hashed_once(tmp_path):
    (tmp_path / "mine.py").write_text("import one\n")
    (tmp_path / "one.py").write_text("import two, mine\n")
    (tmp_path / "two.py").write_text("import one\nthis is no Python\n")
    assert list(hash_imported_files(tmp_path / "mine.py", b"import one")) == ["one.py", "two.py"]
    assert hash_imported_files(tmp_path / "mine.py", b"from .. import os\nfrom ...x import y\nimport one.sub") != {}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A finished run with held-out data and a loss function of its own, which imports others."""
    folder = tmp_path_factory.mktemp("stopped")
    save_models(folder, text=TEXT, teacher={"layers": 2, "seed": 1})
    write_files(folder)
    (folder / "held.txt").write_text(HELD_OUT)
    validation = "validation: {source: held.txt, max_rows: 4}"
    recipe = RECIPE.replace("validation: {fraction: 0.1, max_rows: 2}", validation)
    (folder / "r.yaml").write_text(recipe + "loss: {terms: [{type: gap, weight: 1.0}]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert run_command(["run", "r.yaml", "--name", "whole", "--plugin", "mine.py"]) == 0
    return folder


@pytest.mark.parametrize("changed", ["held.txt", "mine.py", *IMPORTED, "unused.py"])
def test_a_changed_file_is_named_on_resume(stopped, tmp_path, monkeypatch, capsys, changed):
    place = tmp_path / "again"
    shutil.copytree(stopped, place)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(stopped))  # the modules are loaded already: what is compared are files
    with (place / changed).open("a") as file:
        file.write("Another line of text that nobody has seen.\n" if changed == "held.txt" else "OTHER = 1\n")
    code = run_command(["run", "r.yaml", "--name", "whole", "--plugin", "mine.py", "--resume"])
    error = capsys.readouterr().err
    name = {"held.txt": "data.validation.held.txt", "mine.py": "loss.plugin.sha256"}.get(
        changed, f"loss.plugin.modules.{changed}"
    )
    if changed == "unused.py":
        assert code == 0, error
    else:
        assert code == 2 and f"{name} differs" in error, error
