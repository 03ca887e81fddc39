"""Reads the code out of a guide: each Python block that begins with `# name.py` is a file. Not a test."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```python\n# (?P<name>\S+\.py)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```python$", re.MULTILINE)


def write_files(guide: Path, folder: Path) -> list[Path]:
    """Write the guide's files into a folder; a block without a name is a mistake, since nobody would run it."""
    text = guide.read_text()
    found = list(_BLOCK.finditer(text))
    if len(found) != len(_ANY_BLOCK.findall(text)):
        raise ValueError(f"{guide.name} has a Python block that does not begin with `# name.py`")
    paths = []
    for block in found:
        path = folder / block["name"]
        path.write_text(block["code"])
        paths.append(path)
    return paths
