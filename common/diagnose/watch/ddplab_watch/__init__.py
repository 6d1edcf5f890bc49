"""Watches a PyTorch training as it is, for ``ddplab diagnose``.

Nothing in a script has to change. ``python -m ddplab_watch train.py …`` runs it watched, and so
does the variable ``DDPLAB_WATCH=FOLDER`` for whatever starts ranks by itself; in a notebook, call
``ddplab_watch.start()``. Each rank writes a file into the folder, the *bundle*: times, counts and
surroundings, nothing of data or weights. ``ddplab diagnose FOLDER`` reads it, anywhere.

The watch changes no number of the training. Where it cannot see something it says so in the bundle;
where it fails it takes itself away, and the training goes on.
"""

from __future__ import annotations

from ddplab_watch.options import Options
from ddplab_watch.watch import start, stop

__all__ = ["Options", "start", "stop"]
__version__ = "0.1.0"
