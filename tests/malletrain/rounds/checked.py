"""Every transition of a rescale leads to a stage that its row names."""

from __future__ import annotations

from malletrain.rounds.table import RoundMachine


def check_transitions(monkeypatch):
    """Make every transition fail that leads elsewhere."""
    carry_out = RoundMachine.carry_out

    def checked(self, row, occurrence):
        stage = self.stage
        actions = carry_out(self, row, occurrence)
        assert self.stage in (stage, *row.to), (
            f"{occurrence.event} while {stage} ({row.guard or 'always'}) led to {self.stage}"
        )
        return actions

    monkeypatch.setattr(RoundMachine, "carry_out", checked)
