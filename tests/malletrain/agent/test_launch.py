"""Command and environment of a launcher."""

import os
import sys
from dataclasses import replace

import pytest

from malletrain.agent.launch import (
    JobPlace,
    LauncherEntry,
    base_environment,
    job_environment,
    launch_arguments,
)
from malletrain.agent.link import pause
from malletrain.agent.software import python_command
from malletrain.elastic.link import Place
from malletrain.launch import script, worker_variables
from malletrain.launch.torchrun import stock_arguments
from malletrain.protocol import messages
from malletrain.protocol.launcher_channel import LaunchOrder


def order(tmp_path, **fields):
    spec = messages.JobSpec(
        "x",
        "me",
        "train.py",
        str(tmp_path),
        "/env/bin/python",
        **{"max_nodes": 4, "nproc_per_node": 2, **fields},
    )
    return LaunchOrder(
        "j1", spec, "ipc:///run/launcher.sock", "node-1", str(tmp_path / "logs"), 5.4, 60.0
    )


def place(tmp_path, outside, **fields):
    values = {"host": "n", "interface": "", "node": "n0", "lease": "l0", **fields}
    return JobPlace(tmp_path, "ipc:///l", "/w", environment=outside, **values)


@pytest.mark.parametrize(("memory_bytes", "named"), [(300 << 20, "300"), (None, None)])
def test_the_launcher_learns_the_memory_of_its_slot(tmp_path, memory_bytes, named):
    outside = {"MALLETRAIN_SLOT_MEMORY_MB": "1"}
    on = place(tmp_path, outside, memory_bytes=memory_bytes)
    inside = job_environment(on, order(tmp_path), flags="/f")
    assert inside.get("MALLETRAIN_SLOT_MEMORY_MB") == named


@pytest.mark.parametrize(
    ("outside", "own", "chosen", "network"),
    [
        ({}, {}, False, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({}, {}, True, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"GLOO_SOCKET_IFNAME": "hsn0"}, {}, False, {"GLOO_SOCKET_IFNAME": "hsn0"}),
        ({"NCCL_SOCKET_IFNAME": "x"}, {"GLOO_SOCKET_IFNAME": "ib1"}, True,
         {"GLOO_SOCKET_IFNAME": "ib1", "NCCL_SOCKET_IFNAME": "x"}),
    ],
    ids=["nobody", "the-site", "the-node", "the-job"],
)  # fmt: skip
def test_who_says_by_which_network_a_job_goes(tmp_path, outside, own, chosen, network):
    launch = order(tmp_path, env=own)
    on = place(tmp_path, outside, interface="eth0", chosen=chosen)
    inside = job_environment(on, launch, flags="/f")
    assert {name: value for name, value in inside.items() if "IFNAME" in name} == network


@pytest.mark.parametrize(
    ("interface", "own", "network"),
    [
        ("eth0", {}, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}),
        ("", {}, {}),
        ("", {"GLOO_SOCKET_IFNAME": "ib1"}, {"GLOO_SOCKET_IFNAME": "ib1"}),
        ("eth0", {"NCCL_SOCKET_IFNAME": "ib1"}, {"NCCL_SOCKET_IFNAME": "ib1"}),
    ],
    ids=["known", "unknown", "the-job", "the-job-too"],
)
def test_the_network_of_an_earlier_round_is_not_kept(monkeypatch, interface, own, network):
    earlier = own or {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    message = worker_variables.round_for_launcher(
        messages.Round("j1", 2, 0, 2, interface=interface, address="10.77.0.1"), own
    )
    assert message.address == "10.77.0.1"
    restarted = dict(earlier)
    worker_variables.set_network(restarted, message.interface)
    monkeypatch.setattr(os, "environ", live := dict(earlier))
    Place(
        2, 0, 2, network=tuple(worker_variables.network_variables(message.interface).items())
    ).set_network_variables()
    assert restarted == live == network


def test_where_no_network_is_wanted_the_sites_own_stays():
    environment = {"GLOO_SOCKET_IFNAME": "hsn0"}
    worker_variables.set_network(
        environment,
        worker_variables.round_for_launcher(messages.Round("j1", 2, 0, 2), {}).interface,
    )
    assert environment == {"GLOO_SOCKET_IFNAME": "hsn0"}


@pytest.mark.parametrize(
    ("outside", "fields", "seed"),
    [
        ({}, {}, "0"),
        ({}, {"mode": "live"}, "0"),
        ({"PYTHONHASHSEED": "3"}, {}, "3"),
        ({}, {"env": {"PYTHONHASHSEED": "random"}}, "random"),
        ({}, {"mode": "service"}, None),
    ],
)
def test_hashes_of_strings_are_the_same_in_all_processes_of_a_training(
    tmp_path, outside, fields, seed
):
    """Also in forks of a fork server, of which trainings have one. Not those of a service."""
    launch = order(tmp_path, **fields)
    inside = job_environment(place(tmp_path, outside), launch, flags="/f")
    assert inside.get("PYTHONHASHSEED") == seed
    if launch.spec.trains:
        assert base_environment(outside, launch.spec.env)["PYTHONHASHSEED"] == seed


def test_what_describes_the_lease_does_not_reach_the_job(tmp_path):
    outside = {
        "PATH": "/bin",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "1",
        "MALLETRAIN_LEASE_KEY": "k",
        "MALLETRAIN_CLUSTER": "/c",
        "RANK": "5",
        "MASTER_ADDR": "x",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    launch = order(tmp_path, env={"MALLETRAIN_JOB": "forged", "RANKING": "kept", "PATH": "/mine"})
    inside = job_environment(place(tmp_path, outside, daemon="d1"), launch, flags="/f")
    assert inside == {
        "PATH": "/mine",
        "MALLETRAIN_CLUSTER": "/c",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RANKING": "kept",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONHASHSEED": "0",
        "MALLETRAIN_JOB": "j1",
        "MALLETRAIN_DAEMON_ID": "d1",
        "MALLETRAIN_SOCKET": "/w",
        "MALLETRAIN_FLAGS": "/f",
        "MALLETRAIN_STEP_TIMES": "1",
        "MALLETRAIN_AGENT": "ipc:///run/launcher.sock",
        "MALLETRAIN_HOST": "node-1",
        "MALLETRAIN_MAX_WORLD_SIZE": "8",
        "MALLETRAIN_NODE": "n0",
        "MALLETRAIN_LEASE": "l0",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }


def command(launch, order_file):
    entry = LauncherEntry("/pkg/launch/entry.py", "The Python /env/bin/python")
    return python_command(launch.spec, launch_arguments(launch.spec, order_file, entry))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "restart"),
        ({"mode": "live"}, "restart"),
        ({"mode": "service"}, "service"),
        ({"launcher": "torchrun"}, "torchrun"),
    ],
)
def test_the_launcher_gets_its_order_in_a_file(tmp_path, fields, kind):
    made = command(order(tmp_path, **fields), tmp_path / "order.json")
    assert made == [
        "/env/bin/python",
        *("/pkg/launch/entry.py", kind, "The Python /env/bin/python", ""),
        *("--launch", str(tmp_path / "order.json")),
    ]


def test_torchrun_gets_the_jobs_sizes_and_our_rendezvous(tmp_path):
    launch = order(tmp_path, launcher="torchrun", min_nodes=2, args=("--epochs", "3"))
    made = stock_arguments(launch, tmp_path / "scratch")
    expected = [
        "--rdzv-backend=malletrain",
        "--rdzv-endpoint=ipc:///run/launcher.sock",
        "--rdzv-id=j1",
        "--nnodes=2:4",
        "--nproc-per-node=2",
    ]
    assert set(expected) <= set(made)
    assert made[-6:] == [sys.executable, "-u", script.__file__, "train.py", "--epochs", "3"]


def test_the_largest_number_of_ranks_stays_when_the_limit_is_lowered(tmp_path):
    lowered = order(tmp_path, max_nodes=1, sized_for=4, nproc_per_node=2)
    made = job_environment(place(tmp_path, {}), lowered, flags="/f")
    assert made["MALLETRAIN_MAX_WORLD_SIZE"] == "8"


def test_setup_is_the_only_text_a_shell_reads(tmp_path):
    launch = order(tmp_path, setup="module load python", args=("$(boo)",))
    made = command(launch, tmp_path / "order.json")
    assert made[:2] == ["bash", "-c"]
    assert "module load python" in made[2]
    assert "$(boo)" not in made[2]


def test_pauses_between_attempts_grow_and_are_spread():
    assert [pause(n, 0.0) for n in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert pause(1, 0.99) > pause(1, 0.0)
    assert pause(1000, 0.99) <= 2.0


def test_a_job_is_told_how_much_may_be_in_memory_and_be_handed_over(tmp_path):
    on = replace(place(tmp_path, {}), memory=tmp_path)
    inside = job_environment(on, order(tmp_path), flags="/f", memory_bytes=7, hand_over_bytes=5)
    assert inside["MALLETRAIN_MEMORY"] == str(tmp_path)
    assert (inside["MALLETRAIN_MEMORY_LIMIT"], inside["MALLETRAIN_HAND_OVER"]) == ("7", "5")
