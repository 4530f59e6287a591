"""Two models: similarity, attribution, Monte-Carlo check."""
