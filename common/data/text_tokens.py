"""Labelled texts to tokens: a model's own WordPiece, a local one, or one trained on the texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.runtime.hub import check_hub
from common.runtime.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from common.data.text_sources import LabelledTexts

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Of a vocabulary that is trained here, with the numbers 0 to 4."""
LARGEST_ALPHABET = 1000
"""Rarer characters become [UNK], as when BERT's vocabulary was made."""
BATCH_TEXTS = 4096
ENDLESS = 10**9
"""What transformers says of a model that has no greatest length is above this."""
TRANSFORMERS_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
WITHOUT_HUB = "--model_name FOLDER takes a local one, --model_name small needs none"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, and what a trainer has to know of it."""

    backend: Tokenizer
    name: str
    pad_id: int
    model_limit: int | None = None
    """Most tokens that the model takes; None where that is not known."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, special ones among them."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str], max_length: int = 0) -> list[list[int]]:
        """The tokens of each text, [CLS] and [SEP] (or what the model has for them) around them.

        Cut at ``max_length`` tokens, [SEP] being the last of them; 0 leaves them whole.
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
            # Without the offsets of tokens in the text, which nobody needs here.
            tokens += [encoding.ids for encoding in self.backend.encode_batch_fast(batch)]
        return tokens


@dataclass(frozen=True)
class TokenizedTexts:
    """One split as a trainer uses it: n texts, not padded."""

    lengths: NDArray[np.int64]
    """Tokens of each text, int64 [n]."""
    tokens: list[list[int]]
    labels: NDArray[np.int64]
    """0 to ``num_labels`` − 1, int64 [n]."""
    vocab_size: int
    pad_id: int
    num_labels: int
    name: str
    source: str


def tokenize_texts(
    texts: LabelledTexts, tokenizer: TextTokenizer, max_length: int
) -> TokenizedTexts:
    """The tokens of a split, each text cut at ``max_length`` tokens.

    Raises:
        UserError: ``max_length`` leaves no room for text or is beyond the model's.
    """
    check_max_length(max_length, tokenizer.model_limit, tokenizer.name)
    tokens = tokenizer.encode(texts.texts, max_length)
    return TokenizedTexts(
        lengths=np.array([len(ids) for ids in tokens], np.int64),
        tokens=tokens,
        labels=np.array(texts.labels, np.int64),
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        num_labels=texts.num_labels,
        name=texts.name,
        source=texts.source,
    )


def check_max_length(max_length: int, model_limit: int | None, model_name: str) -> None:
    """Raise UserError for a ``max_length`` that the model cannot take, or that holds no text."""
    if max_length < 3:
        raise UserError(f"max_length {max_length}: at least 3 ([CLS], a token, [SEP])")
    if model_limit is not None and max_length > model_limit:
        raise UserError(
            f"max_length {max_length}: model {model_name} takes at most {model_limit} tokens"
        )


def open_tokenizer(
    model_name: str,
    *,
    texts: Sequence[str] = (),
    vocab_size: int = 8192,
    folder: Path | str | None = None,
) -> TextTokenizer:
    """The tokenizer of a model.

    For ``small`` a WordPiece of ``vocab_size`` tokens is trained on ``texts``, the same for the
    same texts on every rank. Other names are those of a local folder (what transformers saves, or
    just ``vocab.txt``) or of a transformers model on the hub or in its cache. ``folder`` holds the
    tokenizer if it is not the model's own.

    Raises:
        UserError: there is none, it is damaged, or the hub cannot be reached.
    """
    if folder is not None:
        return _local_tokenizer(Path(folder))
    if model_name == "small":
        return train_wordpiece(texts, vocab_size)
    path = Path(model_name).expanduser()
    if path.exists() or model_name.startswith((".", "/", "~")):
        return _local_tokenizer(path)
    return _hub_tokenizer(model_name)


def train_wordpiece(texts: Sequence[str], vocab_size: int = 8192) -> TextTokenizer:
    """A lower-cased WordPiece of at most ``vocab_size`` tokens, trained on ``texts``.

    The trainer numbers the pieces ``##a`` in the order in which a hash map with a random seed
    gives it the words, and decides ties by these numbers, so that every process would get another
    vocabulary. Given all single characters as known tokens, it has nothing left to choose.

    Raises:
        UserError: no texts, or a vocabulary too small for their characters.
    """
    from tokenizers import Tokenizer, models, trainers

    if not any(text.strip() for text in texts):
        raise UserError("a WordPiece for the model small is trained on texts; there are none")
    blank = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    _as_bert(blank, lowercase=True)
    letters = _alphabet(texts, blank)
    known = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    if vocab_size < len(known):
        raise UserError(
            f"vocabulary of {vocab_size} tokens: the characters of these texts need {len(known)}"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=known,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    blank.train_from_iterator(texts, trainer)
    # Made anew, as the trained one takes every single character for a special token.
    return _wordpiece(blank.get_vocab(), "small", lowercase=True)


def _alphabet(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """The most frequent characters of normalized texts, sorted."""
    counts: Counter[str] = Counter()
    for letter, count in Counter(chain.from_iterable(texts)).items():
        for normalized in tokenizer.normalizer.normalize_str(letter):
            if not normalized.isspace():
                counts[normalized] += count
    by_count = sorted(counts, key=lambda letter: (-counts[letter], letter))
    return sorted(by_count[:LARGEST_ALPHABET])


def _as_bert(tokenizer: Tokenizer, lowercase: bool) -> None:
    """Divide text into words as BERT does (clean, lower-case without accents, punctuation)."""
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
        return _transformers_tokenizer(str(folder), local=True)
    if (folder / "vocab.txt").is_file():
        return _vocabulary_file(folder / "vocab.txt")
    raise UserError(
        f"tokenizer {folder}: {', '.join(TRANSFORMERS_FILES[:-1])} or vocab.txt is needed"
    )


def _vocabulary_file(path: Path) -> TextTokenizer:
    """The WordPiece of BERT's ``vocab.txt``: a token per line, numbered from 0."""
    try:
        tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason})") from None
    vocabulary = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing or len(vocabulary) < len(tokens):
        problem = f"has no {', '.join(missing)}" if missing else "holds a token twice"
        raise UserError(f"{path}: {problem}; one token per line is needed, as in BERT's")
    # The file does not say. In a vocabulary of lower-cased text nothing can match upper case.
    cased = any(token != token.lower() for token in vocabulary if not token.startswith("["))
    return _wordpiece(vocabulary, str(path.parent), lowercase=not cased)


def _hub_tokenizer(name: str) -> TextTokenizer:
    from huggingface_hub import try_to_load_from_cache

    def is_cached(file: str) -> bool:
        return isinstance(try_to_load_from_cache(name, file), str)

    # transformers asks the hub for what is missing, which takes it a minute where there is none.
    cached = is_cached("config.json") and (is_cached("tokenizer.json") or is_cached("vocab.txt"))
    if not cached:
        check_hub(f"model {name}", WITHOUT_HUB)
    return _transformers_tokenizer(name, local=cached)


def _transformers_tokenizer(name: str, *, local: bool) -> TextTokenizer:
    from transformers import AutoTokenizer  # seconds, so only for a model that is transformers'

    try:
        loaded = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except Exception as error:  # of transformers, tokenizers, json or the hub, by what is broken
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"tokenizer {name}: {problem}; {WITHOUT_HUB}") from None
    if not getattr(loaded, "is_fast", False):
        raise UserError(f"tokenizer {name}: has no fast tokenizer (tokenizer.json); {WITHOUT_HUB}")
    limit = loaded.model_max_length
    # A model that generates text has none; what fills up a row is masked, so any token does.
    pad_id = next((i for i in (loaded.pad_token_id, loaded.eos_token_id) if i is not None), 0)
    return TextTokenizer(
        loaded.backend_tokenizer, name, pad_id, int(limit) if limit < ENDLESS else None
    )
