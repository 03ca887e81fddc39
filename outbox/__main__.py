"""`python -m outbox` runs the command `outbox`."""

from outbox.cli.command import main

main()
