"""Whether the site's image is a job's, and how it is run; and that another environment is another
kind of job.
"""

import pytest

from malletrain.config.model import ConfigError, parse_config
from malletrain.daemon.jobs.admission import problem_of, with_site_software
from malletrain.daemon.jobs.repository import decode_spec
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment

SITE = """
[scheduler]
kind = "local"
[containers]
image = "/images/site.sif"
runtime = "apptainer"
binds = ["/scratch", "/archive:/data"]
options = ["--no-mount=cwd"]
"""


def job(**software):
    environment = SoftwareEnvironment(**software) if software else None
    places = ("/w/t.py", "/w", "/env/bin/python")
    return JobSpec("x", "ada", *places, max_nodes=2, goal="throughput", software=environment)


def site_job(config=SITE, **software):
    return with_site_software(job(**software), parse_config(config).containers)


def test_the_sites_image_is_that_of_jobs_that_name_no_environment():
    assert site_job().software == SoftwareEnvironment(
        container="/images/site.sif",
        runtime="apptainer",
        binds=("/scratch", "/archive:/data"),
        options=("--no-mount=cwd",),
    )
    assert site_job().python == "python"
    assert site_job(modules=("gcc",)).software.container == "/images/site.sif"


@pytest.mark.parametrize("own", [{"conda": "a"}, {"venv": "/v"}, {"container": ""}])
def test_jobs_that_name_another_environment_stay_as_they_are(own):
    assert site_job(**own) == job(**own)


def test_an_image_of_the_jobs_own_is_run_as_the_site_runs_images():
    software = site_job(container="mine", binds=("/mine",)).software
    assert (software.container, software.runtime) == ("mine", "apptainer")
    assert software.binds == ("/mine", "/scratch", "/archive:/data")
    other = site_job(container="mine", runtime="podman").software
    assert (other.runtime, other.options) == ("podman", ())


def test_a_site_without_an_image_changes_nothing():
    assert site_job('[scheduler]\nkind = "local"\n') == job()


@pytest.mark.parametrize("bind", ["scratch", "/a:/b:/c", "/a:b", ""])
def test_binds_are_absolute(bind):
    with pytest.raises(ConfigError, match="SRC or SRC:DST with absolute paths"):
        parse_config(f'[scheduler]\nkind = "local"\n[containers]\nbinds = ["{bind}"]\n')


@pytest.mark.parametrize(
    ("software", "words"),
    [
        ({"modules": ("a\nb",)}, "an unprintable character"),
        ({"modules": ("",)}, "is empty"),
        ({"container": "--privileged"}, "begins with '-'"),
        ({"conda": "a", "container": "b"}, "neither with a virtual one"),
        ({"venv": "v"}, "must be absolute"),
        ({"container": "x", "binds": ("../x",)}, "must be absolute"),
    ],
)
def test_what_a_client_may_not_send(software, words):
    assert words in problem_of(job(**software), files=False)
    assert problem_of(job(modules=("a b",), container="x"), files=False) == ""


def test_a_job_stored_before_there_were_environments_is_read():
    text = '{"name":"x","owner":"ada","script":"/t.py","workdir":"/","python":"/p","max_nodes":2}'
    assert decode_spec(text).software is None
