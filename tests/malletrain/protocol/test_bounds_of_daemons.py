"""What a daemon says has bounds where it is said back to it."""

from __future__ import annotations

import pytest

from malletrain.protocol import messages, wire


@pytest.mark.parametrize("kind", ["Welcome", "Alive", "WhoAreYou"])
def test_a_boot_id_that_could_not_be_said_back_is_refused(kind):
    """An agent puts the boot id of its Welcome into each heartbeat, where it has a bound."""
    more = {"heartbeat_s": 1.0} if kind == "Welcome" else {}
    good = wire.encode(getattr(messages, kind)(boot="17", **more))
    assert wire.decode(good).boot == "17"
    with pytest.raises(wire.WireError, match="boot"):
        wire.decode(wire.encode(getattr(messages, kind)(boot="1" * 70_000, **more)))
