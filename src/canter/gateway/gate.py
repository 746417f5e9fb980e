"""Holds new generations while the policy is being changed."""

from __future__ import annotations

import asyncio

from canter.errors import EngineUnavailable


class Gate:
    """Open or paused. What already generates goes on; the engine has its own pause."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def passed(self, timeout_s: float) -> None:
        """Returns once the gate is open. Raises `EngineUnavailable` after `timeout_s`."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError as error:
            raise EngineUnavailable(
                f"generations have been paused for {timeout_s:g} s (POST /api/pause); POST /api/resume lets them go on"
            ) from error
