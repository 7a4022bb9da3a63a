"""Stands in for ``gcloud``: a project with one request, whose workers are folders of this machine.

A folder has all of it: ``scenario.json`` says what happens, ``world.json`` what has happened, ``calls.jsonl`` keeps
every call, ``workers/`` has the home of each worker. A scenario has

- ``states``: for each creation, what the looks at it see, one after the other; the last stays. "ACTIVE/PREEMPTED" is an
  active request with a VM that is taken; "ACTIVE*3" stays for three looks, "ACTIVE@FILE:5" until FILE has five lines.
- ``rules``: ``match`` (a pattern of the command line), ``skip``, ``times``, then ``code``, ``stderr``, ``stdout``,
  ``hang`` (seconds); with ``anyway`` the call does its work all the same.
- ``hosts`` of a slice, ``env`` of the workers, ``deleting``: how many looks see a deletion, ``taken``: for each
  creation, the last for all others, the signals that processes get when their VM goes, ``notice`` (seconds) apart.
- ``why``: what a request that is FAILED says of it.

As a program it takes the folder from ``FAKE_CLOUD``.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


class Refused(Exception):
    """Says why."""


class Call:
    """One call of ``gcloud``.

    Args:
      cloud: the folder.
      arguments: of the command line.
    """

    def __init__(self, cloud, arguments):
        self.cloud, self.arguments, self.line = Path(cloud), arguments, " ".join(arguments)
        self.scenario = json.loads((self.cloud / "scenario.json").read_text())

    def run(self, stdin, seconds=1000.0):
        """Status, standard output and standard error."""
        try:
            rule, later = self.begin()
            out = later(stdin, seconds) if later else b""
            if rule is None:
                return (0, out, "") if isinstance(out, bytes) else (out.returncode, out.stdout, out.stderr.decode())
            if rule.get("hang", 0) > seconds:
                raise subprocess.TimeoutExpired("gcloud", seconds)
            time.sleep(rule.get("hang", 0))
            return rule.get("code", 0), rule.get("stdout", "").encode(), rule.get("stderr", "")
        except Refused as error:
            return 1, b"", f"ERROR: (gcloud) {error}\n"
        except subprocess.TimeoutExpired:
            time.sleep(seconds if rule else 0)
            return 124, b"", f"no answer in {seconds:g} s"

    def begin(self):
        """The rule that holds, if there is one, and what is left to be done with the world unlocked."""
        with (self.cloud / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self.cloud / "world.json"
            world = json.loads(file.read_text()) if file.exists() else {"request": None, "made": 0, "used": {}}
            with (self.cloud / "calls.jsonl").open("a") as calls:
                calls.write(json.dumps(self.arguments) + "\n")
            rule = self.ruled(world)
            try:
                return rule, (self.work(world) if rule is None or rule.get("anyway") else None)
            finally:
                file.write_text(json.dumps(world))

    def ruled(self, world):
        for i, rule in enumerate(self.scenario.get("rules", [])):
            if re.search(rule["match"], self.line):
                n = world["used"][str(i)] = world["used"].get(str(i), 0) + 1
                if rule.get("skip", 0) < n <= rule.get("skip", 0) + rule.get("times", 10**9):
                    return rule
        return None

    def option(self, name, default=None):
        for i, word in enumerate(self.arguments):
            if word == f"--{name}":
                return self.arguments[i + 1]
            if word.startswith(f"--{name}="):
                return word.partition("=")[2]
        return default

    def work(self, world):
        words = self.arguments
        if words[:2] == ["storage", "rsync"]:
            return self.rsync(words[2], Path(words[3]))
        assert words[:2] == ["compute", "tpus"] and self.option("zone") and self.option("project"), words
        assert "--quiet" in words, words
        return {
            "queued-resources create": self.create,
            "queued-resources describe": self.describe,
            "queued-resources delete": self.delete,
            "tpu-vm describe": self.describe_node,
            "tpu-vm ssh": self.ssh,
        }[" ".join(words[2:4])](world, words[4])

    def rsync(self, url, folder):
        source = self.cloud / "bucket" / url[len("gs://") :]
        if not source.is_dir():
            raise Refused(f"The following URLs matched no objects or files: {source}: NOT_FOUND")
        left_out = re.compile(self.option("exclude", "$^"))

        def ignore(at, names):
            return [n for n in names if left_out.match(str(Path(at, n).relative_to(source)) + "/")]

        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignore)

    def create(self, world, name):
        if world["request"]:
            raise Refused(f"ALREADY_EXISTS: Resource '{name}' already exists")
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        kind, slices = self.option("accelerator-type"), int(self.option("node-count", 1))
        world["request"] = {"name": name, "type": kind, "looks": 0, "n": world["made"], "port": port}
        world["request"] |= {"slices": slices, "born": time.time(), "deleting": None}
        world["made"] += 1

    def script(self, request):
        """What the present look sees, with what it waits for."""
        creations = self.scenario.get("states", [["ACTIVE"]])
        script = []
        for word in creations[min(request["n"], len(creations) - 1)]:
            word, _, times = word.partition("*")
            script += [word] * int(times or 1)
        return script[min(max(request["looks"] - 1, 0), len(script) - 1)]

    def state(self, request):
        """As the latest look saw it."""
        return self.script(request).partition("@")[0]

    def describe(self, world, name):
        request = world["request"]
        if request and request["deleting"] is not None:
            request["deleting"] -= 1
            if request["deleting"] < 0:
                world["request"] = request = None
        if not request:
            raise Refused(f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{name}' was not found")
        until = self.script(request).partition("@")[2]
        file, _, lines = until.rpartition(":")
        if not until or (Path(file).exists() and Path(file).read_text().count("\n") >= int(lines)):
            request["looks"] += 1
        now = "DELETING" if request["deleting"] is not None else self.state(request)
        if now not in ("ACTIVE", "ACTIVE/REPAIRING", "PROVISIONING", "WAITING_FOR_RESOURCES"):
            self.take(request)
        spec = [{"node": {"acceleratorType": request["type"]}}]
        state = {"state": now.split("/")[0], "stateInitiator": "SERVICE"}
        if now == "FAILED" and "why" in self.scenario:
            state["failedData"] = {"error": {"code": 8, "message": self.scenario["why"]}}
        return self.told({"name": name, "state": state, "tpu": {"nodeSpec": spec}})

    def describe_node(self, world, name):
        request = world["request"]
        several = [f"{request['name']}-{i}" for i in range(request["slices"])]
        if name not in ([request["name"]] if request["slices"] == 1 else several):
            raise Refused(f"NOT_FOUND: Resource 'projects/p/locations/z/nodes/{name}' was not found")
        node = self.state(request).partition("/")[2]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime(request["born"]))
        told = {"state": node or "READY", "networkEndpoints": [{}] * self.scenario.get("hosts", 2)}
        return self.told(told | {"createTime": stamp, "id": f"{name}-{request['n']}"})

    def told(self, what):
        return lambda stdin, seconds: json.dumps(what).encode()

    def delete(self, world, name):
        if not world["request"]:
            raise Refused(f"NOT_FOUND: Resource '{name}' was not found")
        assert "--force" in self.arguments
        self.take(world["request"])
        world["request"]["deleting"] = self.scenario.get("deleting", 0)

    def take(self, request):
        """The VMs go, with all that runs and lies on them."""
        taken = self.scenario.get("taken", [["KILL"]])
        for i, name in enumerate(taken[min(request["n"], len(taken) - 1)]):
            until = time.monotonic() + self.scenario.get("notice", 0)
            while i and self.jobs() and time.monotonic() < until:
                time.sleep(0.05)
            for pid in self.jobs():
                try:
                    os.killpg(int(pid.read_text().split()[0]), signal.Signals[f"SIG{name}"])
                except ProcessLookupError:
                    pass
        for home in (self.cloud / "workers").glob("*"):
            home.rename(self.cloud / f"gone-{request['n']}-{home.name}")

    def jobs(self):
        """Those that may run."""
        found = self.cloud.glob("workers/*/grpojax/jobs/*/pid")
        return [pid for pid in found if not (pid.parent / "exit").exists()]

    def ssh(self, world, name):
        request = world["request"]
        if not request or self.state(request).split("/")[0] != "ACTIVE" or "/" in self.state(request):
            raise Refused(f"TPU {name} is in state PREEMPTED and cannot be used")
        node = int(name.rpartition("-")[2]) if request["slices"] > 1 else 0
        index, hosts = int(self.option("worker")), self.scenario.get("hosts", 2)
        home = self.cloud / "workers" / f"{name}-{index}"
        home.mkdir(parents=True, exist_ok=True)
        env = {"HOME": str(home), "PATH": f"{self.cloud}/worker-bin:/usr/bin:/bin", "FAKE_RUN": f"{self.cloud}/run"}
        env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{request['port']}"}
        env |= {"JAX_NUM_PROCESSES": str(hosts * request["slices"]), "JAX_PROCESS_ID": str(node * hosts + index)}
        env |= self.scenario.get("env", {})
        # As gcloud does: the line is split at spaces and put together again by ssh, and the shell there reads it.
        command = ["sh", "-c", " ".join(self.option("command").split(" "))]
        return lambda stdin, seconds: subprocess.run(
            command, input=stdin, cwd=home, env=env, capture_output=True, timeout=seconds
        )


if __name__ == "__main__":
    code, out, err = Call(os.environ["FAKE_CLOUD"], sys.argv[1:]).run(sys.stdin.buffer.read())
    sys.stderr.write(err)
    sys.stdout.buffer.write(out)
    sys.stdout.flush()
    sys.exit(code)
