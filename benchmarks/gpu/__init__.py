"""What matters on one NVIDIA GPU: python -m benchmarks.gpu."""
