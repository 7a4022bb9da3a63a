"""Who joins whom: the environment and the metadata server of each case, and jax's own word for it."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import jax
import pytest
import runs
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster
from metadata_server import serving, worker

from grpojax.extensions.pods import joining
from grpojax.host import internals
from grpojax.host.errors import UserError

OLD = "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3,unknown:unknown:10.0.0.4"
NEW = "10.0.0.2,10.0.0.3,10.0.0.4"
V4_24 = {"TPU_ACCELERATOR_TYPE": "v4-24"}
TASK = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
RANK = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc,t-2.svc", "TPU_WORKER_ID": "2", "TPU_SKIP_MDS_QUERY": "true"}
MEGA = {"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.9:8080", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}


def nobody(key):
    raise AssertionError(f"the metadata server was asked for {key}")


def from_metadata(environment, attributes):
    return joining.find(environment, tpu=True, ask=attributes.get)


# ------------------------------------------------------------------------------------- who is there


def test_a_laptop_is_alone_and_asks_nobody():
    assert joining.find({"HOME": "/home/me"}, tpu=False, ask=nobody) is None
    assert not joining.on_tpu()


@pytest.mark.parametrize("endpoints", [OLD, NEW])
def test_hosts_of_a_plain_slice(endpoints):
    got = from_metadata(V4_24, worker(1, endpoints, "1,1,3"))
    assert (got.count, got.index, got.address, got.method) == (3, 1, "10.0.0.2:8482", "deactivate")
    assert got.source == "the metadata server"


def test_hosts_of_several_plain_slices():
    got = from_metadata({}, worker(2, NEW, "1,1,3", **MEGA))
    assert (got.count, got.index, got.address) == (6, 5, "10.0.0.9:8482")
    one_each = from_metadata({}, worker(0, "10.0.0.3", "1,1,1", **MEGA))
    assert (one_each.count, one_each.index) == (2, 1)


def test_hosts_of_kubernetes_are_in_the_environment():
    got = joining.find(GKE, tpu=True, ask=nobody)
    assert (got.count, got.index, got.address) == (3, 2, "t-0.svc:8482")
    got = joining.find(GKE | MEGA | {"JAX_COORDINATOR_PORT": "99"}, tpu=True, ask=nobody)
    assert (got.count, got.index, got.address) == (6, 5, "10.0.0.9:99")


def test_one_host_is_alone():
    assert from_metadata({}, worker(0, "10.0.0.2")) is None
    assert from_metadata({}, {}) is None  # a notebook: no such attribute, or no server
    notebook = {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_HOST_BOUNDS": "1,1,1"}
    assert joining.find(notebook, tpu=True, ask=nobody) is None
    assert joining.find({"TPU_SKIP_MDS_QUERY": "1"}, tpu=True, ask=nobody) is None


def test_one_host_taken_out_of_its_slice():
    apart = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}
    assert joining.find(GKE | apart, tpu=True, ask=nobody) is None


@pytest.mark.parametrize(
    ("environment", "attributes", "says"),
    [
        ({"TPU_PROCESS_BOUNDS": "2,2,1"}, {}, "TPU_PROCESS_BOUNDS=2,2,1 says that there are other processes"),
        ({"TPU_HOST_BOUNDS": "1,1,2", "TPU_WORKER_HOSTNAMES": "a"}, {}, "TPU_HOST_BOUNDS=1,1,2"),
        ({"MEGASCALE_NUM_SLICES": "2"}, {}, "MEGASCALE_NUM_SLICES=2"),
        ({}, worker(0, "10.0.0.2", "1,1,2"), "HOST_BOUNDS=1,1,2.*\n.*TPU_WORKER_HOSTNAMES"),
        ({}, worker(3, NEW, "1,1,3"), "process 3 of 3"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, "TPU_WORKER_ID=None must be a number"),
        (GKE | {"MEGASCALE_NUM_SLICES": "2"}, {}, "MEGASCALE_SLICE_ID=None must be a number"),
    ],
)
def test_who_should_have_company_and_is_alone_stops(environment, attributes, says):
    with pytest.raises(UserError, match=says):
        from_metadata(environment, attributes)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_NUM_PROCESSES=4.*\nset JAX_COORDINATOR_ADDRESS"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4"},
            "JAX_PROCESS_ID must be set too",
        ),
        ({k: v for k, v in TASK.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_NTASKS=3.*\nSLURM_STEP_NODELIST.*srun"),
        ({k: v for k, v in RANK.items() if "uri" not in k}, "OMPI_COMM_WORLD_SIZE=5.*\n.*JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_launched_halfway(environment, says):
    with pytest.raises(UserError, match=says):
        joining.find(environment, tpu=False, ask=nobody)


def test_explicit_variables_come_first():
    given = {"JAX_COORDINATOR_ADDRESS": "here:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    for tpu in (False, True):
        got = joining.find(given | GKE | TASK, tpu=tpu, ask=nobody)
        assert (got.count, got.index, got.address) == (2, 1, "here:1")
    assert joining.find(given | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, tpu=False) is not None


def test_tasks_of_a_launcher():
    got = joining.find(TASK, tpu=False, ask=nobody)
    assert (got.count, got.index, got.address, got.method) == (3, 2, None, "slurm")
    got = joining.find(RANK, tpu=False, ask=nobody)
    assert (got.count, got.index, got.address, got.method) == (5, 3, None, "ompi")
    assert joining.find(TASK | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, tpu=False, ask=nobody) is None


@pytest.mark.parametrize(
    ("environment", "attributes"),
    [
        ({}, worker(1, OLD, "1,1,3")),
        ({}, worker(2, NEW, "1,1,3", **MEGA)),
        (GKE | MEGA, {}),
        (TASK, None),
        (RANK, None),
    ],
)
def test_jax_would_join_the_same(monkeypatch, environment, attributes):
    """Its own detection, with the same machine before it."""
    for name in [n for n in os.environ if n.startswith(("TPU_", "MEGASCALE_", "SLURM_", "OMPI_", "JAX_C", "JAX_P"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as held:
        tpu = attributes is not None
        if tpu:
            monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
            monkeypatch.setattr(socket, "gethostbyname", lambda name: name)
            monkeypatch.setenv("GCE_METADATA_IP", held.enter_context(serving(attributes))[0])
        got = joining.find(os.environ, tpu=tpu)
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0], None, 1)
        assert found[1:3] == (got.count, got.index)
        assert got.address in (None, found[0])


# ---------------------------------------------------------------------------------- the metadata server


def test_the_server_is_asked_directly(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(worker(1, OLD, "1,1,3")) as (address, asked):
        monkeypatch.setenv("GCE_METADATA_IP", address)
        got = joining.find({}, tpu=True)
        assert (got.count, got.index) == (3, 1)
        assert asked == ["agent-worker-number", "worker-network-endpoints", "tpu-env"]
        assert joining.ask("nothing") is None and asked[3:] == ["nothing"]


@pytest.mark.slow
def test_a_server_that_stumbles_is_asked_again(monkeypatch):
    with serving({"a": "1"}, first=[503, 429]) as (address, asked):
        monkeypatch.setenv("GCE_METADATA_IP", address)
        assert joining.ask("a") == "1" and asked == ["a"] * 3
    with serving({"a": "1"}, first=[503] * 3) as (address, asked):
        monkeypatch.setenv("GCE_METADATA_IP", address)
        with pytest.raises(UserError, match="answers 503 for a"):
            joining.ask("a")


@pytest.mark.slow
def test_no_server_costs_no_time(monkeypatch):
    with socket.socket() as s:  # bound, and nobody listens
        s.bind(("127.0.0.1", 0))
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{s.getsockname()[1]}")
        start = time.monotonic()
        assert joining.find({}, tpu=True) is None and time.monotonic() - start < 2
        monkeypatch.setattr(joining, "_ASK_S", 0.1)
        s.listen()  # and never answers
        assert joining.find({}, tpu=True) is None and time.monotonic() - start < 4


# ------------------------------------------------------------------------------------------- the chips


def test_which_machine_is_a_tpu_vm(monkeypatch):
    monkeypatch.setattr(internals, "has_tpu_runtime", lambda: True)
    assert not joining.on_tpu()  # the tests say JAX_PLATFORMS=cpu
    before = jax.config.jax_platforms
    try:
        for platforms, wanted in (("tpu,cpu", True), (None, True), ("cuda", False)):
            jax.config.update("jax_platforms", platforms)
            assert joining.on_tpu() is wanted
        monkeypatch.setattr(internals, "has_tpu_runtime", lambda: False)
        jax.config.update("jax_platforms", None)
        assert not joining.on_tpu()
        monkeypatch.setattr(internals, "tpu_chips", lambda: 4)
        with pytest.raises(UserError, match="TPU chips and no libtpu"):
            joining.on_tpu()
    finally:
        jax.config.update("jax_platforms", before)


# --------------------------------------------------------------------------------------------- joining

START = """
import os, jax
os.environ.pop("TPU_SKIP_MDS_QUERY", None)  # jax sets it where there are no chips
from grpojax.extensions.pods import joining
from grpojax.host import coordination, processes
from grpojax.host.errors import UserError
if "GCE_METADATA_IP" in os.environ:
    joining.on_tpu = lambda: True
joining.JOIN_S = float(os.environ.get("JOIN_S", 100))
try:
    processes.start()
    print(jax.process_index(), jax.process_count(), coordination.exchange("hello", str(jax.process_index())))
except UserError as e:
    print(e)
"""


def start(*environments):
    clean = {k: v for k, v in runs.environment().items() if k != "TPU_SKIP_MDS_QUERY"}
    group = [
        subprocess.Popen([sys.executable, "-c", START], env=clean | env, stdout=subprocess.PIPE, text=True)
        for env in environments
    ]
    return [process.communicate(timeout=100)[0].strip() for process in group]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
def test_hosts_of_a_plain_slice_join():
    hosts, port = "x:y:127.0.0.1,x:y:127.0.0.1", free_port()
    with serving(worker(0, hosts, "1,1,2")) as (a, _), serving(worker(1, hosts, "1,1,2")) as (b, _):
        said = start(*({"GCE_METADATA_IP": server, "JAX_COORDINATOR_PORT": port} for server in (a, b)))
    assert said == ["0 2 ['0', '1']", "1 2 ['0', '1']"]


@pytest.mark.slow
def test_who_waits_in_vain_says_so():
    (said,) = start(runs.together(2)[1] | {"JOIN_S": "0.5"})
    assert said.startswith("process 1 of 2 (by JAX_NUM_PROCESSES) waited 0.5 s for the others at localhost:")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TASK, RANK])
def test_tasks_of_a_launcher_join(launcher):
    where = {"SLURM_STEP_NODELIST": "127.0.0.1", "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1"}
    port = free_port()
    tasks = []
    for i in "01":
        counts = {k: "2" for k in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")} | {"JAX_COORDINATOR_PORT": port}
        ranks = {k: i for k in ("SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")}
        changed = {k: v for k, v in (where | counts | ranks).items() if k in launcher}
        tasks.append(launcher | changed | {"JAX_COORDINATOR_PORT": port})
    assert start(*tasks) == ["0 2 ['0', '1']", "1 2 ['0', '1']"]
