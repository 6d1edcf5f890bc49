"""The kernel that executes notebooks: reached through files of this user, not over TCP."""

import subprocess
import tempfile

from jupyter_client import AsyncKernelManager

from common.runtime.processes.child import kill_group

_running: set[subprocess.Popen] = set()
"""Kernels that have not ended."""


class LocalKernelManager(AsyncKernelManager):
    """A kernel with Unix domain sockets in a folder of its own, which only this user can enter."""

    transport = "ipc"

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._folder = tempfile.TemporaryDirectory(prefix="ddplab-kernel-")
        self.ip = f"{self._folder.name}/socket"

    async def start_kernel(self, **settings) -> None:
        """Starts the kernel, in a session of its own: Ctrl-C does not reach it."""
        await super().start_kernel(**settings)
        _running.add(self.provisioner.process)

    async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Asks the kernel to end, and ends it where it does not.

        The inherited method interrupts the kernel first. One that has just answered the last
        request may still be in its handler, and prints the interrupt as an error. ``now`` makes no
        difference: a kernel is given a few seconds.
        """
        if self.has_kernel:
            _running.discard(self.provisioner.process)
            await self.request_shutdown(restart=restart)
            await self.finish_shutdown(restart=restart)
        await self.cleanup_resources(restart=restart)


def end_kernels() -> None:
    """Kills all kernels, which other threads wait for."""
    for process in list(_running):
        if process.poll() is None:  # the number of one that died may be another process's by now
            kill_group(process)
