"""Detection test: flipped bits in every kind of stored file, and learning rates that are far too high.

    python tests/runs/flip_bits.py --flips 120 --rates 10 --seed 0

A tiny run with checkpoints and a teacher's cache is made once. Each flip turns one random bit of a random file over,
asks `distill verify`, and turns it back. Each learning rate is a run of its own, which has to improve, to stop and say
that training has diverged, or to say that the student is worse than before. The exit code is 1 where anything passes
unnoticed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from interrupt_runs import MODEL

from distill.cli import run_command

RECIPE = """
teacher: {init: random, config: tiny.json}
student: {init: random, config: tiny.json}
data: {source: synthetic, max_length: 32, max_rows: 64, cache: false, validation: {fraction: 0.1}}
train: {steps: 12, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 6, device: cpu}
generate: {prompts: []}
"""
KINDS = {
    "a checkpoint": "runs/whole/checkpoint-*/*",
    "the student": "runs/whole/student/*",
    "the run's records": "runs/whole/*",
    "a teacher's cache": "said/*",
}
RATES = (0.03, 0.3, 3.0, 30.0, 300.0)


def quietly(*arguments: str) -> tuple[int, str]:
    """The exit code of a command of distill, and all that it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run_command(list(arguments))
    return code, out.getvalue()


def flip(draw: random.Random, pattern: str) -> str | None:
    """Flip one bit of a file that matches; the file's name where `verify` does not notice, else None."""
    files = (path for path in Path().glob(pattern) if path.is_file() and path.name[0] != ".")
    path = draw.choice(sorted(path for path in files if path.stat().st_size))
    whole = path.read_bytes()
    content, at = bytearray(whole), draw.randrange(len(whole))
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    try:
        code, _ = quietly("verify", "said" if pattern.startswith("said") else "whole", "--json")
    finally:
        path.write_bytes(whole)
    return None if code else f"{path}, byte {at}"


def outcome_of(rate: float, seed: int) -> str:
    """Return the outcome of a run with this learning rate, in words."""
    name = f"rate-{rate:g}-{seed}"
    settings = ("train.steps=30", "train.save_every=0", "train.on_divergence=stop")
    rates = f"train.learning_rate={rate}", f"train.seed={seed}"
    code, text = quietly("run", "r.yaml", "--name", name, *rates, *settings)
    if code:
        return "stopped: diverged" if "training has diverged" in text else "stopped: NaN" if "NaN" in text else "failed"
    result = json.loads(Path("runs", name, "result.json").read_text())
    if result["after"]["forward_kl"] <= result["before"]["forward_kl"]:
        return "improved"
    return "ended worse, and says so" if "worse than before training" in " ".join(text.split()) else "UNNOTICED"


def main() -> int:
    """Damage files and runs; print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=120)
    parser.add_argument("--rates", type=int, default=10, help="How many runs with high learning rates.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, missed = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        os.chdir(folder)
        Path("tiny.json").write_text(json.dumps(MODEL))
        Path("r.yaml").write_text(RECIPE)
        for command in (
            ["run", "r.yaml", "--name", "whole"],
            ["cache", "r.yaml", "--out", "said"],
        ):
            code, text = quietly(*command)
            if code:
                print(text)
                return 1
        for number in range(arguments.flips):
            kind = list(KINDS)[number % len(KINDS)]
            if (unseen := flip(draw, KINDS[kind])) is not None:
                missed.append(f"{kind}: {unseen}")
        for number, kind in enumerate(KINDS):
            tries = len(range(number, arguments.flips, len(KINDS)))
            print(f"{kind:<20}{tries:>4} flips, {sum(line.startswith(kind) for line in missed)} unnoticed", flush=True)
        outcomes: collections.Counter[tuple[float, str]] = collections.Counter()
        for number in range(arguments.rates):
            rate = RATES[number % len(RATES)]
            outcomes[rate, outcome_of(rate, arguments.seed + number)] += 1
        for (rate, outcome), count in sorted(outcomes.items()):
            print(f"learning rate {rate:<8g}{count:>3} x {outcome}")
        os.chdir("/")
    print("\n".join(missed))
    return 1 if missed or any(outcome in ("UNNOTICED", "failed") for _, outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
