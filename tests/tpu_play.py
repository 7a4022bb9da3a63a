"""A cloud to play with: ``gcloud`` and, on the workers, ``curl`` and ``uv`` are stand-ins; all the rest is as it is."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_gcloud
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
SCRIPTS = ROOT / "tpu_scripts"
sys.path.append(str(SCRIPTS))

import cloud as cloud_module  # noqa: E402
import tpu  # noqa: E402

ENV = """
PROJECT=my-project
ZONE=us-west4-a
BUCKET=my-bucket
NAME=grpo
TYPE=v5e-16
SPOT=true
MAX_CHIP_HOURS=96
POLL_SECONDS=0.02
SETTLE_SECONDS=0.04
GRACE_SECONDS=1
LOST_SECONDS=3
CALL_SECONDS=20
"""

# What "curl" writes as the installer of uv. Its "pip install" makes `grpojax` the program that the scenario names.
UV = r"""#!/bin/sh
echo "$@" >>"$HOME/uv.log"
case "$1 $2" in
"--version "*) echo "uv 0.9.30 (a stand-in)" ;;
"venv "*)
    for last; do :; done
    mkdir -p "$last/bin"
    printf '#!/bin/sh\necho 3.12.9\n' >"$last/bin/python"
    chmod +x "$last/bin/python"
    ;;
"pip install")
    if [ -e "$FAKE_RUN.fails" ]; then echo "no such package" && exit 1; fi
    ln -sf "$FAKE_RUN" "$HOME/grpojax/venv/bin/grpojax"
    ;;
"pip freeze") printf 'grpojax @ file://%s\njax==%s\n' "$PWD" "${FAKE_JAX:-0.11.2}" ;;
*) exit 64 ;;
esac
"""
CURL = """#!/bin/sh
for last; do :; done
printf 'mkdir -p "$UV_INSTALL_DIR" && cp "%s" "$UV_INSTALL_DIR/uv"\\n' "$0.uv" >"$last"
"""


@dataclasses.dataclass
class Play:
    """The folder that one is in, and the cloud."""

    folder: Path
    cloud: Path

    def scenario(self, **changes):
        """What happens from here on; see fake_gcloud.py."""
        (self.cloud / "scenario.json").write_text(json.dumps(changes))

    def runs(self, script: str):
        """What ``grpojax`` is on the workers."""
        program = self.cloud / "run"
        program.write_text(script)
        program.chmod(0o700)

    def env(self, **changes):
        """Other values in the env file."""
        given = dict(line.split("=", 1) for line in ENV.split()) | {k.upper(): str(v) for k, v in changes.items()}
        (self.folder / "tpu.env").write_text("".join(f'{k}="{v}"\n' for k, v in given.items()))

    def start(self, *words, env=None) -> subprocess.Popen:
        """``tpu.py`` as on a laptop that has nothing but Python."""
        place = {"PATH": f"{self.cloud}/bin:/usr/bin:/bin", "HOME": str(self.folder), "FAKE_CLOUD": str(self.cloud)}
        command = [sys.executable, "-S", str(SCRIPTS / "tpu.py"), *words]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=place | (env or {}), **out)

    def tpu(self, *words, status=0, env=None) -> str:
        """``tpu.py`` to its end, and `gcloud` with it, in this process; what it said."""

        def call(command, stdin, seconds):
            return cloud_module.Answer(*fake_gcloud.Call(self.cloud, command[1:]).run(stdin, seconds))

        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            patch.setattr(cloud_module, "call", call)
            patch.chdir(self.folder)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            ended = tpu.main(words)
        assert ended == status, said.getvalue()
        return said.getvalue()

    def outside(self, *words, status=0, env=None) -> str:
        """The same by processes of their own."""
        process = self.start(*words, env=env)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == status, said
        return said

    def calls(self, *words) -> list[list[str]]:
        """Command lines so far that hold all of these words in one."""
        file = self.cloud / "calls.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if all(word in " ".join(line) for word in words)]

    def ready(self, *command):
        """Created, set up and, with a command, launched."""
        for words in (["create"], ["setup"], ["launch", "--", *command] if command else []):
            if words:
                self.tpu(*words)

    def home(self, index=0, name="grpo") -> Path:
        """Of a worker."""
        return self.cloud / "workers" / f"{name}-{index}"

    def ledger(self) -> dict:
        """What is kept between commands."""
        return json.loads((self.folder / ".tpu/grpo.json").read_text())

    def clear(self):
        """Ends what runs on the workers."""
        for pid in self.cloud.glob("**/grpojax/jobs/*/pid"):
            if not (pid.parent / "exit").exists():
                try:
                    os.killpg(int(pid.read_text().split()[0]), signal.SIGKILL)
                except ProcessLookupError:
                    pass


def program(path: Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)


def start(tmp_path: Path) -> Play:
    """A project and a cloud in which nothing has happened."""
    folder, cloud = tmp_path / "my project", tmp_path / "cloud"
    (folder / "grpojax").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'grpojax'\n")
    (folder / "grpojax/__init__.py").write_text("")
    (folder / ".gitignore").write_text(".tpu/\nignored\n")
    (folder / "ignored").write_text("not sent")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    program(cloud / "bin/gcloud", f'#!/bin/sh\nexec {sys.executable} -S {HERE / "fake_gcloud.py"} "$@"\n')
    program(cloud / "worker-bin/curl", CURL)
    (cloud / "worker-bin/curl.uv").write_text(UV)
    (cloud / "worker-bin/curl.uv").chmod(0o700)
    play = Play(folder, cloud)
    play.env()
    play.scenario()
    play.runs("#!/bin/sh\necho trained\n")
    return play
