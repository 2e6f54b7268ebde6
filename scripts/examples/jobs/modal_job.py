"""A run on a rented GPU by Modal, from a clone of this repository:

    modal run scripts/examples/jobs/modal_job.py --recipe my-chat.yaml --name first
    modal volume get distill first/student

The recipe's text is sent along; its data are a hub data set, or files of the volume under /runs. A function that is
started again (`retries`) continues the run from its last checkpoint. Gated models need a secret `huggingface` with
HF_TOKEN. The image and the app were made with Modal's package; not run.
"""

import subprocess
from pathlib import Path

import modal

HOURS = 24
CLONE = "/opt/distill"

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")  # Triton compiles the launchers of its kernels
    .add_local_dir(".", CLONE, copy=True, ignore=["**/.*", "**/__pycache__", "runs", "caches", "site", "tests"])
    .run_commands(f"cd {CLONE} && pip install -c constraints.txt .")
    .env({"DISTILL_CACHE": "/cache/distill", "HF_HOME": "/cache/huggingface", "TRITON_CACHE_DIR": "/cache/triton"})
)
app = modal.App("distill", image=image)
runs = modal.Volume.from_name("distill", create_if_missing=True)
cache = modal.Volume.from_name("distill-cache", create_if_missing=True)


@app.function(
    gpu="H100",
    timeout=HOURS * 3600,
    retries=3,
    volumes={"/runs": runs, "/cache": cache},
    secrets=[modal.Secret.from_name("huggingface")],
)
def train(recipe: str, name: str) -> None:
    """Write the recipe, and run or continue it."""
    path = Path("/tmp/recipe.yaml")
    path.write_text(recipe)
    subprocess.run(
        ["distill", "run", str(path), "--output-dir", "/runs", "--name", name, "--resume-if-any"], check=True
    )


@app.local_entrypoint()
def main(recipe: str, name: str = "modal") -> None:
    """Send a recipe."""
    train.remote(Path(recipe).read_text(), name)
