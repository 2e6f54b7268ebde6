"""The files of a release: wheels of both packages, the hub's kernel and the notes, from the commit that is checked out.

    python -m scripts.release dist          # distill_toolkit-*.whl, distill_kernels-*.whl, hub-kernel/, notes.md

Built from an archive of HEAD, so that nothing uncommitted gets in. On a tagged commit the tag has to be `v` and the
version (`distill.__version__`), and CHANGELOG.md a section of it with a date; on any other the notes are those of
*Unreleased*. `.ci/run` installs the wheels outside of the checkout and runs the quickstart from there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from distill import __version__
from scripts import hub_kernel

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str | None) -> str:
    """Return the section of a version, which has a date, or of what is unreleased (None), without its heading.

    Raises:
        ValueError: there is no such section.
    """
    heading = r"## \[Unreleased\]" if version is None else rf"## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"
    found = re.search(rf"^{heading}\n(.*?)(?=^## |\Z)", changelog, flags=re.M | re.S)
    if found is None:
        raise ValueError(f"CHANGELOG.md: expected a section '## [{version or 'Unreleased'}]', with a date if released")
    return found[1].strip() + "\n"


def released_version(tags: list[str], versions: dict[str, str]) -> str | None:
    """Return the version that a commit's tags release; None where it has no tag of a version.

    Raises:
        ValueError: the packages' versions differ, or the tag names another.
    """
    if len(set(versions.values())) > 1:
        raise ValueError(f"expected one version, got {versions}")
    (version,) = set(versions.values())
    tagged = [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]
    if tagged and tagged != [f"v{version}"]:
        raise ValueError(f"tag: expected v{version}, got {', '.join(tagged)}")
    return version if tagged else None


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def main(folder: Path) -> None:
    kernels = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]["version"]
    tags = _git("tag", "--points-at", "HEAD").decode().split()
    version = released_version(tags, {"distill-toolkit": __version__, "distill-kernels": kernels})
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        archive = Path(place, "source.tar")
        archive.write_bytes(_git("archive", "HEAD"))
        with tarfile.open(archive) as tar:
            tar.extractall(Path(place, "source"), filter="data")
        for package in ("./", "./kernels"):  # a bare `kernels` is a package of that name on the index
            command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder.resolve()), package]
            subprocess.run(command, cwd=Path(place, "source"), check=True)
        shutil.rmtree(folder / "hub-kernel", ignore_errors=True)
        hub_kernel.write(Path(place, "source/kernels/distill_kernels"), folder / "hub-kernel")
    (folder / "notes.md").write_text(text, encoding="utf-8")
    print("\n".join(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
