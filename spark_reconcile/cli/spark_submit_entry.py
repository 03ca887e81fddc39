"""The script for `spark-submit`: runs the command `outbox reconcile`."""

from __future__ import annotations

import sys

from outbox_core.common.errors import OutboxError
from outbox_core.runtime.terminal_text import escaped

EXIT_USAGE = 2


def main() -> None:
    """Run `outbox reconcile` with this process's arguments."""
    try:
        from spark_reconcile.cli.run_command import app

        app(prog_name="outbox reconcile")
    except (OutboxError, ModuleNotFoundError) as error:  # a cluster may lack a package; 1 is for findings alone
        sys.stderr.write(escaped(f"error: {error}\n", but="\n"))
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
