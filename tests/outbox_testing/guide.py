"""Reads the code out of a guide: each Python block that begins with `# name.py` is a file. Not a test."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```python\n# (?P<name>\S+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```python$", re.MULTILINE)


_NAMED = "http://127.0.0.1:7788"
_NOBODY = "http://127.0.0.1:1"


def write_files(guide: Path, folder: Path, *, broker_url: str = _NOBODY) -> list[Path]:
    """Write the guide's files into a folder; a block without a name is a mistake, since nobody would run it.

    They have `broker_url` for the broker that the guide names: one may run there, and is not the test's.
    """
    text = guide.read_text().replace(_NAMED, broker_url)
    found = list(_BLOCK.finditer(text))
    if len(found) != len(_ANY_BLOCK.findall(text)):
        raise ValueError(f"{guide.name} has a Python block that does not begin with `# name.py`")
    paths = []
    for block in found:
        path = folder / block["name"]
        path.write_text(block["code"])
        paths.append(path)
    return paths
