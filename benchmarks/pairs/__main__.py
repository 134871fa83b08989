"""python -m benchmarks.pairs: measured processes import cases.py, which they cannot do by -m."""

from benchmarks.pairs.cases import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
