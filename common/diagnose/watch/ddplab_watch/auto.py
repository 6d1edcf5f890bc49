"""Starts the watch when a process imports torch, and not before.

Called by ``ddplab_watch.pth`` in every process whose environment has ``DDPLAB_WATCH``: also in
those that never import torch, for which this costs one look at each import.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterTorch(MetaPathFinder):
    """Finds torch as it would be found anyway, and starts the watch once it is imported.

    Other packages ask for its spec only to learn whether it is there: it stays until it was loaded.
    """

    is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of torch, with a loader that starts the watch; None for others."""
        if name != "torch" or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def and_start(module: ModuleType) -> None:
                plain(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                start_now()

            spec.loader.exec_module = and_start  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Starts the watch now if torch is imported, else when it will be."""
    if "torch" in sys.modules:
        start_now()
    elif not any(isinstance(finder, AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterTorch())


def start_now() -> None:
    """Starts the watch; where it cannot, says why in a line and leaves the script alone."""
    try:
        from ddplab_watch.watch import start

        start()
    except Exception as error:
        print(f"ddplab-watch: not watching: {error}", file=sys.stderr)
