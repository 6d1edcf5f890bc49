"""The kernel that executes notebooks: reached through files of this user, not over TCP."""

import tempfile

from jupyter_client import AsyncKernelManager


class LocalKernelManager(AsyncKernelManager):
    """A kernel with Unix domain sockets in a folder of its own, which only this user can enter."""

    transport = "ipc"

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._folder = tempfile.TemporaryDirectory(prefix="ddplab-kernel-")
        self.ip = f"{self._folder.name}/socket"

    async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Asks the kernel to end, and ends it where it does not.

        The inherited method interrupts the kernel first. One that has just answered the last
        request may still be in its handler, and prints the interrupt as an error. ``now`` makes no
        difference: a kernel is given a few seconds.
        """
        if self.has_kernel:
            await self.request_shutdown(restart=restart)
            await self.finish_shutdown(restart=restart)
        await self.cleanup_resources(restart=restart)
