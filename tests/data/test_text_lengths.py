"""Lengths of texts: recorded ones are those of the files, draws follow them, labels are learned."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import problem

from common.cli.data import TextLengths
from common.data.text_lengths import (
    LengthDistribution,
    read_text_lengths,
    recorded_lengths,
    write_text_lengths,
)
from common.data.text_splits import synthetic_texts
from common.data.text_tokens import open_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
BERT = SHARED / "vocab" / "bert-base-uncased"
lengths_of_texts = st.lists(st.integers(3, 60), min_size=1, max_size=80)


@pytest.mark.slow  # 67,349 texts
def test_recorded_lengths_are_those_of_the_training_files(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if not (BERT.is_dir() and (SHARED / "datasets" / "sst2").is_dir()):
        pytest.skip("no ../shared/datasets and ../shared/vocab/bert-base-uncased")
    # That the tokens are transformers' own is shown in test_text_tokens.py.
    TextLengths(
        datasets=("sst2",),
        dataset_dir=str(SHARED / "datasets"),
        tokenizer=str(BERT),
        output_dir=str(tmp_path),
    ).run()
    assert "sst2.csv: 67,349 texts, mean 13.3 tokens" in capsys.readouterr().out
    recorded = ROOT / "data" / "text-lengths" / "sst2.csv"
    assert (tmp_path / "sst2.csv").read_text() == recorded.read_text()


@pytest.mark.parametrize(
    ("name", "texts"), [("sst2", 67_349), ("ag_news", 10_001), ("imdb", 5_000)]
)
def test_every_text_of_the_training_files_is_counted(name: str, texts: int) -> None:
    assert name in recorded_lengths()
    found = read_text_lengths(name)
    assert found.num_texts == texts
    assert found.lengths.dtype == found.texts.dtype == np.int64
    assert found.lengths[0] >= 3  # [CLS], a token, [SEP]


@given(lengths_of_texts, st.integers(1, 70))
def test_a_distribution_counts_as_counter_does(lengths: list[int], cut: int) -> None:
    found = LengthDistribution.of(lengths, "some")
    assert dict(zip(found.lengths.tolist(), found.texts.tolist(), strict=True)) == Counter(lengths)
    assert found.mean == pytest.approx(np.mean(lengths))
    shares = [0.0, 0.25, 0.5, 0.95, 1.0]
    theirs = np.quantile(lengths, shares, method="inverted_cdf")
    assert found.quantile(shares).tolist() == theirs.tolist()
    shorter = found.cut_at(cut)
    counts = dict(zip(shorter.lengths.tolist(), shorter.texts.tolist(), strict=True))
    assert counts == Counter(min(length, cut) for length in lengths)


@given(lengths_of_texts)
def test_a_table_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    written = LengthDistribution.of(lengths, "some")
    folder = tmp_path_factory.mktemp("lengths")
    write_text_lengths(written, folder)
    read = read_text_lengths("some", folder)
    assert read.name == "some"
    assert read.lengths.tolist() == written.lengths.tolist()
    assert read.texts.tolist() == written.texts.tolist()


@pytest.mark.parametrize("name", ["sst2", "ag_news", "imdb"])
def test_draws_follow_the_recorded_distribution(name: str) -> None:
    found = read_text_lengths(name)
    count = 100_000
    drawn = found.draw(count, np.random.default_rng(7))
    assert set(drawn.tolist()) <= set(found.lengths.tolist())
    recorded = np.cumsum(found.texts) / found.num_texts
    ours = np.searchsorted(np.sort(drawn), found.lengths, "right") / count
    # Kolmogorov's distance; by the DKW inequality above this in one of 10,000 seeds.
    assert np.abs(ours - recorded).max() < np.sqrt(np.log(2 / 1e-4) / (2 * count))
    again = found.draw(count, np.random.default_rng(7))
    assert np.array_equal(drawn, again)
    assert not np.array_equal(drawn, found.draw(count, np.random.default_rng(8)))
    cut = found.draw(count, np.random.default_rng(7), max_length=32)
    assert np.array_equal(cut, np.minimum(drawn, 32))


@pytest.mark.parametrize(
    "content",
    [
        *("", "length_tokens,texts\n", "texts,length_tokens\n3,1\n", "length_tokens,texts\n3\n"),
        *("length_tokens,texts\n3,x\n", "length_tokens,texts\n3,0\n"),
        *("length_tokens,texts\n2,1\n3,1\n", "length_tokens,texts\n3,1\n3,1\n"),
        "length_tokens,texts\n3,1,4\n5,6,7\n",
    ],
)
def test_what_is_no_table_of_lengths_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "some.csv").write_text(content)
    assert "columns length_tokens,texts" in problem(read_text_lengths, "some", tmp_path)


def test_texts_without_a_token_between_cls_and_sep_are_not_recorded(tmp_path: Path) -> None:
    message = problem(write_text_lengths, LengthDistribution.of([5, 1], "some"), tmp_path / "new")
    assert "some: a text of 1 token; at least 3" in message
    assert not (tmp_path / "new").exists()


def test_lengths_are_read_without_torch() -> None:
    code = "import sys, common.data.text_lengths; print({'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "set()"


def test_made_up_texts_are_as_long_as_real_ones() -> None:
    texts = synthetic_texts("ag_news", 2000, vocab_size=500, num_labels=4, seed=5)
    assert texts.lengths.tolist() == [len(ids) for ids in texts.tokens]
    expected = read_text_lengths("ag_news").draw(2000, np.random.default_rng(5))
    assert texts.lengths.tolist() == expected.tolist()
    assert set(texts.labels.tolist()) == {0, 1, 2, 3}
    # Special tokens have the numbers that they have in a vocabulary trained for small.
    small = open_tokenizer("small", texts=["abc"], vocab_size=20).backend
    begin, end = small.token_to_id("[CLS]"), small.token_to_id("[SEP]")
    assert {(ids[0], ids[-1]) for ids in texts.tokens} == {(begin, end)}
    inner = np.concatenate([ids[1:-1] for ids in texts.tokens])
    assert inner.min() >= 5
    assert inner.max() < 500
    assert texts.pad_id == small.token_to_id("[PAD]")
    again = synthetic_texts("ag_news", 2000, vocab_size=500, num_labels=4, seed=5)
    assert again.tokens == texts.tokens
    other = synthetic_texts("ag_news", 2000, vocab_size=500, num_labels=4, seed=6)
    assert other.tokens != texts.tokens
    cut = synthetic_texts("ag_news", 2000, vocab_size=500, max_length=16)
    assert max(map(len, cut.tokens)) == max(cut.lengths) == 16


@pytest.mark.parametrize(("num_labels", "least"), [(2, 0.75), (4, 0.55)])
def test_the_label_of_a_made_up_text_can_be_learned(num_labels: int, least: float) -> None:
    # An oracle that knows nothing of how texts are made: naive Bayes over counts of tokens.
    learn, test = (
        synthetic_texts("sst2", 4000, num_labels=num_labels, seed=seed) for seed in (1, 2)
    )
    counts = np.ones((num_labels, learn.vocab_size))
    for ids, label in zip(learn.tokens, learn.labels, strict=True):
        np.add.at(counts[label], ids, 1)
    scores = np.log(counts / counts.sum(axis=1, keepdims=True))
    guesses = [int(scores[:, ids].sum(axis=1).argmax()) for ids in test.tokens]
    accuracy = np.mean(np.array(guesses) == test.labels)
    assert accuracy > least > 1.4 / num_labels
    # Nothing but the tokens tells: the label that the length suggests is a guess.
    long = test.lengths > np.median(test.lengths)
    share = np.bincount(test.labels[long], minlength=num_labels) / long.sum()
    assert np.allclose(share, 1 / num_labels, atol=0.05)


def test_what_cannot_be_made_up_is_one_line() -> None:
    unknown = problem(synthetic_texts, "sst")
    assert "unknown data set 'sst'; did you mean 'sst2'? known: ag_news, imdb, sst2" in unknown
    assert "at least 7 are needed" in problem(synthetic_texts, vocab_size=6)
    assert "at least 1" in problem(synthetic_texts, samples=0)
    assert "max_length 2: at least 3" in problem(synthetic_texts, max_length=2)
