"""Train a GPT-2 on token shards: FSDP. See --help."""

from common.runtime.script import run_script
from common.training.config import FsdpConfig
from common.training.trainer import train

if __name__ == "__main__":
    run_script(train, FsdpConfig)
