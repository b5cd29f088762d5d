"""Files that come with the product and are no Python of it: the batch scripts of the leases, the
examples, the configurations of sites with the systemd unit.

They lie in this package under the names that they have in the source tree: as links there, as
files in a wheel. Decides where such a file is, not what is in it. Runs everywhere and imports
nothing of ours.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def shipped(name: str) -> Path:
    """The file that ships as ``name``, such as ``"jobscripts/slurm/lease.sh"``.

    Raises:
        FileNotFoundError: nothing of this name ships, or the installation is damaged.
    """
    file_names = names()
    if name not in file_names:
        raise FileNotFoundError(
            f'MalleTrain has no file "{name}"; it comes with {", ".join(file_names)}.'
            if file_names
            else f"The files that MalleTrain comes with are not in {HERE}; install it again."
        )
    return HERE / name


def names() -> list[str]:
    """Names of all files that ship, in order."""
    paths: list[str] = []
    configurations = HERE / "site-configs"
    below = ("grafana", "ood", "ood/template", "prometheus")
    folders = (configurations, *(configurations / name for name in below))
    for folder in (*sorted((HERE / "jobscripts").glob("*")), *folders):
        paths += [
            str(file.relative_to(HERE))
            for file in sorted(folder.glob("*"))
            if file.suffix
            in (".py", ".conf", ".service", ".sh", ".toml", ".json", ".yml", ".yaml", ".erb")
        ]
    return paths
