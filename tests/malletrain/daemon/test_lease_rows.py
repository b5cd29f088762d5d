"""The rows of leases, in the store and at hand."""

from malletrain.daemon.engine.state import LeaseRows
from malletrain.protocol.event_kinds import LeaseStatus
from malletrain.store.records import LeaseRow
from malletrain.store.store import Store


def test_what_the_store_knows_already_is_not_written_again():
    with Store.open("sqlite://") as store:
        store.add_leases(
            [
                LeaseRow(name, name.upper(), LeaseStatus.RUNNING, public_key=name, started=5.0)
                for name in ("l1", "l2", "l3")
            ]
        )
        rows, written, change = LeaseRows(store), [], store.change_leases

        def counted(changes):
            written.extend(row.id for row, _ in changes)
            return change(changes)

        store.change_leases = counted
        values = {"state": LeaseStatus.RUNNING, "started": 5.0}
        rows.update_all({"l1": values, "l2": {**values, "started": 6.0}})
        assert rows.update("l3", **values).started == 5.0
        assert written == ["l2"]
        assert {row.id: row.started for row in store.active_leases()} == {
            "l1": 5.0,
            "l2": 6.0,
            "l3": 5.0,
        }
        assert rows.active["l2"].started == 6.0
