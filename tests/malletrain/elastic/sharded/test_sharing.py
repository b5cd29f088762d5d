"""Who takes over what leavers hold: what can be said without a group."""

from malletrain.elastic.sharded.sharing import who_stays


def test_who_has_no_place_or_only_that_of_an_older_round_is_a_leaver():
    """A round that comes while the group agrees to leave may not have the member that has not heard
    of it; its shards would be lost.
    """
    assert who_stays([(2, 0, 2), (2, 1, 2), None]) == {0: (0, 2), 1: (1, 2)}
    assert who_stays([(3, 0, 2), (2, 1, 3), (3, 1, 2)]) == {0: (0, 2), 2: (1, 2)}
    assert who_stays([None, None]) == {}
