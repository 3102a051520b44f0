"""Refuse errors that are not numbers without waiting for the device to say so."""

from __future__ import annotations

import torch
from torch import Tensor

from buffers.priority import refuse


class Refusals:
    """Look at errors [B] as they come.

    On the CPU a wrong one raises at once. On CUDA it is left out at once and raises at one of the
    next calls, when the news has reached the host by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        if self._on_host:
            return
        # Whether there was a wrong one; the first: its place, id and error. Stays once set.
        self._first = torch.zeros(4, dtype=torch.float64, device=device)
        self._news = torch.zeros(4, dtype=torch.float64, pin_memory=True)
        self._sent: torch.cuda.Event | None = None

    def check(self, index: Tensor, error: Tensor, slots: int) -> Tensor:
        """Return which errors are finite, [B]; raise for one that is not, here or seen before."""
        finite = error.isfinite()
        if self._on_host:
            wrong = ~finite | (index < 0) | (index >= slots)
            if wrong.any():
                place = int(wrong.byte().argmax())
                raise refuse(place, int(index[place]), float(error[place]), slots)
            return finite
        self._listen(slots)
        first = (~finite).byte().argmax(keepdim=True)  # [1]; indexing with it asks nothing back
        parts = ((~finite).any()[None], first, index[first], error[first])
        seen = torch.cat([part.double() for part in parts])
        self._first.copy_(torch.where(self._first[0] > 0, self._first, seen))
        self._news.copy_(self._first, non_blocking=True)
        if self._sent is None:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent.record(torch.cuda.current_stream(error.device))
        return finite

    def _listen(self, slots: int) -> None:
        if self._sent is not None and self._sent.query():  # type: ignore[no-untyped-call]
            wrong, place, index, error = self._news.tolist()
            if wrong:
                raise refuse(int(place), int(index), error, slots)
