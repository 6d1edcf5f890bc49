"""How many messages, and of which size, outlast a backward pass: on made-up networks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from common.benchmarks import lasting_messages
from common.benchmarks.lasting_messages import LastingMessages
from common.perfmodel.collectives import AlphaBeta

MIB, GIB = 2**20, 2**30
NVLINK = AlphaBeta(30e-6, 230e9)
ETHERNET = AlphaBeta(200e-6, 1e9)
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@dataclass
class Network:
    """Stands in for all-reduces: what so many take, launched at once."""

    link: AlphaBeta
    most_bytes: int = 0

    def time(self, messages: list[torch.Tensor], worker: object) -> float:
        different = {id(message): message.nbytes for message in messages}
        self.most_bytes = max(self.most_bytes, sum(different.values()))
        return sum(float(self.link.time_s(message.nbytes)) for message in messages)


def messages_on(
    network: Network, device: torch.device, memory_bytes: int, patch: pytest.MonkeyPatch
) -> LastingMessages:
    """Messages without memory, on a rank of a network that does not exist."""
    zeros = torch.zeros
    patch.setattr(lasting_messages, "time_in_flight", network.time)
    patch.setattr(torch, "zeros", lambda numel, device: zeros(numel, device="meta"))
    worker = SimpleNamespace(device=device, is_main=True, gather=lambda item: [item])
    return LastingMessages(worker, memory_bytes)


@pytest.mark.parametrize("pass_s", [0.03, 0.3, 0.6])
@pytest.mark.parametrize("asked_bytes", [1024, 8 * MIB])
def test_on_nvlink_few_larger_messages_outlast_the_pass(monkeypatch, pass_s, asked_bytes):
    network = Network(NVLINK)
    size, count = messages_on(network, GPU, 3 * GIB, monkeypatch).few_lasting(
        asked_bytes, 2 * pass_s
    )
    assert count <= 200
    assert count * NVLINK.time_s(size) >= 2 * pass_s
    assert size >= asked_bytes
    assert network.most_bytes <= 3 * GIB


def test_a_size_of_which_few_last_is_kept(monkeypatch):
    network = Network(ETHERNET)
    size, count = messages_on(network, GPU, GIB, monkeypatch).few_lasting(8 * MIB, 0.6)
    assert size == 8 * MIB
    assert 2 <= count <= 200
    assert count * ETHERNET.time_s(size) >= 0.6


def test_where_memory_permits_no_message_that_lasts_it_is_said(monkeypatch, caplog):
    network = Network(NVLINK)
    messages = messages_on(network, GPU, GIB, monkeypatch)
    with caplog.at_level(logging.WARNING):
        size, count = messages.few_lasting(8 * MIB, 2 * 0.9)
    assert (size, count) == (GIB // 2, 200)
    assert network.most_bytes <= GIB
    assert "200 all-reduces of 512 MiB" in caplog.text
    assert "1.800 s" in caplog.text


def test_on_the_cpu_a_size_that_was_asked_for_is_kept_up_to_a_thousand_messages(monkeypatch):
    network = Network(AlphaBeta(100e-6, 1e9))  # 64 KiB: 166 µs
    size, count = messages_on(network, CPU, GIB, monkeypatch).few_lasting(2**16, 0.1)
    assert size == 2**16
    assert 200 < count <= 1000


def test_messages_take_turns_in_eight_buffers():
    worker = SimpleNamespace(device=CPU)
    made = LastingMessages(worker, GIB).make(1024, 20)
    assert len(made) == 20
    assert len({id(message) for message in made}) == 8
    assert all(made[i] is made[i + 8] for i in range(12))
    assert {message.nbytes for message in made} == {1024}
    assert len({id(message) for message in LastingMessages(worker, 3000).make(1024, 20)}) == 2
