"""Loading from the Hugging Face hub or its cache: fails within seconds, and in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from common.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Loaded = TypeVar("Loaded")


def load(
    name: str, what: str, instead: str, loader: Callable[..., Loaded], files: Sequence[str] = ()
) -> Loaded:
    """Loads something from a folder or the hub's cache, else from the hub if it can be reached.

    Args:
        what: the kind of thing, such as ``model``, for messages.
        instead: the way to do without the hub, for messages.
        loader: takes the keyword arguments of ``from_pretrained`` that say where to look.
        files: names of files, one of which must be in the cache: without a tokenizer's own file
            transformers makes an empty one.

    Raises:
        UserError: it cannot be had or read.
    """
    is_folder = Path(name).is_dir()
    with one_line_errors(f"{what} {name}", instead):
        if is_folder or not files or _is_cached(name, files):
            try:
                return loader(local_files_only=True)
            except OSError:
                if is_folder:
                    raise
        check_hub(f"{what} {name}", instead)
        return loader()


def load_fast_tokenizer(
    name: str, what: str, instead: str, files: Sequence[str]
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer of transformers that has one of ``tokenizers`` behind it; see ``load``."""

    def from_pretrained(**where: bool) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer  # the import takes seconds

        return AutoTokenizer.from_pretrained(name, **where)

    loaded = load(name, what, instead, from_pretrained, files)
    if not getattr(loaded, "is_fast", False):
        raise UserError(f"{what} {name}: has no fast tokenizer (tokenizer.json); {instead}")
    return loaded


def _is_cached(name: str, files: Sequence[str]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


@contextlib.contextmanager
def one_line_errors(what: str, instead: str) -> Iterator[None]:
    """Turns whatever the hub's libraries raise about ``what`` into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any kind: files of others are looked at with few checks
        raise UserError(f"{what}: {first_line(error)}; {instead}") from None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, after its kind where that says more."""
    line = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    if line and (isinstance(error, OSError | ValueError) or type(error) is Exception):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def check_hub(what: str, instead: str) -> None:
    """Raises UserError if the Hugging Face hub does not answer within seconds.

    Its own libraries retry for most of a minute before they give up.

    Args:
        what: the thing wanted from the hub, such as ``model distilbert-base-uncased``.
        instead: the way to do without the hub, for the message.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # raised by httpx or requests, by version
        raise UserError(
            f"{what}: {constants.ENDPOINT} cannot be reached ({first_line(error)}); {instead}"
        ) from None
