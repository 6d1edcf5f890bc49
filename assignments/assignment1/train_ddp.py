"""Train a GPT-2 on token shards: DDP. See --help."""

from common.runtime.script import run_script
from common.training.config import DdpConfig
from common.training.trainer import train

if __name__ == "__main__":
    run_script(train, DdpConfig)
