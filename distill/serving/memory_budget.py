"""Bound on the bytes of memory that requests, or responses, hold at a time."""

from __future__ import annotations

import asyncio


class MemoryBudget:
    """Memory budget in bytes.

    A request that does not fit waits, and the first waiting one that fits continues, so that a small response does not
    wait for a large one. One larger than the whole budget runs alone.

    Args:
        most: the budget in bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def try_take(self, size: int) -> bool:
        if not self._fits(size):
            return False
        self.held += size
        return True

    async def take(self, size: int, seconds: float) -> None:
        """Take `size` bytes once there is room.

        Raises:
            TimeoutError: there was none within `seconds`.
        """
        if self.try_take(size):
            return
        turn = size, asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn[1], seconds)
        except BaseException:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn[1].done() and not turn[1].cancelled():  # admitted at the same moment
                self.give(size)
            raise

    def give(self, size: int) -> None:
        self.held -= size
        self._let_in()

    def _fits(self, size: int) -> bool:
        return not self.held or self.held + size <= self.most

    def _let_in(self) -> None:
        for turn in [*self._waiting]:
            if self._fits(turn[0]):
                self._waiting.remove(turn)
                if not turn[1].done():
                    self.held += turn[0]
                    turn[1].set_result(None)
