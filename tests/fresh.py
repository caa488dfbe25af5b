"""Run programs in a fresh interpreter that has imported torch and nothing else.

Importing torch takes seconds, so each program is a fork of one process that has imported it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"

# A request is four files: the code with its arguments, stdout, stderr, and a pipe for the status.
SERVER = """
import json, os, signal, socket, sys, traceback
import torch

asked, paths = socket.socket(fileno=int(sys.argv[1])), sys.path[1:]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    _, files, _, _ = socket.recv_fds(asked, 1, 4)
    if not files:
        sys.exit()
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child = os.fork()
        if not child:
            break
        for file in files[:3]:
            os.close(file)
        status = 0x7f
        while os.WIFSTOPPED(status):
            _, status = os.waitpid(child, os.WUNTRACED)
            os.write(files[3], f"{child} {status}\\n".encode())
        os._exit(0)
    for file in files:
        os.close(file)
asked.close()
for number, file in enumerate(files[1:3], 1):
    os.dup2(file, number)
with open(files[0]) as words:
    code, sys.argv[1:], folder, variables = json.load(words)
for file in files[1:]:
    os.close(file)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
sys.path[:] = ["", *variables["PYTHONPATH"].split(os.pathsep), *paths]
status = 0
try:
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    status = end.code or 0
except BaseException:
    traceback.print_exc()
    status = 1
try:
    sys.stdout.flush()
except OSError:
    status = status or 120  # what Python says of it at its end
os._exit(status)  # to take all of torch apart takes a second
"""


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


class Program:
    """A running program.

    Args:
        code: Python code; it can import the package of this checkout, and from PYTHONPATH.
        arguments: its ``sys.argv[1:]``.
        first: a folder in which it looks for modules before all others.
        variables: environment variables, on top of those of this process.
        out: file descriptor of its standard output.
        err: file descriptor of its standard error.
    """

    def __init__(
        self,
        code: str,
        *arguments: object,
        first: Path | None = None,
        variables: Mapping[str, str] | None = None,
        out: int = 1,
        err: int = 2,
    ) -> None:
        folders = [*([first] if first else []), SOURCE, os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(str(folder) for folder in folders if folder)
        environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
        told, tell = os.pipe()
        self._told = os.fdopen(told)
        with tempfile.TemporaryFile("w+") as words:
            json.dump((code, [str(a) for a in arguments], os.getcwd(), environment), words)
            words.seek(0)
            socket.send_fds(_server(), [b"x"], [words.fileno(), out, err, tell])
        os.close(tell)

    def wait(self) -> tuple[int, int]:
        """Wait until it stops or ends, and return its process id and its wait status."""
        told = self._told.readline()
        assert told, "the process that forks programs is gone"
        number, status = told.split()
        if not os.WIFSTOPPED(int(status)):
            self._told.close()
        return int(number), int(status)


def run(
    code: str, *arguments: object, check: bool = True, out: int | None = None, **others: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code and output.

    Args:
        code: as in ``Program``, and so are ``arguments`` and ``others``.
        check: fail with the program's standard error if its exit code is not 0.
        out: file descriptor of its standard output, which is then not in the result.
    """
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        files = {"out": said.fileno() if out is None else out, "err": complaints.fileno()}
        _, status = Program(code, *arguments, **files, **others).wait()
        words = [file.seek(0) or file.read() for file in (said, complaints)]
        result = subprocess.CompletedProcess(code, os.waitstatus_to_exitcode(status), *words)
    assert not (check and result.returncode), result.stderr
    return result
