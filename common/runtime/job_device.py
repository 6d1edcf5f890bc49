"""A check that a job file makes before it starts ranks: that they can use the device they want.

torchrun prints much about every rank that fails. A job that cannot use the GPUs it was granted ends
before that, with one line. The device is chosen as every script chooses it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from common.runtime.machine.device import choose_device
from common.runtime.script import exit_status


def main(arguments: Sequence[str]) -> None:
    """Checks the device of a script's ``arguments`` on this host, without using it.

    A file of settings (``--config``) may name another device; then the script itself checks.

    Raises:
        UserError: an unknown device; CUDA cannot be used, but was asked for or granted.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The script itself refuses a flag without its value.
    parser.add_argument("--device", nargs="?")
    parser.add_argument("--config", nargs="?")
    flags, _ = parser.parse_known_args(arguments)
    if flags.device or not flags.config:
        choose_device(flags.device, instead="DEVICE=cpu")


if __name__ == "__main__":
    with exit_status():
        main(sys.argv[1:])
