"""Policy versions on their way from the backend to whoever samples from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from canter.engine import Engine
from canter.errors import CheckpointError
from canter.trainer.backend import Backend
from canter.trainer.collect import Rollouts
from canter.trainer.worker import InThread
from canter.types import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Publisher:
    """Brings each policy version to the store, then to the engine; holds the engine back during a replay.

    `recorded` is the last version that the store knows, `served` the one that the engine has.
    """

    client: Rollouts
    backend: Backend
    engine: Engine
    in_thread: InThread
    recorded: int
    served: int | None = None

    @classmethod
    async def open(cls, client: Rollouts, backend: Backend, engine: Engine, in_thread: InThread) -> Publisher:
        """Raises CheckpointError where the weights are newer than the store, which is then another run's."""
        versions = await client.versions()
        recorded = versions[-1].version if versions else -1
        if backend.version > max(recorded, 0):
            raise CheckpointError(
                f"the checkpoint has policy version {backend.version}, but the store has published only up to "
                f"{recorded}; the run folder's store and checkpoints do not belong together"
            )
        if recorded > backend.version:
            log.info("replaying the updates to policy version %d from recorded calls", recorded)
        return cls(client, backend, engine, in_thread, recorded)

    async def publish(self, step: int) -> None:
        """Makes the backend's version the one that is sampled from. The record comes first: no call can have a version
        that the store does not know."""
        version = self.backend.version
        if version > self.recorded:
            await self.client.add_version(PolicyVersion(version, step))
            self.recorded = version
        if version == self.recorded and version != self.served:
            await self.engine.pause()
            await self.in_thread(self.backend.publish)
            self.served = version
            await self.engine.resume()
