"""python -m benchmarks.export: measured processes import exports.py, which they cannot do by -m."""

from benchmarks.export.exports import main

if __name__ == "__main__":
    main()
