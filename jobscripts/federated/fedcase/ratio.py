"""The ratio rules: they choose which share of a round's clients are experienced ones. Pure.

The reward of a round is the relative decrease of its mean loss per second. Two rules choose a share
from a list of shares: ε-greedy, the default, and a random forest that predicts the reward of each
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

SHARES = (0.25, 0.5, 0.75, 0.9)
"""The shares that the rules choose from."""


class RatioRule(Protocol):
    """Chooses a share for each round and learns from the reward of the round."""

    def choose(self, random: Random) -> float:
        """Return the part of the next round that is for experienced clients, 0 to 1."""

    def observe(self, share: float, reward: float) -> None:
        """Learn the reward of a round.

        Args:
            share: the share that was chosen for it.
            reward: relative decrease of the loss per second; negative if the loss rose.
        """

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs, as values for JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


def reward_of(loss_before: float | None, loss_after: float, seconds: float) -> float | None:
    """Return the reward of a round: the decrease of the loss relative to the round before, per
    second. None for a first round, which has no round before it.

    Args:
        loss_before: mean loss of the round before.
        loss_after: mean loss of this round.
        seconds: duration of this round, seconds.
    """
    if loss_before is None or loss_before <= 0 or seconds <= 0:
        return None
    return (loss_before - loss_after) / loss_before / seconds


@dataclass
class EpsilonGreedy:
    """Chooses the share with the highest mean reward, and another one with probability ε.

    Rewards shrink while a training converges, so a mean forgets old ones: each reward moves it by
    ``step``. Shares without a reward come first, in their order.
    """

    shares: Sequence[float] = SHARES
    epsilon: float = 0.1
    step: float = 0.3
    means: dict[float, float] = field(default_factory=dict)

    def choose(self, random: Random) -> float:
        """See :class:`RatioRule`."""
        untried = [share for share in self.shares if share not in self.means]
        if untried:
            return untried[0]
        if random.random() < self.epsilon:
            return random.choice(list(self.shares))
        return max(self.shares, key=lambda share: self.means[share])

    def observe(self, share: float, reward: float) -> None:
        """See :class:`RatioRule`."""
        mean = self.means.get(share)
        self.means[share] = reward if mean is None else mean + self.step * (reward - mean)

    def state(self) -> dict[str, Any]:
        """See :class:`RatioRule`."""
        return {"means": [[share, mean] for share, mean in self.means.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """See :class:`RatioRule`."""
        self.means = {float(share): float(mean) for share, mean in state["means"]}


@dataclass
class Forest:
    """Chooses the share for which a random forest, fitted to the rounds so far, predicts the
    highest reward. Needs scikit-learn.
    """

    shares: Sequence[float] = SHARES
    least: int = 8
    """Number of rounds before the forest is used; until then the rule tries the shares in turn."""
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """Share and reward of each round."""

    def choose(self, random: Random) -> float:
        """See :class:`RatioRule`."""
        if len(self.rounds) < max(1, self.least):
            return self.shares[len(self.rounds) % len(self.shares)]
        from sklearn.ensemble import RandomForestRegressor

        # The number of the round is a feature: rewards shrink as a training converges.
        features = [[share, number] for number, (share, _) in enumerate(self.rounds)]
        forest = RandomForestRegressor(n_estimators=50, random_state=random.randrange(2**31))
        forest.fit(features, [reward for _, reward in self.rounds])
        predicted = forest.predict([[share, len(self.rounds)] for share in self.shares])
        return self.shares[max(range(len(self.shares)), key=lambda i: float(predicted[i]))]

    def observe(self, share: float, reward: float) -> None:
        """See :class:`RatioRule`."""
        self.rounds.append((share, reward))

    def state(self) -> dict[str, Any]:
        """See :class:`RatioRule`."""
        return {"rounds": [list(pair) for pair in self.rounds]}

    def restore(self, state: dict[str, Any]) -> None:
        """See :class:`RatioRule`."""
        self.rounds = [(float(share), float(reward)) for share, reward in state["rounds"]]


RULES: dict[str, type[EpsilonGreedy] | type[Forest]] = {
    "epsilon-greedy": EpsilonGreedy,
    "forest": Forest,
}
"""The rules by name."""
