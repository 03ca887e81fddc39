"""Settings of a node that cannot work: refused where they are read, with the place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_broker.cluster.cluster_settings import load_cluster_settings
from outbox_core.common.errors import ConfigurationError

STORE = "bookkeeper://zk1/outbox"


@pytest.mark.parametrize("zone", ["Zürich", "z" * 65, ""])
def test_a_zone_that_other_nodes_could_not_use_is_refused(zone: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'[cluster]\nzone = "{zone}"\n')

    with pytest.raises(ConfigurationError, match=r"node.toml: .*'zone' .*1 to 64 printable ASCII characters"):
        load_cluster_settings({"store": STORE}, file=file)


def test_a_zone_may_have_as_many_characters_as_the_registry_holds() -> None:
    assert load_cluster_settings({"store": STORE, "zone": "z" * 64}, file=None).zone == "z" * 64
