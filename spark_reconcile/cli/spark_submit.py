"""The script for `spark-submit`: runs the command `outbox reconcile`."""

from __future__ import annotations

import sys

from outbox_core.common.errors import OutboxError

EXIT_USAGE = 2


def main() -> None:
    """Run `outbox reconcile` with this process's arguments."""
    from spark_reconcile.cli.run_command import app

    try:
        app(prog_name="outbox reconcile")
    except OutboxError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
