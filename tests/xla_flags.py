"""Flags with which XLA compiles quickly, for programs that run once or twice; also printed, for `.ci/run`.

It optimises nothing, does not divide a program among threads and, where its version still has the choice, writes
fused loops by its older and much lighter emitters: compiling takes a third of the time, and tests two thirds.
"""

import sys
from importlib.metadata import version

QUICK = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if version("jaxlib").startswith("0.10."):  # a flag that XLA does not know ends the process
    QUICK.append("--xla_cpu_use_fusion_emitters=false")

if __name__ == "__main__":
    sys.stdout.write(" ".join(QUICK))
