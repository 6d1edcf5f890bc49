"""Every command of the README is run by CI or here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Commands that CI runs (.ci/run), or runs in another form: its own, or the smaller preset.
RUN_BY_CI = {
    "pip install uv": "pip install --quiet uv",
    "uv run ddplab run": "uv run ddplab run --preset smoke",
    "uv run ddplab --help": "uv run ddplab --help",
    "uv run ddplab doctor": "uv run ddplab doctor",
    "uv run ddplab doctor --selftest": "uv run ddplab doctor --selftest",
    "uv run ddplab emulate --hosts 2 --rate 1gbit -- assignments/assignment2/ddp_benchmark.py "
    "--config assignments/assignment2/configs/smoke.yaml": "uv run ddplab emulate --hosts 2 "
    "--rate 1gbit -- assignments/assignment2/ddp_benchmark.py "
    "--config assignments/assignment2/configs/smoke.yaml",
    "uv run ddplab run assignment2 --preset smoke": "uv run ddplab run --preset smoke",
    "uv run pytest": "uv run pytest",
    "uv run ddplab tune common.tuning.examples:convolutions": "uv run ddplab tune "
    "common.tuning.examples:convolutions",
    "uv run python assignments/assignment0/memory_analysis.py --model gpt2-xl": "uv run python "
    "assignments/assignment0/memory_analysis.py --model gpt2-xl",
    "uv run papermill notebooks/assignment2_part1_model.ipynb outputs/part1.ipynb": "uv run "
    "papermill --no-progress-bar notebooks/assignment2_part1_model.ipynb outputs/part1.ipynb",
    "uv run ddplab data tokens --synthetic --output_dir outputs/tokens": "uv run ddplab data "
    "tokens --synthetic --output_dir outputs/tokens",
    "uv run torchrun --nproc_per_node=2 assignments/assignment1/train_ddp.py --data outputs/tokens "
    "--config assignments/assignment1/configs/smoke.yaml --save_every 5": "uv run torchrun "
    "--nproc_per_node=2 assignments/assignment1/train_ddp.py --data outputs/tokens "
    "--config assignments/assignment1/configs/smoke.yaml --save_every 5",
    "assignments/assignment3/run_all.sh --config assignments/assignment3/configs/smoke.yaml": ""
    "assignments/assignment3/run_all.sh --config assignments/assignment3/configs/smoke.yaml",
    "uv run torchrun --nproc_per_node=2 assignments/assignment4/benchmark.py "
    "--config assignments/assignment4/configs/smoke.yaml": "uv run torchrun "
    "--nproc_per_node=2 assignments/assignment4/benchmark.py "
    "--config assignments/assignment4/configs/smoke.yaml",
    "uv run torchrun --nproc_per_node=2 assignments/assignment2/ddp_benchmark.py "
    "--config assignments/assignment2/configs/smoke.yaml --bucket_cap_mb 1 25": "uv run torchrun "
    "--nproc_per_node=2 assignments/assignment2/ddp_benchmark.py "
    "--config assignments/assignment2/configs/smoke.yaml --bucket_cap_mb 1 25",
}
RUN_HERE = {
    "uv run ddplab predict --run-dir data/epyc-2-cores/assignment2",
    "uv run ddplab predict --model gpt2-large --cluster h100-ib --gpus 8..16384",
}


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", line.strip()) for line in lines if line.strip()]


def test_every_command_is_run_somewhere() -> None:
    assert set(readme_commands()) == RUN_HERE | set(RUN_BY_CI)


def test_ci_runs_its_share() -> None:
    ci = re.sub(r"\\\n\s*", "", (ROOT / ".ci" / "run").read_text())
    assert [command for command in RUN_BY_CI.values() if command not in ci] == []


def test_the_other_commands_work() -> None:
    for command in sorted(RUN_HERE):
        arguments = shlex.split(command)[2:]
        tool = Path(sys.executable).with_name(arguments[0])
        done = subprocess.run(
            [tool, *arguments[1:]], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr[-2000:]
