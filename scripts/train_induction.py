"""Train the induction series that tnsim ships as `data/induction`.

    python scripts/train_induction.py OUT_DIR

writes `step_000000.safetensors`, ... at log-spaced steps, and `metrics.json` with the loss and the
accuracies of each: `repeated` are the tokens that an earlier occurrence of their predecessor
determines, `fresh` those before them. The run is deterministic for a given jax version and device.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import tnsim
from benchmarks.paper.repetitions import RepetitionSetting, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = RepetitionSetting(learning_rate=args.learning_rate, weight_decay=args.weight_decay)
    rows = []
    for step, model, measures in trained(setting, args.seed):
        rows.append({"step": step, **measures})
        print(rows[-1], flush=True)
        tnsim.save(model, args.out / f"step_{step:06d}.safetensors")
    settings = {**dataclasses.asdict(setting), "optimiser": "adamw", "seed": args.seed}
    text = json.dumps({"settings": settings, "checkpoints": rows}, indent=1)
    (args.out / "metrics.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
