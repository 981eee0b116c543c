"""Copies of an environment, each in a process of its own.

Gymnasium's AsyncVectorEnv does the same by pipes of multiprocessing, which pickle. Here a copy is
given an action and return what it led to as the bytes of their arrays. The processes are forks, so
that an environment that a script registered is known in them; none outlives this process.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from keel.control.spaces import ActionSpace, Discrete
from keel.sandbox.lifeline import Lifeline

PATIENCE = 5.0
"""Seconds that a copy which is idle has to close its environment."""
RESET, RESET_SOME, STEP, CLOSE, REPLY, FAILED = b"r", b"m", b"s", b"c", b"+", b"-"
_LENGTH, _SEED, _MOVED = struct.Struct("<I"), struct.Struct("<?q"), struct.Struct("<d??")

Observations = npt.NDArray[np.float32]
Stepped = tuple[
    Observations, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Any
]


class CopyError(Exception):
    """What an environment raised in its own process, as `Type: message`."""


class Copies:
    """As much of Gymnasium's VectorEnv, with AutoresetMode.DISABLED, as `Environments` needs.

    Copies step at the same time. An error in one is a CopyError here, and ends them all.
    """

    def __init__(
        self, makers: Sequence[Callable[[], gym.Env]], actions: ActionSpace, observation_size: int
    ) -> None:
        self.count, self.size = len(makers), observation_size
        self.dtype = np.int64 if isinstance(actions, Discrete) else np.float32
        self.observation_EO = np.zeros((self.count, observation_size), dtype=np.float32)
        self._busy = True
        self._copies: list[_Copy] = []
        self._finalizer = weakref.finalize(self, _end, self._copies, os.getpid())
        try:
            for make in makers:
                self._copies.append(_Copy(make, actions))
            for copy in self._copies:
                copy.receive()  # that it is made
        except BaseException:
            self._finalizer()
            raise
        self._busy = False

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [copy.pid for copy in self._copies]

    def reset(
        self, *, seed: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode in each copy, or in those of `options["reset_mask"]`."""
        mask_E = np.ones(self.count, dtype=bool) if options is None else options["reset_mask"]
        kind = RESET if options is None else RESET_SOME
        chosen = [slot for slot in range(self.count) if mask_E[slot]]
        replies = self._ask(
            {e: kind + _SEED.pack(seed[e] is not None, seed[e] or 0) for e in chosen}
        )
        for slot, reply in replies.items():
            self.observation_EO[slot] = np.frombuffer(reply, dtype=np.float32)
        return self.observation_EO, {}

    def step(self, action_E: Any) -> Stepped:
        """Take an action in each copy; none begins another episode by itself."""
        sent_E = np.asarray(action_E, dtype=self.dtype)
        replies = self._ask({slot: STEP + sent_E[slot].tobytes() for slot in range(self.count)})
        reward_E = np.zeros(self.count)
        terminated_E, truncated_E = np.zeros((2, self.count), dtype=bool)
        for slot, reply in replies.items():
            reward_E[slot], terminated_E[slot], truncated_E[slot] = _MOVED.unpack_from(reply)
            self.observation_EO[slot] = np.frombuffer(reply, np.float32, offset=_MOVED.size)
        return self.observation_EO, reward_E, terminated_E, truncated_E, {}

    def close(self) -> None:
        """Let the environments close and end their processes; those at work are killed."""
        for copy in () if self._busy else self._copies:
            copy.leave()
        self._finalizer()

    def _ask(self, requests: dict[int, bytes]) -> dict[int, bytes]:
        """Each copy's answer to its request. Raises CopyError for the first that failed."""
        self._busy = True
        for slot, request in requests.items():
            self._copies[slot].send(request)
        replies = {slot: self._copies[slot].receive() for slot in requests}
        self._busy = False
        return replies


class _Copy:
    """One process, seen from this one."""

    def __init__(self, make: Callable[[], gym.Env], actions: ActionSpace) -> None:
        self.channel, inside = socket.socketpair()
        self.lifeline = Lifeline()
        sys.stdout.flush()  # a fork would print what waits there once more
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _live(inside, self, make, actions)
            finally:
                os._exit(1)
        inside.close()
        self.lifeline.give()

    def send(self, request: bytes) -> None:
        with suppress(OSError):  # it is gone, as `receive` will say
            _say(self.channel, request)

    def receive(self) -> bytes:
        """Its reply. Raises CopyError where that is an error, or it ended."""
        try:
            reply = _receive(self.channel)
        except (EOFError, OSError):
            raise CopyError("its process ended in the midst of it") from None
        if reply[:1] == FAILED:
            raise CopyError(reply[1:].decode(errors="replace"))
        return reply[1:]

    def leave(self) -> None:
        """Ask it to close its environment, and wait a while."""
        self.send(CLOSE)
        self.channel.settimeout(PATIENCE)
        with suppress(OSError):
            self.channel.recv(1)

    def end(self) -> None:
        """Kill it and what it started, and bury it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)  # it had no group of its own yet
        os.waitpid(self.pid, 0)
        self.channel.close()
        self.lifeline.cut()


def _end(copies: list[_Copy], owner: int) -> None:
    if os.getpid() == owner:  # a fork of this process owns nothing
        while copies:
            copies.pop().end()


# ---------------------------------------------------------------- in the process of a copy


def _live(
    channel: socket.socket, copy: _Copy, make: Callable[[], gym.Env], actions: ActionSpace
) -> None:
    """Answer requests until asked to close; the process ends here."""
    os.setsid()
    copy.lifeline.tie(os.getpid())
    copy.lifeline.cut()
    copy.channel.close()
    if copy.lifeline.is_cut():
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a fork has the trainer's handlers
    try:
        env = make()
        _say(channel, REPLY)
        while (request := _receive(channel)) != CLOSE:
            _say(channel, REPLY + _answer(env, request, actions))
        env.close()
    except EOFError:
        pass  # no one asks any more
    except Exception as error:
        _say(channel, FAILED + " ".join(f"{type(error).__name__}: {error}".split()).encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(env: gym.Env, request: bytes, actions: ActionSpace) -> bytes:
    """What the environment shows after a reset, or what a step of it led to."""
    kind, rest = request[:1], request[1:]
    if kind != STEP:
        has_seed, seed = _SEED.unpack(rest)
        options: dict[str, Any] | None = None if kind == RESET else {}
        observation, _ = env.reset(seed=seed if has_seed else None, options=options)
        return _seen(env, observation)
    action: Any
    if isinstance(actions, Discrete):
        action = int(np.frombuffer(rest, dtype=np.int64)[0])
    else:
        action = np.frombuffer(rest, dtype=np.float32).reshape(actions.shape).copy()
    observation, reward, terminated, truncated, _ = env.step(action)
    moved = _MOVED.pack(float(reward), bool(terminated), bool(truncated))
    return moved + _seen(env, observation)


def _seen(env: gym.Env, observation: Any) -> bytes:
    """An observation of the environment's own kind of number, as float32."""
    space = env.observation_space
    whole = np.asarray(observation).astype(space.dtype, casting="same_kind")
    if whole.shape != space.shape:
        raise ValueError(f"an observation of shape {whole.shape}, not {space.shape}")
    return whole.astype(np.float32).tobytes()


# ---------------------------------------------------------------- on either side


def _say(channel: socket.socket, what: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(what)) + what)


def _receive(channel: socket.socket) -> bytes:
    """The next message. Raises EOFError where there will be none."""
    (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    return bytes(_exactly(channel, length))


def _exactly(channel: socket.socket, size: int) -> bytearray:
    whole = bytearray(size)
    left = memoryview(whole)
    while left:
        count = channel.recv_into(left)
        if count == 0:
            raise EOFError
        left = left[count:]
    return whole
