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
