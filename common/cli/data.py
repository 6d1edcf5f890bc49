"""``ddplab data``: measurements kept for others, token shards to train on, lengths of texts."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from common.cli.help import Subcommands
from common.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from common.data.markov_text import MarkovSource
    from common.data.token_shards import ShardWriter


@dataclass(frozen=True)
class Record:
    """Keep a complete run's tables under data/<machine>/<assignment>, for others to read."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """Run directory to record."""
    machine: str
    """Name of a folder of data/, made if it is not there; any name of yours, such as h100-8."""
    assignment: str = ""
    """Name of the run's folder there, like study-accuracy; by default the assignment it is of."""

    def run(self) -> None:
        """Copies the tables and says where they are."""
        from common.report.recording import keep_run
        from common.runtime.paths import relative_to_project

        run_dir = Path(self.run_dir)
        name = self.assignment or run_dir.absolute().parent.name
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: not a run directory (no environment.json)")
        if not self.assignment and not re.fullmatch(r"assignment\d", name):
            raise UserError(f"{run_dir}: of no assignment by its path; give --assignment NAME")
        print(relative_to_project(keep_run(run_dir, self.machine, name)))


@dataclass(frozen=True)
class Tokens:
    """Make token shards from a text file, a Hugging Face dataset or a source of known entropy.

    One of --text, --dataset and --synthetic says from what. For example --dataset
    HuggingFaceFW/fineweb-edu --dataset_config sample-10BT, or --text FILE --vocab FOLDER offline.
    """

    text: str | None = None
    """UTF-8 text file; <|endoftext|> divides documents."""
    dataset: str | None = None
    """Data set on the Hugging Face hub, or a local folder of data files; it is streamed."""
    synthetic: bool = False
    """Write synthetic text: symbols of a Markov source, whose entropy is the lowest loss
    possible."""
    dataset_config: str | None = None
    """Configuration of the dataset, like wikitext-103-raw-v1."""
    split: str = "train"
    """Split of the dataset."""
    text_column: str = "text"
    """Column of the dataset that holds the text."""
    vocab: str = "gpt2"
    """Vocabulary: a folder with tokenizer.json, vocab.json and merges.txt, or encoder.json and
    vocab.bpe; or a name on the hub."""
    max_tokens: int = 0
    """Stop after so many tokens; 0 takes all of the text or dataset."""
    num_tokens: int = 4_000_000
    """Tokens of the synthetic source."""
    seed: int = 0
    """Seed of the synthetic source and of its sample."""
    output_dir: str = "outputs/tokens"
    """Folder of the shards; it must hold none."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard; the last one holds the rest."""

    def run(self) -> None:
        """Writes the shards and says how to train on them."""
        from common.data.token_shards import ShardWriter

        self._check()
        logging.getLogger("common").setLevel(logging.INFO)  # progress
        writer = ShardWriter(self.output_dir, shard_tokens=self.shard_tokens)
        with writer:
            source = self._write_synthetic(writer) if self.synthetic else self._write_text(writer)
        for name, count in writer.written:
            print(f"{name}: {count:,} tokens")
        if source:
            from common.data.markov_text import write_source

            write_source(writer.folder, source, self.num_tokens)
            print(
                f"{source.symbols} symbols; the lowest loss that a model can reach, "
                "in nats a token:"
                f"\n  knowing how frequent each symbol is: {source.unigram_entropy_nats:.4f}"
                f"\n  knowing the symbol before: {source.first_order_entropy_nats:.4f}"
                f"\n  knowing the source: {source.entropy_nats:.4f}"
            )
        print(f"{writer.num_tokens:,} tokens; to train on them: --data {self.output_dir}")

    def _check(self) -> None:
        """Raises UserError for options that contradict each other or would have no effect."""
        sources = [name for name in SOURCES if getattr(self, name) not in (None, False)]
        if len(sources) != 1:
            names = " and ".join(f"--{name}" for name in sources) or "none"
            raise UserError(f"exactly one of --text, --dataset and --synthetic, not {names}")
        for field in fields(self):
            only = SOURCES_OF.get(field.name, SOURCES)
            if sources[0] not in only and getattr(self, field.name) != field.default:
                needs = " or ".join(f"--{name}" for name in only)
                raise UserError(f"--{field.name} needs {needs}; --{sources[0]} does not use it")
        if self.max_tokens < 0:
            raise UserError(f"--max_tokens {self.max_tokens}: at least 1, or 0 for all")

    def _write_synthetic(self, writer: ShardWriter) -> MarkovSource:
        from common.data.markov_text import MarkovSource

        source = MarkovSource(seed=self.seed)
        writer.append(source.sample(self.num_tokens, self.seed))
        return source

    def _write_text(self, writer: ShardWriter) -> None:
        for tokens in self._encoded():
            writer.append(tokens)
        if not writer.num_tokens:
            raise UserError(f"{self.text or self.dataset}: no text in it")

    def _encoded(self) -> Iterator[np.ndarray]:
        # Read when these libraries are imported: what they say beside an error is its repetition.
        for name in ("HF_HUB", "DATASETS", "TRANSFORMERS"):
            os.environ.setdefault(f"{name}_VERBOSITY", "critical")
        from common.data.tokenization import dataset_pieces, encode, load_vocabulary, text_pieces

        vocabulary = load_vocabulary(self.vocab)
        if self.text is not None:
            pieces = text_pieces(self.text)
        else:
            pieces = dataset_pieces(self.dataset, self.dataset_config, self.split, self.text_column)
        return encode(pieces, vocabulary, self.max_tokens)


@dataclass(frozen=True)
class TextLengths:
    """Record how long the texts of training splits are, for ``--dataset synthetic`` to draw from.

    Lengths are in tokens with [CLS] and [SEP], before any cut. Offline: --dataset_dir FOLDER with
    the files and --tokenizer FOLDER with BERT's vocab.txt.
    """

    datasets: tuple[str, ...] = ("sst2", "ag_news", "imdb")
    """Data sets to count; all of their training split is read."""
    dataset_dir: str = "datasets"
    """Folder of local files, which come first; others come from the hub or its cache."""
    tokenizer: str = "bert-base-uncased"
    """Tokenizer: a transformers model or a local folder."""
    output_dir: str = "data/text-lengths"
    """Folder of the CSV files, one per data set."""

    def run(self) -> None:
        """Writes the tables and says what is in them."""
        from common.data.text_lengths import LengthDistribution, write_text_lengths
        from common.data.text_sources import load_texts
        from common.data.text_tokens import open_tokenizer

        logging.getLogger("common").setLevel(logging.INFO)  # progress
        tokenizer = open_tokenizer(self.tokenizer)
        for name in self.datasets:
            texts = load_texts(name, "train", dataset_dir=self.dataset_dir).texts
            lengths = [len(tokens) for tokens in tokenizer.encode(texts)]
            distribution = LengthDistribution.of(lengths, name)
            path = write_text_lengths(distribution, Path(self.output_dir))
            median, p95 = distribution.quantile([0.5, 0.95])
            print(
                f"{path}: {distribution.num_texts:,} texts, mean {distribution.mean:.1f} tokens, "
                f"median {median}, P95 {p95}, longest {distribution.lengths[-1]}"
            )


SOURCES = ("text", "dataset", "synthetic")
SOURCES_OF = {
    "dataset_config": ("dataset",),
    "split": ("dataset",),
    "text_column": ("dataset",),
    "vocab": ("text", "dataset"),
    "max_tokens": ("text", "dataset"),
    "num_tokens": ("synthetic",),
    "seed": ("synthetic",),
}
"""The sources that use an option, where not all do."""


SUBCOMMANDS = Subcommands(
    about="Keep measurements for others, make token shards, or measure lengths of texts.",
    groups={
        "Measurements": {
            "record": (Record, "keep a complete run's tables under data/, for others to read"),
        },
        "Texts": {
            "tokens": (Tokens, "token shards of a file, a dataset or a source of known entropy"),
            "text-lengths": (TextLengths, "how long the texts of training splits are"),
        },
    },
)


@dataclass(frozen=True)
class Data:
    """Keep measurements for others, make token shards to train on, or measure lengths of texts."""

    what: Annotated[SUBCOMMANDS.union, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Runs what was asked for."""
        self.what.run()
