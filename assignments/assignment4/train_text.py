"""Train a text classifier on one GPU or with DDP, step times taken apart. See --help."""

from common.training.texts.files import run_experiment
from common.training.texts.text_trainer import train_text

if __name__ == "__main__":
    run_experiment(train_text)
