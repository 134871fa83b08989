"""Scores of edits by a judge, a vision-language model behind an OpenAI-compatible endpoint.

    questions = questions_of(pairs, folder, "gedit", load_prompts(None, "gedit", ()))
    answers, failures = ask_all(questions, Path("judge/0.jsonl"), flags, bar)

GEdit-Bench asks two questions for each edit, of VIEScore: how well the edit succeeds (0 to 10, the
least of two scores) and how good the image looks (likewise); the overall score is the root of
their product. ImgEdit-Bench asks one, with three scores from 1 to 5, and takes their mean.

Source: Step1X-Edit (arXiv 2504.17761) and github.com/stepfun-ai/Step1X-Edit; VIEScore (arXiv
2312.14867); ImgEdit (arXiv 2505.20275) and github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic.
"""

import ast
import base64
import io
import json
import math
import os
import re
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from PIL import Image

from diffusers_flax.command_line import Above, AtLeast
from diffusers_flax.evaluation.intervals import mean_over, save_values
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.messages import first_names, one_line

ANSWERS = "judge"  # directory of questions and answers, a file for each row of results.json
KEY = "OPENAI_API_KEY"  # environment variable
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
OWN_PROMPTS = "this project's prompts: not comparable with papers"
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


def make_client(flags):
    """A client of the judge's API, which repeats failed requests with growing pauses.

    flags: JudgeFlags.

    Raises:
        ValueError: the client is not installed, or the address or the key cannot be one.
    """
    try:
        import openai  # a second to import
    except ImportError as error:
        raise ValueError("--judge needs the package openai: pip install openai") from error
    if not re.fullmatch(r"https?://[^\s/]\S*", flags.judge):
        raise ValueError(f"--judge {flags.judge} is no URL; give one like http://localhost:8000/v1")
    key = os.environ.get(KEY, "").strip() or "no-key"
    if not (key.isascii() and key.isprintable()):  # errors of the client would print it
        raise ValueError(f"{KEY} has characters that no key has; set it again")
    return openai.OpenAI(
        base_url=flags.judge.rstrip("/").removesuffix("/chat/completions"),
        api_key=key,
        timeout=flags.judge_timeout,
        max_retries=flags.judge_attempts - 1,
    )


# ---------------------------------------------------------------- questions


class Question(NamedTuple):
    """A question to the judge about a result."""

    key: str  # of the result
    name: str  # SEMANTICS, QUALITY or ALL_TYPES
    text: str
    images: tuple[Path, ...]  # the last is the result


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
    try:
        prompts = PROMPTS[protocol] if file is None else read_prompts(file)
    except (OSError, ValueError, SyntaxError, KeyError) as error:
        raise ValueError(f"--judge_prompts {file} cannot be read: {one_line(error)}") from error
    needed = [SEMANTICS, QUALITY] if protocol == "gedit" else [*groups]
    found = {name: prompts.get(name, prompts.get(ALL_TYPES, "")) for name in needed}
    mark = MARKS[protocol]
    for name, text in found.items():
        if name != QUALITY and mark not in text:
            raise ValueError(f"--judge_prompts {file} has no prompt {name!r} with {mark}")
    return found


def read_prompts(file):
    """{name: text} of a JSON object, or of the texts in vie_prompts.py."""
    if file.suffix != ".py":
        return {name: str(text) for name, text in read_json(file).items()}
    texts = {
        line.targets[0].id: line.value.value
        for line in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
    }
    return {name: "\n".join(texts[x] for x in parts) for name, parts in VIESCORE.items()}


def questions_of(pairs, folder, protocol, prompts):
    """The list of Questions about all results in a folder; writes the inputs beside them."""
    questions = []
    for place, pair in enumerate(pairs):
        result = folder / pair.result_file(place)
        before = result.with_name(f"{result.stem}_SRCIMG.png")
        # An older one may be of earlier results, of another image.
        if not before.is_file() or before.stat().st_mtime_ns < result.stat().st_mtime_ns:
            original = pair.decoded("original")
            save_image(gedit_size(original) if protocol == "gedit" else original, before)

        asked = {ALL_TYPES: (before, result)}
        if protocol == "gedit":
            asked = {SEMANTICS: (before, result), QUALITY: (result,)}
        for name, images in asked.items():
            prompt = prompts[pair.group if name == ALL_TYPES else name]
            text = prompt.replace(MARKS[protocol], pair.instruction)
            questions.append(Question(pair.key, name, text, images))
    return questions


def gedit_size(image):
    """A PIL image with about GEDIT_AREA pixels and the same shape, as its judge gets it."""
    ratio = image.width / image.height
    width = math.sqrt(GEDIT_AREA * ratio)
    return image.resize((max(int(width), 1), max(int(width / ratio), 1)))


def data_urls(question):
    """The images of a question as data URLs of PNGs.

    The judge of GEdit-Bench gets the result scaled, as the image before the edit is in its file.
    """
    *before, result = (file.read_bytes() for file in question.images)
    if question.name in (SEMANTICS, QUALITY):
        with Image.open(io.BytesIO(result)) as image, io.BytesIO() as encoded:
            gedit_size(image.convert("RGB")).save(encoded, "PNG")
            result = encoded.getvalue()
    return [f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in (*before, result)]


# ---------------------------------------------------------------- answers


def parse_scores(question, reply):
    """The scores in a reply; what the judge thinks first does not count.

    Args:
        question: its name.
        reply: text: of ALL_TYPES lines that end in ": 3", of which the last three count; else JSON
            with "score", or a list, of which the last counts.

    Returns:
        List of numbers, three or two.

    Raises:
        ValueError: there are more, fewer or none, or they are out of range.
    """
    text, number = THINKING.sub("", reply), r"\d{1,2}(?:\.\d+)?"
    if question == ALL_TYPES:
        least, most, count = 1, 5, 3
        found = re.findall(rf"(?m):[ *]*({number})(?: */ *5)?[ *.]*(?:\(.*\))?[ *.\r]*$", text)
        found = found[-count:] if len(found) % count == 0 else []
    else:
        least, most, count = 0, 10, 2
        lists = re.findall(r"""(?i)scores?["']?\s*:\s*\[([^\[\]]*)\]""", text)
        if not lists and "score" not in text.lower():
            lists = re.findall(r"\[([^\[\]]*)\]", text)
        last = re.sub(r"\([^()]*\)", "", lists[-1]) if lists else ""  # without reasons in brackets
        found = [item.strip(" \n\"'") for item in last.split(",")]
    is_valid = len(found) == count and all(re.fullmatch(number, x) for x in found)
    scores = [float(x) if "." in x else int(x) for x in found] if is_valid else []
    if not scores or not all(least <= x <= most for x in scores):
        raise ValueError(
            f"no {count} scores from {least} to {most} in the answer {one_line(text, 80)!r}"
        )
    return scores


def scores_of_edit(protocol, answers):
    """{metric: float} of an edit, NaN if a question has no answer.

    protocol: "gedit" or "imgedit"; answers: {question: list of scores}.
    """
    if protocol == "imgedit":
        scores = answers.get(ALL_TYPES)
        # Its program rounds the mean of each edit.
        return {"overall": np.nan if scores is None else round(sum(scores) / len(scores), 2)}
    if len(answers) < 2:
        return dict.fromkeys((SEMANTICS, QUALITY, "overall"), np.nan)
    least = {name: min(answers[name]) for name in (SEMANTICS, QUALITY)}
    return least | {"overall": math.sqrt(least[SEMANTICS] * least[QUALITY])}


class JudgeDownError(Exception):
    """The judge answers no question: it refuses all, or cannot be reached."""


def ask(client, flags, question):
    """(scores, reply) of a Question, asked until the answer has scores.

    client: of make_client; flags: JudgeFlags.

    Raises:
        ValueError: no attempt had scores; says the last attempt's reason.
        JudgeDownError: the endpoint refuses all requests, or cannot be reached.
    """
    import httpx2
    import openai

    content = [{"type": "text", "text": question.text}]
    content += [{"type": "image_url", "image_url": {"url": x}} for x in data_urls(question)]
    messages = [{"role": "user", "content": content}]
    for attempt in range(1, flags.judge_attempts + 1):
        try:
            answer = client.chat.completions.create(model=flags.judge_model, messages=messages)
            reply = answer.choices[0].message.content or ""
            return parse_scores(question.name, reply), reply
        except openai.APIStatusError as error:
            if error.status_code in (401, 403, 404):
                raise JudgeDownError(
                    f"refuses requests (HTTP {error.status_code}); set {KEY}, and check the "
                    "address and --judge_model"
                ) from error
            # The message of the server, without a key that it may repeat
            said = one_line(error.message, 200).replace(client.api_key, KEY)
            raise ValueError(f"HTTP {error.status_code}: {said}") from error
        except openai.APIConnectionError as error:
            reason = one_line(error.__cause__ or error, 100)
            if isinstance(error.__cause__, httpx2.ConnectError):
                raise JudgeDownError(f"cannot be reached ({reason}); start it") from error
            raise ValueError(reason) from error
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError) as error:
            if attempt == flags.judge_attempts:  # without scores, or not the answer of a chat
                raise ValueError(one_line(error, 200)) from error


def ask_all(questions, file, flags, bar):
    """Ask what has no answer yet; every answer is saved at once.

    Args:
        questions: list of Question.
        file: of answers, JSON lines.
        flags: JudgeFlags.
        bar: progress bar, in units of answers.

    Returns:
        ({(key, question): (scores, reply)}, {(key, question): reason} without a score).

    Raises:
        ValueError: the endpoint refuses all requests, cannot be reached, or has no score for the
            first MOST_FAILURES questions.
    """
    sums = {question[:2]: checksum(question, flags.judge_model) for question in questions}
    answers, failures = load_answers(file, sums), {}
    todo = [question for question in questions if question[:2] not in answers]
    bar.update(len(questions) - len(todo))
    file.parent.mkdir(parents=True, exist_ok=True)
    client, pool = make_client(flags), ThreadPoolExecutor(flags.judge_parallel)
    try:
        asked = {pool.submit(ask, client, flags, question): question for question in todo}
        for future in as_completed(asked):
            key, name, *_ = asked[future]
            try:
                scores, reply = answers[key, name] = future.result()
                line = {"key": key, "question": name, "checksum": sums[key, name]}
                with open(file, "a", encoding="utf-8") as opened:
                    opened.write(f"{json.dumps(line | {'scores': scores, 'reply': reply})}\n")
            except JudgeDownError as error:
                raise ValueError(f"--judge {error}; the same command goes on") from error
            except ValueError as error:
                failures[key, name] = error
                if len(failures) == MOST_FAILURES and not answers:
                    raise ValueError(
                        f"--judge has no score for the first {MOST_FAILURES} questions ({error}); "
                        "check that it works; the same command goes on"
                    ) from error
            bar.update(1)
    finally:
        client.close()
        pool.shutdown(wait=False, cancel_futures=True)
    return answers, failures


def checksum(question, model):
    """CRC-32 of a question's text and images and of the judge's name."""
    total = zlib.crc32(json.dumps([model, question.text]).encode())
    for file in question.images:
        total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"


def load_answers(file, sums):
    """{(key, question): (scores, reply)} of a file of answers with the checksums in sums."""
    answers = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with suppress(ValueError):  # of a line that a kill cut short
            entry = json.loads(line)
            key = entry["key"], entry["question"]
            if entry["checksum"] == sums.get(key):
                answers[key] = entry["scores"], entry["reply"]
    return answers


# ---------------------------------------------------------------- all rows


def judge_rows(evaluation, prompts, bar):
    """Write the questions about every row's results; ask them if there is a judge.

    Args:
        evaluation: measuring.Evaluation; the rows of its results get the metrics.
        prompts: of load_prompts.
        bar: function of total=, the number of answers -> progress bar.

    Returns:
        Sentences: the judge and its prompts, and each row with edits that have no score.
    """
    config, pairs, rows = evaluation.config, evaluation.pairs, evaluation.results["rows"]
    images, folder = config.output_dir / "images", config.output_dir / ANSWERS
    questions = {
        row["images"]: questions_of(pairs, images / row["images"], config.protocol, prompts)
        for row in rows
    }
    for name, asked in questions.items():
        lines = [
            x._asdict() | {"images": [os.path.relpath(file, images) for file in x.images]}
            for x in asked
        ]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        write_text(folder / f"{name}_questions.jsonl", text)
    sentences = []
    with bar(total=sum(map(len, questions.values())), disable=not config.judge) as progress:
        for row in rows if config.judge else ():
            name = row["images"]
            file = folder / f"{name}.jsonl"
            answers, failures = ask_all(questions[name], file, config, progress)
            add_scores(row, pairs, answers, config)
            evaluation.save()
            if config.protocol == "imgedit":
                replies = {key: reply for (key, _), (_, reply) in answers.items()}
                write_text(images / name / "result.json", json.dumps(replies, indent=4))
            if failures:
                reasons = {key: f"{key} ({reason})" for (key, _), reason in failures.items()}
                sentences.append(
                    f"no score for {len(reasons)} of {len(pairs)} edits of {row['model']}: "
                    f"{first_names([*reasons.values()])}; the same command asks again"
                )
    judged = [row for row in rows if "judge" in row]
    judges = {f"judge: {row['judge']}, with {row['judge_prompts']}" for row in judged}
    if len(judged) < len(rows):
        sentences.append(f"not judged: {ANSWERS}/ has the questions, and --judge asks them")
    return [*sorted(judges), *sentences]


def add_scores(row, pairs, answers, config):
    """Add the metrics of the answers to a row and to its values per pair."""
    answers_to = defaultdict(dict)
    for (key, name), (scores, _) in answers.items():
        answers_to[key][name] = scores
    found = [scores_of_edit(config.protocol, answers_to[pair.key]) for pair in pairs]
    values = {}
    for part in sorted({part for pair in pairs for part in pair.parts}):
        for name in found[0]:
            values[f"{name}{part}"] = [
                scores[name] if part in pair.parts else np.nan for scores, pair in zip(found, pairs)
            ]
    save_values(config.output_dir, row["images"], values)
    row |= {name: mean_over(x, [pair.group for pair in pairs]) for name, x in values.items()}
    prompts = f"the prompts of {config.judge_prompts.name}" if config.judge_prompts else OWN_PROMPTS
    row |= {"judge": config.judge_model, "judge_prompts": prompts, "ranked_by": "overall"}
