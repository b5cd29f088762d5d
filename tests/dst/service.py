"""A launcher with the process of a service, as :mod:`malletrain.launch.service` and
:mod:`malletrain.membership` do it.

The process holds something for the others and hands it over when it learns that it leaves. When the
work of a service is done, all its processes end by themselves.
"""

from __future__ import annotations

from typing import Any

from malletrain.protocol.messages import Drain, Drained, Failure, Round
from malletrain.protocol.phases import AssignmentPhase
from tests.dst.launcher import CRASHED, VirtualLauncher
from tests.dst.truth import BATCH, STEP_S


class ServiceNodeLauncher(VirtualLauncher):
    """One process, started once and told of every view."""

    def _begin(self) -> None:
        self.view: Round | None = None
        """The newest view that it received."""
        self.up = False
        """Whether its process has joined and has not ended."""
        self._generation = 0
        self._address = ""
        self._holds = False
        self._leaving = self._farewell = False
        self._after(self._rng.uniform(0.2, 1.5), self._join)

    def _join(self) -> None:
        if self.truth.finished:
            self._succeed()
            return
        self.up = True
        self._address = f"{self.node.name}:{self.number}"
        phase = AssignmentPhase.RUNNING if self._generation else AssignmentPhase.READY
        self._phase(phase, self._generation, (), self._address)
        self._pass_on()
        self._after(STEP_S, self._serve)

    def _serve(self) -> None:
        """A moment of its work."""
        if not self.up:
            return
        self.truth.trained += BATCH
        if self.truth.finished or self.truth.trained >= self.truth.length:
            self.truth.finished = True
            self._after(self._rng.uniform(0.05, 0.4), self._succeed)
        else:
            self._after(STEP_S, self._serve)

    def _succeed(self) -> None:
        if not self._farewell:
            self.up = self._holds = False
            self._phase(AssignmentPhase.SUCCEEDED, self._generation, (), self._address)

    # --- views ---

    def _heard(self, message: Any) -> None:
        if self._farewell:
            return
        if isinstance(message, Drain):  # no daemon is there to make a view
            if self.up:
                self._next(self._rng.uniform(0.05, 0.6), self._hand_over)
            return
        assert isinstance(message, Round), message
        if self.view is None or message.generation > self.view.generation:
            self.view = message
            self._pass_on()

    def _pass_on(self) -> None:
        view = self.view
        if view is None or not self._address or view.generation <= self._generation:
            return
        self._generation = view.generation
        if self.up:
            self._phase(AssignmentPhase.RUNNING, self._generation, (), self._address)
            me = [m for m in view.members if m.node == self.node.name]
            leaving = any(m.gone_in_s is not None for m in me)
            self._holds |= not leaving  # it takes up work once it is seen
            if leaving != self._leaving:
                self._leaving = leaving
                in_s = self._rng.uniform(0.05, 0.6)
                self._next(in_s, self._hand_over if leaving else self._take_up)

    def _take_up(self) -> None:
        """Stay in the round."""
        self._holds = self.up

    def _hand_over(self) -> None:
        if self.up:
            self._holds = False
            self._say(Drained(self.job, self._generation, True))

    # --- its end ---

    def crash(self) -> None:
        if self._code is None and self.up:
            self.truth.crashes += 1
            self.up, self._farewell, self._last_code = False, True, 1
            failures = (Failure(0, 1, self._trainings.loop.wall(), CRASHED),)
            self._phase(AssignmentPhase.FAILED, self._generation, failures, self._address)
            self._phase(AssignmentPhase.EXITED, self._generation, failures)

    def _stop_worker(self) -> None:
        if self.up and self._holds and not self.truth.finished:
            self.truth.cut_short += 1
            self._trainings.say("service", f"{self.job} is cut short on {self.node.name}")
        self.up = False
