"""`python -m outbox` is the command `outbox`."""

from outbox.cli.command import main

main()
