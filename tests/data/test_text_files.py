"""Labelled texts from files: every format the same texts, every broken row with its line."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import problem

from common.data import text_sources
from common.data.text_files import read_file
from common.data.text_sources import load_texts

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "datasets"
TEXTS = ['a "quoted" word, a comma', "it 's fine", "naïve café — 東京\u2028same line", "x"]
LABELS = [1, 0, 1, 0]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def shared_folder() -> Path:
    if not (SHARED / "sst2").is_dir():
        pytest.skip("no ../shared/datasets with SST-2, AG News and IMDB")
    return SHARED


# Counts of rows as published with the files (../shared/README.md), labels counted by hand below.
@pytest.mark.parametrize(
    ("dataset", "split", "rows", "source"),
    [
        pytest.param("sst2", "train", 67_349, "sst2/train.tsv", marks=pytest.mark.slow),
        ("sst2", "validation", 872, "sst2/dev.tsv"),
        ("ag_news", "train", 10_001, "ag_news/train.csv"),
        ("ag_news", "validation", 7_600, "ag_news/test.csv"),
        ("imdb", "train", 5_000, "imdb/train.csv"),
        ("imdb", "validation", 2_000, "imdb/test.csv"),
    ],
)
def test_real_files_are_read_to_the_last_row(
    dataset: str, split: str, rows: int, source: str
) -> None:
    folder = shared_folder()
    loaded = load_texts(dataset, split, dataset_dir=folder)
    assert (len(loaded.texts), loaded.source) == (rows, source)
    # Python's own reader, not strict, is the oracle for what the fields are.
    with (folder / source).open(newline="", encoding="utf-8") as file:
        theirs = list(csv.reader(file, delimiter="\t" if source.endswith("tsv") else ","))
    if dataset == "ag_news":
        assert loaded.labels == [int(row[0]) - 1 for row in theirs]
        assert loaded.texts == [f"{title} {text}" if title else text for _, title, text in theirs]
        assert set(Counter(loaded.labels)) == {0, 1, 2, 3}
    else:
        assert [str(label) for label in loaded.labels] == [row[0] for row in theirs[1:]]
        assert loaded.texts == [row[1] for row in theirs[1:]]
    # The folder of the data set itself does as well.
    alone = load_texts(dataset, split, dataset_dir=folder / dataset)
    assert (alone.texts, alone.source) == (loaded.texts, Path(source).name)


def parquet(path: Path, columns: dict) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_every_format_gives_the_same_texts(tmp_path: Path) -> None:
    import pyarrow

    rows = list(zip(LABELS, TEXTS, strict=True))
    for name in ("tsv", "csv", "ag_news"):
        path = write(tmp_path / f"train.{name.replace('ag_news', 'x')}", "")
        with path.open("w", newline="", encoding="utf-8") as file:
            if name == "ag_news":
                csv.writer(file, quoting=csv.QUOTE_ALL).writerows([c + 1, "", t] for c, t in rows)
            else:
                delimiter = "\t" if name == "tsv" else ","
                csv.writer(file, delimiter=delimiter).writerows([["label", "text"], *rows])
    (tmp_path / "train.x").rename(tmp_path / "test.csv")
    parquet(tmp_path / "train.parquet", {"sentence": TEXTS, "label": LABELS})
    few = pyarrow.array(TEXTS).dictionary_encode()  # as pandas writes a column of categories
    parquet(tmp_path / "few.parquet", {"sentence": few, "label": LABELS})
    # Columns in another order and one that is not needed; a spreadsheet's mark and line ends.
    swapped = ["Sentence\tidx\tlabel"] + [f"{text}\t7\t{label}" for label, text in rows[1:]]
    write(tmp_path / "dev.tsv", "\ufeff" + "\r\n".join(swapped))
    names = {"train.tsv": "sst2", "train.csv": "imdb", "train.parquet": "sst2"}
    for name, dataset in (names | {"few.parquet": "sst2"}).items():
        assert read_file(tmp_path / name, dataset, 2) == (TEXTS, LABELS), name
    assert read_file(tmp_path / "test.csv", "ag_news", 4) == (TEXTS, LABELS)
    assert read_file(tmp_path / "dev.tsv", "sst2", 2) == (TEXTS[1:], LABELS[1:])
    kaggle = write(tmp_path / "val.csv", "Class Index,Title,Description\n4,A title,and a text\n")
    assert read_file(kaggle, "ag_news", 4) == (["A title and a text"], [3])


def test_a_quote_within_a_field_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "train.tsv", 'label\tsentence\n1\tthe "best" of it "\n0\t5" wide\n')
    assert read_file(path, "sst2", 2) == (['the "best" of it "', '5" wide'], [1, 0])


@pytest.mark.parametrize(("name", "delimiter"), [("train.tsv", "\t"), ("train.csv", ",")])
def test_a_text_may_be_longer_than_csv_takes_by_itself(
    tmp_path: Path, name: str, delimiter: str
) -> None:
    long = "word " * 40_000 + "end"
    path = write(tmp_path / name, f'label{delimiter}text\n1{delimiter}{long}\n0{delimiter}"b"\n')
    assert read_file(path, "sst2", 2) == ([long, "b"], [1, 0])


TSV = "label\tsentence\n1\tgood\n"
CSV = "label,text\n1,good\n"
OK_AG = '"1","a","b"\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", TSV + '0\t"never closed\n1\tgood\n', "a.tsv:3: a field begins with a quote"),
        ("a.tsv", TSV + '0\t"closed" too early\n', "a.tsv:3: a field begins with a quote"),
        ("a.tsv", TSV + '0\t"open\n1\tclosed"\n', "a.tsv:3: a field begins with a quote"),
        ("a.tsv", TSV + "0\tone\ttoo many\n", "a.tsv:3: 3 fields, others have 2"),
        ("a.tsv", TSV + "0\n", "a.tsv:3: 1 fields, others have 2"),
        ("a.tsv", TSV + "\n0\tbad\n", "a.tsv:3: 0 fields, others have 2"),
        ("a.tsv", TSV + "0\t \n", "a.tsv:3: empty text"),
        ("a.tsv", TSV + "0\t\n", "a.tsv:3: empty text"),
        ("a.tsv", TSV + "positive\tx\n", "a.tsv:3: label 'positive' is not an integer; legal are"),
        ("a.tsv", TSV + "0.5\tx\n", "a.tsv:3: label '0.5' is not an integer"),
        ("a.tsv", TSV + "\tx\n", "a.tsv:3: no label; legal are 0 to 1"),
        ("a.tsv", TSV + "2\tx\n", "a.tsv:3: label 2; legal are 0 to 1"),
        ("a.tsv", TSV + "-1\tx\n", "a.tsv:3: label -1 stands for a hidden one"),
        ("a.tsv", TSV.encode() + b"0\tcaf\xe9\n", "a.tsv:3: not UTF-8"),
        ("a.tsv", "", "a.tsv: an empty file"),
        ("a.tsv", "\n\n", "a.tsv: an empty file"),
        ("a.tsv", "label\tsentence\n", "a.tsv: no texts below its header"),
        ("a.tsv", "1\tgood\n0\tbad\n", "a.tsv:1: columns label and sentence, text or content"),
        ("a.csv", CSV + '0,"first\nsecond"\n1,"never\nclosed\n1,x\n', "a.csv:5: a field begins"),
        ("a.csv", CSV + '0,"open\n1,next\n1,"closed",1\n', "a.csv:3: a field begins with a quote"),
        ("a.csv", CSV + '0,"two ""quotes"""\n1,"x" y\n', "a.csv:4: a field begins with a quote"),
        ("a.csv", CSV + '0,"over\ntwo lines"\n1,a,b\n', "a.csv:5: 3 fields, others have 2"),
        ("a.csv", CSV + '0,"' + "x\n" * 70_000, "a.csv:3: a field begins with a quote"),
        ("a.csv", CSV + '"good","x"\n', "a.csv:3: label 'good' is not an integer"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_a_broken_row_is_named_by_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = write(tmp_path / name, content)
    assert f"{tmp_path}/{message}" in problem(read_file, path, "sst2", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OK_AG + '"0","a","b"\n', ":2: label 0; legal are 1 to 4"),
        (OK_AG + '"5","a","b"\n', ":2: label 5; legal are 1 to 4"),
        (OK_AG + '"1","a"\n', ":2: 2 fields, others have 3"),
        (OK_AG + '"1",""," "\n', ":2: empty text"),
        (OK_AG + '"1","over\ntwo","never closed\n', ":3: a field begins with a quote"),
    ],
)
def test_broken_rows_of_ag_news(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "train.csv", content)
    assert message in problem(read_file, path, "ag_news", 4)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a", "b"], "label": [1, None]}, ", row 2: no label"),
        ({"text": ["a", None], "label": [1, 0]}, ", row 2: empty text"),
        ({"text": ["a", "b"], "label": [1, -1]}, ", row 2: label -1 stands for a hidden one"),
        ({"text": ["a"], "label": ["good"]}, "labels are string; they must be integers"),
        ({"text": [7], "label": [1]}, "column text is of int64; it must be of strings"),
        ({"text": [b"a"], "label": [1]}, "column text is of binary; it must be of strings"),
        ({"words": ["a"], "label": [1]}, "one of the columns sentence, text, content is needed"),
    ],
)
def test_broken_parquet(tmp_path: Path, columns: dict, message: str) -> None:
    parquet(tmp_path / "a.parquet", columns)
    assert message in problem(read_file, tmp_path / "a.parquet", "sst2", 2)


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", "label\tsentence\n")
    assert "no parquet file that can be read" in problem(read_file, path, "sst2", 2)


@given(st.lists(st.text(st.sampled_from('ab ",\n\té'), min_size=1), min_size=1, max_size=6))
def test_what_csv_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    texts = [f"{text}." for text in texts]  # not empty
    path = tmp_path_factory.mktemp("texts") / "train.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["label", "text"], *((1, text) for text in texts)])
    assert read_file(path, "imdb", 2) == (texts, [1] * len(texts))


@given(st.integers(0, 5), st.lists(st.sampled_from(["x", '"a\nb"', '"c,""d"""']), max_size=4))
def test_the_line_of_an_unclosed_quote_is_where_its_field_begins(
    tmp_path_factory: pytest.TempPathFactory, plain_rows: int, fields: list[str]
) -> None:
    before = "label,text\n" + "".join(f"1,{field}\n" for field in ["y"] * plain_rows + fields)
    path = write(
        tmp_path_factory.mktemp("texts") / "train.csv", before + '0,"opened\nand never\n1,closed\n'
    )
    assert f":{before.count(chr(10)) + 1}: a field begins" in problem(read_file, path, "imdb", 2)


def test_a_subset_is_random_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    rows = [(label, f"text {label} {n}") for label in (0, 1) for n in range(100)]
    write(tmp_path / "train.tsv", "label\ttext\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    some, again, other = (
        load_texts("sst2", dataset_dir=tmp_path, max_samples=50, seed=seed) for seed in (1, 1, 2)
    )
    assert some == again
    assert some.texts != other.texts
    assert len(set(some.texts)) == 50
    assert [f"text {label}" for label in some.labels] == [text[:6] for text in some.texts]
    # The file is sorted by label; its first 50 rows have one label.
    assert 15 <= sum(some.labels) <= 35
    assert len(load_texts("sst2", dataset_dir=tmp_path, max_samples=500).texts) == 200
    assert some.num_labels == 2
    assert "-1 samples" in problem(load_texts, "sst2", dataset_dir=tmp_path, max_samples=-1)


def test_where_files_are_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    missing = problem(load_texts, "sst2", dataset_dir=folder)
    assert missing == f"--dataset_dir {folder} does not exist; a folder is needed"
    folder.mkdir()
    assert f"{folder}: no files of sst2" in problem(load_texts, "sst2", dataset_dir=folder)
    (folder / "sst2").mkdir()
    assert "no train split; looked for train" in problem(load_texts, "sst2", dataset_dir=folder)
    write(folder / "sst2" / "train.tsv", TSV)
    nothing = problem(load_texts, "sst2", "validation", dataset_dir=folder)
    assert "no validation split; looked for dev or validation or valid" in nothing
    # GLUE's test split has no labels, so it is not the validation split.
    write(folder / "sst2" / "test.tsv", "index\tsentence\n0\tx\n")
    unlabelled = problem(load_texts, "sst2", "validation", dataset_dir=folder)
    assert "test.tsv: no column label" in unlabelled
    write(folder / "sst2" / "valid.csv", CSV)
    assert load_texts("sst2", "validation", dataset_dir=folder).source == "sst2/valid.csv"
    parquet(folder / "imdb" / "train-00000-of-00002.parquet", {"text": ["a"], "label": [0]})
    parquet(folder / "imdb" / "train-00001-of-00002.parquet", {"text": ["b"], "label": [1]})
    assert load_texts("imdb", dataset_dir=folder).texts == ["a", "b"]
    third = folder / "imdb" / "train-00002-of-00003.parquet"
    parquet(third, {"text": ["c"], "label": [1]})
    assert "parts of train of 00002 and of 00003" in problem(load_texts, "imdb", dataset_dir=folder)
    third.unlink()
    (folder / "imdb" / "train-00000-of-00002.parquet").unlink()
    assert "train-00000-of-00002.parquet missing; all 2 parts" in problem(
        load_texts, "imdb", dataset_dir=folder
    )
    # Another data set's folder is not taken for this one's, nor one of two files chosen.
    assert "not those of imdb" in problem(load_texts, "imdb", dataset_dir=folder / "sst2")
    write(folder / "sst2" / "train.csv", CSV)
    both = problem(load_texts, "sst2", dataset_dir=folder)
    assert "both train.tsv and train.csv are there" in both
    assert "known: sst2, ag_news, imdb" in problem(load_texts, "sst", dataset_dir=folder)


def test_without_files_and_hub_two_flags_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    message = problem(load_texts, "sst2")
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "--dataset_dir FOLDER" in message
    assert "--dataset synthetic" in message
    # What was downloaded before is used without the hub.
    folder = tmp_path / "cache" / "stanfordnlp___sst2" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    split = datasets.Dataset.from_dict({"sentence": TEXTS, "label": LABELS, "idx": range(4)})
    writer = datasets.arrow_writer.ArrowWriter(path=str(folder / "sst2-train.arrow"))
    writer.write_table(split.data.table)
    writer.finalize()
    info = datasets.DatasetInfo(
        features=split.features,
        config_name="default",
        dataset_name="sst2",
        splits=datasets.SplitDict(
            {"train": datasets.SplitInfo("train", num_examples=4, dataset_name="sst2")}
        ),
    )
    info.write_to_directory(str(folder))
    cached = load_texts("sst2")
    assert (cached.texts, cached.labels) == (TEXTS, LABELS)
    assert cached.source == "hub: stanfordnlp/sst2"
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_hub_is_asked_for_the_published_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_dict({"sentence": TEXTS, "text": TEXTS, "label": LABELS})

    monkeypatch.setattr(text_sources, "check_hub", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for dataset in ("sst2", "ag_news", "imdb"):
        loaded = load_texts(dataset, "validation", max_samples=2)
        assert len(loaded.texts) == 2
        assert set(loaded.texts) <= set(TEXTS)
        assert loaded.source == f"hub: {asked[-1][0]}"
    assert asked == [
        ("stanfordnlp/sst2", "validation"),
        ("fancyzhx/ag_news", "test"),
        ("stanfordnlp/imdb", "test"),
    ]
