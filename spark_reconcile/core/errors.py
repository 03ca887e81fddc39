"""The errors that reconciliation adds to the error tree. After an error, no verdict was given."""

from __future__ import annotations

from outbox_core.common.errors import ConfigurationError, OutboxError


class NotComparable(OutboxError):
    """A source is missing, damaged or unreachable: verdicts would be guesses, so none is given."""

    retryable = True


class SourceFailed(NotComparable):
    """Spark failed while it read a source, or a cache of the output folder."""


class OutputFailed(ConfigurationError):
    """The results cannot be written: the disk is full, or failed. No result of the run is published."""

    retryable = True


class OutputBusy(ConfigurationError):
    """Another run writes to the output folder; the folder is free when that run ends."""

    retryable = True
