"""--protocol gedit and imgedit with a stub of a judge that answers, fails and stalls."""

import base64
import io
import json
import math
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from evaluations import evaluate, png
from helpers import photo
from local_server import LocalServer
from PIL import Image
from tiny_models import make_tiny_pipeline

from diffusers_flax.evaluation import judging
from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.evaluation.judging import (
    ALL_TYPES,
    QUALITY,
    SEMANTICS,
    load_prompts,
    parse_scores,
)

GOOD = {
    SEMANTICS: 'Sure. {"score": [8, 6], "reasoning": "a {red} hat"}',
    QUALITY: '{"score": [9, 4],\n "reasoning": "soft"}',
    ALL_TYPES: "Brief reasoning: fine.\nPrompt Compliance: 5\nSeamlessness: 4  \nFidelity: 4",
}


class JudgeServer(LocalServer):
    """A chat endpoint.

    Args:
        faults: {word of the prompt: list of statuses or texts for its first answers}.
    """

    def __init__(self, faults=()):
        self.faults, self.requests = {k: list(x) for k, x in dict(faults).items()}, []
        self.lock = threading.Lock()
        super().__init__()

    def answer(self, request):
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        text = body["messages"][0]["content"][0]["text"]
        with self.lock:
            self.requests.append((request.path, request.headers["Authorization"], body, text))
            fault = next((x for word, x in self.faults.items() if word in text and x), None)
            reply = fault.pop(0) if fault else self.good(text)
        status, content = 200, {"choices": [{"message": {"content": reply}}]}
        if isinstance(reply, int):
            status, content = reply, {"error": {"message": "no"}}
        content = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Retry-After-Ms", "1")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    @staticmethod
    def good(text):
        if "three scores" in text or "type prompt" in text:
            return GOOD[ALL_TYPES]
        return GOOD[QUALITY] if "made by a model" in text else GOOD[SEMANTICS]


def opened(url):
    """The image of a data URL."""
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def write_gedit(folder):
    """Four rows of GEdit-Bench in datasets' Arrow stream, one of them Chinese."""
    rows = []
    for i, (task, language) in enumerate(
        (("color_alter", "en"), ("color_alter", "cn"), ("subject-add", "en"), ("color_alter", "en"))
    ):
        image = {"bytes": png(photo(64, 48, i)), "path": None}
        rows.append(
            {"task_type": task, "key": f"k{i}", "instruction": f"make it red {i}"}
            | {"instruction_language": language, "input_image": image, "input_image_raw": image}
            | {"Intersection_exist": i != 2}
        )
    table = pa.Table.from_pylist(rows)
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)


def write_imgedit(folder):
    """Two edits of ImgEdit-Bench's basic suite; the images are in a folder beside the list."""
    edits = {}
    for i, (key, group) in enumerate((("1082", "adjust"), ("673", "style"))):
        file = folder / "images" / group / f"00{i}.jpg"
        file.parent.mkdir(parents=True)
        photo(64, 64, i).save(file)
        edits[key] = {"id": f"{group}/00{i}.jpg", "prompt": f"make it red {i}", "edit_type": group}
    (folder / "basic_edit.json").write_text(json.dumps(edits))


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """The working directory; there is a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    return tmp_path


@pytest.mark.slow
def test_gedit(bare):
    """Layout, questions, what is sent, retries, errors per edit, resuming and the figures."""
    make_tiny_pipeline(bare / "sd")
    write_gedit(bare / "set")
    given = {"protocol": "gedit", "data_dir": "set", "output_dir": "out"}
    (row,) = evaluate(**given)["rows"]
    images, report = Path("out/images", row["images"]), Path("out/results.md")
    names = [f"fullset/color_alter/en/k{i}" for i in (0, 3)] + ["fullset/subject-add/en/k2"]
    expected = {f"{name}{end}.png" for name in names for end in ("", "_SRCIMG")}
    assert {str(x.relative_to(images)) for x in images.rglob("*.png")} == expected
    assert "not judged: --judge asks a judge about images/" in report.read_text()

    faults = {
        "red 0": [429, 500, "no idea"],  # answered at the fourth request
        "red 2": [*[500] * 4, '{"score": [9, 2]}'],  # no score; later one
        "red 3": ['{"score": [11, 5]}'],
    }
    with JudgeServer(faults) as server:
        judge = {"judge": f"{server.endpoint}/v1", "judge_model": "stub", "judge_attempts": 4}
        results = evaluate(**given | judge)
        said = "no score for 1 of 3 edits of sd, such as fullset/subject-add/en/k2 (Error code: 500"
        assert said in report.read_text()
        counts = Counter(text for *_, text in server.requests)
        assert sorted(counts.values()) == [2, 3, 4, 4]  # quality has one text for all
        for path, key, body, _ in server.requests:
            assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "stub")
        body = next(body for *_, body, text in server.requests if "red 3" in text)
        before, after = (opened(x["image_url"]["url"]) for x in body["messages"][0]["content"][1:])
        width = math.sqrt(512 * 512 * 64 / 48)
        expected = photo(64, 48, 3).resize((int(width), int(width * 48 / 64)))
        assert before.tobytes() == expected.tobytes()  # scaled once
        made = Image.open(images / "fullset/color_alter/en/k3.png").resize(after.size)
        assert after.tobytes() == made.tobytes()

        (row,) = results["rows"]
        assert (row["semantics"], row["quality"]) == (6, 4)
        assert row["overall"] == pytest.approx(math.sqrt(6 * 4), abs=1e-4)
        values = json.loads(Path("out/values", f"{row['images']}.json").read_text())
        # As in the benchmark's program, an edit without one of the answers counts nowhere.
        assert values["semantics"] == [6, None, 6] and values["quality"] == [4, None, 4]
        assert values["overall_intersection"] == [values["overall"][0], None, values["overall"][2]]

        # Only what failed is asked again.
        before = len(server.requests)
        (row,) = evaluate(**given | judge)["rows"]
        assert ["red 2" in text for *_, text in server.requests[before:]] == [True]
        # Means of the tasks' means: two edits with 6, and one with 2
        assert row["semantics"] == (6 + 2) / 2 and row["semantics_intersection"] == 6
        assert row["overall"] == pytest.approx((math.sqrt(6 * 4) + math.sqrt(2 * 4)) / 2)
        table = report.read_text()
        assert "judge: stub, with this project's prompts: not comparable with papers" in table
        assert table.count("| G_SC | G_PQ | G_O |") == 2
        assert "Full set, 3 pairs:" in table and "Intersection subset, 2 pairs:" in table
        assert (
            "| overall | guidance | image guidance | color_alter (2) | subject-add (1) |" in table
        )


@pytest.mark.slow
def test_imgedit(bare):
    """Layout, prompts by type, the file of replies, and means of types."""
    make_tiny_pipeline(bare / "sd")
    write_imgedit(bare / "set")
    prompts = {"adjust": "type prompt A: <edit_prompt>", "style": "type prompt S: <edit_prompt>"}
    Path("prompts.json").write_text(json.dumps(prompts))
    low = "Brief reasoning: nothing.\n**Style Fidelity**: 1\nContent: 2/5\n- Rendering: **1**\n"
    with JudgeServer({"prompt S": [low]}) as server:
        (row,) = evaluate(
            protocol="imgedit",
            data_dir="set",
            output_dir="out",
            judge=f"{server.endpoint}/v1",
            judge_model="stub",
            judge_prompts="prompts.json",
        )["rows"]
        asked = sorted(x[3] for x in server.requests)
        assert asked == ["type prompt A: make it red 0", "type prompt S: make it red 1"]
    folder = Path("out/images", row["images"])
    replies = json.loads((folder / "result.json").read_text())
    assert replies == {"1082": GOOD[ALL_TYPES], "673": low}
    assert (folder / "1082.png").is_file()
    assert np.array_equal(
        Image.open(folder / "673_SRCIMG.png"), Image.open("set/images/style/001.jpg")
    )
    assert row["overall"] == pytest.approx((4.33 + 1.33) / 2, abs=1e-4)
    table = Path("out/results.md").read_text()
    assert "| adjust (1) | style (1) |" in table
    assert "judge: stub, with the prompts of prompts.json" in table


@pytest.mark.parametrize(
    ("protocol", "reply", "scores"),
    [
        ("gedit", GOOD[QUALITY], [9, 4]),
        ("gedit", '<think>Maybe {"score": [2, 3]}?</think>{"score": [7, 8]}', [7, 8]),
        ("gedit", '{"Scores": [7, 6.5], "reasoning": "boxes [1, 2]"}', [7, 6.5]),
        ("gedit", '<thinking>Maybe {"score": [2, 3]}, or', None),
        ("gedit", '{"score": [7, 11]}', None),
        ("gedit", '{"score": 7, "reasoning": "boxes [1, 2]"}', None),
        ("imgedit", "<think>A: 1\nB: 1\nC: 1</think>A: 4 (good)\nB: 3/5\nC: 2.", [4, 3, 2]),
        ("imgedit", GOOD[ALL_TYPES].replace("4  ", "7"), None),
    ],
)
def test_scores_of_replies(protocol, reply, scores):
    if scores is None:
        with pytest.raises(ValueError, match=r"no [23] scores from"):
            parse_scores(protocol, reply)
    else:
        assert parse_scores(protocol, reply) == scores


def test_prompts_of_files(tmp_path):
    """VIEScore's module is read without being run."""
    file = tmp_path / "vie_prompts.py"
    names = ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule")
    names += ("_prompts_0shot_tie_rule_SC", "_prompts_0shot_rule_PQ")
    texts = ("context", "rule", "Editing instruction: <instruction>", "quality")
    lines = [f'{name} = """{text}"""' for name, text in zip(names, texts)]
    file.write_text("\n".join([*lines, "raise SystemExit('this was run')"]))
    assert load_prompts(file, "gedit", {"color_alter"}) == {
        SEMANTICS: "context\nrule\nEditing instruction: <instruction>",
        QUALITY: "context\nquality",
    }
    file.write_text("text = (")
    with pytest.raises(ValueError, match=r"vie_prompts.py is not valid Python: .*never closed"):
        load_prompts(file, "gedit", {"color_alter"})


def ask(folder, endpoint, number):
    """judging.ask_all about results of ImgEdit-Bench."""
    pairs = [HeldOutPair(i, "", f"{i}.", b"", key=f"k{i}", group="add") for i in range(number)]
    for pair in pairs:
        for name in (pair.key, f"{pair.key}_SRCIMG"):
            photo(8, 8).save(folder / f"{name}.png")
    flags = judging.JudgeFlags(judge=endpoint, judge_model="stub", judge_attempts=2)
    config = SimpleNamespace(**vars(flags), protocol="imgedit")
    prompts = {"add": "type prompt <edit_prompt>"}
    return judging.ask_all(pairs, folder, folder / "answers.jsonl", config, prompts)


def test_a_judge_that_refuses_the_key_ends_the_program(bare):
    """Other failures do not end it."""
    with JudgeServer({"type": [401] * 99}) as server:
        with pytest.raises(ValueError, match=r"Error code: 401.*; check its address, --judge_mod"):
            ask(bare, server.endpoint, 40)
        assert len(server.requests) < 40
    with JudgeServer({f"prompt {i}.": [400] for i in range(1, 31)}) as server:
        answers = ask(bare, server.endpoint, 31)
        assert [len(x) for x in answers] == 31 * [1]
        assert ["scores" in x for (x,) in answers] == [True, *[False] * 30]
