"""Labelled texts to tokens: by a model's own WordPiece or one trained on them, or as hashes."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.runtime.hugging_face_hub import load_fast_tokenizer
from common.runtime.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from common.data.text_sources import LabelledTexts

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of a vocabulary that is trained here, numbered 0 to 4."""
LARGEST_ALPHABET = 1000
"""Upper bound on the characters of a vocabulary: rarer ones become [UNK], as in BERT's."""
BATCH_TEXTS = 4096
ENDLESS = 10**9
"""Threshold for lengths, in tokens: transformers gives more for a model without a limit."""
TRANSFORMERS_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
WITHOUT_HUB = "--model_name FOLDER takes a local one, --model_name small needs none"
PAD_ID = 0
"""Number of padding among those of hashed words."""
WORD = re.compile(r"[^\W_]+")
"""Letters and digits of any script; everything else divides words."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its padding token and the longest text that its model takes."""

    backend: Tokenizer
    name: str
    pad_id: int
    model_limit: int | None = None
    """Most tokens that the model takes; None where that is not known."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens in the vocabulary, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str], max_length: int = 0) -> list[list[int]]:
        """Returns the tokens of each text, between [CLS] and [SEP] or the model's equivalents.

        Each text is cut at ``max_length`` tokens, of which [SEP] is the last; 0 leaves it whole.
        """
        self.backend.no_padding()
        self.backend.no_truncation()
        if max_length:
            self.backend.enable_truncation(max_length)
        tokens: list[list[int]] = []
        progress = Progress(-(-len(texts) // BATCH_TEXTS))
        for first in range(0, len(texts), BATCH_TEXTS):
            if first:
                progress.step("texts to tokens")
            batch = list(texts[first : first + BATCH_TEXTS])
            # The fast variant leaves out the tokens' offsets in the text, which are not used.
            tokens += [encoding.ids for encoding in self.backend.encode_batch_fast(batch)]
        return tokens


@dataclass(frozen=True)
class TokenizedTexts:
    """One split of n texts as tokens, not padded."""

    lengths: NDArray[np.int64]
    """Tokens of each text, int64 [n]."""
    tokens: list[list[int]]
    labels: NDArray[np.int64]
    """Class of each text, 0 to ``num_labels`` − 1: int64 [n]."""
    vocab_size: int
    pad_id: int
    num_labels: int
    name: str
    source: str

    @classmethod
    def of(
        cls, texts: LabelledTexts, tokens: list[list[int]], *, vocab_size: int, pad_id: int
    ) -> TokenizedTexts:
        """Makes a split of its texts' tokens."""
        return cls(
            lengths=np.array([len(ids) for ids in tokens], np.int64),
            tokens=tokens,
            labels=np.array(texts.labels, np.int64),
            vocab_size=vocab_size,
            pad_id=pad_id,
            num_labels=texts.num_labels,
            name=texts.name,
            source=texts.source,
        )


def tokenize_texts(
    texts: LabelledTexts, tokenizer: TextTokenizer, max_length: int
) -> TokenizedTexts:
    """Returns the tokens of a split, each text cut at ``max_length`` tokens.

    Raises:
        UserError: ``max_length`` leaves no room for text or is beyond the model's.
    """
    check_max_length(max_length, tokenizer.model_limit, tokenizer.name)
    tokens = tokenizer.encode(texts.texts, max_length)
    return TokenizedTexts.of(
        texts, tokens, vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id
    )


def check_max_length(max_length: int, model_limit: int | None, model_name: str) -> None:
    """Raises UserError if ``max_length`` is above the model's limit or leaves no room for text."""
    if max_length < 3:
        raise UserError(f"max_length {max_length}: at least 3 ([CLS], a token, [SEP])")
    if model_limit is not None and max_length > model_limit:
        raise UserError(
            f"max_length {max_length}: model {model_name} takes at most {model_limit} tokens"
        )


def hash_texts(texts: LabelledTexts, vocab_size: int, max_length: int) -> TokenizedTexts:
    """Returns a split with its words as numbers, each text cut at ``max_length`` words.

    Args:
        vocab_size: count of numbers; 0 is padding, words have 1 to ``vocab_size`` − 1.
    """
    tokens = hashed_words(texts.texts, vocab_size, max_length)
    return TokenizedTexts.of(texts, tokens, vocab_size=vocab_size, pad_id=PAD_ID)


def hashed_words(texts: Sequence[str], vocab_size: int, max_length: int) -> list[list[int]]:
    """Returns the lower-cased words of each text as numbers.

    A word's number is 1 + (CRC-32 of its UTF-8) mod (``vocab_size`` − 1). Nothing is trained or
    downloaded, and every rank numbers the words alike: Python's own ``hash`` differs from process
    to process. A model cannot tell words that share a number apart, which with 20,000 numbers
    hardly matters to a classifier. A text without words keeps one token, that of the empty word, so
    that a mean over its tokens exists.
    """
    numbers: dict[str, int] = {}

    def number(word: str) -> int:
        if word not in numbers:
            numbers[word] = 1 + zlib.crc32(word.encode()) % (vocab_size - 1)
        return numbers[word]

    words = ((WORD.findall(text.lower()) or [""])[:max_length] for text in texts)
    return [[number(word) for word in of_text] for of_text in words]


def open_tokenizer(
    model_name: str, *, texts: Sequence[str] = (), vocab_size: int = 8192
) -> TextTokenizer:
    """Opens the tokenizer of a model.

    For ``small`` a WordPiece of ``vocab_size`` tokens is trained on ``texts``, the same for the
    same texts on every rank. Other names are those of a local folder (what transformers saves, or
    just ``vocab.txt``) or of a transformers model on the hub or in its cache.

    Raises:
        UserError: there is none, it is damaged, or the hub cannot be reached.
    """
    if model_name == "small":
        return train_wordpiece(texts, vocab_size)
    path = Path(model_name).expanduser()
    if path.exists() or model_name.startswith((".", "/", "~")):
        return _local_tokenizer(path)
    return _transformers_tokenizer(model_name)


def train_wordpiece(texts: Sequence[str], vocab_size: int = 8192) -> TextTokenizer:
    """Trains a lower-cased WordPiece of at most ``vocab_size`` tokens on ``texts``.

    The result is the same in every process. Left alone, the trainer numbers the pieces ``##a`` in
    the order of a hash map with a random seed and decides ties by these numbers. Here it is given
    all single characters as known tokens, so that it has nothing left to choose.

    Raises:
        UserError: no texts, or a vocabulary too small for their characters.
    """
    from tokenizers import Tokenizer, models, trainers

    if not any(text.strip() for text in texts):
        raise UserError("a WordPiece for the model small is trained on texts; there are none")
    blank = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    _as_bert(blank, lowercase=True)
    letters = _alphabet(texts, blank)
    required = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    if vocab_size < len(required):
        raise UserError(
            f"vocabulary of {vocab_size} tokens: the characters of these texts need {len(required)}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=required,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    blank.train_from_iterator(texts, trainer)
    # A new tokenizer, as the trained one takes every single character for a special token.
    return _wordpiece(blank.get_vocab(), "small", lowercase=True)


def _alphabet(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Returns the most frequent characters of the normalized texts, at most 1000, sorted."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(chain.from_iterable(texts)).items():
        for normalized in tokenizer.normalizer.normalize_str(letter):
            if not normalized.isspace():
                counts[normalized] += count
    by_count = sorted(counts, key=lambda letter: (-counts[letter], letter))
    return sorted(by_count[:LARGEST_ALPHABET])


def _as_bert(tokenizer: Tokenizer, lowercase: bool) -> None:
    """Makes a tokenizer divide text as BERT does: clean, lower-case, no accents, punctuation."""
    from tokenizers import normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _wordpiece(vocabulary: Mapping[str, int], name: str, lowercase: bool) -> TextTokenizer:
    from tokenizers import Tokenizer, decoders, models, processors

    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token="[UNK]"))
    _as_bert(tokenizer, lowercase)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    tokenizer.decoder = decoders.WordPiece()
    return TextTokenizer(tokenizer, name, pad_id=vocabulary["[PAD]"])


def _local_tokenizer(folder: Path) -> TextTokenizer:
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise UserError(f"tokenizer {folder}: {problem}; a folder is needed")
    if any((folder / name).is_file() for name in TRANSFORMERS_FILES):
        return _transformers_tokenizer(str(folder))
    if (folder / "vocab.txt").is_file():
        return _vocabulary_file(folder / "vocab.txt")
    raise UserError(
        f"tokenizer {folder}: {', '.join(TRANSFORMERS_FILES[:-1])} or vocab.txt is needed"
    )


def _vocabulary_file(path: Path) -> TextTokenizer:
    """Reads the WordPiece of BERT's ``vocab.txt``: a token per line, numbered from 0."""
    try:
        tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason})") from None
    vocabulary = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing or len(vocabulary) < len(tokens):
        problem = f"has no {', '.join(missing)}" if missing else "holds a token twice"
        raise UserError(f"{path}: {problem}; one token per line is needed, as in BERT's")
    # The file does not say whether text is lower-cased first, but then no token has upper case.
    cased = any(token != token.lower() for token in vocabulary if not token.startswith("["))
    return _wordpiece(vocabulary, str(path.parent), lowercase=not cased)


def _transformers_tokenizer(name: str) -> TextTokenizer:
    files = ["tokenizer.json", "vocab.txt"]
    loaded = load_fast_tokenizer(name, "tokenizer", WITHOUT_HUB, files)
    limit = loaded.model_max_length
    # A generative model has no padding token. Padding is masked, so any token serves.
    pad_id = next((i for i in (loaded.pad_token_id, loaded.eos_token_id) if i is not None), 0)
    return TextTokenizer(
        loaded.backend_tokenizer, name, pad_id, int(limit) if limit < ENDLESS else None
    )
