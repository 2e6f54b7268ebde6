"""A release has one version, in the tag, in both packages and in CHANGELOG.md."""

import tomllib
from pathlib import Path

import pytest

from distill import __version__
from scripts.release import notes, released_version

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = """\
# Changelog

## [Unreleased]

- c

## [0.2.0] - 2026-11-28

### Added

- b

## [0.1.0]

- a
"""


def test_notes_are_the_section_of_the_version():
    assert notes(CHANGELOG, "0.2.0") == "### Added\n\n- b\n"
    assert notes(CHANGELOG, None) == "- c\n"
    for version in ("0.1.0", "0.3.0"):  # without a date; not there
        with pytest.raises(ValueError, match=r"CHANGELOG\.md: expected a section"):
            notes(CHANGELOG, version)


def test_the_tag_names_the_version_of_both_packages():
    both = {"one": "0.1.0", "two": "0.1.0"}
    assert released_version(["v0.1.0", "nightly"], both) == "0.1.0"
    assert released_version(["nightly"], both) is None
    with pytest.raises(ValueError, match=r"tag: expected v0\.1\.0, got v0\.2\.0"):
        released_version(["v0.2.0"], both)
    with pytest.raises(ValueError, match="expected one version"):
        released_version([], both | {"two": "0.2.0"})


def test_both_packages_have_the_version_of_the_module():
    kernels = tomllib.loads((ROOT / "kernels/pyproject.toml").read_text())["project"]["version"]
    assert kernels == __version__
    assert notes((ROOT / "CHANGELOG.md").read_text(), None)
