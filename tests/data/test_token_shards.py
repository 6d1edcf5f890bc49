"""Token shards against the format written out by hand, and what ranks read by brute force."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import problem

from common.data.token_shards import ShardWriter, TokenBatches, TokenShards, read_shard, write_shard
from common.errors import UserError


def by_hand(path: Path, tokens: list[int], *, magic: int = 20240520, version: int = 1, **header):
    """Writes a shard with struct alone."""
    count = header.get("count", len(tokens))
    head = struct.pack("<256i", magic, version, count, *[0] * 253)
    path.write_bytes(head + struct.pack(f"<{len(tokens)}H", *tokens))
    return path


def shards_of(folder: Path, *lengths: int) -> TokenShards:
    """Writes shards whose token at each place of the stream is that place."""
    start = 0
    for number, length in enumerate(lengths):
        by_hand(folder / f"part_{number}.bin", list(range(start, start + length)))
        start += length
    return TokenShards.open(folder)


def test_a_written_shard_is_the_format_byte_for_byte(tmp_path: Path) -> None:
    tokens = [0, 1, 50256, 65535]
    write_shard(tmp_path / "ours.bin", np.array(tokens))
    theirs = by_hand(tmp_path / "theirs.bin", tokens)
    assert (tmp_path / "ours.bin").read_bytes() == theirs.read_bytes()
    assert np.fromfile(tmp_path / "ours.bin", "<i4", 3).tolist() == [20240520, 1, 4]
    read = read_shard(theirs)
    assert isinstance(read, np.memmap)
    assert read.dtype == np.uint16
    assert read.tolist() == tokens


@pytest.mark.parametrize("token", [-1, 65536, 2**40])
def test_a_token_that_16_bits_do_not_hold_is_refused_and_nothing_left(
    tmp_path: Path, token: int
) -> None:
    path = tmp_path / "shard.bin"
    said = problem(write_shard, path, [5, token])
    assert f"token {token} at 1: a shard holds 0 to 65535" in said
    assert "0 tokens; a shard holds 1 to" in problem(write_shard, path, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": 20240801, "version": 7}, "begins with 20240801; .* 20240520 and version 1"),
        ({"magic": 0}, "begins with 0;"),
        ({"version": 2}, "begins with 20240520 and version 2;"),
        ({"count": 4}, "holds 3 tokens, its header says 4"),
        ({"count": 2}, "holds 3 tokens, its header says 2"),
        ({"count": 0}, "header says 0 tokens"),
        ({"count": -5}, "header says -5 tokens"),
    ],
)
def test_what_is_no_whole_shard_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    path = by_hand(tmp_path / "bad.bin", [1, 2, 3], **change)
    assert re.search(f"{path}.*{message}", problem(read_shard, path))


def test_files_without_a_header_or_with_half_a_token_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(b"\0" * 1023)
    assert "1023 bytes; a token shard's header alone has 1024" in problem(read_shard, path)
    path.write_bytes(by_hand(path, [1, 2]).read_bytes() + b"\0")
    assert "holds 2.5 tokens, its header says 2" in problem(read_shard, path)
    assert "No such file" in problem(read_shard, tmp_path / "none.bin")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_a_writer_divides_what_is_appended(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("writer") / "new"
    arrays = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    with ShardWriter(folder, "p", shard_tokens) as writer:
        for array in arrays:
            writer.append(array)
    expected = np.concatenate(arrays)
    parts = [expected[i : i + shard_tokens] for i in range(0, len(expected), shard_tokens)]
    assert writer.written == [(f"p_{i:06d}.bin", len(part)) for i, part in enumerate(parts)]
    for (name, _), part in zip(writer.written, parts, strict=True):
        assert read_shard(folder / name).tolist() == part.tolist()
    # Nothing else is there; a writer that got nothing leaves no folder.
    assert len(list(folder.glob("*"))) == len(parts)
    assert folder.exists() == bool(parts)


def test_a_writer_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def broken_off() -> None:
        with ShardWriter(folder, shard_tokens=2) as writer:
            writer.append([1, 2, 3])
            # The first shard is whole, but has no final name before all are.
            assert not list(folder.glob("*.bin"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert not folder.exists()


def test_a_writer_refuses_a_folder_with_shards(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "other.bin", [1])
    assert "holds token shards already" in problem(ShardWriter(tmp_path).__enter__)
    assert list(tmp_path.iterdir()) == [path]
    path.rename(tmp_path / "source.json")
    assert "holds source.json of other shards" in problem(ShardWriter(tmp_path).__enter__)
    said = problem(ShardWriter, tmp_path, shard_tokens=0)
    assert "0 tokens a shard: legal are 1 to" in said


def test_missing_shards_name_the_command_that_makes_them(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert re.search(f"{path} .*ddplab data tokens", problem(TokenShards.open, path))


def test_shards_are_in_the_order_of_their_names_and_one_file_is_enough(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, 3, 1, 4)
    assert shards.lengths == (3, 1, 4)
    assert shards.num_tokens == 8
    assert [path.name for path in shards.paths] == ["part_0.bin", "part_1.bin", "part_2.bin"]
    assert TokenShards.open(tmp_path / "part_2.bin").read(0, 4).tolist() == [4, 5, 6, 7]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 50))
def test_reading_goes_over_shards_and_epochs(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], position: int, count: int
) -> None:
    shards = shards_of(tmp_path_factory.mktemp("shards"), *lengths)
    tokens = shards.read(position, count)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [(position + i) % sum(lengths) for i in range(count)]


def test_a_token_outside_the_vocabulary_is_found_where_it_is(tmp_path: Path) -> None:
    by_hand(tmp_path / "a.bin", [1, 2, 3])
    bad = by_hand(tmp_path / "b.bin", [4, 99, 5])
    shards = TokenShards.open(tmp_path)
    shards.check_vocabulary(100, 0, 10**9)
    shards.check_vocabulary(50, 5, 5)  # 5, 1, 2, 3, 4: around the end, without the bad one
    for position, count in ((0, 5), (4, 1), (5, 6), (0, 10**12)):
        said = problem(shards.check_vocabulary, 50, position, count)
        assert re.search(rf"{bad}: token 99 at 1 is outside .* 50 \(0 to 49\)", said)


def batches(shards: TokenShards, position: int = 0, **changes: int) -> TokenBatches:
    asked = {"global_batch_size": 4, "micro_batch_size": 2, "seq_len": 3}
    asked |= {"rank": 0, "world_size": 1, "vocab_size": 70_000}
    made = TokenBatches(shards=shards, **(asked | changes))
    made.position = position
    return made


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_token_is_an_input_once_an_epoch_and_its_target_is_the_next(
    tmp_path: Path, world_size: int, accumulation: int
) -> None:
    # 3 steps of 8 sequences of 5 tokens are one epoch.
    shards = shards_of(tmp_path, 50, 7, 63)
    micro = 8 // (world_size * accumulation)
    sizes = {"global_batch_size": 8, "micro_batch_size": micro, "seq_len": 5}
    ranks = [batches(shards, rank=r, world_size=world_size, **sizes) for r in range(world_size)]
    assert {rank.accumulation for rank in ranks} == {accumulation}
    inputs = []
    for step in range(3):
        for rank in ranks:
            pairs = rank.next_step()
            assert len(pairs) == accumulation
            for tokens, targets in pairs:
                assert tokens.shape == targets.shape == (micro, 5)
                assert tokens.dtype == targets.dtype == torch.int64
                assert torch.equal(targets, (tokens + 1) % 120)
                inputs += tokens.ravel().tolist()
            assert rank.position == (step + 1) * 40
    assert sorted(inputs) == list(range(120))


@pytest.mark.parametrize(("world_size", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_a_step_sees_the_same_sequences_on_any_number_of_ranks(
    tmp_path: Path, world_size: int, micro: int
) -> None:
    shards = shards_of(tmp_path, 17, 26)  # a step goes around the end, at no multiple of anything
    sizes = {"global_batch_size": 8, "micro_batch_size": micro, "seq_len": 5}
    ranks = [
        batches(shards, rank=r, world_size=world_size, position=40, **sizes)
        for r in range(world_size)
    ]
    for step in range(3):
        by_rank = [rank.next_step() for rank in ranks]
        # micro-batch k of rank r has the sequences from (k · world size + r) · micro-batch on
        rows = [
            row.tolist()
            for k in range(ranks[0].accumulation)
            for rank in by_rank
            for row in rank[k][0]
        ]
        start = 40 + step * 40
        expected = [[(start + 5 * j + i) % 43 for i in range(5)] for j in range(8)]
        assert rows == expected


def test_resuming_from_a_position_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, 31)
    whole = batches(shards, rank=1, world_size=2, micro_batch_size=1)
    for _ in range(4):
        whole.next_step()
    resumed = batches(shards, rank=1, world_size=2, micro_batch_size=1, position=whole.position)
    for _ in range(5):
        for ours, theirs in zip(whole.next_step(), resumed.next_step(), strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


def test_only_the_rank_that_meets_a_token_outside_the_vocabulary_speaks(tmp_path: Path) -> None:
    by_hand(tmp_path / "a.bin", [0, 1, 2, 3, 4, 5, 6, 7, 99, 9, 10, 11, 0, 0, 0])
    shards = TokenShards.open(tmp_path)
    first, second = (batches(shards, rank=r, world_size=2, vocab_size=50) for r in range(2))
    first.next_step()
    with pytest.raises(UserError, match="token 99 at 8") as refusal:
        second.next_step()
    assert refusal.value.this_rank_only
    assert second.position == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 10, "world_size": 2}, ("10", "2 × 2 ranks", "8 or 12")),
        ({"global_batch_size": 3, "micro_batch_size": 4}, ("3", "4 × 1 rank", "nearest: 4")),
        ({"global_batch_size": 0}, ("global batch size 0", "at least 1")),
        ({"micro_batch_size": -1}, ("micro-batch size -1", "at least 1")),
        ({"seq_len": 0}, ("sequence length 0",)),
        ({"vocab_size": 0}, ("vocabulary size 0",)),
        ({"seq_len": 20}, ("20 tokens", "at least 21")),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict, words: tuple[str, ...]
) -> None:
    said = problem(batches, shards_of(tmp_path, 20), **changes)
    assert all(word in said for word in words), said
