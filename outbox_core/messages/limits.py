"""Limits that all packages share. Each is a default that configuration may lower, not a limit of the format."""

from datetime import timedelta
from typing import Final

TOPIC_CHARS_MAX: Final = 255
GROUP_CHARS_MAX: Final = 255
MESSAGE_ID_CHARS_MAX: Final = 64
KEY_BYTES_MAX: Final = 1024
HEADERS_MAX: Final = 64
HEADER_NAME_CHARS_MAX: Final = 128
HEADERS_BYTES_MAX: Final = 32 * 1024
BODY_BYTES_MAX: Final = 16 * 1024 * 1024
BATCH_MESSAGES_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
DELAY_MAX: Final = timedelta(days=731)
DELAY_MAX_MS: Final = 731 * 24 * 60 * 60 * 1000
CLOCK_DIFFERENCE_MS_MAX: Final = 60 * 60 * 1000
"""How far clocks of hosts may be apart: the publisher's clock bounds a delay, so those that get the message later
accept as much more by their own, rather than park what was published within the bound."""
DELAY_ACCEPTED_MS_MAX: Final = DELAY_MAX_MS + CLOCK_DIFFERENCE_MS_MAX
PULL_MESSAGES_MAX: Final = 1000
PULL_WAIT_MS_MAX: Final = 60_000
INVISIBLE_MS_DEFAULT: Final = 30_000
INVISIBLE_MS_MIN: Final = 1
INVISIBLE_MS_MAX: Final = 12 * 60 * 60 * 1000
ATTEMPTS_MAX_DEFAULT: Final = 16
REASON_CHARS_MAX: Final = 1024
RECURRING_BODY_BYTES_MAX: Final = 64 * 1024
"""The bodies of all recurring messages are in memory, and in each checkpoint."""
RECURRING_CATCH_UP_MAX: Final = 100
RECURRING_RUNS_MAX: Final = 1_000
"""How many of the next occurrences are told at most."""
CRON_CHARS_MAX: Final = 256
TZ_CHARS_MAX: Final = 64
TIME_MS_MAX: Final = 2**53 - 1
"""The largest integer that every JSON parser represents exactly."""
