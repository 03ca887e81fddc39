"""Which keys differ in a part, told by its sums alone; and what is left of a part without them.

The sums of a part are one cell of an invertible table (Goodrich and Mitzenmacher, "Invertible Bloom Lookup Tables",
2011). Beside the sum of what is compared, w, stand those of its products with the key's number k, k w and k k w, modulo
a prime. Where all that differs is of one key, the differences of the three are W, k W and k k W: a division tells k,
and the third sum that there is no other. Arrow tables in, Arrow tables out: it reads no rows, and judges none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spark_reconcile.parts import COMPARED, EXACT, PRIME, TALLIED

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    Numbers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

KEYS: Final = ("key_1", "key_2", "key_3")
_PARTED: Final = ("number", "period", "part")
_SIGNALS: Final = (
    (("stored_n", "stored_low", "stored_high"), ("stored_low", "stored_product", "stored_square")),
    (("asked_n", "asked_low", "asked_high"), ("asked_n", "asked_low", "asked_square")),
    (("odd",), ("odd", "odd_key", "odd_square")),
)
"""What tells that archive and broker, business and broker, or a row by itself ask for a look; and W, k W, k k W."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Unclean parts: those in which up to three keys are known to differ, with their numbers (KEYS), and the others."""

    by_key: pa.Table
    whole: pa.Table

    @property
    def keys(self) -> int:
        """How many keys are known."""
        named = np.sort([self.by_key[name].to_numpy() for name in KEYS], axis=0)
        return int(self.by_key.num_rows + np.count_nonzero(np.diff(named, axis=0)))


def decoded(parts: pa.Table) -> Decoded:
    """What the sums of unclean parts tell, in the columns of parts.clean_parts()."""
    import pyarrow as pa

    columns = {name: parts[name].to_numpy() for name in COMPARED}
    fit = parts["comparable"].to_numpy(zero_copy_only=False)
    some = np.zeros(parts.num_rows, np.int64)
    found = []
    for differing, sums in _SIGNALS:
        wrong = np.any([columns[name] != 0 for name in differing], axis=0)
        key, single = _key_of(*(columns[name] % PRIME for name in sums))
        fit = fit & (single | ~wrong)
        some = np.where(wrong, key, some)
        found.append((wrong, key))
    by_key = parts.filter(pa.array(fit))
    for name, (wrong, key) in zip(KEYS, found, strict=True):
        # Where one source tells nothing, what another told is named again.
        by_key = by_key.append_column(name, pa.array(np.where(wrong, key, some)[fit]))
    return Decoded(by_key=by_key, whole=parts.filter(pa.array(~fit)))


def without(parts: pa.Table, found: pa.Table) -> pa.Table | None:
    """What stands in the parts (TALLIED, by window_ms, topic and note) but for what was `found` there.

    Both in the columns of parts.clean_parts(). None: something else differs in one of the parts.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    summed = [*TALLIED, *EXACT]
    here = found.join(parts.select(list(_PARTED)), list(_PARTED), join_type="left semi")
    minus = {name: here[name] if name in _PARTED else pc.negate(here[name]) for name in (*_PARTED, *summed)}
    # Made of columns, so that neither table says that it has no nulls.
    both = pa.concat_tables([pa.table({name: parts[name] for name in minus}), pa.table(minus)])
    left = both.group_by(list(_PARTED)).aggregate([(name, "sum") for name in summed])
    if any(pc.any(pc.not_equal(left[f"{name}_sum"], 0)).as_py() for name in EXACT):
        return None
    named = ["window_ms", "topic", "note"]
    placed = left.join(parts.select([*_PARTED, *named]), list(_PARTED))
    tallied = placed.group_by(named).aggregate([(f"{name}_sum", "sum") for name in TALLIED])
    return tallied.rename_columns([name.removesuffix("_sum_sum") for name in tallied.column_names])


def _key_of(weight: Numbers, product: Numbers, square: Numbers) -> tuple[Numbers, Flags]:
    """The number of the key that has all the weight, and whether it is a single one; all modulo PRIME."""
    key = product * _inverse(weight) % PRIME
    return key, (weight != 0) & (key * product % PRIME == square)


def _inverse(values: Numbers) -> Numbers:
    """By Fermat's little theorem; of 0, 0."""
    found = np.ones_like(values)
    for bit in f"{PRIME - 2:b}":
        found = found * found % PRIME
        if bit == "1":
            found = found * values % PRIME
    return found
