"""The forms that viewers send: jobs to submit, and limits of their scale. Decides only their
format; a job is validated by the same code as in ``malletrain submit``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.messages import JobSpec
from malletrain.submission.resuming import with_snapshots_bound
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build

Text = Annotated[str, Field(max_length=4096)]
Texts = Annotated[list[Text], Field(max_length=1000)]
Nodes = Annotated[int, Field(ge=1, le=MAX_NODES)]


class SubmitForm(BaseModel):
    """A job, with the options of ``malletrain submit``."""

    model_config = ConfigDict(extra="forbid")

    script: Annotated[str, Field(min_length=1, max_length=4096)]
    """Path of the script on the host of the page."""
    args: Texts = []
    nodes: Annotated[str, Field(max_length=40)] | None = None
    """``N`` or ``MIN:MAX``."""
    name: Annotated[str, Field(max_length=64)] | None = None
    workdir: Text | None = None
    env: Texts = []
    """``NAME=VALUE`` each."""
    live: bool = False
    profile: bool = True
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    nproc_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    venv: Text | None = None
    conda: Text | None = None
    container: Text | None = None
    modules: Texts = []

    def spec(self) -> JobSpec:
        """Return the validated job specification. Raises SpecError."""
        software = SoftwareOptions(
            module=tuple(self.modules),
            venv=self.venv,
            conda=self.conda,
            container=self.container,
        )
        spec = build(
            self.script,
            self.args,
            nodes=self.nodes,
            name=self.name,
            workdir=self.workdir,
            env=self.env,
            live=self.live,
            profile=self.profile,
            weight=self.weight,
            nproc_per_node=self.nproc_per_node,
            software=software,
        )
        return with_snapshots_bound(spec)


class ScaleForm(BaseModel):
    """New limits of a job's scale."""

    model_config = ConfigDict(extra="forbid")

    min_nodes: Nodes
    max_nodes: Nodes
