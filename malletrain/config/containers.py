"""The configuration of containers: the default image of jobs, and how images run on the site's
nodes.

Decides which keys exist and what a valid value is; :mod:`malletrain.agent.containers` builds the
command lines.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Section, Words, key


class ContainersSection(Section):
    """Containers of jobs. The agent stays outside; a job's processes run inside."""

    image: str = key(
        "",
        description="Image of jobs that name no environment themselves (--container, --conda, "
        "--venv or --no-container): a file or directory that the nodes share, or a "
        "name that the runtime knows; empty: none.",
    )
    runtime: Literal[
        "auto", "apptainer", "singularity", "podman-hpc", "charliecloud", "enroot", "podman"
    ] = key(
        "auto",
        description="Container runtime; auto: the first of these that a node has, in this order.",
    )
    binds: Words = key(
        [],
        description="Paths of the node that every container sees, as SRC or SRC:DST, such as "
        "\"/scratch\"; the job's working directory, its script's and the home "
        "directory are always visible.",
    )
    options: Words = key(
        [],
        description="Additional arguments of the runtime, put before the image, such as "
        '["--cgroups=disabled"] for podman. They depend on the runtime, so set that '
        "too.",
    )

    @field_validator("binds")
    @classmethod
    def _binds(cls, value: Words) -> Words:
        for text in value:
            places = text.split(":")
            if len(places) > 2 or not all(os.path.isabs(place) for place in places):
                raise PydanticCustomError(
                    "bind",
                    '"{text}" is not SRC or SRC:DST with absolute paths, such as "/scratch"',
                    {"text": text},
                )
        return value
