"""Adds the site's software to a job's environment at submission. Pure.

Decides whether the job uses the site's image, and how images are run. The result is stored in the
job, so that a change of the configuration does not affect it.
"""

from __future__ import annotations

import msgspec

from malletrain.config.containers import ContainersSection
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment


def with_site_software(spec: JobSpec, site: ContainersSection) -> JobSpec:
    """Return the job with the site's image, unless it names an environment. If it has an image, the
    site's binds and options of the runtime are added.
    """
    software = spec.software or SoftwareEnvironment()
    image = software.container
    if image is None:
        image = "" if software.conda or software.venv else site.image
    if not image:
        return spec
    runtime = software.runtime
    if runtime == "auto":
        runtime = site.runtime
    software = msgspec.structs.replace(
        software,
        container=image,
        runtime=runtime,
        binds=(*software.binds, *site.binds),
        options=tuple(site.options) if runtime == site.runtime else (),
    )
    python = spec.python if software.venv else "python"
    return msgspec.structs.replace(spec, software=software, python=python)
