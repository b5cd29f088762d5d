"""How long a node is on its way from owner to owner."""

from malletrain.core.lease_planner import LeaseWay


def went(way, node, seconds, began=100.0):
    way.begins(node, "bob", began)
    way.joined(node, "bob", began + seconds)
    return way.seconds


def test_the_way_is_the_median_of_what_was_seen():
    way = LeaseWay(5.0, longest_s=150.0)
    assert way.seconds == 5.0
    assert [went(way, node, s) for node, s in (("n1", 150.0), ("n2", 10.0), ("n3", 40.0))] == [
        150.0,
        80.0,
        40.0,
    ]


def test_a_node_that_went_elsewhere_for_hours_is_no_measure_of_the_way():
    way = LeaseWay(5.0, longest_s=150.0)
    assert went(way, "n1", 7200.0) == 5.0
    assert went(way, "n1", 20.0, began=9000.0) == 20.0
