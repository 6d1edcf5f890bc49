"""Synthetic text whose entropy is known: the lowest loss that any model can reach on it.

The source is a Markov chain of order two. Its conditional distributions are log-linear,

    P(x | b before it, a before that) = softmax_x(s · U[x]·(A[b] + B[a]) + bias[x]),

which a transformer's embeddings and output layer can express, so that a small model learns it in a
few hundred steps: first the frequencies, then pairs, then triples. Each of these has an entropy of
its own, computed here exactly, as a mark on a loss curve. A model that sees the same sample more
than once may fall below the entropy by learning it by heart.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common.data.shard_files import SOURCE_FILE, read_shard, write_shard
from common.errors import UserError, naming_os_errors
from common.runtime.progress import Progress
from common.runtime.records.run_directory import write_atomically

logger = logging.getLogger(__name__)

DIMENSION = 8
SHARPNESS = 0.65
BIAS = 0.5
"""Parameters that give the default source an entropy rate of about 3.1 nats a token. The best model
of pairs is 1.0 nats above that, and the best model of frequencies 1.8."""
CHAIN_TOKENS = 4096
UNIFORMS_AT_ONCE = 64
LARGEST_ALPHABET = 512
"""Upper bound on the symbols: the table of triples has symbols³ numbers, 1 GiB at 512."""


@dataclass(frozen=True)
class MarkovSource:
    """A Markov source of order two over ``symbols`` symbols, drawn at random by ``seed``.

    Entropies are in nats a token. The table of the default source takes 128 MiB and a second.

    Raises:
        UserError: fewer than 2 symbols or more than 512, a seed below 0.
    """

    symbols: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.symbols <= LARGEST_ALPHABET:
            raise UserError(f"{self.symbols} symbols: legal are 2 to {LARGEST_ALPHABET}")
        _check_seed(self.seed)

    @cached_property
    def transitions(self) -> np.ndarray:
        """Computes P(x | a, b), float64 [a, b, x]: a is two before x, b just before it."""
        random = np.random.default_rng(self.seed)
        u, of_b, of_a = random.standard_normal((3, self.symbols, DIMENSION))
        bias = BIAS * random.standard_normal(self.symbols)
        table = np.empty((self.symbols,) * 3)
        for a in range(self.symbols):
            logits = SHARPNESS * (of_b + of_a[a]) @ u.T + bias
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            table[a] = weights / weights.sum(axis=1, keepdims=True)
        return table

    @cached_property
    def stationary(self) -> np.ndarray:
        """Computes the stationary probability π(a, b) of each pair of neighbours, float64 [a, b].

        Every triple has a positive probability, so the chain of pairs forgets where it began.
        """
        # Power iteration on the chain of pairs: π'(b, x) = Σ_a π(a, b) P(x | a, b), from uniform
        # until the total change is 1e-12. One matrix product for each b does it without the matrix
        # of pairs by pairs, which would have symbols⁴ entries.
        by_b = self.transitions.transpose(1, 0, 2)
        pairs = np.full((self.symbols,) * 2, self.symbols**-2.0)
        change = 1.0
        while change > 1e-12:
            following = np.matmul(pairs.T[:, None, :], by_b)[:, 0, :]  # Σ_a π(a, b) P(x | a, b)
            following /= following.sum()
            change = np.abs(following - pairs).sum()
            pairs = following
        return pairs

    @cached_property
    def entropy_nats(self) -> float:
        """Computes the entropy rate, Σ π(a, b) H(P(· | a, b)) (Cover and Thomas, theorem 4.2.4)."""
        rows = [_entropies(self.transitions[a]) for a in range(self.symbols)]
        return float((self.stationary * np.array(rows)).sum())

    @property
    def unigram_entropy_nats(self) -> float:
        """Returns the loss of the best model that knows only the frequency of each symbol."""
        return float(_entropies(self.stationary.sum(axis=0)))

    @property
    def first_order_entropy_nats(self) -> float:
        """Returns the loss of the best model that sees only the symbol before: H(a, b) − H(a)."""
        return float(_entropies(self.stationary.ravel())) - self.unigram_entropy_nats

    def sample(self, num_tokens: int, seed: int) -> np.ndarray:
        """Draws tokens of the source, uint16 [num_tokens]; the same for the same seed.

        Many independent chains are drawn side by side and laid end to end, each of at least 4096
        tokens (or one chain of all) from a pair of the stationary distribution. The first two
        tokens of a chain have a context that is not their own: that costs a model that knows the
        source less than 0.01 nats a token.
        """
        if num_tokens < 1:
            raise UserError(f"{num_tokens} synthetic tokens: must be at least 1")
        _check_seed(seed)
        random = np.random.default_rng(seed)
        chains = max(1, num_tokens // CHAIN_TOKENS)
        length = max(2, -(-num_tokens // chains))
        tokens = np.empty((length, chains), np.uint16)
        # A pair (a, b) is kept as the number a · symbols + b. The first pair of each chain is drawn
        # by inverting the cumulative stationary distribution at a uniform number.
        starts = np.searchsorted(np.cumsum(self.stationary), random.random(chains), side="right")
        starts = np.minimum(starts, self.symbols**2 - 1)  # the sum may end just below 1
        tokens[0], tokens[1] = np.divmod(starts, self.symbols)
        pair = starts.astype(np.int64)
        progress = Progress(-(-(length - 2) // UNIFORMS_AT_ONCE))
        for first in range(2, length, UNIFORMS_AT_ONCE):
            uniforms = random.random((UNIFORMS_AT_ONCE, chains), np.float32)
            for step, uniform in zip(range(first, length), uniforms, strict=False):
                symbol = self._draw(pair, uniform)
                tokens[step] = symbol
                pair = pair % self.symbols * self.symbols + symbol  # (a, b) becomes (b, symbol)
            progress.step("drawing synthetic tokens")
        return tokens.T.ravel()[:num_tokens]

    @cached_property
    def _cumulative(self) -> np.ndarray:
        """Computes P(up to x | a, b), float32 [a, b, x], with x padded to a power of two."""
        width = 1 << (self.symbols - 1).bit_length()
        table = np.full((self.symbols, self.symbols, width), 2.0, np.float32)
        for a in range(self.symbols):  # the last symbol takes what rounding leaves
            table[a, :, : self.symbols - 1] = np.cumsum(self.transitions[a], axis=1)[:, :-1]
        return table

    def _draw(self, pair: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Returns the symbol after each pair, int64 [chains], for uniform numbers, [chains]."""
        table = self._cumulative
        width = table.shape[-1]
        flat = table.ravel()
        # A branch-free binary search in the rows of all pairs at once: the symbol is the number of
        # cumulative probabilities that do not exceed the uniform number. ``searchsorted`` would
        # need a call for each row; the power of two makes every search equally long.
        row = pair * width
        at = row.copy()
        half = width // 2
        while half:
            at += half * (flat[at + (half - 1)] <= uniform)
            half //= 2
        return at - row

    def settings(self, num_tokens: int) -> dict:
        """Returns all that decides the tokens of a sample, by the names in ``source.json``."""
        return {
            "source": "markov",
            "order": 2,
            "symbols": self.symbols,
            "seed": self.seed,
            "dimension": DIMENSION,
            "sharpness": SHARPNESS,
            "bias": BIAS,
            "num_tokens": num_tokens,
        }

    def describe(self, num_tokens: int) -> dict:
        """Returns the content of ``source.json``: settings and entropies (nats a token)."""
        return self.settings(num_tokens) | {
            "entropy_nats": self.entropy_nats,
            "first_order_entropy_nats": self.first_order_entropy_nats,
            "unigram_entropy_nats": self.unigram_entropy_nats,
        }


def synthetic_shards(folder: Path | str, num_tokens: int = 4_000_000, seed: int = 0) -> Path:
    """Returns a folder below ``folder`` with a shard of the default source and ``source.json``.

    Makes it if it is missing or incomplete. Two processes may make it at once: they write the same
    bytes, and ``source.json`` comes last. ``seed`` is that of the source and of the sample.

    Raises:
        UserError: fewer than 1 token, a seed below 0, or an unwritable folder.
    """
    source = MarkovSource(seed=seed)
    path = Path(folder) / f"markov-{source.symbols}-symbols-seed-{seed}-{num_tokens}-tokens"
    shard = path / "tokens_000000.bin"
    if not _intact(path, shard, source, num_tokens):
        logger.info("making %s synthetic tokens: %s", f"{num_tokens:,}", path)
        tokens = source.sample(num_tokens, seed)
        with naming_os_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            write_shard(shard, tokens)
            write_source(path, source, num_tokens)
    return path


def write_source(folder: Path | str, source: MarkovSource, num_tokens: int) -> None:
    """Writes ``source.json`` beside shards of ``source``."""
    text = json.dumps(source.describe(num_tokens), indent=1)
    write_atomically(Path(folder) / SOURCE_FILE, text)


def read_source(folder: Path | str) -> dict | None:
    """Reads ``source.json`` in a folder of shards, or beside one shard; None if there is none.

    Raises:
        UserError: it is there and cannot be read.
    """
    folder = Path(folder)
    path = (folder.parent if folder.is_file() else folder) / SOURCE_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("entropy_nats"), float):
        raise UserError(f"{path}: expected JSON with entropy_nats; remove it or make it again")
    return content


def _intact(path: Path, shard: Path, source: MarkovSource, num_tokens: int) -> bool:
    """Returns True if a folder holds the shard that this version of the source would write."""
    try:
        content = read_source(path) or {}
        is_same = source.settings(num_tokens).items() <= content.items()
        return is_same and len(read_shard(shard)) == num_tokens
    except UserError:
        return False


def _entropies(probabilities: np.ndarray) -> np.ndarray:
    """Computes −Σ p log p in nats along the last axis; a probability may be 0 by underflow."""
    logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    return -(probabilities * logs).sum(axis=-1)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"seed {seed}: must be at least 0")
