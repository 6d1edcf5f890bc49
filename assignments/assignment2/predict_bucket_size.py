"""Part 2: T(b) and b* from your tables; the same as ``ddplab predict``. See --help."""

from common.cli.predict import Predict
from common.runtime.script import run_script

if __name__ == "__main__":
    run_script(Predict.run, Predict)
