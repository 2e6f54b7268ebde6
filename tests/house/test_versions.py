"""The core of the suite that runs on other versions names tests that there are, and versions that pyproject allows."""

import ast
from pathlib import Path

from scripts import versions

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_of_the_core_exists():
    left_out = [test for version in versions.VERSIONS.values() for test in version.left_out]
    for test in (*versions.CORE, *left_out):
        path, _, name = test.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert not name or name in functions, test


def test_requirements_are_those_of_the_project():
    wanted = {name: versions.requirement(version) for name, version in versions.VERSIONS.items()}
    assert wanted == {
        "transformers-oldest": "transformers==5.17.*",
        "transformers-newest": "transformers>=5.17,<6",
        "torch-oldest": "torch==2.9.*",
        "torch-newest": "torch>=2.9",
    }
