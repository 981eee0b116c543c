"""`keel` in processes of its own, forked from one that has imported it: quick to start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.durability.mounts import own_namespace

HEAVY = ("keel.cli.train", "keel.training.run", "keel.training.rl_stage", "keel.analysis.plots")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*HEAVY, "torch", "transformers", __name__])


@dataclass(frozen=True)
class Keel:
    """A running `keel`, the leader of a process group."""

    process: BaseProcess
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """As that of a Popen, so that commands can be waited for alike."""
        return self.end(timeout)[1:]

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def end(self, seconds: float = 60.0) -> tuple[int, str, str]:
        """Its exit code (−n: signal n), what it printed, and its stderr."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            raise AssertionError(f"it never ended: {self.err.read_text()}")
        return code, self.out.read_text(), self.err.read_text()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait while it runs until something holds."""
        while not holds():
            if not self.process.is_alive():
                raise AssertionError(f"it ended: {self.err.read_text()}")
            time.sleep(0.005)


def start(
    folder: Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    ignore: Sequence[int] = (),
    output: Path | None = None,
) -> Keel:
    """`keel ARGUMENTS`, some signals ignored from the start; it prints to files in `folder`.

    With `output`, a pipe or terminal, to that instead, errors too where it is a terminal.
    """
    own_namespace()  # before the first is forked, so that all see the mounts of a test
    number = len(list(folder.glob("out-*")))
    out, err = folder / f"out-{number}", folder / f"err-{number}"
    out.touch()
    err.touch()
    wanted = (output or out, err if output is None or output.is_fifo() else output)
    process = _context.Process(
        target=_main,
        args=([str(a) for a in arguments], *wanted, dict(environment or {}), ignore),
    )
    process.start()
    return Keel(process, out, err)


def keel(
    folder: Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    ignore: Sequence[int] = (),
) -> tuple[int, str, str]:
    """`keel ARGUMENTS` to its end: exit code, stdout, stderr."""
    return start(folder, *arguments, environment=environment, ignore=ignore).end()


def _main(
    arguments: Sequence[str],
    out: Path,
    err: Path,
    environment: Mapping[str, str],
    ignore: Sequence[int],
) -> None:
    os.setsid()
    for path, descriptor in ((out, 1), (err, 2)):
        # A terminal that is opened for reading too becomes the one that controls this process.
        way = os.O_RDWR if path.is_char_device() else os.O_WRONLY
        opened = os.open(path, way | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.environ |= environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in ignore:
        signal.signal(signum, signal.SIG_IGN)
    from keel.cli.main import main

    sys.exit(main(arguments))
