"""Network interfaces: the one that the ranks use, and the fastest that they could.

No name is looked up in the network, which could take seconds: addresses come from the variables,
from /etc/hosts and from the kernel's routes. Where a host's name is in none of them, the default
route is taken, and ``interface_source`` says so.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddplab_watch.files import ROOT, read_integer, read_text

UP, LOOPBACK = 0x1, 0x8
"""Flags of an interface, IFF_UP and IFF_LOOPBACK of Linux's if.h."""
LOCAL_ROUTE, NO_ROUTE = 0x80000000, 0x0200
"""Flags of a route to one of this machine's own addresses (RTF_LOCAL), and to nowhere (RTF_REJECT).
"""
SOCKET_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
MASTER, HOST, DEFAULT = "route to MASTER_ADDR", "address of the host", "default route"
PREFERRED = "preferred by NCCL"
LEFT_OUT_BY_NCCL = ("lo", "docker", "virbr")
"""Prefixes of interfaces that NCCL takes only where there is no other."""


@dataclass(frozen=True)
class Interface:
    """A network interface.

    ``speed_mbit`` is what the card has agreed on with its other end; None where the driver does
    not tell, and for virtual interfaces without a card below them.
    """

    name: str
    is_up: bool
    is_loopback: bool
    speed_mbit: int | None


def interfaces(root: Path = ROOT) -> list[Interface]:
    """Returns all network interfaces, sorted by name."""
    folders = sorted((root / "sys/class/net").glob("*"))
    return [_interface(folder) for folder in folders if (folder / "operstate").is_file()]


def _interface(folder: Path) -> Interface:
    flags = read_integer(folder / "flags", base=16) or 0
    # Loopback and some drivers never say "up".
    works = read_text(folder / "operstate") in ("up", "unknown")
    return Interface(
        name=folder.name,
        is_up=works and bool(flags & UP),
        is_loopback=bool(flags & LOOPBACK),
        speed_mbit=_speed_mbit(folder),
    )


def _speed_mbit(folder: Path) -> int | None:
    """Returns the speed of a card or bond; of a VLAN or bridge, that of the fastest card below.

    Other virtual interfaces have a speed of the driver's choice (veth: 10 Gbit/s), which is no
    one's.
    """
    if (folder / "device").exists() or (folder / "bonding").exists():
        speed = read_integer(folder / "speed")
        return speed if speed and speed > 0 else None
    below = (folder.parent / link.name.removeprefix("lower_") for link in folder.glob("lower_*"))
    return max(filter(None, (_speed_mbit(card) for card in below)), default=None)


def fastest(candidates: Sequence[Interface]) -> Interface | None:
    """Returns the fastest interface that is up, no loopback, and of a known speed."""
    usable = [
        interface
        for interface in candidates
        if interface.is_up and not interface.is_loopback and interface.speed_mbit
    ]
    return max(usable, key=lambda interface: interface.speed_mbit, default=None)


def interface_in_use(
    backend: str | None, host: str, env: Mapping[str, str], root: Path = ROOT
) -> tuple[str | None, str | None]:
    """Returns the interface that gloo or NCCL (over sockets) takes, and how that is known.

    gloo takes the one that has the address of the host's name, NCCL one that begins with ``ib``, or
    else any but loopback and Docker's; of those, the one towards the master is taken to be it. Any
    other backend is treated as gloo.
    """
    candidates = interfaces(root)
    backend = backend if backend in SOCKET_VARIABLES else "gloo"
    variable = SOCKET_VARIABLES[backend]
    if env.get(variable):
        return _named(env[variable], candidates, exact=backend == "gloo"), variable
    if backend == "nccl":
        ib = _named("ib", candidates, exact=False)
        if ib is not None:
            return ib, PREFERRED
    targets = [(host, HOST), (env.get("MASTER_ADDR", ""), MASTER)]
    if backend == "nccl":
        targets.reverse()
    for name, source in targets:
        address = resolve(name, root)
        interface = route_to(address, root) if address else None
        if interface and not (backend == "nccl" and interface.startswith(LEFT_OUT_BY_NCCL)):
            return interface, source
    default = route_to("0.0.0.0", root)
    return (default, DEFAULT) if default else (None, None)


def _named(value: str, candidates: Sequence[Interface], *, exact: bool) -> str | None:
    """Returns the first interface that is up and that a variable's value allows.

    gloo's value is a list of names. NCCL's is a list of prefixes, with ``^`` before it of those to
    leave out, and ``=`` before names that are whole.
    """
    names = [interface.name for interface in candidates if interface.is_up]
    leave_out = not exact and value.startswith("^")
    names_text = value[1:] if leave_out else value
    is_exact = exact or names_text.startswith("=")
    wanted = [entry.strip() for entry in names_text.removeprefix("=").split(",") if entry.strip()]
    if leave_out:
        allowed = [name for name in names if not _fits(name, wanted, is_exact)]
        return next((name for name in allowed if not name.startswith(LEFT_OUT_BY_NCCL)), None)
    return next(
        (name for entry in wanted for name in names if _fits(name, [entry], is_exact)), None
    )


def _fits(name: str, wanted: Sequence[str], is_exact: bool) -> bool:
    return name in wanted if is_exact else name.startswith(tuple(wanted))


def resolve(name: str, root: Path = ROOT) -> str | None:
    """Returns the address of a name: itself if it is one, else as /etc/hosts has it; or None."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    for line in (read_text(root / "etc/hosts") or "").splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if name in names:
            return address
    return "127.0.0.1" if name == "localhost" else None


def route_to(address: str, root: Path = ROOT) -> str | None:
    """Returns the interface towards an address, of this machine or of another; None if none leads.

    The longest prefix decides, then the smallest metric. ``0.0.0.0`` asks for the default route.
    """
    target = ipaddress.ip_address(address.partition("%")[0])
    if target.is_loopback:
        return "lo"
    routes = _routes_4(root) if target.version == 4 else _routes_6(root)
    fitting = [route for route in routes if target in route[0]]
    best = min(fitting, key=lambda route: (-route[0].prefixlen, route[1]), default=None)
    return best[2] if best else None


def _routes_4(root: Path) -> list[tuple[ipaddress.IPv4Network, int, str]]:
    routes = []
    for line in (read_text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or int(words[3], 16) & NO_ROUTE:
            continue
        # The kernel prints the four bytes of an address as a number of this machine's byte order.
        network, mask = (
            ipaddress.IPv4Address(int(words[at], 16).to_bytes(4, sys.byteorder)) for at in (1, 7)
        )
        prefix = ipaddress.IPv4Network(f"{network}/{mask}")
        routes.append((prefix, int(words[6]), words[0]))
    return routes


def _routes_6(root: Path) -> list[tuple[ipaddress.IPv6Network, int, str]]:
    routes = []
    for line in (read_text(root / "proc/net/ipv6_route") or "").splitlines():
        words = line.split()
        if len(words) < 10 or int(words[8], 16) & (LOCAL_ROUTE | NO_ROUTE):
            continue
        network = ipaddress.IPv6Address(bytes.fromhex(words[0]))
        prefix = ipaddress.IPv6Network(f"{network}/{int(words[1], 16)}")
        routes.append((prefix, int(words[5], 16), words[9]))
    return routes


def infiniband(root: Path = ROOT) -> str | None:
    """Returns the active ports of InfiniBand (or RoCE) adapters and their rates.

    Such as ``mlx5_0:1 100 Gb/sec (4X EDR) InfiniBand``, joined by ``; ``; None for no active port.
    """
    ports = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = read_text(port / "state") or ""  # "4: ACTIVE"
        if state.endswith("ACTIVE"):
            name = f"{port.parents[1].name}:{port.name}"
            details = (read_text(port / "rate"), read_text(port / "link_layer"))
            ports.append(" ".join([name, *filter(None, details)]))
    return "; ".join(ports) or None
