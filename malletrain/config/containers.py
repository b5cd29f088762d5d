"""The configuration of containers: the image that jobs run in unless they say otherwise, and how it
is run on the site's nodes.

Decides which keys exist and what a valid value is; :mod:`malletrain.agent.containers` has the
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
        description="Image of jobs that name no environment of their own (--container, --conda, "
        "--venv or --no-container): a file or directory that the nodes share, or a name that the "
        "runtime knows; empty: none.",
    )
    runtime: Literal[
        "auto", "apptainer", "singularity", "podman-hpc", "charliecloud", "enroot", "podman"
    ] = key(
        "auto",
        description="What runs images; auto: the first of these that a node has, in this order.",
    )
    binds: Words = key(
        [],
        description="What every container sees of the node, as SRC or SRC:DST, such as "
        "\"/scratch\"; the job's working directory, its script's and the home directory are seen "
        "anyway.",
    )
    options: Words = key(
        [],
        description="More words for the runtime, put before the image, such as "
        '["--cgroups=disabled"] for podman; they go with runtime, so set that too.',
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
