"""Take the claims and figures of a reproduction into the documentation, and write its page.

    python -m benchmarks.paper all --out RUNS
    python scripts/publish_reproduction.py RUNS

copies `claims.json` and the figures of every run to `docs/reproduction/`, and writes
`docs/reproduction.md` from them.
"""

import argparse
import shutil
from pathlib import Path

from PIL import Image

from benchmarks.paper import page

COLOURS = 256
ROUNDS = 1  # that move rare colours to where they are: without, colour bars have bands
DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the --out of benchmarks.paper")
    runs = parser.parse_args().runs
    kept = DOCS / "reproduction"
    for placed, record in page.gathered(runs, runs):
        folder = kept / placed
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(runs / placed / "claims.json", folder)
        for name in record["figures"]:
            picture = Image.open(runs / placed / name).convert("RGB")
            small = picture.quantize(COLOURS, kmeans=ROUNDS, dither=Image.Dither.NONE)
            small.save(folder / name, optimize=True)
    print(page.write(kept, DOCS / "reproduction.md"))


if __name__ == "__main__":
    main()
