# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 4. Reading a training run
#
# Thirteen checkpoints of one bilinear layer that learns `(a + b) mod 113`. All pairs under the
# `Gaussian` metric make a matrix, exactly and without data. It is labelled by training step.

# %%
import json
from pathlib import Path

import tnsim
from tnsim.analysis import baselines, figures, reading, report

folder = Path(tnsim.__file__).parent / "data" / "modular-addition"
series = tnsim.load(folder)
run = tnsim.pairwise(series, slices=True).sel(output=[0, 28, 56, 84])
steps = run.a.values
run.similarity.sel(a=[0, 400, 8000, 100000], b=[0, 400, 8000, 100000]).round(2)

# %% [markdown]
# An exact metric is an inner product, so this is a Gram matrix: no eigenvalue is negative.

# %%
reading.spectrum(run)

# %% [markdown]
# ## Phases
#
# The best division into contiguous phases minimises the scatter of the models around the mean of
# their phase. Three phases are initialisation, memorisation and generalisation, as the accuracies
# logged in training say: at the first change point the training set is fitted and the validation
# set is not, at the second all but 0.02 % of the validation set is right.

# %%
log = {row["step"]: row for row in json.loads((folder / "metrics.json").read_text())["checkpoints"]}
phases = reading.segment(run, 3)
for step in steps:
    mark = "-- change --" if step in phases.labels else ""
    print(
        f"{step:7d}  train {log[step]['train_accuracy']:7.2%}  "
        f"validation {log[step]['validation_accuracy']:7.2%}  {mark}"
    )
assert (
    log[phases.labels[0]]["train_accuracy"]
    > 0.9
    > 0.3
    > log[phases.labels[0]]["validation_accuracy"]
)
assert log[phases.labels[1]]["validation_accuracy"] > 0.999

# %% [markdown]
# ## Beside what needs data, or the parametrisation
#
# On Gaussian inputs the cosine of the outputs is an estimate of the similarity, and CKA sees the
# same borders; both need inputs. The cosine of the weights needs none, but changes slowly and blurs
# them. The block score, mean within minus mean across, puts a number on it.

# %%
run["weight_cosine"] = baselines.weight_cosine(series)
run["cka"] = baselines.cka(series, 2000)
run["output_cosine"] = baselines.output_cosine(series, 2000)
for name in ("similarity", "output_cosine", "cka", "weight_cosine"):
    print(f"{name:14s} {reading.block_score(run[name], phases.change_points):.3f}")

# %%
figures.pairwise(run, "heatmap", ["similarity", "weight_cosine", "cka"], phases.change_points)

# %% [markdown]
# ## Along the run
#
# The similarity to the model before dips where the training set is fitted; the similarity to the
# final model goes on rising long after validation accuracy is 100 %.

# %%
figures.pairwise(run, "trajectory", ["similarity", "weight_cosine"], phases.change_points)

# %%
figures.pairwise(run, "mds", change_points=phases.change_points)

# %%
figures.pairwise(run, "dendrogram", change_points=phases.change_points)

# %% [markdown]
# ## Output by output
#
# Every residue is learned at the same time: the slices look alike.

# %%
figures.pairwise(run, "slices", change_points=phases.change_points)

# %% [markdown]
# ## To pass on
#
# One page without network holds all of it, with every pair's values under the pointer.

# %%
page = report.write(run, "run.html", "Modular addition")
f"{page.stat().st_size / 1000:.0f} kB"
