"""python -m benchmarks.tables: write the tables of README and docs/."""

from benchmarks.rows import ROOT
from benchmarks.tables import fill


def main() -> None:
    """Write all pages."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (filled := fill(text)) != text:
            path.write_text(filled)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
