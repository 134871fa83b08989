"""python -m benchmarks.export: measured processes import exports.py, which they cannot do by -m."""

from benchmarks.export.exports import SUBCOMMANDS, main

__all__ = ["SUBCOMMANDS", "main"]

if __name__ == "__main__":
    main()
