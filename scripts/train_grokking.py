"""Train the series of modular addition that groks, which tnsim ships as `data/grokking`.

    python scripts/train_grokking.py OUT_DIR

writes `OUT_DIR/seed-0/`: checkpoints at twenty log-spaced steps, and `log.json` with the accuracy
and loss of each on the pairs that are trained on and on the others. The settings are those of the
paper's published code, three tenths of the pairs and a weight decay of 0.3. Equal versions of jax
and optax give equal bytes.
"""

import argparse
from pathlib import Path

from benchmarks.paper.grokking import GrokkingSetting, train_series
from benchmarks.paper.run import ExperimentRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    run = ExperimentRun(out, GrokkingSetting(), given=out, progress=True)
    train_series(run, "seed-0")


if __name__ == "__main__":
    main()
