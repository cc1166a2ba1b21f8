"""A process in which Python behaves, in part, as on Windows: run `python without_posix.py COMMAND...`.

What Windows lacks is removed: modules, names of `os` and `signal`, and /proc. Folders can't be opened, only files that
are open for writing can be synced, no open file can be replaced, and names have no character that Windows forbids.
Locks are those of `msvcrt`. Libraries are imported before, because they would find a Linux without these names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import os
import pkgutil
import signal
import sys
import tempfile
import types

import PIL.Image  # noqa: F401
import safetensors.torch  # noqa: F401
import sklearn.datasets
import sklearn.linear_model  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.parallel
import torchvision.transforms.v2  # noqa: F401
import typer  # noqa: F401

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix_ipc", "triton", "triton.language")
OF_OS = (
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "geteuid", "getpgid", "getuid", "killpg",
    "lchown", "mkfifo", "nice", "posix_fadvise", "pread", "pwrite", "register_at_fork", "sched_getaffinity",
    "sched_setaffinity", "setsid", "statvfs", "sysconf", "sysconf_names", "uname", "waitid",
)  # fmt: skip
OF_SIGNAL = (
    "SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2", "alarm",
    "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigwait",
)  # fmt: skip
FORBIDDEN = set('<>:"|?*')
guarding = True


@contextlib.contextmanager
def unguarded():
    global guarding
    guarding = False
    yield
    guarding = True


def open_files() -> list[str]:
    with unguarded():
        found = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
        return found


def check(event: str, arguments: tuple) -> None:
    """The audit hook: raise what Windows would."""
    if not guarding or event not in ("open", "os.mkdir", "os.rename"):
        return
    path = os.fspath(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
    path = os.fsdecode(path)
    if event == "open" and path.startswith("/proc"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    if event == "open" and arguments[1] is None and path and os.path.isdir(path):  # by os.open
        raise PermissionError(errno.EACCES, "Permission denied", path)
    new = os.fsdecode(arguments[1]) if event == "os.rename" else path
    name = os.path.basename(new)
    writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if writes and (FORBIDDEN & set(name) or name != name.rstrip(" .")):
        raise OSError(errno.EINVAL, "Invalid argument", new)
    if event == "os.rename" and os.path.realpath(new) in open_files():
        raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used", new)


def fsync(handle: int, inner=os.fsync, flags=fcntl.fcntl) -> None:
    if flags(handle, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR) == 0:
        raise OSError(errno.EBADF, "Bad file descriptor")
    inner(handle)


def locking(handle: int, mode: int, count: int, lock=fcntl.lockf) -> None:
    try:
        lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(handle, 0, os.SEEK_CUR))
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def become_windows() -> None:
    for name in OF_OS:
        if hasattr(os, name):
            delattr(os, name)
    for name in OF_SIGNAL:
        delattr(signal, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it raises ImportError
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)  # type: ignore[assignment]
    os.fsync = fsync
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]  # it opens a folder
    sys.addaudithook(check)


def import_everything() -> int:
    """Import every module of kontrast but the kernels for NVIDIA's GPUs; return how many."""
    import kontrast

    names = [module.name for module in pkgutil.walk_packages(kontrast.__path__, "kontrast.")]
    names = [n for n in names if not n.rpartition(".")[2].startswith("triton_") and not n.endswith("__main__")]
    for name in names:
        importlib.import_module(name)
    return len(names)


def main(out: str) -> int:
    """Import everything, and run the commands that most users run."""
    become_windows()
    print(import_everything(), "modules")
    torch.set_num_threads(1)
    from kontrast.cli.main import run

    tiny = ["training.max_steps=4", "training.batch=16", "encoder.width=16", "evaluation.every=0", "evaluation.k=5"]
    tiny += ["evaluation.linear=false", "evaluation.gallery=20", "checkpoints.every=0.01"]
    commands = [
        ["pretrain", "--device", "cpu", "--no-probes", "--out", out, *tiny],
        ["pretrain", "--device", "cpu", "--no-probes", "--out", out, "--resume"],
        ["probe", out, "knn", "--device", "cpu"],
        ["embed", out, "digits", "--out", f"{out}/vectors.npy", "--device", "cpu"],
        ["export", out, "--format", "safetensors", "--out", f"{out}/exported.safetensors"],
        ["report", out],
    ]
    for argv in commands:
        code = run([*argv, "--debug"])
        if code:
            print(argv, "ended with", code)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
