"""Text to shards: GPT-2's tokens as transformers makes them, and ``ddplab data tokens``."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import ROOT, Ended, answered, error_line, refused
from hypothesis import given
from hypothesis import strategies as st
from refusals import problem

from common.cli.data import Tokens
from common.data import markov_text, shard_files, tokenization
from common.data.markov_text import MarkovSource, read_source
from common.data.token_shards import TokenShards, read_shard
from common.data.tokenization import (
    Piece,
    Vocabulary,
    dataset_pieces,
    encode,
    load_vocabulary,
    text_pieces,
)

GPT2 = ROOT.parent / "shared" / "vocab" / "gpt2"
SHAKESPEARE = ROOT.parent / "shared" / "datasets" / "text" / "tinyshakespeare.txt"
MARK = "<|endoftext|>"
UNREACHABLE = "http://127.0.0.1:9"

SAMPLE = (
    "Hello world! It's 2024, isn't it?  Two spaces,\ttabs\r\n\r\n   and\n\n\nlines.\n"
    "naïve café — 東京タワー 🙂🙃 \u00a0\u2003wide   \n x=1;y+=22 don't WE'LL "
)


@pytest.fixture(scope="module")
def gpt2() -> Vocabulary:
    """Loads GPT-2's published vocabulary."""
    if not GPT2.is_dir():
        pytest.skip("GPT-2's vocabulary is not here: no ../shared/vocab/gpt2")
    return load_vocabulary(str(GPT2))


@pytest.fixture
def small_vocabulary(tmp_path: Path) -> Path:
    """Writes a byte-level vocabulary without merges: a token a byte. Needs no shared data."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path / "bytes"
    folder.mkdir()
    letters = sorted(ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate([*letters, MARK])}
    (folder / "vocab.json").write_text(json.dumps(tokens))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def tokens_of(pieces: object, vocabulary: Vocabulary, max_tokens: int = 0) -> list[int]:
    return [int(t) for array in encode(pieces, vocabulary, max_tokens) for t in array]


def text_of(tokens: Iterable[int], vocabulary: Vocabulary) -> str:
    return vocabulary.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def test_tokens_are_those_of_transformers(gpt2: Vocabulary) -> None:
    from transformers import GPT2Tokenizer

    files = {"vocab": str(GPT2 / "encoder.json"), "merges": str(GPT2 / "vocab.bpe")}
    theirs = GPT2Tokenizer(**files)
    assert gpt2.size == len(theirs) == 50257
    assert gpt2.end_of_text == theirs.convert_tokens_to_ids(MARK) == 50256
    texts = [SAMPLE, "x", " ", "\n\n", f"a {MARK} b"]
    if SHAKESPEARE.is_file():
        texts.append(SHAKESPEARE.read_text()[:100_000])
    for text, ours in zip(texts, gpt2.encode(texts), strict=True):
        assert ours == theirs(text)["input_ids"]
        assert text_of(ours, gpt2) == text
    # published: the first example of GPT-2's own documentation
    assert gpt2.encode(["Hello world"]) == [[15496, 995]]


def test_a_file_read_in_pieces_has_the_tokens_of_the_whole_text(
    gpt2: Vocabulary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not SHAKESPEARE.is_file():
        pytest.skip("no ../shared/datasets/text/tinyshakespeare.txt")
    text = tmp_path / "text.txt"
    text.write_bytes(SHAKESPEARE.read_bytes()[:200_000])
    # newline="" as bytes are: the text's own line breaks
    whole = gpt2.tokenizer.encode(text.read_bytes().decode()).ids
    assert tokens_of(text_pieces(text), gpt2) == [50256, *whole]
    monkeypatch.setattr(tokenization, "PIECE_BYTES", 777)
    pieces = list(text_pieces(text))
    assert len(pieces) > 200
    assert tokens_of(pieces, gpt2) == [50256, *whole]


@given(
    st.lists(
        st.sampled_from([*" \n\r\t\u00a0ab'", "12", "don't", "é", "🙂", "!?", MARK]), max_size=40
    ),
    st.integers(4, 30),
)
def test_pieces_divide_documents_at_marks_and_lose_nothing(
    gpt2: Vocabulary, tmp_path_factory: pytest.TempPathFactory, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "PIECE_BYTES", size)  # also in the middle of a character
        pieces = list(text_pieces(path))
    documents = [document for document in text.split(MARK) if document]
    expected = [i for d in documents for i in (50256, *gpt2.tokenizer.encode(d).ids)]
    assert tokens_of(pieces, gpt2) == expected


def test_a_text_without_a_space_is_cut_all_the_same(
    small_vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = load_vocabulary(str(small_vocabulary))
    path = tmp_path / "text.txt"
    text = "x" * 700 + MARK + "y" * 1500 + MARK
    path.write_text(text)
    monkeypatch.setattr(tokenization, "PIECE_BYTES", 100)
    monkeypatch.setattr(tokenization, "UNCUT_CHARACTERS", 200)
    pieces = list(text_pieces(path))
    assert max(len(piece.text) for piece in pieces) <= 300  # memory is bounded
    assert "".join(piece.text for piece in pieces) == "x" * 700 + "y" * 1500
    x, y = vocabulary.encode(["xy"])[0]
    expected = [vocabulary.end_of_text, *[x] * 700, vocabulary.end_of_text, *[y] * 1500]
    assert tokens_of(pieces, vocabulary) == expected


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_encoding_ends_at_the_tokens_asked_for(small_vocabulary: Path, limit: int) -> None:
    vocabulary = load_vocabulary(str(small_vocabulary))
    taken = []

    def endless():
        for number in range(10**9):
            taken.append(number)
            yield Piece("abc")

    assert len(tokens_of(endless(), vocabulary, limit)) == limit
    assert len(taken) <= tokenization.BATCH_PIECES
    whole = tokens_of([Piece("abc"), Piece("", True), Piece("d"), Piece("e", False)], vocabulary)
    a, b, c, d, e = vocabulary.encode(["abcde"])[0]
    end = vocabulary.end_of_text
    assert whole == [end, a, b, c, end, d, e]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_local_folder_is_streamed_as_documents(
    small_vocabulary: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    table = pd.DataFrame({"id": [1, 2, 3, 4], "body": ["one two", "", None, "three"]})
    if kind == "jsonl":
        table.to_json(folder / "train.jsonl", orient="records", lines=True)
    else:
        table.to_parquet(folder / "train.parquet")
    vocabulary = load_vocabulary(str(small_vocabulary))
    tokens = tokens_of(dataset_pieces(str(folder), text_column="body"), vocabulary)
    assert text_of(tokens, vocabulary) == f"{MARK}one two{MARK}three"
    for asked, words in (
        ({"text_column": "text"}, "'text' is no text column; has id, body"),
        ({"text_column": "id"}, "'id' is no text column"),
        ({"text_column": "body", "split": "nope"}, r"split nope: .*Available splits: \['train'\]"),
        ({"text_column": "body", "config": "nope"}, "'nope' not found"),
    ):
        assert re.search(words, problem(list, dataset_pieces(str(folder), **asked)))


def test_datasets_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{broken")
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path: "JSON",
        tmp_path / "empty": "doesn't contain any data",
        tmp_path / "x": "exist",
    }
    for name, words in {**cases, tmp_path / "train.jsonl": "a file; a name on the hub"}.items():
        said = problem(list, dataset_pieces(str(name)))
        assert words in said
        assert str(name) in said


def test_vocabularies_that_do_not_serve_are_refused(small_vocabulary: Path, tmp_path: Path) -> None:
    legal = "tokenizer.json, or vocab.json and merges.txt, or encode"
    assert legal in problem(load_vocabulary, str(tmp_path))
    assert "no vocabulary in nowhere" in problem(load_vocabulary, "./nowhere")
    tokens = json.loads((small_vocabulary / "vocab.json").read_text())
    more = {f"word{i}": 257 + i for i in range(65536 - 256)}
    without_mark = {token: number for token, number in tokens.items() if token != MARK}
    for content, words in (
        (json.dumps(tokens | more), "65537 tokens; a shard's 16 bits hold at most 65536"),
        (json.dumps(without_mark), "which begins every document"),
        ("{broken", "vocab.json"),
    ):
        (small_vocabulary / "vocab.json").write_text(content)
        assert words in problem(load_vocabulary, str(small_vocabulary))


def test_a_tokenizer_json_is_read_as_it_is(small_vocabulary: Path, tmp_path: Path) -> None:
    vocabulary = load_vocabulary(str(small_vocabulary))
    folder = tmp_path / "saved"
    folder.mkdir()
    vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    again = load_vocabulary(str(folder))
    assert again.encode([SAMPLE]) == vocabulary.encode([SAMPLE])
    assert text_of(again.encode([SAMPLE])[0], again) == SAMPLE


def test_a_models_way_to_cut_and_pad_texts_is_not_the_shards(
    small_vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = load_vocabulary(str(small_vocabulary)).tokenizer
    saved.enable_truncation(5)
    saved.enable_padding(length=9)
    (tmp_path / "saved").mkdir()
    saved.save(str(tmp_path / "saved" / "tokenizer.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = ["ab", "abcdefgh"]  # a token a byte
    lengths = [len(tokens) for tokens in load_vocabulary("~/saved").encode(texts)]
    assert lengths == [2, 8]


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("é".encode("latin-1") + b" abc")
    cases = {path: "not UTF-8 text near byte 0", tmp_path: "is a folder", tmp_path / "x": "No such"}
    for name, words in cases.items():
        assert words in problem(list, text_pieces(name))
    path.write_bytes("abc é".encode()[:-1])  # ends inside of a character
    assert "not UTF-8" in problem(list, text_pieces(path))


def test_the_command_writes_shards_and_says_how_to_train(
    small_vocabulary: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("ab\n" * 500)
    asked = ("data", "tokens", "--text", text, "--vocab", small_vocabulary, "--output_dir", out)
    assert answered(*asked, "--shard_tokens", 600).splitlines() == [
        "tokens_000000.bin: 600 tokens",
        "tokens_000001.bin: 600 tokens",
        "tokens_000002.bin: 301 tokens",
        f"1,501 tokens; to train on them: --data {out}",
    ]
    shards = TokenShards.open(out)
    vocabulary = load_vocabulary(str(small_vocabulary))
    assert text_of(shards.read(0, 1501), vocabulary) == MARK + "ab\n" * 500
    # Other shards are not mixed in.
    assert refused(*asked) == f"error: {out} holds token shards already; choose another folder"


def test_the_command_makes_a_source_of_known_entropy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MarkovSource(seed=3)  # whose tables take a second
    monkeypatch.setattr(markov_text, "MarkovSource", lambda seed: {3: source}[seed])
    asked = ("--num_tokens", 9000, "--seed", 3, "--output_dir", tmp_path / "out")
    said = answered("data", "tokens", "--synthetic", *asked)
    entropies = (source.unigram_entropy_nats, source.first_order_entropy_nats, source.entropy_nats)
    for entropy in entropies:
        assert f"{entropy:.4f}" in said
    assert read_source(tmp_path / "out")["entropy_nats"] == pytest.approx(source.entropy_nats)
    tokens = read_shard(tmp_path / "out" / "tokens_000000.bin")
    assert np.array_equal(tokens, source.sample(9000, 3))


def test_shards_that_were_not_written_leave_no_record_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(markov_text, "MarkovSource", lambda seed: MarkovSource(6, seed))
    monkeypatch.setattr(shard_files._Part, "finish", full)
    with pytest.raises(OSError, match="no space"):
        Tokens(synthetic=True, num_tokens=9000, output_dir=str(tmp_path / "out")).run()
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line_and_leave_nothing(
    small_vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", UNREACHABLE)
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_bytes(b"")
    local = {"vocab": str(small_vocabulary)}
    of_text = {"text": str(text), **local}
    cases = [
        ({}, "exactly one of --text, --dataset and --synthetic, not none"),
        ({"text": str(text), "synthetic": True}, "not --text and --synthetic"),
        ({"text": str(text), "seed": 1}, "--seed needs --synthetic"),
        ({"synthetic": True, "max_tokens": 5}, "--max_tokens needs --text or --dataset"),
        ({**of_text, "max_tokens": -1}, "--max_tokens -1: at least 1, or 0 for all"),
        ({**of_text, "shard_tokens": 0}, "0 tokens a shard"),
        (of_text, "no text in it"),
        ({"dataset": "a/b", **local}, "--dataset FOLDER, --text FILE and --synthetic need no hub"),
    ]
    for flags, words in cases:
        assert words in problem(Tokens(**flags, output_dir=str(out)).run)
        assert not out.exists(), flags


def test_an_unreachable_hub_is_said_at_once_and_how_to_do_without(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc")
    variables = {"HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(tmp_path / "cache")}
    # A process of its own: the hub's libraries, which are imported only once, must not warn.
    tool = Path(sys.executable).with_name("ddplab")
    command = [tool, "data", "tokens", "--text", text, "--output_dir", tmp_path / "out"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | variables
    )
    line = error_line(Ended(done.returncode, done.stdout, done.stderr))
    assert line.startswith(f"error: vocabulary gpt2: {UNREACHABLE} cannot be reached")
    assert "--vocab FOLDER" in line
    assert not (tmp_path / "out").exists()


def test_recording_a_run_is_asked_for_as_before() -> None:
    for flags, words in (
        (("record", "/nowhere", "--machine", "m"), "/nowhere"),
        (("record", "--machine", "m"), "Run directory"),
        (("nope",), "record, tokens"),
    ):
        assert words in refused("data", *flags)
