"""Text to tokens: a byte-pair vocabulary, and documents that are encoded as they are read.

No text is held in memory whole. A document is preceded by ``<|endoftext|>``, as in GPT-2's and
FineWeb's shards; a literal mark in a document of a dataset begins a new one.
"""

from __future__ import annotations

import codecs
import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.shard_files import LARGEST_TOKEN
from common.errors import UserError
from common.runtime.hugging_face_hub import check_hub, first_line, load_fast_tokenizer
from common.runtime.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
PIECE_BYTES = 2**18
UNCUT_CHARACTERS = 2 * PIECE_BYTES
"""Length up to which a text without a place to cut it is held in memory."""
BATCH_PIECES, BATCH_CHARACTERS = 512, 2**21
"""Size at which a batch to encode ends: that many pieces or characters, whichever comes first."""
LOCAL_VOCABULARIES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
)
CUT = re.compile(r".*\S(?=[ \r\n])", re.DOTALL)
"""A text up to its last visible character before a space or line break."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer whose tokens fit in 16 bits, and the token that begins a document."""

    tokenizer: Tokenizer
    end_of_text: int

    @property
    def size(self) -> int:
        """Returns the number of tokens in the vocabulary, added ones included."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the tokens of each text, without tokens for its beginning or end."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


@dataclass(frozen=True)
class Piece:
    """Part of a document, or all of it."""

    text: str
    begins_document: bool = True


def load_vocabulary(name: str) -> Vocabulary:
    """Loads a vocabulary from a folder, or from the Hugging Face hub (or its cache) by name.

    A folder holds ``tokenizer.json``, ``vocab.json`` and ``merges.txt``, or the ``encoder.json``
    and ``vocab.bpe`` that OpenAI published; the last two pairs are read as GPT-2's byte-level BPE.

    Raises:
        UserError: none of them is there or they are damaged, the hub cannot be reached, or the
            vocabulary has no ``<|endoftext|>`` or does not fit in 16 bits.
    """
    folder = Path(name).expanduser()
    if folder.exists() or name.startswith((".", "/", "~")):
        tokenizer = _local_tokenizer(folder)
    else:
        instead = "--vocab FOLDER takes a local one"
        loaded = load_fast_tokenizer(name, "vocabulary", instead, ["tokenizer.json"])
        tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()  # a tokenizer.json may say how its model cuts and pads texts
    tokenizer.no_padding()
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise UserError(f"vocabulary {name}: has no {END_OF_TEXT}, which begins every document")
    vocabulary = Vocabulary(tokenizer, end_of_text)
    if vocabulary.size > LARGEST_TOKEN + 1:
        raise UserError(
            f"vocabulary {name}: {vocabulary.size} tokens; a shard's 16 bits hold at most "
            f"{LARGEST_TOKEN + 1}"
        )
    return vocabulary


def _local_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabularies = [
        names for names in LOCAL_VOCABULARIES if all((folder / n).is_file() for n in names)
    ]
    if not vocabularies:
        legal = ", or ".join(" and ".join(names) for names in LOCAL_VOCABULARIES)
        raise UserError(f"no vocabulary in {folder}: a folder with {legal} is needed")
    files = [str(folder / name) for name in vocabularies[0]]
    try:
        if len(files) == 1:
            return Tokenizer.from_file(files[0])
        tokenizer = Tokenizer(models.BPE.from_file(*files))
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(f"vocabulary {' and '.join(files)}: {first_line(error)}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer


def text_pieces(path: Path | str) -> Iterator[Piece]:
    """Yields the documents of a UTF-8 file, divided at ``<|endoftext|>``, in pieces of 256 KiB.

    The size is approximate: a piece ends where a visible character meets a space or line break. No
    pre-token of GPT-2 reaches over such a place (only its first character can be a space, and a
    run of white space is not divided), so the tokens are those of the whole text. A piece that has
    no such place is cut anywhere, which can cost a token.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; --text takes a file, --dataset a folder of data files"
        )
    done_bytes = 0
    try:
        progress = Progress(-(-path.stat().st_size // PIECE_BYTES))
        decoder = codecs.getincrementaldecoder("utf-8")()
        pending, begins = "", True
        with path.open("rb") as file:
            while encoded := file.read(PIECE_BYTES):
                *complete, last = (pending + decoder.decode(encoded)).split(END_OF_TEXT)
                for text in complete:
                    yield Piece(text, begins)
                    begins = True
                cut = _cut(last)
                if cut:
                    yield Piece(last[:cut], begins)
                    begins = False
                pending = last[cut:]
                done_bytes += len(encoded)
                progress.step(f"reading {path.name}")
        decoder.decode(b"", final=True)
        yield Piece(pending, begins)
    except UnicodeDecodeError as error:
        where = f"near byte {done_bytes + error.start}"
        raise UserError(f"{path}: not UTF-8 text {where} ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _cut(text: str) -> int:
    """Returns the position at which a text can be cut; 0 while it is too short to be cut."""
    match = CUT.match(text)
    if match:
        return match.end()
    # The end of the text is kept: it may be the beginning of an end-of-text mark.
    return len(text) - len(END_OF_TEXT) if len(text) > UNCUT_CHARACTERS else 0


def dataset_pieces(
    name: str, config: str | None = None, split: str = "train", text_column: str = "text"
) -> Iterator[Piece]:
    """Yields the documents of a Hugging Face dataset, streamed from a local folder or the hub.

    Raises:
        UserError: it cannot be reached or read, or has no such configuration, split or column.
    """
    import datasets

    local = "--dataset FOLDER, --text FILE and --synthetic need no hub"
    path = Path(name)
    if path.is_file() or (not path.exists() and name.startswith((".", "/", "~"))):
        problem = "a file" if path.is_file() else "does not exist"
        raise UserError(f"dataset {name}: {problem}; a name on the hub or a folder is needed")
    if not path.exists():
        check_hub(f"dataset {name}", local)
    last, characters = time.monotonic(), 0
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows, 1):
            text = row.get(text_column)
            if text_column not in row or not isinstance(text, str | None):
                columns = ", ".join(row)
                raise UserError(f"dataset {name}: {text_column!r} is no text column; has {columns}")
            yield Piece(text or "")
            characters += len(text or "")
            if time.monotonic() - last >= 2:
                last = time.monotonic()
                logger.info(
                    "%s: %s documents, %s characters", name, f"{number:,}", f"{characters:,}"
                )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        hint = f"; {local}" if isinstance(error, ConnectionError) else ""
        raise UserError(f"dataset {name}, split {split}: {first_line(error)}{hint}") from None


def encode(
    pieces: Iterable[Piece], vocabulary: Vocabulary, max_tokens: int = 0
) -> Iterator[np.ndarray]:
    """Yields the tokens of pieces, uint16 [any], with ``<|endoftext|>`` before each document.

    Documents without text are left out. Ends after ``max_tokens`` tokens; 0 is no limit.
    """
    remaining = max_tokens or None
    for batch in _batches(piece for piece in pieces if piece.text):
        tokens: list[int] = []
        ids = vocabulary.encode([piece.text for piece in batch])
        for piece, of_piece in zip(batch, ids, strict=True):
            if piece.begins_document:
                tokens.append(vocabulary.end_of_text)
            tokens += of_piece
        encoded = np.array(tokens[:remaining], np.uint16)
        yield encoded
        if remaining is not None:
            remaining -= len(encoded)
            if not remaining:
                return


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if len(batch) == BATCH_PIECES or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
