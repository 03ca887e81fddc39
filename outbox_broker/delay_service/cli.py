"""Command `outbox delay serve`: runs the schedule as a separate process, in front of a broker without delays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outbox_core.runtime.logs import LogFormat
from outbox_core.runtime.secret_files import read_secret

app = typer.Typer(no_args_is_help=True, help="Run a delay service in front of any broker.")


@app.callback()
def _delay() -> None:
    """Run a delay service in front of any broker."""


@app.command()
def serve(
    target: Annotated[str, typer.Option(help="The broker that gets what is due: any URL that an adapter knows.")],
    data: Annotated[Path | None, typer.Option(help="The folder of its segments; made where it is missing.")] = None,
    target_token_file: Annotated[Path | None, typer.Option(help="File with the bearer token for the target.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (7788); 0 picks a free one.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="TOML file of bearer tokens (see `outbox broker token`).")] = None,
    insecure_no_auth: Annotated[
        bool | None, typer.Option("--insecure-no-auth", help="Serve everybody on an address that others can reach.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Write the URL here once it can serve.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="json or text (json, on a terminal text).")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [broker].")] = None,
) -> None:
    """Publish messages to a target when they are due.

    They come over the broker's HTTP protocol.

    It listens as `outbox broker serve` does, with the same settings; consumers pull from the target itself.

    Example: outbox delay serve --data ./delay --target http://broker:7788 --port 7799
    """
    from outbox_broker.config.broker_config import load
    from outbox_broker.delay_service.process import run

    flags = {
        "data": data, "host": host, "port": port, "tokens": tokens, "insecure_no_auth": insecure_no_auth,
        "tls_cert": tls_cert, "tls_key": tls_key, "ready_file": ready_file, "log_level": log_level,
        "log_format": log_format,
    }  # fmt: skip
    token = None if target_token_file is None else read_secret(target_token_file, what="token")
    run(load(flags, file=config), target_url=target, target_token=token)
