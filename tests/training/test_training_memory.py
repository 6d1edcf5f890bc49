"""The memory of a rank in training, as its allocator tells it, against the prediction."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from common.perfmodel.memory import predict_memory
from common.perfmodel.sharding import Sharding
from common.perfmodel.workload import Workload


@pytest.mark.two_ranks
def test_each_strategy_takes_the_memory_that_is_predicted(rank_server, tmp_path):
    worker = Path(__file__).with_name("memory_worker.py")
    done = rank_server.run(worker, tmp_path, ranks=2, timeout_s=110)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    runs = sorted(tmp_path.glob("*/memory.csv"))
    assert len(runs) == 8
    for path in runs:
        settings = yaml.safe_load((path.parent / "config.yaml").read_text())
        micro_batch = settings["micro_batch_size"]
        workload = Workload(
            *("gpt2-nano", micro_batch, 64),
            optimizer_implementation="fused",
            gradient_accumulation=16 // (2 * micro_batch),
        )
        views = settings.get("gradient_as_bucket_view", False)
        predicted = predict_memory(workload, Sharding(settings["strategy"], 2, views)).peak_bytes
        # Both ranks; a little room for messages on their way.
        assert pd.read_csv(path)["peak_bytes"].tolist() == pytest.approx([predicted] * 2, rel=0.01)
