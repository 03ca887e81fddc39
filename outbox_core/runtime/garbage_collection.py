"""freeze_what_stays(): takes what a service has loaded out of later garbage collections."""

from __future__ import annotations

import gc


def freeze_what_stays() -> None:
    """Freeze the objects that exist by now, mostly code, which stay to the end: garbage collections over them would
    block every thread for a tenth of a second, now and then.
    """
    gc.collect()
    gc.freeze()
