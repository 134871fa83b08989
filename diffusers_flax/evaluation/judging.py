"""Scores of edits by a judge, a vision-language model behind an OpenAI-compatible endpoint.

    questions = questions_of(pairs, folder, "gedit", load_prompts(None, "gedit", ()))
    lines = ask_all(questions, Path("judge/0.jsonl"), flags)

GEdit-Bench asks two questions for each edit, of VIEScore: how well the edit succeeds (0 to 10, the
least of two scores) and how good the image looks (likewise); the overall score is the root of
their product. ImgEdit-Bench asks one, with three scores from 1 to 5, and takes their mean.

Source: Step1X-Edit (arXiv 2504.17761) and github.com/stepfun-ai/Step1X-Edit; VIEScore (arXiv
2312.14867); ImgEdit (arXiv 2505.20275) and github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic.
"""

import ast
import base64
import hashlib
import io
import json
import math
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusers_flax.command_line import Above, AtLeast
from diffusers_flax.evaluation.intervals import mean_over
from diffusers_flax.evaluation.protocols import PROTOCOLS
from diffusers_flax.evaluation.results import save_results, save_values
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.messages import one_line

ANSWERS = "judge"  # directory of answers, a file for each row of results.json
MOST_FAILURES = 8  # questions of a row without any answer, after which the judge counts as down
GEDIT_AREA = 512 * 512  # pixels of the images that the judge of GEdit-Bench sees
# Up to the last end of thinking, and thinking without an end.
THINKING = re.compile(r"(?s)^.*</think(?:ing)?>|<think(?:ing)?>.*$")
SEMANTICS, QUALITY, ALL_TYPES = "semantics", "quality", "all types"
# In the words of this project; a benchmark's own words are given by --judge_prompts.
PROMPTS = {
    "gedit": {
        SEMANTICS: "The first image was edited, and the second image is the result. The "
        "instruction was: <instruction>\nGive two scores from 0 to 10. First: does the second "
        "image do what the instruction asks (0 not at all, 10 perfectly)? Second: is everything "
        "else as it was (0 another scene, 10 no change without need)? Both images may be the same "
        'if the edit failed. Answer with JSON only: {"score": [first, second], "reasoning": "one '
        'sentence"}',
        QUALITY: "The image was made by a model. Give two scores from 0 to 10. First: does it look "
        "natural, with right distances, shadows and light (0 not at all, 10 like a photograph)? "
        "Second: is it free of artifacts, such as distorted or blurred parts, wrong limbs, "
        "scratches or watermarks (0 full of them, 10 none)? Answer with JSON only: "
        '{"score": [first, second], "reasoning": "one sentence"}',
    },
    "imgedit": {
        ALL_TYPES: "The first image was edited, and the second image is the result. The "
        "instruction was: <edit_prompt>\nGive three scores from 1 (bad) to 5 (perfect): does the "
        "result do what the instruction asks; is the edit seamless and natural; are all other "
        "details kept? If the first score is low, the others are no higher. Answer in four lines:\n"
        "Brief reasoning: one sentence\nPrompt Compliance: a number\n"
        "Visual Seamlessness: a number\nDetail Fidelity: a number"
    },
}
MARKS = {"gedit": "<instruction>", "imgedit": "<edit_prompt>"}  # of the instruction in a prompt
# Names in VIEScore's vie_prompts.py, of which each prompt consists
VIESCORE = {
    SEMANTICS: (
        *("_context_no_delimit", "_prompts_0shot_two_image_edit_rule"),
        "_prompts_0shot_tie_rule_SC",
    ),
    QUALITY: ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}


@dataclass(frozen=True)
class JudgeFlags:
    """The judge of --protocol gedit and imgedit; its key is in the environment, OPENAI_API_KEY."""

    # base URL of an OpenAI-compatible API such as http://localhost:8000/v1; "": images, no scores
    judge: str = ""
    judge_model: str = ""  # name of the model for the API
    # the benchmark's own prompts: vie_prompts.py of VIEScore for gedit, prompts.json of ImgEdit;
    # default: this project's, whose scores are not comparable with papers
    judge_prompts: Path | None = None
    judge_parallel: Annotated[int, AtLeast(1)] = 8  # requests at once
    judge_timeout: Annotated[float, Above(0)] = 120.0  # seconds of a request
    # of a request that fails, and of a question whose answer has no scores
    judge_attempts: Annotated[int, AtLeast(1)] = 5


def load_prompts(file, protocol, groups):
    """The prompts {SEMANTICS and QUALITY: text} of "gedit", {type of edit: text} of "imgedit".

    Args:
        file: JSON object, or vie_prompts.py, whose texts are read and nothing is run; None: this
            project's prompts. ALL_TYPES is the prompt of types that have none of their own.
        protocol: "gedit" or "imgedit".
        groups: types of edits.

    Raises:
        ValueError: it cannot be read, or lacks a prompt with <instruction> or <edit_prompt>.
    """
    if file is None:
        prompts = PROMPTS[protocol]
    elif file.suffix == ".py":
        texts = defaultdict(str)
        for line in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
                texts[line.targets[0].id] = line.value.value
        prompts = {x: "\n".join(texts[part] for part in parts) for x, parts in VIESCORE.items()}
    else:
        prompts = read_json(file)
    needed = (SEMANTICS, QUALITY) if protocol == "gedit" else groups
    found = {name: prompts.get(name, prompts.get(ALL_TYPES, "")) for name in needed}
    for name, text in found.items():
        if name != QUALITY and MARKS[protocol] not in text:
            raise ValueError(
                f"--judge_prompts {file} has no prompt {name!r} with {MARKS[protocol]}"
            )
    return found


def source_file(result):
    """The file of the image before an edit, beside its result."""
    return result.with_name(f"{result.stem}_SRCIMG.png")


def gedit_size(image):
    """A PIL image with about GEDIT_AREA pixels and the same shape, as its judge gets it."""
    ratio = image.width / image.height
    width = math.sqrt(GEDIT_AREA * ratio)
    return image.resize((max(int(width), 1), max(int(width / ratio), 1)))


def save_source(pair, protocol, result):
    """Write the image before an edit as the judge gets it, beside the result."""
    original = pair.decoded("original")
    save_image(gedit_size(original) if protocol == "gedit" else original, source_file(result))


def questions_of(pairs, folder, protocol, prompts):
    """Questions {"key", "name", "text", "images"} about all results, the last of the images."""
    questions = []
    for place, pair in enumerate(pairs):
        result = folder / pair.result_file(place)
        both = [source_file(result), result]
        asked = [(ALL_TYPES, prompts.get(pair.group), both)]
        if protocol == "gedit":
            asked = [(SEMANTICS, prompts[SEMANTICS], both), (QUALITY, prompts[QUALITY], both[1:])]
        for name, prompt, images in asked:
            text = prompt.replace(MARKS[protocol], pair.instruction)
            questions.append({"key": pair.key, "name": name, "text": text, "images": images})
    return questions


def content_of(question):
    """A question as the content of a chat message; results of GEdit-Bench are scaled."""
    content = [{"type": "text", "text": question["text"]}]
    for file in question["images"]:
        image = Path(file).read_bytes()
        if question["name"] != ALL_TYPES and file == question["images"][-1]:
            encoded = io.BytesIO()
            gedit_size(Image.open(file).convert("RGB")).save(encoded, "PNG")
            image = encoded.getvalue()
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return content


def parse_scores(question, reply):
    """The scores in a reply; what the judge thinks first does not count.

    Args:
        question: its name.
        reply: text: of ALL_TYPES lines that end in ": 3", of which the last three count; else JSON
            with "score", or a list, of which the last counts.

    Returns:
        List of floats, three or two.

    Raises:
        ValueError: there are more, fewer or none, or they are out of range.
    """
    text = THINKING.sub("", reply)
    if question == ALL_TYPES:
        least, most, count = 1, 5, 3
        line = r"(?m):[ *]*(\d(?:\.\d+)?)(?: */ *5)?[ *.]*(?:\(.*\))?[ *.\r]*$"
        found = re.findall(line, text)[-count:]
    else:
        least, most, count = 0, 10, 2
        start = r"""(?i)scores?["']?\s*:\s*""" if "score" in text.lower() else ""
        lists = re.findall(rf"{start}\[([^\[\]]*)\]", text)
        last = re.sub(r"\([^()]*\)", "", lists[-1]) if lists else ""  # without reasons in brackets
        found = re.findall(r"-?\d+(?:\.\d+)?", last)
    scores = [float(x) for x in found]
    if len(scores) != count or not all(least <= x <= most for x in scores):
        raise ValueError(
            f"no {count} scores from {least} to {most} in the answer {one_line(text, 80)!r}"
        )
    return scores


def ask_all(questions, file, flags):
    """Ask each question until its answer has scores, if it has no answer in a file yet.

    Args:
        questions: of questions_of.
        file: of answers, JSON lines, which gets the new ones.
        flags: JudgeFlags.

    Returns:
        A line per question, with "key", "question", "scores" and "reply"; without scores "reason".

    Raises:
        ValueError: the judge has never answered and has no score for MOST_FAILURES questions.
    """
    import openai  # a second to import

    known, lines = {}, []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):  # of a line that a kill cut short
            entry = json.loads(line)
            known[entry["checksum"]] = entry
    client = openai.OpenAI(
        base_url=flags.judge,
        api_key=os.environ.get("OPENAI_API_KEY") or "no-key",
        timeout=flags.judge_timeout,
        max_retries=flags.judge_attempts - 1,
    )

    def ask(question):
        content = content_of(question)
        text = json.dumps([flags.judge_model, content])
        checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
        if checksum in known:
            return known[checksum]
        entry = {"key": question["key"], "question": question["name"], "checksum": checksum}
        messages = [{"role": "user", "content": content}]
        for _ in range(flags.judge_attempts):
            try:
                answer = client.chat.completions.create(model=flags.judge_model, messages=messages)
                entry["reply"] = answer.choices[0].message.content or ""
                entry["scores"] = parse_scores(question["name"], entry["reply"])
            except (ValueError, TypeError) as error:  # no scores, or not the answer of a chat
                reason = one_line(error, 200)
            except Exception as error:  # of the server; the client has asked again
                return entry | {"reason": one_line(error, 200)}
            else:
                with open(file, "a", encoding="utf-8") as opened:
                    opened.write(f"{json.dumps(entry)}\n")
                return entry
        return entry | {"reason": reason}

    pool = ThreadPoolExecutor(flags.judge_parallel)
    asked = [pool.submit(ask, question) for question in questions]
    try:
        for future in tqdm(as_completed(asked), "judging", len(asked), unit="answer"):
            lines.append(future.result())
            is_silent = not known and not any("scores" in line for line in lines)
            if is_silent and len(lines) == MOST_FAILURES:
                raise ValueError(
                    f"--judge has no score for the first {MOST_FAILURES} questions "
                    f"({lines[0]['reason']}); check its address, model and OPENAI_API_KEY"
                )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
    return lines


def judge_rows(config, pairs, results, prompts):
    """Ask about every row's results if there is a judge; else say so.

    Args:
        config: Config of evaluate_edits.py.
        pairs: list of HeldOutPair.
        results: content of results.json; its rows get the metrics.
        prompts: of load_prompts.

    Returns:
        Sentences: the judge and its prompts, and each row with edits that have no score.
    """
    sentences = []
    given = "this project's prompts: not comparable with papers"
    if config.judge_prompts:
        given = f"the prompts of {config.judge_prompts.name}"
    for row in results["rows"] if config.judge else ():
        images = config.output_dir / "images" / row["images"]
        file = config.output_dir / ANSWERS / f"{row['images']}.jsonl"
        file.parent.mkdir(exist_ok=True)
        lines = ask_all(questions_of(pairs, images, config.protocol, prompts), file, config)
        if config.protocol == "imgedit":
            replies = {line["key"]: line["reply"] for line in lines if "scores" in line}
            write_text(images / "result.json", json.dumps(replies, indent=4))
        values = values_of_answers(config.protocol, pairs, lines)
        save_values(config.output_dir, row["images"], values)
        row |= {name: mean_over(x, [pair.group for pair in pairs]) for name, x in values.items()}
        row |= {"judge": config.judge_model, "judge_prompts": given}
        save_results(config.output_dir, results)
        failed = {line["key"]: line["reason"] for line in lines if "reason" in line}
        if failed:
            key, reason = next(iter(failed.items()))
            sentences.append(
                f"no score for {len(failed)} of {len(pairs)} edits of {row['model']}, such as "
                f"{key} ({reason}); the same command asks again"
            )
    judged = [row for row in results["rows"] if "judge" in row]
    sentences += [f"judge: {x['judge']}, with {x['judge_prompts']}" for x in judged]
    if len(judged) < len(results["rows"]):
        sentences.append("not judged: --judge asks a judge about images/")
    return [*dict.fromkeys(sentences)]


def values_of_answers(protocol, pairs, lines):
    """{metric and part's suffix: one score per pair}; NaN for an edit that lacks an answer."""
    answers, values = defaultdict(dict), defaultdict(list)
    for line in lines:
        if "scores" in line:
            answers[line["key"]][line["question"]] = line["scores"]
    for pair in pairs:
        found = answers[pair.key]
        if protocol == "imgedit":  # ImgEdit's own program rounds the mean of each edit
            scores = {"overall": round(float(np.mean(found.get(ALL_TYPES, np.nan))), 2)}
        else:
            known = len(found) == 2
            scores = {name: min(found[name]) if known else np.nan for name in (SEMANTICS, QUALITY)}
            scores["overall"] = math.sqrt(scores[SEMANTICS] * scores[QUALITY])
        for part in PROTOCOLS[protocol].parts:
            for name, score in scores.items():
                values[f"{name}{part}"].append(score if part in pair.parts else np.nan)
    return values
