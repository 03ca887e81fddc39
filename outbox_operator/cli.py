"""The commands `outbox operator run` and `manifests`. No logic; kopf and the client are imported when `run` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Keep brokers as Kubernetes resources.", no_args_is_help=True)


@app.command()
def run(
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", help="Look after the resources of this one. May be repeated (all)."),
    ] = None,
    kubeconfig: Annotated[Path | None, typer.Option(help="How to reach the cluster (in a pod: its own).")] = None,
    lease_namespace: Annotated[
        str | None, typer.Option(help="Where the lease is, which one of several operators has (outbox-system).")
    ] = None,
    interval: Annotated[str | None, typer.Option(help="Between two looks at a resource (10s).")] = None,
    busy_interval: Annotated[str | None, typer.Option(help="The same while it is rolled out or drained (1s).")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the status page (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port of /metrics and /readyz; none by default.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json (json, on a terminal text).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (info).")] = None,
    config: Annotated[Path | None, typer.Option(envvar="OUTBOX_CONFIG", help="TOML file with [operator].")] = None,
) -> None:
    """Look after OutboxBrokers until SIGTERM or SIGINT.

    Several may run: one has the lease and acts, the others wait for it.

    Each option is also OUTBOX_OPERATOR__NAME (--namespace: namespaces), and NAME of [operator] in the file; flags win.

    Examples:

      outbox operator run --kubeconfig ~/.kube/config --namespace shop

      outbox operator run --host 0.0.0.0 --port 9100
    """
    from outbox_core.runtime import logs
    from outbox_operator.process import serve
    from outbox_operator.settings import load

    flags = {
        "namespaces": namespace, "kubeconfig": kubeconfig, "lease_namespace": lease_namespace, "interval": interval,
        "busy_interval": busy_interval, "host": host, "port": port, "log_format": log_format, "log_level": log_level,
    }  # fmt: skip
    settings = load(flags, file=config)
    # kopf writes a line each time that a drain goes on, and at length what is logged here in one.
    quiet = {"kopf": "warning", "kopf.objects": "critical", "kopf._core.reactor.running": "error", "aiohttp": "warning"}
    chosen = settings.log_format or logs.fitting_format(sys.stderr)
    logs.configure(format=chosen, level=settings.log_level, quiet=quiet)
    serve(settings)


@app.command()
def manifests(
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", help="Rights to the resources of this one alone. May be repeated (all)."),
    ] = None,
    lease_namespace: Annotated[str, typer.Option(help="Where the operator and its lease are.")] = "outbox-system",
    image: Annotated[str | None, typer.Option(help="Print a Deployment of the operator, too, with this image.")] = None,
) -> None:
    """Print what a cluster needs before it knows OutboxBrokers.

    Their definition, and an account for the operator that may do what it does, and nothing else.

    Examples:

      outbox operator manifests | kubectl apply --server-side -f -

      outbox operator manifests --image registry.example/outbox-mq:0.1.0 --namespace shop > operator.yaml
    """
    from outbox_operator.manifests import manifests_text

    text = manifests_text(lease_namespace=lease_namespace, namespaces=namespace or (), image=image)
    typer.echo(text, nl=False)
