"""Command and environment of a launcher; and what is understood of torchrun's own words."""

import pytest

from malletrain.agent.launch import JobPlace, job_environment, launch_command
from malletrain.agent.link import pause
from malletrain.agent.worker_failures import stock_failures
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


def test_what_describes_the_lease_does_not_reach_the_job(tmp_path):
    outside = {
        "PATH": "/bin",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_ID": "7",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "1",
        "MALLETRAIN_LEASE_KEY": "k",
        "MALLETRAIN_CLUSTER": "/c",
        "RANK": "5",
        "MASTER_ADDR": "x",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    launch = order(tmp_path, env={"MALLETRAIN_JOB": "forged", "RANKING": "kept", "PATH": "/mine"})
    inside = job_environment(place(tmp_path, outside), launch, flags="/f")
    assert inside == {
        "PATH": "/mine",
        "SLURM_JOB_ID": "7",
        "MALLETRAIN_CLUSTER": "/c",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RANKING": "kept",
        "PYTHONUNBUFFERED": "1",
        "MALLETRAIN_JOB": "j1",
        "MALLETRAIN_SOCKET": "/w",
        "MALLETRAIN_FLAGS": "/f",
        "MALLETRAIN_AGENT": "ipc:///run/launcher.sock",
        "MALLETRAIN_HOST": "node-1",
        "MALLETRAIN_MAX_WORLD_SIZE": "8",
        "MALLETRAIN_NODE": "n0",
        "MALLETRAIN_LEASE": "l0",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }


def test_the_builtin_launcher_gets_its_order_in_a_file(tmp_path):
    launch = order(tmp_path)
    command = launch_command(launch.spec, launch, tmp_path / "order.json", tmp_path / "scratch")
    assert (command[0], command[-2:]) == (
        "/env/bin/python",
        ["--launch", str(tmp_path / "order.json")],
    )


def test_torchrun_gets_the_jobs_sizes_and_our_rendezvous(tmp_path):
    launch = order(tmp_path, launcher="torchrun", min_nodes=2, args=("--epochs", "3"))
    command = launch_command(launch.spec, launch, tmp_path / "order.json", tmp_path / "scratch")
    wanted = [
        "--rdzv-backend=malletrain",
        "--rdzv-endpoint=ipc:///run/launcher.sock",
        "--rdzv-id=j1",
        "--nnodes=2:4",
        "--nproc-per-node=2",
    ]
    assert set(wanted) <= set(command)
    assert command[-5:] == ["/env/bin/python", "-u", "train.py", "--epochs", "3"]


@pytest.mark.parametrize("launcher", ["builtin", "torchrun"])
def test_setup_is_the_only_text_a_shell_reads(tmp_path, launcher):
    launch = order(tmp_path, launcher=launcher, setup="module load python", args=("$(boo)",))
    command = launch_command(launch.spec, launch, tmp_path / "order.json", tmp_path / "scratch")
    assert command[:2] == ["bash", "-c"]
    assert "module load python" in command[2]
    assert "$(boo)" not in command[2]


def test_torchruns_words_on_a_failure():
    text = (
        "E0101 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
        "E0101 api.py:1002] failed (exitcode: -11) local_rank: 1 (pid: 9) of binary: python\n"
    )
    assert stock_failures(text, 3, 2, 5.0) == (messages.Failure(7, -11, 5.0),)
    assert stock_failures("nothing of the kind", 3, 2, 5.0) == ()


def test_pauses_between_attempts_grow_and_are_spread():
    assert [pause(n, 0.0) for n in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert pause(1, 0.99) > pause(1, 0.0)
    assert pause(1000, 0.99) <= 2.0
