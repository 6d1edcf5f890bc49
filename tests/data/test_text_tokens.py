"""Tokens of labelled texts: those of transformers, and one trained vocabulary on every rank.

Hashed words are held against a recomputation that shares no code.
"""

import binascii
import json
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import problem

from common.data.text_sources import LabelledTexts, load_texts
from common.data.text_tokens import (
    PAD_ID,
    SPECIAL_TOKENS,
    TextTokenizer,
    check_max_length,
    hash_texts,
    hashed_words,
    open_tokenizer,
    tokenize_texts,
)

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
BERT = SHARED / "vocab" / "bert-base-uncased"
SAMPLE = [
    "Hello world! It's 2024, isn't it?",
    "naïve CAFÉ — 東京タワー 🙂\t\u00a0 x=1;y+=22 [MASK] [SEP] ##ing",
    "unaffable " * 300,
    "a" * 150,
    "q",
]
TO_HASH = ["Hello, World 42!", "naïve_CAFÉ—東京", "  ", "it's x1 it's"]
WORDS = [f"{a}{b}{c}" for a in ("the", "un", "re") for b in ("move", "play") for c in ("d", "er")]


@pytest.fixture(scope="module")
def bert() -> TextTokenizer:
    """Opens the tokenizer of BERT's published vocabulary."""
    if not BERT.is_dir():
        pytest.skip("BERT's vocabulary is not here: no ../shared/vocab/bert-base-uncased")
    return open_tokenizer(str(BERT))


@pytest.fixture(scope="module")
def reviews() -> list[str]:
    """Loads 10,000 texts of SST-2."""
    if not (SHARED / "datasets" / "sst2").is_dir():
        pytest.skip("no ../shared/datasets/sst2")
    return load_texts("sst2", dataset_dir=SHARED / "datasets", max_samples=10_000).texts


@pytest.fixture
def vocabulary_folder(tmp_path: Path) -> Path:
    """Makes a folder with nothing but a small vocab.txt."""
    tokens = [*SPECIAL_TOKENS, "good", "bad", "##ly", "film"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    return tmp_path


def made_up_texts(count: int = 300) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]


def test_tokens_are_those_of_transformers(bert: TextTokenizer, reviews: list[str]) -> None:
    from transformers import BertTokenizer

    theirs = BertTokenizer(vocab=str(BERT / "vocab.txt"))
    assert bert.vocab_size == len(theirs) == 30522
    assert bert.pad_id == theirs.pad_token_id == 0
    texts = SAMPLE + reviews[:500]
    assert bert.encode(texts) == theirs(texts)["input_ids"]
    for max_length in (3, 16, 64):
        cut = theirs(texts, truncation=True, max_length=max_length)["input_ids"]
        assert bert.encode(texts, max_length) == cut
    # published: the ids of the model card's "Hello world"
    assert bert.encode(["Hello world"]) == [[101, 7592, 2088, 102]]


def test_a_texts_tokens_do_not_depend_on_what_was_encoded_before(bert: TextTokenizer) -> None:
    whole = bert.encode(SAMPLE)
    bert.encode(SAMPLE, 8)
    assert bert.encode(SAMPLE) == whole
    assert [bert.encode([text])[0] for text in SAMPLE] == whole
    # cut tokens are the first of the whole, then [SEP]
    assert bert.encode(SAMPLE, 8) == [ids if len(ids) <= 8 else [*ids[:7], 102] for ids in whole]


def test_a_split_keeps_its_labels_and_says_its_lengths(vocabulary_folder: Path) -> None:
    tokenizer = open_tokenizer(str(vocabulary_folder))
    split = LabelledTexts(["Good film", "badly", "BAD " * 9], [2, 0, 1], 3, "some", "here")
    texts = tokenize_texts(split, tokenizer, 6)
    assert texts.tokens == [[2, 5, 8, 3], [2, 6, 7, 3], [2, 6, 6, 6, 6, 3]]
    assert (texts.lengths.tolist(), texts.lengths.dtype) == ([4, 4, 6], np.int64)
    assert (texts.labels.tolist(), texts.labels.dtype) == ([2, 0, 1], np.int64)
    assert (texts.num_labels, texts.vocab_size, texts.pad_id) == (3, 9, 0)
    assert (texts.name, texts.source) == ("some", "here")


def test_a_vocabulary_with_upper_case_keeps_it(vocabulary_folder: Path) -> None:
    assert open_tokenizer(str(vocabulary_folder)).encode(["Film"]) == [[2, 8, 3]]
    with (vocabulary_folder / "vocab.txt").open("a") as file:
        file.write("Film\n")
    assert open_tokenizer(str(vocabulary_folder)).encode(["Film film"]) == [[2, 9, 8, 3]]


def test_every_process_trains_the_same_vocabulary(tmp_path: Path) -> None:
    # Hash maps are seeded anew in every process, and in each for every map; this one is another.
    texts = made_up_texts()
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, sys; from common.data.text_tokens import open_tokenizer\n"
        "texts = json.load(open(sys.argv[1]))\n"
        "found = open_tokenizer('small', texts=texts, vocab_size=90)\n"
        "print(json.dumps(sorted(found.backend.get_vocab().items())))\n"
        "print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "texts.json")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    vocabulary, imported = said.splitlines()
    assert imported == "set()"  # they take seconds, and are not needed for small
    here = [
        open_tokenizer("small", texts=texts, vocab_size=90).backend.get_vocab() for _ in range(3)
    ]
    assert all(one == dict(json.loads(vocabulary)) for one in here)


def test_a_trained_vocabulary_spells_frequent_words_as_one_token() -> None:
    texts = made_up_texts()
    tokenizer = open_tokenizer("small", texts=texts, vocab_size=120)
    vocabulary = tokenizer.backend.get_vocab()
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.vocab_size <= 120
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    for word in WORDS:
        assert tokenizer.encode([word]) == [[2, vocabulary[word], 3]]
    # lower-cased; letters that never occurred are unknown
    assert tokenizer.encode(["Theplayer"]) == tokenizer.encode(["theplayer"])
    assert tokenizer.encode(["žzz 東"]) == [[2, 1, 1, 3]]
    # a word that never occurred is put together from pieces, and its text comes back
    ids = tokenizer.encode(["replayed"])[0]
    assert 1 not in ids
    assert tokenizer.backend.decode(ids) == "replayed"


def test_a_trained_vocabulary_of_real_reviews(reviews: list[str]) -> None:
    tokenizer = open_tokenizer("small", texts=reviews)
    assert tokenizer.vocab_size == 8192
    tokens = tokenizer.encode(reviews, 256)
    # What it was trained on has no unknown token, and each text begins and ends as it should.
    assert not any(1 in ids for ids in tokens)
    assert {(ids[0], ids[-1]) for ids in tokens} == {(2, 3)}
    # As an independent measure of the training: about as many tokens as there are words.
    words = sum(len(text.split()) for text in reviews)
    assert words <= sum(map(len, tokens)) - 2 * len(tokens) < 1.25 * words


def test_more_letters_than_the_alphabet_takes() -> None:
    letters = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 1500))
    texts = [letters, letters[:1000]] * 2
    first = open_tokenizer("small", texts=texts, vocab_size=2005)
    assert (
        first.backend.get_vocab()
        == open_tokenizer("small", texts=texts, vocab_size=2005).backend.get_vocab()
    )
    # The 1,000 most frequent are known, the others are not.
    ids = first.encode([letters])[0][1:-1]
    assert [number == 1 for number in ids] == [False] * 1000 + [True] * 500
    assert "characters of these texts need 2005" in problem(
        open_tokenizer, "small", texts=texts, vocab_size=2004
    )


def test_a_folder_that_transformers_saved(tmp_path: Path, vocabulary_folder: Path) -> None:
    from transformers import BertTokenizer

    saved = BertTokenizer(vocab=str(vocabulary_folder / "vocab.txt"), model_max_length=32)
    saved.save_pretrained(tmp_path / "model")
    tokenizer = open_tokenizer(str(tmp_path / "model"))
    texts = ["a GOOD film", "badly", "good " * 40]
    assert tokenizer.encode(texts, 12) == saved(texts, truncation=True, max_length=12)["input_ids"]
    assert tokenizer.encode(texts, 12) == open_tokenizer(str(vocabulary_folder)).encode(texts, 12)
    assert (tokenizer.model_limit, tokenizer.pad_id) == (32, 0)
    split = LabelledTexts(texts, [0, 1, 0], 2, "some", "here")
    assert "takes at most 32 tokens" in problem(tokenize_texts, split, tokenizer, 33)


def test_a_greatest_length_is_checked() -> None:
    check_max_length(512, 512, "bert-base-uncased")
    check_max_length(3, None, "small")
    message = problem(check_max_length, 513, 512, "bert-base-uncased")
    assert message == "max_length 513: model bert-base-uncased takes at most 512 tokens"
    assert "at least 3" in problem(check_max_length, 2, 512, "bert-base-uncased")


def test_what_is_no_tokenizer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    assert "vocab.txt is needed" in problem(open_tokenizer, str(tmp_path))
    assert "does not exist; a folder" in problem(open_tokenizer, str(tmp_path / "nothing"))
    (tmp_path / "vocab.txt").write_text("[PAD]\ngood\n")
    assert "has no [UNK], [CLS], [SEP], [MASK]" in problem(open_tokenizer, str(tmp_path))
    assert "is a file" in problem(open_tokenizer, str(tmp_path / "vocab.txt"))
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\n")
    assert "not UTF-8" in problem(open_tokenizer, str(tmp_path))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "a"]))
    assert "holds a token twice" in problem(open_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"tokenizer {tmp_path}: " in problem(open_tokenizer, str(tmp_path))
    assert "there are none" in problem(open_tokenizer, "small", texts=[" "])
    assert "tokenizer a b/c: Repo id must" in problem(open_tokenizer, "a b/c")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    unreachable = problem(open_tokenizer, "someone/something")
    assert "tokenizer someone/something: http://127.0.0.1:9 cannot be reached" in unreachable
    assert "--model_name FOLDER" in unreachable
    assert "--model_name small" in unreachable


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(2, 50), st.integers(1, 8))
def test_numbers_are_those_of_each_words_checksum(texts, vocab_size, max_length):
    expected = []
    for text in texts:
        runs = groupby(text.lower(), str.isalnum)  # what Python calls letters or digits
        words = ["".join(run) for is_word, run in runs if is_word][:max_length] or [""]
        checksums = [binascii.crc32(word.encode("utf-8", "surrogatepass")) for word in words]
        expected.append([1 + checksum % (vocab_size - 1) for checksum in checksums])
    assert hashed_words(texts, vocab_size, max_length) == expected


def test_every_process_gives_the_same_numbers():
    # Python's own hash of a string is another in every process.
    code = f"from common.data.text_tokens import hashed_words as h; print(h({TO_HASH!r}, 20000, 9))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert said == {f"{hashed_words(TO_HASH, 20_000, 9)}\n"}


def test_no_word_is_padding_and_case_and_punctuation_do_not_matter():
    texts = LabelledTexts(TO_HASH, [0, 1, 1, 0], 2, "made up", "here")
    hashed = hash_texts(texts, vocab_size=3, max_length=2)
    assert {number for ids in hashed.tokens for number in ids} <= {1, 2}
    assert (hashed.pad_id, hashed.vocab_size, hashed.num_labels) == (PAD_ID, 3, 2)
    # Texts are cut at two words; one without words keeps one.
    assert hashed.lengths.tolist() == [2, 2, 1, 2]
    assert hashed.labels.tolist() == [0, 1, 1, 0]
    same = hashed_words(["Spam, SPAM; spam_spam"], 20_000, 9)
    assert len(set(same[0])) == 1
    assert len(same[0]) == 4
