"""What reconciliation adds to the error tree. Not a verdict: a verdict is given, an error means that none was."""

from __future__ import annotations

from outbox_core.common.errors import ConfigurationError, OutboxError


class NotComparable(OutboxError):
    """A source is missing, damaged or unreachable: any verdict would be a guess, so none is given."""

    retryable = True


class OutputFailed(ConfigurationError):
    """The results cannot be written: the disk is full, or failed. Nothing of the run is shown."""

    retryable = True


class OutputBusy(ConfigurationError):
    """Another run writes to the output folder: nothing is wrong with either, and the folder is free when it ends."""

    retryable = True
