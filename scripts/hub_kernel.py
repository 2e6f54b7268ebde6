"""The kernels in the layout that Hugging Face's `kernels` loads: `python -m scripts.hub_kernel FOLDER`.

    FOLDER/build.toml                     what kernel-builder reads, of a kernel without compiled code
    FOLDER/build/torch-cuda/              the package, with metadata.json; and for CPU tensors
    FOLDER/build/torch-cpu/               the same files, whose reference implementations run there

Such a kernel is imported from a folder outside of the path, and several versions of it into one process. So absolute
imports become relative, names of modules in strings follow from `__package__`, and the namespace of its torch ops
carries the kernel's id. `examples.py` describes calls for tests and the doctor and is left out. Nothing is uploaded.

    import kernels
    losses = kernels.get_local_kernel(Path("FOLDER"))
    loss = losses.FusedKLLoss()(student_hidden, student_head, teacher_hidden, teacher_head)
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import tokenize
from pathlib import Path

PACKAGE = "distill_kernels"
NAME = "distill-kernels"
OPS = "distill"  # namespace of torch ops in the package
VERSION = 1  # of the interface on the hub, which numbers them as 1, 2, ...; not that of the package
BACKENDS = ("cpu", "cuda")
LEFT_OUT = ("examples.py",)
BUILD = f"""\
[general]
edition = 5
name = "{NAME}"
version = {VERSION}
license = "apache-2.0"
backends = [{", ".join(f'"{backend}"' for backend in BACKENDS)}]

[torch-noarch]
"""


def relocated(text: str, depth: int, ops: str) -> str:
    """Return a module's text without the name of its package.

    Args:
        depth: Number of packages between it and the top one.
        ops: Namespace of its torch ops.

    Raises:
        ValueError: The name is left in code that this function does not know.
    """
    dots = "." * (depth + 1)
    text = re.sub(rf"^(\s*)from {PACKAGE}\.([\w.]+) import", rf"\1from {dots}\2 import", text, flags=re.M)
    text = re.sub(rf"^(\s*)from {PACKAGE} import", rf"\1from {dots} import", text, flags=re.M)
    top = "__package__" if depth == 0 else f'__package__.rsplit(".", {depth})[0]'
    text = re.sub(rf'(["\']){PACKAGE}((?:\.\w+)+)\1', rf'{top} + "\2"', text)
    text = text.replace(f"torch.ops.{OPS},", f"torch.ops.{ops},").replace(f"torch.ops.{OPS}.", f"torch.ops.{ops}.")
    text = text.replace(f"{OPS}::", f"{ops}::")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == PACKAGE:
            raise ValueError(f"line {token.start[0]}: expected no name of the package, got {token.line.strip()}")
    return text


def files_of(source: Path) -> dict[str, str]:
    """Return the package's files by their path in it."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        if path.name not in LEFT_OUT:
            found[path.relative_to(source).as_posix()] = path.read_text(encoding="utf-8")
    return found


def write(source: Path, folder: Path) -> None:
    """Write the hub's folder of a package.

    Args:
        source: The package's folder.
        folder: Written new; expected not to hold a build.

    Raises:
        ValueError: As of `relocated`, with the file's name.
    """
    files = files_of(source)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:7]
    for backend in BACKENDS:
        identity = f"_{PACKAGE}_{backend}_{digest}"
        variant = folder / "build" / f"torch-{backend}"
        for name, text in files.items():
            try:
                made = relocated(text, name.count("/"), identity)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            path = variant / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made, encoding="utf-8")
        metadata = {
            "name": NAME,
            "id": identity,
            "version": VERSION,
            "license": "apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    (folder / "build.toml").write_text(BUILD, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1] / "kernels" / PACKAGE, Path(sys.argv[1]))
