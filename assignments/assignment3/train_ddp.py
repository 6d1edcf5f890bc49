"""Fine-tune a text classifier with dynamic micro-batches. See --help."""

from common.runtime.script import run_script
from common.training.micro_batches.config import MicroBatchConfig
from common.training.texts.text_trainer import train_text

if __name__ == "__main__":
    run_script(train_text, MicroBatchConfig)
