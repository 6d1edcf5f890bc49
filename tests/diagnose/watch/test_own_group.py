"""Scripts whose process group is none of torch's: one whose futures make backward passes wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from watch_support import MAIN, SCRIPTS, short_watch

from common.diagnose.opened import open_diagnosis


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "waits"), [("OwnGroup", 1), ("ProcessGroupNCCL2", 1), ("ProcessGroupNCCL2", 0)]
)
def test_only_a_group_whose_futures_wait_is_said_not_to_overlap(
    rank_server, tmp_path: Path, name: str, waits: int
) -> None:
    """Six buckets of 11 ms each, and a layer's backward pass of 10: 55 ms of it are waited for."""
    script = (SCRIPTS / "own_group.py", "--waits", waits, "--name", name)
    done = rank_server.run(MAIN, *short_watch(tmp_path, bucket_steps=8), *script, ranks=2)
    assert done.exit_codes == [0, 0], "\n".join(done.stderr)
    opened = open_diagnosis(tmp_path / "bundle")
    assert opened.case.run.process_group == name
    found = {verdict.cause: verdict for verdict in opened.diagnosis.verdicts}
    assert ("no-overlap" in found) == bool(waits)
    if waits:
        assert ("TORCH_DIST_USE_NCCL2=0" in found["no-overlap"].change) == (name != "OwnGroup")
