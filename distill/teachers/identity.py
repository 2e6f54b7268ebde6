"""Identity of the model that a section of a recipe names: a readable name, and the hash of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from distill.models.load.source import resolve_model_source
from distill.recipe import ModelSection, TeacherConfig

WEIGHTS = ("*.safetensors", "config.json")


def teacher_identity(section: TeacherConfig) -> dict[str, object]:
    """Return name, revision and adapter of a teacher, and the hash of its files where they are on this machine."""
    named = {"model": section.model, "revision": section.revision, "adapter": section.adapter}
    if section.init == "random" or section.model is None:
        return {**named, "config": section.config, "init": section.init, "files_sha256": None}
    source = resolve_model_source(section.model, "teacher.model")
    files: list[Path] = []
    if source.local:
        folder = Path(source.location)
        files = [folder / source.gguf_file] if source.gguf_file else sorted(f for p in WEIGHTS for f in folder.glob(p))
    return {**named, "config": None, "init": section.init, "files_sha256": files_hash(files) if files else None}


def files_hash(files: list[Path]) -> str:
    """Return the SHA-256 of the files' names, sizes and contents."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def model_name(section: ModelSection) -> str:
    if section.init == "random":
        return f"{section.config} (random weights)"
    return section.model or "cut from the teacher"
