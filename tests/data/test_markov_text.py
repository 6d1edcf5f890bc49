"""The source of known entropy against simulation, counting and linear algebra."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import problem

from common.data import markov_text
from common.data.markov_text import MarkovSource, read_source, synthetic_shards
from common.data.token_shards import TokenShards, write_shard
from common.training.checkpoints.resume import recorded_settings
from common.training.config import TrainingConfig

SMALL = MarkovSource(symbols=6, seed=3)


@pytest.fixture(scope="module")
def source() -> MarkovSource:
    return MarkovSource()


@pytest.fixture(scope="module")
def sample(source: MarkovSource) -> np.ndarray:
    return source.sample(2_000_000, 1)


def losses(source: MarkovSource, tokens: np.ndarray) -> np.ndarray:
    """Computes −log of the true conditional, in nats, for every token but the first two."""
    tokens = tokens.astype(np.int64)
    return -np.log(source.transitions[tokens[:-2], tokens[1:-1], tokens[2:]])


def test_the_default_source_leaves_much_to_learn_at_each_stage(source: MarkovSource) -> None:
    assert 2 <= source.entropy_nats <= 3.5
    assert source.unigram_entropy_nats >= source.entropy_nats + 1.5
    assert source.first_order_entropy_nats >= source.entropy_nats + 0.3
    assert source.unigram_entropy_nats >= source.first_order_entropy_nats + 0.3


def test_the_true_conditional_reaches_the_entropy_on_a_long_sample(
    source: MarkovSource, sample: np.ndarray
) -> None:
    of_tokens = losses(source, sample)
    chains = len(sample) // 4096
    starts = np.arange(1, chains) * -(-len(sample) // chains)
    own_context = np.ones(len(sample), bool)
    own_context[[0, 1, *starts, *(starts + 1)]] = False
    inside = of_tokens[own_context[2:]]
    error = inside.std() / len(inside) ** 0.5
    assert abs(inside.mean() - source.entropy_nats) <= 3 * error
    # What the boundaries cost, as a model that sees the sample end to end pays it.
    assert abs(of_tokens.mean() - source.entropy_nats) <= 0.01
    assert of_tokens.mean() > inside.mean()


def test_frequencies_and_pairs_are_those_of_the_stationary_distribution(
    source: MarkovSource, sample: np.ndarray
) -> None:
    symbols = source.symbols
    counted = np.bincount(sample, minlength=symbols) / len(sample)
    entropy = -(counted * np.log(counted)).sum()
    assert entropy == pytest.approx(source.unigram_entropy_nats, abs=0.005)
    # The best model that sees one symbol, scored on the sample.
    given_before = source.stationary / source.stationary.sum(axis=1, keepdims=True)
    score = -np.log(given_before[sample[:-1], sample[1:]]).mean()
    assert score == pytest.approx(source.first_order_entropy_nats, abs=0.01)


def test_the_stationary_distribution_is_the_eigenvector_of_the_chain_of_pairs() -> None:
    symbols = SMALL.symbols
    chain = np.zeros((symbols**2, symbols**2))
    for a in range(symbols):
        for b in range(symbols):
            for x in range(symbols):
                chain[a * symbols + b, b * symbols + x] = SMALL.transitions[a, b, x]
    values, vectors = np.linalg.eig(chain.T)
    vector = np.real(vectors[:, np.argmax(np.real(values))])
    vector /= vector.sum()
    assert np.allclose(SMALL.stationary.ravel(), vector, atol=1e-10)
    assert np.allclose(SMALL.stationary.sum(axis=0), SMALL.stationary.sum(axis=1), atol=1e-10)
    rows = -(chain * np.log(np.where(chain > 0, chain, 1))).sum(axis=1)
    assert SMALL.entropy_nats == pytest.approx((vector * rows).sum(), abs=1e-10)


def test_counting_triples_of_a_small_alphabet_finds_the_entropy_and_the_table() -> None:
    tokens = SMALL.sample(1_000_000, 5).astype(np.int64)
    triples = np.zeros((SMALL.symbols,) * 3)
    np.add.at(triples, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    fitted = triples / triples.sum(axis=2, keepdims=True)
    seen = triples.sum(axis=2)
    error = np.sqrt(SMALL.transitions * (1 - SMALL.transitions) / seen[:, :, None])
    # 216 probabilities within 4.5 standard errors, and what the few boundaries shift
    assert (np.abs(fitted - SMALL.transitions) <= 4.5 * error + 2e-3).all()
    entropy = -(triples * np.log(np.where(triples > 0, fitted, 1))).sum() / triples.sum()
    assert entropy == pytest.approx(SMALL.entropy_nats, abs=0.005)


@pytest.mark.parametrize("symbols", [2, 3, 8, 17])
def test_entropies_are_ordered_whatever_the_alphabet(symbols: int) -> None:
    source = MarkovSource(symbols=symbols, seed=1)
    bounds = (0, source.entropy_nats, source.first_order_entropy_nats)
    assert list(bounds) == sorted(bounds)
    assert source.first_order_entropy_nats <= source.unigram_entropy_nats <= np.log(symbols)
    tokens = source.sample(20_000, 0)
    assert set(tokens.tolist()) == set(range(symbols))
    assert np.allclose(source.transitions.sum(axis=2), 1)


def test_a_sample_is_decided_by_its_seed_and_has_the_length_asked_for() -> None:
    for count in (1, 2, 3, 4095, 4097, 10_001):
        tokens = SMALL.sample(count, 0)
        assert tokens.dtype == np.uint16
        assert len(tokens) == count
    assert np.array_equal(SMALL.sample(9000, 4), SMALL.sample(9000, 4))
    assert not np.array_equal(SMALL.sample(9000, 4), SMALL.sample(9000, 5))
    other = MarkovSource(symbols=6, seed=4)
    assert other.entropy_nats != SMALL.entropy_nats
    assert MarkovSource(symbols=6, seed=3) == SMALL


def test_settings_outside_their_range_are_refused() -> None:
    for settings in ({"symbols": 1}, {"symbols": 513}, {"seed": -1}):
        problem(MarkovSource, **settings)
    assert "0 synthetic tokens: must be at least 1" in problem(SMALL.sample, 0, 0)
    assert "seed -1" in problem(SMALL.sample, 5, -1)


def test_synthetic_shards_are_made_once_and_again_where_damaged(
    tmp_path: Path, source: MarkovSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markov_text, "MarkovSource", lambda seed: source)
    folder = synthetic_shards(tmp_path, 5000)
    for word in ("256", "seed-0", "5000"):
        assert word in folder.name
    shards = TokenShards.open(folder)
    assert shards.read(0, 5000).tolist() == source.sample(5000, 0).tolist()
    record = read_source(folder)
    assert record == read_source(shards.paths[0])
    assert record["entropy_nats"] == source.entropy_nats
    assert (record["symbols"], record["order"], record["num_tokens"]) == (256, 2, 5000)

    made = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert synthetic_shards(tmp_path, 5000) == folder
    assert all(path.stat().st_mtime_ns == when for path, (when, _) in made.items())

    # A shard cut short, as by a full disk, and a record of other settings: both made again.
    shards.paths[0].write_bytes(shards.paths[0].read_bytes()[:-2])
    synthetic_shards(tmp_path, 5000)
    assert all(path.read_bytes() == content for path, (_, content) in made.items())
    (folder / "source.json").write_text(json.dumps({**record, "sharpness": 9.0}))
    synthetic_shards(tmp_path, 5000)
    assert all(path.read_bytes() == content for path, (_, content) in made.items())
    assert {path.name for path in folder.iterdir()} == {path.name for path in made}


def test_a_folder_without_a_record_has_no_known_entropy(tmp_path: Path) -> None:
    assert read_source(tmp_path) is None
    (tmp_path / "source.json").write_text("{broken")
    assert "source.json: expected JSON with entropy_nats" in problem(read_source, tmp_path)


def test_shards_of_a_source_have_its_entropy_and_others_beside_its_record_have_none(
    tmp_path: Path,
) -> None:
    def recorded(path: Path) -> tuple[int, float | None]:
        settings = recorded_settings(TrainingConfig(data=str(path)), TokenShards.open(path), None)
        return settings["data_tokens"], settings["entropy_nats"]

    (tmp_path / "source.json").write_text('{"entropy_nats": 3.25, "num_tokens": 4}')
    first = tmp_path / "tokens_000000.bin"
    write_shard(first, [1, 2, 3])
    assert recorded(tmp_path) == (3, None)
    write_shard(tmp_path / "tokens_000001.bin", [3])
    assert recorded(tmp_path) == (4, 3.25)
    assert recorded(first) == (3, 3.25)  # one of the source's shards
