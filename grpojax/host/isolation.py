"""What keeps code that nobody has read from doing harm: no network, limits, and a process of its own (Linux).

`cut_network` and `contain` are for a process that already runs. `run_python` runs a program in a fresh one, which also
has no other processes in view, and may write nowhere but to a folder that is gone with it.

This file is run as a script too, by the program's own process, so it imports nothing but the standard library.
"""

import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

# Of `unshare`, in <sched.h>.
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
# Of `mount` and `mount_setattr`, in <sys/mount.h>; the number of the system call is the same on x86-64 and arm64.
READ_ONLY, NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE, FOLLOWS = 1, 2, 4, 0x4000, 1 << 18, 1 << 19
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000
# Of `prctl`, in <sys/prctl.h>: PR_SET_PDEATHSIG, PR_CAPBSET_DROP and PR_SET_NO_NEW_PRIVS.
END_WITH_PARENT, DROP_BOUND, NO_NEW_RIGHTS = 1, 24, 38
CAPABILITIES_VERSION = 0x20080522  # of `capset`, in <linux/capability.h>

# Exit status of `run_python`'s process where it could not be closed off, so that the program never ran.
NOT_CLOSED = 97
# MiB that a program may write in its folder, and into its output.
DISK_MB = 64
# Processes and threads that a program may have at a time.
MOST_PROCESSES = 64
# Folders with the sockets of the system's services, which are empty for a program without a network.
SERVICES = ("/run", "/var/run")


class Ran(NamedTuple):
    """How a program ended.

    Attributes:
      output: what it wrote to standard output and error, at most the bytes that were asked for.
      status: its exit status; 128 plus the number of a signal that ended it; None where its time was over.
    """

    output: str
    status: int | None


def cut_network() -> None:
    """Leaves this process, and what it starts, without any network, its own machine's included.

    Needs a process of one thread. Raises `OSError` where the system allows no user namespaces.
    """
    _unshare(NEW_USER | NEW_NETWORK)


@functools.cache
def network_can_be_cut() -> bool:
    """Whether `cut_network` works here, tried in another process."""
    return _works("cut_network")


def contain() -> None:
    """Goes on in a process with which all ends that it starts, also what leaves its group and its session.

    That process has the same id. It and what it starts see only themselves, so that they cannot end what started them.
    The process that called waits for it and ends as it did; if that one is ended first, so is everything.

    Needs a process of one thread. Raises `OSError` where the system does not allow it.
    """
    own = os.getpid()
    flags = NEW_MOUNTS | NEW_PROCESSES
    # Root needs no namespace of users, in which it could not read the files of others.
    if os.getuid() != 0 or _libc().unshare(flags) != 0:
        _unshare(NEW_USER | flags)
    _go_on_as_child()  # the first process of the namespace: when it ends, so does all that was started there
    libc = _libc()
    if libc.mount(b"none", b"/", None, RECURSIVE | FOLLOWS, None):
        raise OSError(ctypes.get_errno(), "mount")
    if libc.mount(b"proc", b"/proc", b"proc", NO_SUID | NO_DEVICES, None):  # with the ids of the namespace
        raise OSError(ctypes.get_errno(), "mount")
    with open("/proc/sys/kernel/ns_last_pid", "w", encoding="ascii") as file:
        file.write(str(own - 1))
    _go_on_as_child()
    os.setpgid(0, 0)
    if os.getpid() != own:
        raise OSError("the process has another id")


@functools.cache
def processes_can_be_contained() -> bool:
    """Whether `contain` works here, tried in another process."""
    return sys.platform == "linux" and _works("contain")


def _works(what: str) -> bool:
    return subprocess.run([sys.executable, "-I", "-S", __file__, what], capture_output=True).returncode == 0


@functools.cache
def programs_can_be_closed_off() -> bool:
    """Whether `run_python` works here without a network: it takes more kinds of namespaces than `cut_network`."""
    try:
        run_python("", seconds=60, memory_mb=512, output_bytes=0)
    except OSError:
        return False
    return True


def run_python(
    code: str, *, seconds: float, memory_mb: int, output_bytes: int, given: str = "", network: bool = False
) -> Ran:
    """Runs a Python program in a process of its own.

    Args:
      code: the program. It can import what is installed, and read files.
      seconds: after this time the process and what it started are ended.
      memory_mb: MiB of address space of each of its processes.
      output_bytes: how much of its output comes back.
      given: its standard input.
      network: whether it may use the network. Then it runs also where the system allows no namespaces, with the files
        and processes that we see.

    Raises:
      OSError: without ``network``, and the system allows no user namespaces.

    Example:
      >>> run_python("print(6 * 7)", seconds=10, memory_mb=512, output_bytes=100).output
      '42\\n'
    """
    with tempfile.TemporaryDirectory(prefix="grpojax-") as folder, tempfile.TemporaryFile() as out:
        with open(f"{folder}/program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(code)
        asked = [folder, str(memory_mb), str(int(seconds) + 1), str(int(network)), str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, "run", *asked],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.communicate(given.encode(errors="replace"), timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
        out.seek(0)
        output = out.read(output_bytes).decode(errors="replace")
    if status == NOT_CLOSED and not network:
        raise OSError("the system allows no user namespaces, and so no process without a network")
    return Ran(output, status)


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _unshare(flags: int) -> None:
    """Gives this process namespaces of its own, in which its user is who it was."""
    if sys.platform != "linux":
        raise OSError("only Linux has user namespaces")
    user, group = os.getuid(), os.getgid()
    if _libc().unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _close_files(folder: str, hidden: Sequence[str]) -> None:
    """Makes all files read-only but those of a new, empty file system at ``folder``, and shows only our processes.

    The folders ``hidden`` are empty then, where what we run from is not in them.
    """
    libc = _libc()

    def mount(what: str, where: str, kind: str | None, flags: int, options: str | None = None) -> int:
        texts = [None if t is None else t.encode() for t in (what, where, kind)]
        return libc.mount(*texts, flags, None if options is None else options.encode())

    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)  # set, clear, propagation, user namespace
    if (
        mount("none", "/", None, RECURSIVE | PRIVATE)
        or libc.syscall(MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
        or mount("tmpfs", folder, "tmpfs", NO_SUID | NO_DEVICES, f"size={DISK_MB}m")
    ):
        raise OSError(ctypes.get_errno(), "mount")
    for each in {os.path.realpath(path) for path in hidden}:
        needed = any(path.startswith(f"{each}/") for path in (folder, *sys.path))
        if os.path.isdir(each) and not needed and mount("tmpfs", each, "tmpfs", READ_ONLY | NO_SUID | NO_DEVICES):
            raise OSError(ctypes.get_errno(), "mount")
    mount("proc", "/proc", "proc", NO_SUID | NO_DEVICES)  # refused where a container hides parts of it
    os.chdir("/")
    os.chdir(folder)


def _limit(memory_mb: int, cpu_seconds: int, processes: int | None) -> None:
    import resource

    limits = {
        resource.RLIMIT_AS: memory_mb * 2**20,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: DISK_MB * 2**20,
        resource.RLIMIT_CORE: 0,
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = processes
    for which, value in limits.items():
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):  # a lower one is in force, or the system has none
            continue


def _main(arguments: Sequence[str]) -> None:
    if arguments[0] in ("cut_network", "contain"):
        {"cut_network": cut_network, "contain": contain}[arguments[0]]()
        return
    folder, memory_mb, most_seconds, network, parent = arguments[1], *map(int, arguments[2:])
    _end_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # it was gone before
    if hasattr(signal, "alarm"):  # for a parent that lives, but does not end us
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(most_seconds)
    with open(f"{folder}/program.py", encoding="utf-8", errors="surrogatepass") as file:
        code = file.read()
    try:
        _unshare(NEW_USER | NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | (0 if network else NEW_NETWORK))
        _end_with_parent()  # a change of users may have taken that back
        _go_on_as_child()  # the first process of the namespace: when it ends, so does all that was started there
        _close_files(folder, hidden=() if network else SERVICES)
        _drop_rights()
        closed = True
    except OSError:
        if not network:
            os._exit(NOT_CLOSED)
        closed = False
    _go_on_as_child()  # the first process would not get its own signals
    # Without a namespace of its own all processes of our user would count.
    _limit(memory_mb, most_seconds, MOST_PROCESSES if closed else None)
    sys.argv = ["program.py"]
    try:
        exec(compile(code, "program.py", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except Exception as error:
        _show(error, code)
        sys.exit(1)


def _go_on_as_child() -> None:
    """Forks. Only the child returns; this process waits for it, and ends as it did."""
    ended, open_while_here = os.pipe()
    child = os.fork()
    if child:
        os.close(ended)
        ended_child, status = os.wait()
        while ended_child != child:  # the first process of a namespace also gets those whose parents are gone
            ended_child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    os.close(open_while_here)
    _end_with_parent()
    if select.select([ended], [], [], 0)[0]:
        os._exit(1)  # the parent was gone before
    os.close(ended)


def _end_with_parent() -> None:
    """Has the kernel end this process with its parent, also with one that is killed (Linux)."""
    if sys.platform == "linux":
        _libc().prctl(END_WITH_PARENT, signal.SIGKILL)


def _drop_rights() -> None:
    """Takes from this process what it may do in its namespaces, such as to mount; it cannot get that back."""
    libc = _libc()
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for capability in range(last + 1):
        if libc.prctl(DROP_BOUND, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits each
    if libc.capset(header, none) or libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "capset")


def _show(error: Exception, code: str) -> None:
    """Prints a traceback of the program's own frames, with its lines, which stand in no file."""
    import linecache
    import traceback

    sys.stdout.flush()
    linecache.cache["program.py"] = (len(code), None, code.splitlines(keepends=True), "program.py")
    traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)


if __name__ == "__main__":
    _main(sys.argv[1:])
