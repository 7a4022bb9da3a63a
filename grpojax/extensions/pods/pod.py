"""What `grpojax.host.processes` asks for in a run of several processes (`grpojax.host.processes.Pod`)."""

import json
import os
import socket
import uuid

import jax
from etils import epath

from grpojax.extensions.pods import joining, peers
from grpojax.extensions.pods.meeting import MeetingPoint
from grpojax.host import files, processes
from grpojax.host.errors import UserError

meeting = MeetingPoint
watched, telling, leave = peers.watched, peers.telling, peers.leave


def join() -> None:
    """Joins the other processes, if there are any (`joining.find`)."""
    company = joining.find(os.environ, tpu=joining.on_tpu())
    if company is not None:
        # On CPUs, programs in flight, and those that another process compiled, receive each other's messages.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        joining.join(company)


def prove_shared(folder: epath.PathLike) -> None:
    """Raises `UserError` on all processes unless all see the first one's ``folder``. Every process must call it."""
    # A name that nobody has asked for yet: network file systems remember for a while that a file did not exist.
    mark = files.path(folder) / f".shared-{processes.meet(uuid.uuid4().hex)[0]}.tmp"
    try:
        if processes.is_first():
            mark.write_text("")
        processes.meet()
        messages = processes.meet(json.dumps([socket.gethostname(), mark.exists()]))
    finally:
        if processes.is_first():
            mark.unlink(missing_ok=True)
    hosts = [json.loads(text) for text in messages]
    if blind := [f"process {i} ({host})" for i, (host, seen) in enumerate(hosts) if not seen]:
        raise UserError(
            f"{folder} is not the same folder everywhere: {', '.join(blind)} cannot see what process 0 ({hosts[0][0]}) "
            "writes there\ngive a run.dir on a file system that all hosts share, or in a bucket: run.dir=gs://BUCKET/RUN"
        )
