"""Who is answered next, and what else the loop does meanwhile."""

from __future__ import annotations

import asyncio

from malletrain.daemon.server.rates import ROUND_S, Answering


def answered(asks, usual_s=ROUND_S):
    """In which order, and in which round of the loop, requests of these users are answered."""
    rounds, order = [0], []

    async def main():
        answering, loop = Answering(), asyncio.get_running_loop()

        def count():
            rounds[0] += 1
            if len(order) < len(asks):
                loop.call_soon(count)

        async def ask(user):
            await answering.turn(user, usual_s)
            order.append((user, rounds[0]))

        loop.call_soon(count)
        await asyncio.gather(*map(ask, asks))

    asyncio.run(main())
    return order


def test_one_that_asks_alone_waits_for_nothing():
    async def main():
        turn = Answering().turn("ann", 10.0)
        try:
            turn.send(None)
        except StopIteration:
            return True
        return False

    assert asyncio.run(main())


def test_users_take_turns():
    order = [user for user, _ in answered(["ann"] * 100 + ["bob"] * 2 + ["olga"])]
    assert sorted(order[1:4]) == ["ann", "bob", "olga"], "each has one before anybody has another"
    assert order.index("bob") < 4
    assert order.count("ann") == 100


def test_what_takes_long_is_not_answered_in_one_round():
    rounds = [number for _, number in answered(["ann"] * 20)]
    assert len(set(rounds)) == 20, "one a round"
    rounds = [number for _, number in answered(["ann"] * 20, ROUND_S / 5)]
    assert {rounds.count(number) for number in rounds} == {5}
    assert len(set(answered(["ann"] * 1000, 0.0))) == 100, "what costs nothing counts for a little"


def test_who_has_gone_takes_nobodys_turn():
    async def main():
        answering = Answering()
        await answering.turn("ann", ROUND_S)
        waiting = [
            asyncio.ensure_future(answering.turn(user, ROUND_S)) for user in ("ann", "bob", "carl")
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, gone, last = asyncio.run(main())
    assert (first, last) == (None, None)
    assert isinstance(gone, asyncio.CancelledError)
