"""Reads the files of a tarball that somebody handed in, and their manifest.

Whoever reads one believes nothing of it: neither names, sizes nor kinds of its members. The name of
the tarball itself says nothing here: browsers and learning platforms rename what they pass on.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import unicodedata
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import UserError

PACKED_BYTES, UNPACKED_BYTES, MEMBERS = 20 * 2**20, 200 * 2**20, 1000
TEXT_BYTES = 2**20
"""Most bytes of an exercise or the manifest, which take many times their size when they are
parsed."""
PART_BYTES, PATH_BYTES = 250, 1000
"""Most bytes of a part of a path, and of a path: less than file systems take."""
MANIFEST, ANSWERS, REPORT, EXERCISES, RUN = (
    "manifest.json",
    "answers.yaml",
    "report.pdf",
    "exercises",
    "run",
)
KINDS_OF_TABLES = (".csv", ".yaml", ".json")
FILES = "files"
"""Entry of the manifest with the checksums."""
GZIP = b"\x1f\x8b"
SHOWN = 100
"""Characters of a name in a message."""


@dataclass(frozen=True)
class Tarball:
    """A tarball, read.

    Attributes:
        files: contents by their path below that folder, without the manifest.
        manifest: entries of the manifest besides the checksums: what a student says of it.
    """

    files: Mapping[str, bytes]
    manifest: Mapping[str, object]


def read_tarball(path: Path) -> Tarball:
    """Reads a tarball, in memory, and compares its files with its manifest.

    Raises:
        UserError: it is not one that ``pack`` wrote, or was changed afterwards.
    """
    name, folder = printable(path.name), ""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(unpacked(path)), mode="r:") as tar:
            for count, member in enumerate(tar, start=1):
                if count > MEMBERS:
                    raise UserError(f"{name}: it has more than {MEMBERS} members")
                if not member.isdir():
                    folder = folder or "".join(PurePosixPath(normal(member.name)).parts[:1])
                    inside = checked_path(name, folder, member, files)
                    files[inside] = read_member(name, tar, member, inside)
    except UserError:
        raise
    except Exception as error:  # of a header that is none, tarfile raises anything
        raise UserError(f"{name}: no whole tarball: {printable(str(error))}") from None
    manifest = check_manifest(name, files)
    return Tarball({n: c for n, c in files.items() if n != MANIFEST}, manifest)


def normal(name: str) -> str:
    """Returns a name with its accents as one character each, whatever system wrote it."""
    return unicodedata.normalize("NFC", name)


def checked_path(
    name: str, folder: str, member: tarfile.TarInfo, files: Mapping[str, bytes]
) -> str:
    """Returns a member's path below the tarball's folder.

    Raises:
        UserError: it is no plain file, may not be there, or stands in the way of one before it.
    """
    full = normal(member.name)
    if not member.isreg() or member.issparse():  # a sparse one may claim any size
        raise UserError(f"{name}: {printable(full)} is no file")
    inside = path_inside(full, folder)
    if inside is None:
        raise UserError(f"{name}: {printable(full)} does not belong in it")
    if inside in files:
        raise UserError(f"{name}: {full} is in it twice")
    if any(inside.startswith(f"{o}/") or o.startswith(f"{inside}/") for o in files):
        raise UserError(f"{name}: {full} is a file and a folder")
    return inside


def read_member(name: str, tar: tarfile.TarFile, member: tarfile.TarInfo, inside: str) -> bytes:
    """Reads a member. Raises UserError for a text that is too long, before it is read."""
    is_text = inside == MANIFEST or inside.startswith(f"{EXERCISES}/")
    most = TEXT_BYTES if is_text else UNPACKED_BYTES
    content = tar.extractfile(member).read(most + 1)
    if len(content) > most:
        raise UserError(f"{name}: {inside} has more than {most / 2**20:.0f} MB")
    return content


def unpacked(path: Path) -> bytes:
    """Returns the bytes of a .tar.gz, or of a .tar: some browsers unpack what they download.

    Raises:
        UserError: they are too many or cut off.
    """
    name = printable(path.name)
    try:
        with path.open("rb") as file:
            is_packed = file.read(len(GZIP)) == GZIP
        most = PACKED_BYTES if is_packed else UNPACKED_BYTES
        if path.stat().st_size > most:
            raise UserError(f"{name}: more than {most / 2**20:.0f} MB")
        if not is_packed:
            return path.read_bytes()
        with gzip.open(path) as file:
            content = file.read(UNPACKED_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{name}: no whole tarball: it is cut off or damaged") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(content) > UNPACKED_BYTES:
        raise UserError(f"{name}: it unpacks to more than {UNPACKED_BYTES / 2**20:.0f} MB")
    return content


def path_inside(name: str, folder: str) -> str | None:
    """Returns a member's path below the tarball's folder; None for one that may not be there."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.parts[:1] != (folder,):
        return None
    if not name.isprintable():  # not UTF-8, or several lines
        return None
    if max(len(part.encode()) for part in path.parts) > PART_BYTES:
        return None
    if len(name.encode()) > PATH_BYTES:
        return None
    inside = "/".join(path.parts[1:])
    top, _, file = inside.partition("/")
    belongs = (
        inside in (MANIFEST, ANSWERS, REPORT)
        or (top == EXERCISES and re.fullmatch(r"\w+\.py", file))
        or (top == RUN and path.suffix in KINDS_OF_TABLES)
    )
    return inside if belongs else None


def check_manifest(name: str, files: Mapping[str, bytes]) -> dict[str, object]:
    """Returns what the manifest says besides the checksums.

    Raises:
        UserError: it does not list these files with their checksums.
    """
    try:
        entries = dict(json.loads(files[MANIFEST]).items())
        pairs = dict(entries.pop(FILES, None).items())
    except KeyError:
        raise UserError(f"{name}: {MANIFEST} is missing") from None
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{name}: {MANIFEST} cannot be read") from None
    for file, content in files.items():
        if file != MANIFEST and pairs.pop(file, "") != hashlib.sha256(content).hexdigest():
            raise UserError(f"{name}: {file} is not what {MANIFEST} says")
    if pairs:
        raise UserError(f"{name}: {printable(min(pairs))} is missing")
    return entries


def printable(name: str) -> str:
    """Returns a name of somebody else's for a message: in a line, and in letters that there are."""
    short = name if len(name) <= SHOWN else f"{name[:SHOWN]}…"
    return short if short.isprintable() else ascii(short)
