"""All pairs of many models, resumable."""
