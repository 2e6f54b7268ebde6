"""Construction of an engine from a recipe or a model, and of a running server from an engine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from starlette.applications import Starlette

from distill.core import console
from distill.core.launch import processes_to_start, visible_gpus
from distill.core.ranks import is_main_process, world_size
from distill.models.gpu_specs import family_in
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.patch.patching import patch
from distill.models.sharding import Placement
from distill.recipe import Recipe, parse
from distill.recipe.compatibility import require_command
from distill.recipe.yaml_text import to_yaml
from distill.serving.connections import DEFAULT_TIMEOUTS, Server, Timeouts, listen
from distill.serving.engine import ServingEngine
from distill.serving.sharded import ShardedEngine
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.served.client import TOKEN_VARIABLE, token_of
from distill.teachers.backends.stored.identity import text_hashes
from distill.teachers.load_context import load_context
from distill.teachers.registry import source_of


def recipe_of_model(model: str, overrides: list[str]) -> Recipe:
    """Return a recipe whose teacher is the named model; its other sections are not used."""
    tree = {
        "teacher": {"model": model},
        "student": {"model": model},
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1},
    }
    return parse(to_yaml(tree), overrides, name="served", origin=model)


def processes_of(recipe: Recipe, processes: int | None = None) -> int:
    """Return the number of processes to start `distill serve` in on this machine: one per GPU for a sharded teacher.

    Args:
        processes: number that the user asks for; None for one per GPU.

    Raises:
        ValueError: several processes for a replicated teacher, or one for a sharded one.
    """
    if recipe.parallel.teacher != "sharded":
        if max(world_size(), processes or 1) > 1:
            raise ValueError(
                "parallel.teacher: expected sharded where several processes serve one teacher; copies are servers of "
                "their own: start one a GPU, each with its --port, and give a trainer all of their addresses "
                "(teacher.url)"
            )
        return 1
    if world_size() > 1:  # one of those that were started
        return 1
    processes = processes or processes_to_start(os.environ, gpus=visible_gpus(), device=recipe.train.device)
    if processes == 1:
        raise ValueError(
            "parallel.teacher: sharded needs several GPUs, or processes: --processes N, or torchrun --nproc-per-node N "
            "-m distill serve"
        )
    return processes


def open_engine(recipe: Recipe, most_tokens: int, budget: int = 16_384) -> ServingEngine:
    """Load the recipe's teacher as a run does, patched with our kernels and quantised as configured.

    Where several processes call this, the teacher is sharded over them.

    Args:
        most_tokens: maximum number of tokens in a request.
        budget: tokens of a forward pass of several requests.

    Raises:
        ValueError: a teacher that `distill run` would refuse, or of a kind that cannot be served.
    """
    require_command(recipe, "serve")
    # a context, a store and the student's tokenizer are handled by the clients
    student = recipe.student.model_copy(update={"vocabulary": "keep"})
    recipe = recipe.model_copy(update={"teacher": recipe.teacher.by_itself, "student": student})
    if recipe.train.deterministic:  # before the first GEMM, as in a run, since it changes cuBLAS's algorithms
        transformers.enable_full_determinism(recipe.train.seed)
    source = source_of(recipe)
    sharded = world_size() > 1
    context = load_context(recipe)
    context = context._replace(placement=Placement("ddp", True, True)) if sharded else context
    vocabulary = source.vocabulary()
    device = context.device
    for problem in source.problems(cuda=device.type == "cuda", sharded=sharded, family=family_in(device)):
        raise ValueError(problem)
    with console.spinner("loading the teacher") if is_main_process() else contextlib.nullcontext():
        teacher = source.open(context, vocabulary)
    assert isinstance(teacher, LoadedTeacher)
    if context.device.type == "cuda" and not sharded:  # a sharded one was patched while it was sharded
        attention = AttentionChoices(recipe).of(teacher.model, "teacher")
        report = patch(teacher.model, "teacher", attention=attention)
        console.print_lines(f"{'kernels':<12}teacher: {report}")
    teacher.quantise()
    template: Any = text_hashes(recipe, vocabulary.tokenizer)["template"]
    given = teacher, recipe.teacher, vocabulary.tokenizer, template, most_tokens
    if not sharded:
        return ServingEngine(*given)
    return ShardedEngine(*given, budget=budget)


def read_token(path: Path | None) -> str | None:
    """Return the token in a file, else in the environment; None where there is neither."""
    token = token_of(path, "--token-file")
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token):
        raise ValueError("the token: expected at least 16 printable ASCII characters without spaces")
    return token


def is_loopback(host: str) -> bool:
    """Return whether a server bound to `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe(host: str, token: str | None) -> None:
    """Require a token where other machines can reach the server."""
    if token is None and not is_loopback(host):
        raise ValueError(
            f"--host {host}: others can reach it, so it needs a token: --token-file FILE or {TOKEN_VARIABLE} "
            "(python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one)"
        )


def require_certificate(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the server's TLS, None for plain HTTP."""
    if (certificate is None) != (key is None):
        raise ValueError("--ssl-certfile: expected together with --ssl-keyfile")
    if certificate is None or key is None:
        return None
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ValueError(f"{option}: {path} cannot be read: {error.strerror}") from None

    def password() -> str:
        raise ValueError(f"--ssl-keyfile: expected a key without a passphrase, got {key}")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        why = error.reason or str(error)
        raise ValueError(
            f"--ssl-certfile: expected a PEM certificate and its key, got {certificate}, {key}: {why}"
        ) from None
    return context


@contextlib.contextmanager
def running(
    app: Starlette, port: int = 0, timeouts: Timeouts = DEFAULT_TIMEOUTS, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve the application on a loopback port, in a thread, inside the context; yields its URL."""
    (listener,) = listeners = listen("127.0.0.1", port)
    with listener:
        server = Server(app, listeners, tls, timeouts)
        thread = threading.Thread(target=server.run, daemon=True, name="server")
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=40)


def describe(engine: ServingEngine) -> list[str]:
    identity = engine.identity
    number = getattr(torch, identity.dtype).itemsize
    return [
        f"{'teacher':<12}{identity.model}, {engine.teacher.size_text()}, {identity.hash}",
        f"{'a token':<12}hidden states {number * identity.hidden:,} bytes; fp8 {identity.hidden + 4:,} (KL "
        f"{identity.notes['fp8_kl']:.1e} nats a token); top 64 {64 * 4 + 6:,}",
    ]
