"""Scores of edits by a judge, a vision-language model behind an OpenAI-compatible endpoint.

    prompts = load_prompts(None, "gedit", ())
    answers = ask_all(pairs, folder, Path("judge/0.jsonl"), config, prompts)

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
import itertools
import json
import math
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
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
        try:
            lines = ast.parse(file.read_text(encoding="utf-8")).body
        except SyntaxError as error:
            raise ValueError(f"--judge_prompts {file} is not valid Python: {error}") from error
        texts = defaultdict(str)
        for line in lines:
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


def gedit_size(image):
    """A PIL image with about GEDIT_AREA pixels and the same shape, as its judge gets it."""
    ratio = image.width / image.height
    width = math.sqrt(GEDIT_AREA * ratio)
    return image.resize((max(int(width), 1), max(int(width / ratio), 1)))


def save_source(pair, protocol, file):
    """Write the image before an edit as the judge gets it."""
    original = pair.decoded("original")
    save_image(gedit_size(original) if protocol == "gedit" else original, file)


def parse_scores(protocol, reply):
    """The scores in a reply; what the judge thinks first does not count.

    Args:
        protocol: "gedit" or "imgedit".
        reply: text: for "imgedit" lines that end in ": 3", of which the last three count; for
            "gedit" JSON with "score", of which the last counts.

    Returns:
        List of floats, three or two.

    Raises:
        ValueError: there are more, fewer or none, or they are out of range.
    """
    text = THINKING.sub("", reply)
    if protocol == "imgedit":
        least, most, count = 1, 5, 3
        line = r"(?m):[ *]*(\d(?:\.\d+)?)(?: */ *5)?[ *.]*(?:\(.*\))?[ *.\r]*$"
        found = re.findall(line, text)[-count:]
    else:
        least, most, count = 0, 10, 2
        lists = re.findall(r"""(?i)scores?["']?\s*:\s*\[([^\[\]]*)\]""", text)
        found = re.findall(r"-?\d+(?:\.\d+)?", lists[-1]) if lists else []
    scores = [float(x) for x in found]
    if len(scores) != count or not all(least <= x <= most for x in scores):
        raise ValueError(
            f"no {count} scores from {least} to {most} in the answer {one_line(text, 80)!r}"
        )
    return scores


def ask_all(pairs, folder, file, config, prompts):
    """Ask about all results, each question until its answer has scores.

    Args:
        pairs: list of HeldOutPair.
        folder: of the results.
        file: of answers, JSON lines; what it answers is not asked again, new answers are added.
        config: JudgeFlags, with protocol.
        prompts: of load_prompts.

    Returns:
        For each pair a list of answers with "key", "question", and "scores" and "reply", or
        "reason": two of "gedit", one of "imgedit".

    Raises:
        ValueError: there is no such server or model, or it refuses the key.
    """
    import openai  # a second to import

    known = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):  # of a line that a kill cut short
            entry = json.loads(line)
            known[entry["checksum"]] = entry
    client = openai.OpenAI(
        base_url=config.judge,
        api_key=os.environ.get("OPENAI_API_KEY") or "no-key",
        timeout=config.judge_timeout,
        max_retries=config.judge_attempts - 1,
    )
    is_gedit = config.protocol == "gedit"

    def ask(pair, question, text, files):
        content = [{"type": "text", "text": text}]
        for image_file in files:
            image, encoded = Image.open(image_file).convert("RGB"), io.BytesIO()
            if is_gedit and image_file == files[-1]:  # the result
                image = gedit_size(image)
            image.save(encoded, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        asked = json.dumps([config.judge_model, content])
        checksum = hashlib.sha256(asked.encode()).hexdigest()[:16]
        if checksum in known:
            return known[checksum]
        entry = {"key": pair.key, "question": question, "checksum": checksum}
        messages = [{"role": "user", "content": content}]
        for _ in range(config.judge_attempts):
            try:
                answer = client.chat.completions.create(model=config.judge_model, messages=messages)
                entry["reply"] = answer.choices[0].message.content or ""
                entry["scores"] = parse_scores(config.protocol, entry["reply"])
            except (ValueError, TypeError, IndexError, AttributeError) as error:  # of an odd answer
                reason = one_line(error, 200)
            except (
                openai.AuthenticationError,
                openai.PermissionDeniedError,
                openai.NotFoundError,
            ):
                raise
            except (openai.APITimeoutError, openai.APIStatusError) as error:
                return entry | {"reason": one_line(error, 200)}  # the client has asked again
            else:
                with open(file, "a", encoding="utf-8") as opened:
                    opened.write(f"{json.dumps(entry)}\n")
                return entry
        return entry | {"reason": reason}

    def ask_about(place):
        pair = pairs[place]
        both = [folder / pair.result_file(place, ending) for ending in ("_SRCIMG", "")]
        files = {SEMANTICS: both, QUALITY: both[1:]} if is_gedit else {pair.group: both}
        answers = []
        for question, images in files.items():
            text = prompts[question].replace(MARKS[config.protocol], pair.instruction)
            answers.append(ask(pair, question, text, images))
        return answers

    with client, ThreadPoolExecutor(config.judge_parallel) as pool:
        try:
            return list(tqdm(pool.map(ask_about, range(len(pairs))), "judging", len(pairs)))
        except openai.OpenAIError as error:
            raise ValueError(
                f"--judge {config.judge}: {one_line(error, 200)}; check its address, --judge_model "
                "and OPENAI_API_KEY"
            ) from error


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
    sentences, groups = [], [pair.group for pair in pairs]
    given = "this project's prompts: not comparable with papers"
    if config.judge_prompts:
        given = f"the prompts of {config.judge_prompts.name}"
    for row in results["rows"] if config.judge else ():
        images = config.output_dir / "images" / row["images"]
        file = config.output_dir / ANSWERS / f"{row['images']}.jsonl"
        file.parent.mkdir(exist_ok=True)
        answers = ask_all(pairs, images, file, config, prompts)
        lines = [line for of_pair in answers for line in of_pair]
        if config.protocol == "imgedit":
            replies = {line["key"]: line["reply"] for line in lines if "scores" in line}
            write_text(images / "result.json", json.dumps(replies, indent=4))
        values = defaultdict(list)
        for pair, of_pair in zip(pairs, answers):
            scores = scores_of_edit(config.protocol, [x.get("scores") for x in of_pair])
            for part, name in itertools.product(PROTOCOLS[config.protocol].parts, scores):
                values[f"{name}{part}"].append(scores[name] if part in pair.parts else np.nan)
        save_values(config.output_dir, row["images"], values)
        row |= {name: mean_over(x, groups) for name, x in values.items()}
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


def scores_of_edit(protocol, scores):
    """{metric: score} of an edit, NaN if an answer has no scores; scores: of each answer."""
    if None in scores:
        return dict.fromkeys(PROTOCOLS[protocol].metrics, np.nan)
    if protocol == "imgedit":  # its own program rounds the mean of each edit
        return {"overall": round(float(np.mean(scores)), 2)}
    semantics, quality = map(min, scores)
    return {SEMANTICS: semantics, QUALITY: quality, "overall": math.sqrt(semantics * quality)}
