"""Stands in for ``gcloud``: a project with one request, whose workers are folders of this machine.

``FAKE_CLOUD`` names a folder: ``scenario.json`` says what happens, ``world.json`` what has happened, ``calls.jsonl``
keeps every call, ``workers/`` has the home of each worker. A scenario has

- ``states``: for each creation, what the looks at it see, one after the other; the last stays. "ACTIVE/PREEMPTED" is an
  active request with a VM that is taken; "ACTIVE*3" stays for three looks, "ACTIVE@FILE:5" until FILE has five lines.
- ``rules``: ``match`` (a pattern of the command line), ``skip``, ``times``, then ``code``, ``stderr``, ``stdout``,
  ``hang`` (seconds); with ``anyway`` the call does its work all the same.
- ``hosts`` of a slice, ``env`` of the workers, ``deleting``: how many looks see a deletion, ``taken``: the signals that
  processes get when their VM goes, ``notice`` (seconds) apart.
"""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["FAKE_CLOUD"])
SCENARIO = json.loads((CLOUD / "scenario.json").read_text())
ARGV = sys.argv[1:]
LINE = " ".join(ARGV)


def fail(text):
    sys.stderr.write(f"ERROR: (gcloud) {text}\n")
    sys.exit(1)


def main():
    with (CLOUD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = CLOUD / "world.json"
        world = json.loads(file.read_text()) if file.exists() else {"request": None, "made": 0, "used": {}}
        with (CLOUD / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps(ARGV) + "\n")
        rule = ruled(world)
        act = None
        try:
            if rule is None or rule.get("anyway"):
                act = work(world)
        finally:
            file.write_text(json.dumps(world))
    out = act() if act else ""
    if rule is not None:
        time.sleep(rule.get("hang", 0))
        sys.stderr.write(rule.get("stderr", ""))
        sys.stdout.write(rule.get("stdout", ""))
        sys.exit(rule.get("code", 0))
    sys.stdout.write(out if isinstance(out, str) else "")
    sys.exit(out if isinstance(out, int) else 0)


def ruled(world):
    for i, rule in enumerate(SCENARIO.get("rules", [])):
        if re.search(rule["match"], LINE):
            n = world["used"][str(i)] = world["used"].get(str(i), 0) + 1
            if rule.get("skip", 0) < n <= rule.get("skip", 0) + rule.get("times", 10**9):
                return rule
    return None


def option(name, default=None):
    for i, word in enumerate(ARGV):
        if word == f"--{name}":
            return ARGV[i + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return default


def work(world):
    """Changes the world; what is left to be done without the lock."""
    if ARGV[:2] == ["storage", "rsync"]:
        import shutil

        source, folder = Path(CLOUD / "bucket" / ARGV[2][len("gs://") :]), Path(ARGV[3])
        if not source.is_dir():
            fail(f"The following URLs matched no objects or files: {source}: NOT_FOUND")
        left_out = re.compile(option("exclude", "$^"))
        ignore = lambda at, names: [n for n in names if left_out.match(str(Path(at, n).relative_to(source)) + "/")]  # noqa: E731
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignore)
        return None
    assert ARGV[:2] == ["compute", "tpus"] and option("zone") and option("project") and "--quiet" in ARGV, ARGV
    return {
        "queued-resources create": create,
        "queued-resources describe": describe,
        "queued-resources delete": delete,
        "tpu-vm describe": describe_node,
        "tpu-vm ssh": ssh,
    }[" ".join(ARGV[2:4])](world, ARGV[4])


def create(world, name):
    if world["request"]:
        fail(f"ALREADY_EXISTS: Resource '{name}' already exists")
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    world["request"] = {"name": name, "type": option("accelerator-type"), "looks": 0, "n": world["made"], "port": port}
    world["request"] |= {"slices": int(option("node-count", 1)), "born": time.time(), "deleting": None}
    world["made"] += 1


def state(request):
    """As the latest look saw it."""
    creations = SCENARIO.get("states", [["ACTIVE"]])
    script = []
    for word in creations[min(request["n"], len(creations) - 1)]:
        word, _, times = word.partition("*")
        script += [word] * int(times or 1)
    word = script[min(max(request["looks"] - 1, 0), len(script) - 1)]
    return word.partition("@")[0]


def describe(world, name):
    request = world["request"]
    if request and request["deleting"] is not None:
        request["deleting"] -= 1
        if request["deleting"] < 0:
            world["request"] = request = None
    if not request:
        fail(f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{name}' was not found")
    creations = SCENARIO.get("states", [["ACTIVE"]])
    script = creations[min(request["n"], len(creations) - 1)]
    until = script[min(max(request["looks"] - 1, 0), len(script) - 1)].partition("@")[2]
    file, _, lines = until.rpartition(":")
    if not until or (Path(file).exists() and Path(file).read_text().count("\n") >= int(lines)):
        request["looks"] += 1
    now = "DELETING" if request["deleting"] is not None else state(request)
    if now not in ("ACTIVE", "PROVISIONING", "WAITING_FOR_RESOURCES"):
        take(request)
    spec = [{"node": {"acceleratorType": request["type"]}}]
    return lambda: json.dumps({"name": name, "state": {"state": now.split("/")[0]}, "tpu": {"nodeSpec": spec}})


def describe_node(world, name):
    request = world["request"]
    nodes = (
        [request["name"]] if request["slices"] == 1 else [f"{request['name']}-{i}" for i in range(request["slices"])]
    )
    if name not in nodes:
        fail(f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found")
    _, _, node = state(request).partition("/")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime(request["born"]))
    told = {"state": node or "READY", "networkEndpoints": [{}] * SCENARIO.get("hosts", 2), "createTime": stamp}
    return lambda: json.dumps(told | {"id": f"{name}-{request['n']}"})


def delete(world, name):
    if not world["request"]:
        fail(f"NOT_FOUND: Resource '{name}' was not found")
    assert "--force" in ARGV
    take(world["request"])
    world["request"]["deleting"] = SCENARIO.get("deleting", 0)


def take(request):
    """The VMs go, with all that runs and lies on them."""
    for i, name in enumerate(SCENARIO.get("taken", ["KILL"])):
        time.sleep(SCENARIO.get("notice", 0) if i else 0)
        for pid in CLOUD.glob("workers/*/grpojax/jobs/*/pid"):
            if (pid.parent / "exit").exists():
                continue
            try:
                os.killpg(int(pid.read_text().split()[0]), signal.Signals[f"SIG{name}"])
            except ProcessLookupError:
                pass
    for home in (CLOUD / "workers").glob("*"):
        home.rename(CLOUD / f"gone-{request['n']}-{home.name}")


def ssh(world, name):
    request = world["request"]
    if not request or state(request).split("/")[0] != "ACTIVE" or "/" in state(request):
        fail(f"TPU {name} is in state PREEMPTED and cannot be used")
    node = int(name.rpartition("-")[2]) if request["slices"] > 1 else 0
    index = int(option("worker"))
    hosts = SCENARIO.get("hosts", 2)
    home = CLOUD / "workers" / f"{name}-{index}"
    home.mkdir(parents=True, exist_ok=True)
    env = {"HOME": str(home), "PATH": f"{CLOUD}/worker-bin:/usr/bin:/bin", "FAKE_RUN": str(CLOUD / "run")}
    env |= {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{request['port']}",
        "JAX_NUM_PROCESSES": str(hosts * request["slices"]),
    }
    env |= {"JAX_PROCESS_ID": str(node * hosts + index)} | SCENARIO.get("env", {})
    # As gcloud does: the line is split at spaces and put together again by ssh, and the shell there reads it.
    line = " ".join(option("command").split(" "))
    os.chdir(home)
    return lambda: os.execvpe("sh", ["sh", "-c", line], env)


main()
