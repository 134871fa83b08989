"""README and docs: links, commands, flags, files and names in snippets exist."""

import ast
import dataclasses
import importlib
import itertools
import json
import re
import subprocess

import pytest
from helpers import ROOT, flags_in_help

from diffusers_flax.generating.requests import ListedFlags

PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "notebooks" / "instruct_pix2pix.ipynb",
]
OUTPUT_FLAGS = re.compile(
    "--(output|output_dir|held_out_dir|image_dir|work_dir|grid|preview|report|cache_latents"
    "|executable_dir|compilation_cache_dir)"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+(?:\n[^`\n]+)?`", re.MULTILINE | re.DOTALL)


def text_of(page):
    """A page; of a notebook its texts, without the code, which tests/test_notebook.py checks."""
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(text):
    """The anchors that GitHub gives the headings of a page."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


def commands(text):
    """The commands in indented blocks and in code spans: lists of words."""
    blocks = re.findall(
        r"(?:^    .*\n)+", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M
    )
    spans = [span.strip("`") for span in CODE.findall(text) if not span.startswith("```")]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines += [span.replace("\n", " ") for span in spans]
    for line in lines:
        words = line.split("#")[0].split()
        words = [
            word for word in words if "=" not in word or word.startswith("-")
        ]  # VARIABLE=value
        if words[:1] and words[0] in ("python", "bash", "make", "pytest"):
            yield words


def flags_in(script):
    """Flags of a script and of its subcommands, with --no_ for switches."""
    if script.startswith("examples."):
        source = (ROOT / "examples" / script.removeprefix("examples.")).read_text()
        return set(re.findall(r'add\("(--\w+)"', source))
    module = importlib.import_module(script.removesuffix(".py"))
    if script == "script.py":  # has no Config
        return flags_in_help(module)
    configs = [module.Config] if hasattr(module, "Config") else module.SUBCOMMANDS.values()
    fields = [field for config in configs for field in dataclasses.fields(config)]
    return {f"--{field.name}" for field in fields} | {
        f"--no_{field.name}" for field in fields if field.type in (bool, "bool")
    }


def faults(text, folder):
    """The problems of a page: links, anchors, files, flags and tests that do not exist."""
    for target in LINK.findall(CODE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        file = folder / path if path else None
        if file is not None and not file.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in anchors(file.read_text() if file else text):
            yield f"{target} has no such heading"
    for words in commands(text):
        program, *rest = words
        if program == "make":
            targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
            if rest and rest[0] not in targets:
                yield f"make {rest[0]}: no such target"
            continue
        if program == "python" and rest[:2] == ["-m", "diffusers_flax"]:
            continue  # the script of a user, with its flags
        if program == "python" and rest[:1] == ["-m"]:
            module = ROOT / rest[1].replace(".", "/")
            file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
            rest = [str(file.relative_to(ROOT)), *rest[2:]]
        files = [word for word in rest if re.fullmatch(r"[\w/-]+\.(py|sh)", word)]
        if missing := [name for name in files if not (ROOT / name).exists()]:
            yield f"{' '.join(words)}: {', '.join(missing)} does not exist"
        elif files and program == "pytest" and "-k" in rest:
            names = re.findall(r"^def (test_\w+)", (ROOT / files[0]).read_text(), re.M)
            word = rest[rest.index("-k") + 1].strip("\"'")
            if not any(word in name for name in names):
                yield f"{files[0]} has no test {word}"
        elif files and program == "python" and (flags := re.findall(r"--\w+", " ".join(rest))):
            known = flags_in(files[0].replace("/", "."))
            for flag in flags:
                if flag not in known:
                    yield f"{files[0]} has no flag {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_commands(page):
    assert list(faults(text_of(page), page.parent)) == []


def written_files(text):
    """What the commands and snippets of a page write in the clone; not PLACEHOLDERS."""
    for words in commands(text):
        for flag, value in itertools.pairwise(words):
            if OUTPUT_FLAGS.fullmatch(flag):
                yield value
        if words[:2] == ["bash", "script.sh"]:
            yield (words[3:] or ["data"])[0]
    yield from re.findall(r"\.save(?:_pretrained)?\(\"([^\"]+)\"", text)


def test_outputs_of_commands_are_ignored():
    """Following README and docs in a clone leaves git status empty."""
    found = {file for page in PAGES for file in written_files(text_of(page))}
    files = {file for file in found if re.match(r"(?!\d+$)[a-z]", file)}
    paths = {file if re.search(r"\.\w+$", file) else f"{file.rstrip('/')}/x" for file in files}
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    text = "\n".join(sorted(paths))
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert len(paths) > 20 and paths - set(done.stdout.split()) == set()


def missing_files(text):
    """Files and folders of this project that code spans name and that do not exist."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for span in CODE.findall(text):
        for name in re.findall(r"(?<![\w./-])[a-z][\w./-]*", span.strip("`")):
            is_ours = name.partition("/")[0] in folders - {"data"} and "output" not in name
            is_pattern = re.search("[A-Z]{2}", name)
            if is_ours and "/" in name and not is_pattern and not (ROOT / name).exists():
                yield name


def missing_imports(text):
    """What the Python snippets import from this project and it does not have."""
    ours = {path.stem for path in ROOT.iterdir()}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ours:
                module = importlib.import_module(node.module)
                yield from (a.name for a in node.names if not hasattr(module, a.name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_imports(page):
    text = text_of(page)
    assert [*missing_files(text), *missing_imports(text)] == []


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_docs_are_short():
    pages = [*(ROOT / "docs").glob("*.md")]
    assert len(pages) <= 20
    assert {page.name for page in pages if len(page.read_text().split()) > 2500} == set()


def test_keys_of_lists():
    """The table of docs/generating.md has the keys of lines, and no other."""
    text = (ROOT / "docs" / "generating.md").read_text()
    section = text.partition("\n## Lists\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    keys = {field.name for field in dataclasses.fields(ListedFlags)}
    assert sorted(named) == sorted(keys)
