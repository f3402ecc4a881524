"""Messages between ranks that nobody waits for: sent at once, received whenever the other looks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

TAG = 7


class Mail:
    """Objects, pickled, over a communicator of its own; from one rank to another they keep their order.

    An object must stay below 2 GiB, which is where MPI libraries fail.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        """``comm`` is used for nothing else; all its ranks make their Mail together."""
        self._mpi, self._comm, self._status = mpi, comm, mpi.Status()
        self.rank = comm.Get_rank()
        self._leaving: list[tuple[Any, np.ndarray]] = []

    def send(self, to: int, thing: Any) -> None:
        """Returns at once; the message is on its way."""
        data = np.frombuffer(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL), np.uint8)
        assert data.size < 2**31, f"a message of {data.size} bytes"
        self._leaving = [(request, kept) for request, kept in self._leaving if not request.Test()]
        self._leaving.append((self._comm.Isend(data, to, TAG), data))

    def receive(self) -> tuple[int, Any] | None:
        """(sender, object) of a message that has come; None when there is none."""
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, TAG, self._status):
            return None
        sender = self._status.Get_source()
        data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
        self._comm.Recv(data, sender, TAG)
        return sender, pickle.loads(data.data)
