"""Cost and benefit of averages of the weights: python -m benchmarks.ema."""
