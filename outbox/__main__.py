"""`python -m outbox` runs the command `outbox`."""

from outbox_core.runtime.command import main

main()
