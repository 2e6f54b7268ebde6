"""Command `serve`: run a teacher server."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.arguments import Overrides, load_recipe
from distill.core import console, launch
from distill.core.files import write_text
from distill.core.folders import check_output_file
from distill.core.ranks import is_main_process
from distill.recipe.shipped import shipped_recipes

if TYPE_CHECKING:
    import uvicorn


def serve(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, whose teacher is served, or a model.")
    ],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option("--host", help="Address to bind; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the bearer token; default: $DISTILL_SERVE_TOKEN.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Maximum tokens of a request.")] = 65_536,
    batch_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum tokens of a forward pass.")] = 16_384,
    queue_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum queued tokens.")] = 1 << 20,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Processes that hold shards (parallel.teacher=sharded); default: one per GPU."
        ),
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the address to this file once the server is ready.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
) -> None:
    """Serve a recipe's teacher, or a model, to remote trainers (teacher.type: server) over HTTP.

    \b
    distill serve quickstart
    distill run quickstart teacher.type=server teacher.url=http://127.0.0.1:8765
    distill serve meta-llama/Llama-3.1-70B-Instruct teacher.dtype=fp8 \\
      --host 0.0.0.0 --token-file ~/.distill-token
    """
    try:
        from distill.serving.open import (
            describe,
            open_engine,
            processes_of,
            read_token,
            recipe_of_model,
            require_certificate,
            require_safe,
        )
    except ModuleNotFoundError as error:
        raise ValueError(f"distill serve: {error.name} is missing: pip install 'distill-toolkit[serve]'") from None
    from distill.serving.app import RequestLimits, make_app
    from distill.serving.connections import Server, listen
    from distill.serving.sharded import ShardedEngine, join_launch

    if address_file is not None:
        check_output_file(address_file, "--address-file")
    token = read_token(token_file)
    require_safe(host, token)
    tls = require_certificate(ssl_certfile, ssl_keyfile)
    resolved = _recipe(recipe, overrides or [], recipe_of_model)
    to_start = processes_of(resolved, processes)
    if to_start > 1:
        raise typer.Exit(launch.restart(to_start))
    # before the teacher is loaded, which may take minutes
    listeners = listen(host, port) if is_main_process() else []
    join_launch(resolved)
    engine = open_engine(resolved, max_tokens, batch_tokens)
    if isinstance(engine, ShardedEngine) and not is_main_process():
        engine.follow()
        return
    app = make_app(engine, token, RequestLimits(max_tokens, batch_tokens, queue_tokens))
    console.print_lines("\n".join(describe(engine)))
    bound = listeners[0].getsockname()[1]
    address = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}"
    console.print_lines(f"{'serving':<12}{address}  (teacher.type=server teacher.url={address}; Ctrl-C ends it)")
    server = Server(app, listeners, tls)
    if address_file is not None:
        threading.Thread(target=_write_address, args=(server, address, address_file), daemon=True).start()
    if isinstance(engine, ShardedEngine):
        engine.run(server)
    else:
        server.run()
    if not server.started:
        raise typer.Exit(1)


def _write_address(server: uvicorn.Server, address: str, file: Path) -> None:
    while not server.started:
        time.sleep(0.01)
    write_text(file, address + "\n")


def _recipe(name: str, overrides: list[str], of_model: Any) -> Any:
    known = {recipe.name for recipe in shipped_recipes()}
    if name in known or name.endswith((".yaml", ".yml")):
        return load_recipe(name, overrides)[1]
    return of_model(name, overrides)
