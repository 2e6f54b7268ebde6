"""Output of `distill inspect` for docs/samples/kinds, ten small chats of different formats."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.public_templates import tokenizer_of

ROOT = Path(__file__).resolve().parents[1]
KINDS = ROOT / "docs" / "samples" / "kinds"
# one of ChatML's kind: with tools and a system prompt, without reasoning
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPE = """\
teacher: {model: ./my-teacher}
student: {from_teacher: {layers: 1}}
data: {source: ./kinds, max_length: 1024, validation: {fraction: 0.1}}
train: {epochs: 1}
"""


def inspected() -> str:
    """The recipe, the command and its output, as Markdown."""
    with tempfile.TemporaryDirectory(prefix="distill-docs-") as folder:
        shutil.copytree(KINDS, Path(folder, "kinds"))
        tokenizer_of(["<|im_end|>", "<|im_start|>", "<|pad|>"], TEMPLATE).save_pretrained(Path(folder, "my-teacher"))
        Path(folder, "kinds.yaml").write_text(RECIPE)
        environment = {"COLUMNS": "120", "DISTILL_CACHE": str(Path(folder, "cache")), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "distill", "inspect", "kinds.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | environment,
        )
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join(["```yaml", RECIPE.rstrip(), "```", "", "```text", "$ distill inspect kinds.yaml", *lines, "```"])
