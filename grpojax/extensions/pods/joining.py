"""Finds the other processes of a run, by its environment and the metadata of its TPU VM, and joins them."""

import dataclasses
import math
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping

import jax

from grpojax.host import internals, metadata
from grpojax.host.errors import PassingError, UserError

HEARTBEAT_S = 30  # a process without a heartbeat for this time counts as gone, and jax aborts all others
JOIN_S = 300.0  # the time to wait for the others
_PORT = "8482"  # of the first host of a TPU slice, as in jax
_ASK_S, _TRIES, _PAUSE_S = 1.0, 3, 0.3  # a metadata server is on the same machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Company:
    """Processes that belong together.

    Attributes:
      count: number of processes.
      index: index of this process.
      address: ``host:port`` of the first; None if jax finds it by ``method``.
      method: jax's name of the method that finds it.
      source: where this comes from, as text for people.
    """

    count: int
    index: int
    address: str | None
    method: str = "deactivate"
    source: str

    def __post_init__(self):
        if not 0 <= self.index < self.count:
            raise UserError(f"{self.source}: process {self.index} of {self.count}; they count from 0")


def on_tpu() -> bool:
    """Whether this is a TPU VM whose chips jax shall use; sends no request. Raises `UserError` if libtpu is missing."""
    platforms = jax.config.jax_platforms  # pyrefly: ignore
    if platforms and "tpu" not in platforms:
        return False
    if internals.has_tpu_runtime():
        return True
    if internals.tpu_chips() and not platforms:
        raise UserError(
            "this machine has TPU chips and no libtpu: pip install -e '.[tpu]', or set JAX_PLATFORMS=cpu to leave them"
        )
    return False


def ask(key: str) -> str | None:
    """An attribute of this machine from the metadata server of Google's cloud; None if there is no such attribute or no
    server.

    Raises:
      PassingError: there is a server, but it does not answer.
    """
    status = None
    for attempt in range(_TRIES):
        time.sleep(_PAUSE_S * attempt)
        try:
            return metadata.get(f"attributes/{key}", _ASK_S)
        except urllib.error.HTTPError as e:
            if e.code == 404:
                return None
            status = e.code
        except OSError:
            pass
    if status is not None:
        message = f"the metadata server {metadata.server()} answers {status} for {key}"
        raise PassingError(f"{message}; start the command again on all hosts")
    return None


def find(environment: Mapping[str, str], *, tpu: bool, ask: Callable[[str], str | None] = ask) -> Company | None:
    """The processes that this one belongs to; None for a single one.

    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` come first. On a TPU VM, the hosts of the
    slice are found by ``TPU_WORKER_HOSTNAMES`` and ``TPU_WORKER_ID`` (GKE), or else by the metadata server. A host that
    has neither is a single process. ``MEGASCALE_*`` from either source joins several slices. Elsewhere, SLURM and Open
    MPI count as jax detects them.

    Args:
      environment: the environment variables of the process.
      tpu: whether TPU chips are used.
      ask: returns an attribute of the machine's metadata, or None.

    Raises:
      UserError: there should be other processes, but nothing says where they are.

    Example:
      >>> find({}, tpu=False) is None
      True
      >>> find({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, tpu=True, ask=lambda key: None).address
      'a:8482'
    """
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        try:
            count, index = int(environment["JAX_NUM_PROCESSES"]), int(environment["JAX_PROCESS_ID"])
        except (KeyError, ValueError):
            raise UserError(
                "JAX_COORDINATOR_ADDRESS is set; JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set too, and be numbers"
            ) from None
        return Company(count=count, index=index, address=address, source="JAX_NUM_PROCESSES")
    if _number(environment, "JAX_NUM_PROCESSES") > 1:
        raise _no_peers(environment, "JAX_NUM_PROCESSES", "set JAX_COORDINATOR_ADDRESS too, host:port of the first")
    found = _slice(environment, ask) if tpu else _launched(environment)
    return None if found is None or found.count == 1 else found


def _slice(environment: Mapping[str, str], ask: Callable[[str], str | None]) -> Company | None:
    """The hosts of a TPU slice, or of several."""
    if _hosts(environment.get("TPU_PROCESS_BOUNDS")) == 1 and _number(environment, "MEGASCALE_NUM_SLICES") == 1:
        return None  # a single host, used separately from its slice
    known, hosts, index, source = dict(environment), list[str](), 0, "TPU_WORKER_HOSTNAMES"
    if names := environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES"):
        hosts = [name.strip() for name in names.split(",")]
        index = _number(environment, "TPU_WORKER_ID", 0 if len(hosts) == 1 else None)
    elif "TPU_SKIP_MDS_QUERY" not in environment and (worker := ask("agent-worker-number")) is not None:
        source = "the metadata server"
        index = _number({"agent-worker-number": worker}, "agent-worker-number")
        # Each entry is an address, or name:id:address.
        hosts = [e.split(":")[-1].strip() for e in (ask("worker-network-endpoints") or "").split(",") if e.strip()]
        known = _pairs(ask("tpu-env") or "") | known
    slices = _number(known, "MEGASCALE_NUM_SLICES")
    bounds = [n for n in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS", "HOST_BOUNDS") if _hosts(known.get(n)) > 1]
    if (len(hosts) <= 1 and bounds) or (not hosts and slices > 1):
        raise _no_peers(
            known,
            bounds[0] if bounds else "MEGASCALE_NUM_SLICES",
            "set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID; TPU_PROCESS_BOUNDS=1,1,1 and TPU_CHIPS_PER_PROCESS_BOUNDS "
            "take this host for itself",
        )
    if not hosts:
        return None
    first = known.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    return Company(
        count=len(hosts) * slices,
        index=index + len(hosts) * _number(known, "MEGASCALE_SLICE_ID", 0 if slices == 1 else None),
        address=f"{first.split(':')[0]}:{environment.get('JAX_COORDINATOR_PORT', _PORT)}",
        source=source,
    )


def _launched(environment: Mapping[str, str]) -> Company | None:
    """The tasks of SLURM or Open MPI."""
    open_mpi = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_MCA_orte_hnp_uri")
    slurm = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
    for method, count, needs in (("ompi", "OMPI_COMM_WORLD_SIZE", open_mpi), ("slurm", "SLURM_NTASKS", slurm)):
        if _number(environment, count) == 1:
            continue
        if missing := [name for name in needs if name not in environment]:
            remedy = "srun starts all tasks" if method == "slurm" else "jax finds them by Open MPI 4"
            raise _no_peers(
                environment, count, f"{missing[0]} is not set ({remedy}); JAX_COORDINATOR_ADDRESS works everywhere"
            )
        size, rank = _number(environment, count), _number(environment, needs[0])
        return Company(count=size, index=rank, address=None, method=method, source=count)
    return None


def join(company: Company) -> None:
    """Joins the others; raises `PassingError` if they do not come within `JOIN_S`."""
    failed: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=company.address,
                num_processes=company.count,
                process_id=company.index,
                cluster_detection_method=company.method,
                initialization_timeout=int(JOIN_S) + 60,
                heartbeat_timeout_seconds=HEARTBEAT_S,
            )
        except BaseException as e:
            failed.append(e)

    # In a thread: if the time runs out inside of jax, it aborts the whole process with a C++ stack.
    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(JOIN_S)
    who = f"process {company.index} of {company.count} (by {company.source})"
    where = f" at {company.address}" if company.address else ""
    if thread.is_alive():
        raise PassingError(
            f"{who} waited {JOIN_S:g} s for the others{where}, and they did not come\n"
            "start the same command on all hosts; their ports must be open to each other"
        )
    if failed:
        raise PassingError(f"{who} cannot join the others{where}: {' '.join(str(failed[0]).split())[:200]}")


def _no_peers(known: Mapping[str, str], name: str, remedy: str) -> UserError:
    return UserError(f"{name}={known[name]} says that there are other processes, and none was found\n{remedy}")


def _number(known: Mapping[str, str], name: str, usual: int | None = 1) -> int:
    """A variable as a number; ``usual`` if it is not set, and an error if that is None."""
    try:
        return int(known[name]) if known.get(name) or usual is None else usual
    except (KeyError, ValueError):
        raise UserError(f"{name}={known.get(name)!r} must be a number for this process to find the others") from None


def _hosts(bounds: str | None) -> int:
    """The number of hosts in bounds such as "2,2,1"; 0 if there are none."""
    try:
        return math.prod(int(n) for n in bounds.split(",")) if bounds else 0
    except ValueError:
        return 0


def _pairs(text: str) -> dict[str, str]:
    """Parses lines ``NAME: 'value'``."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip("'\"") for name, colon, value in lines if colon}
