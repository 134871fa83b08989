"""Scores of edits by a judge, a vision-language model behind an OpenAI-compatible endpoint.

    questions = questions_of(pairs, folder, "gedit", load_prompts(None, "gedit", ()))
    answers, failures = ask_all(questions, Path("judge/0.jsonl"), Judge(flags), bar)

GEdit-Bench asks two questions for each edit, of VIEScore: how well the edit succeeds (0 to 10, the
least of two scores) and how good the image looks (likewise); the overall score is the root of
their product. ImgEdit-Bench asks one, with three scores from 1 to 5, and takes their mean.

Source: Step1X-Edit (arXiv 2504.17761) and github.com/stepfun-ai/Step1X-Edit; VIEScore (arXiv
2312.14867); ImgEdit (arXiv 2505.20275) and github.com/PKU-YuanGroup/ImgEdit, Benchmark/Basic.
"""

import ast
import base64
import contextlib
import http.client
import io
import json
import math
import os
import re
import threading
import urllib.error
import urllib.request
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffusers_flax.evaluation.intervals import load_values, mean_over, save_values
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.messages import one_line

ANSWERS = "judge"  # directory of questions and answers, a file for each row of results.json
KEY = "OPENAI_API_KEY"  # environment variable
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before another attempt, doubled each time
NUM_NAMED = 10  # edits without a score that are named
MOST_FAILURES = 16  # questions of a row without any answer, after which the judge counts as down
GEDIT_AREA = 512 * 512  # pixels of the images that the judge of GEdit-Bench sees
NUM_SCORES = 3  # of an edit of ImgEdit-Bench
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
    judge_parallel: int = 8  # requests at once
    judge_timeout: float = 120.0  # seconds of a request
    judge_attempts: int = 5  # of a request, also after an answer without scores


def check_judge_flags(config, is_judged):
    """Raise a ValueError for flags that do not go together, or for a key that cannot be one.

    config: JudgeFlags, with protocol.
    """
    if not is_judged:
        if config.judge or config.judge_model or config.judge_prompts:
            raise ValueError(
                f"--protocol {config.protocol} has no judge; choose gedit or imgedit, or leave the "
                "--judge flags out"
            )
        return
    if bool(config.judge) != bool(config.judge_model):
        raise ValueError("--judge and --judge_model go together: the address of an API and a model")
    if config.judge and not re.fullmatch(r"https?://[^\s/]\S*", config.judge):
        raise ValueError(
            f"--judge {config.judge} is no URL; give one like http://localhost:8000/v1"
        )
    if config.judge and not (judge_key().isascii() and judge_key().isprintable()):
        # http.client would print it.
        raise ValueError(f"{KEY} has characters that no key has; set it again")
    for name in ("judge_parallel", "judge_timeout", "judge_attempts"):
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name} {getattr(config, name)} must be more than 0")


def judge_key():
    """The key of the judge, or ""."""
    return os.environ.get(KEY, "").strip()


# ---------------------------------------------------------------- questions


class Question(NamedTuple):
    """A question to the judge about a result."""

    key: str  # of the result
    name: str  # SEMANTICS, QUALITY or ALL_TYPES
    text: str
    images: tuple[Path, ...]  # the last is the result


def load_prompts(file, protocol, groups):
    """{SEMANTICS and QUALITY, or a type of edit: text} with <instruction> or <edit_prompt>.

    Args:
        file: JSON object, or vie_prompts.py, whose texts are read and nothing is run; None: this
            project's prompts.
        protocol: "gedit" or "imgedit".
        groups: kinds of edits; with "imgedit" each has a prompt, or ALL_TYPES has one.

    Raises:
        ValueError: it cannot be read, lacks a prompt or a placeholder.
    """
    if file is None:
        return PROMPTS[protocol]
    try:
        if file.suffix == ".py":
            lines = ast.parse(file.read_text(encoding="utf-8")).body
            texts = {
                line.targets[0].id: line.value.value
                for line in lines
                if isinstance(line, ast.Assign)
                and isinstance(line.targets[0], ast.Name)
                and isinstance(line.value, ast.Constant)
            }
            prompts = {name: "\n".join(texts[x] for x in parts) for name, parts in VIESCORE.items()}
        else:
            prompts = read_json(file)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"--judge_prompts {file} cannot be read: {one_line(error)}") from error
    except KeyError as error:
        raise ValueError(f"--judge_prompts {file} lacks {error}") from error
    mark, needed = "<edit_prompt>", [*prompts]
    if protocol == "gedit":
        mark, needed = "<instruction>", [SEMANTICS]
        if lacking := {SEMANTICS, QUALITY} - prompts.keys():
            raise ValueError(f"--judge_prompts {file} lacks {sorted(lacking)[0]}")
    for name in needed:
        if not isinstance(prompts[name], str) or mark not in prompts[name]:
            raise ValueError(f"--judge_prompts {file}: the prompt {name} has no {mark}")
    lacking = sorted(set(groups) - prompts.keys())
    if protocol == "imgedit" and lacking and ALL_TYPES not in prompts:
        raise ValueError(
            f"--judge_prompts {file} has no prompt for edits of type {lacking[0]}; it has "
            f"{', '.join(prompts)}"
        )
    return prompts


def questions_of(pairs, folder, protocol, prompts):
    """The questions about all results in a folder. Of GEdit-Bench writes the inputs beside them.

    Args:
        pairs: list of HeldOutPair.
        folder: of the results.
        protocol: "gedit" or "imgedit".
        prompts: of load_prompts.

    Returns:
        List of Question.

    Raises:
        ValueError: a result is missing.
    """
    questions = []
    for place, pair in enumerate(pairs):
        result = folder / pair.result_file(place)
        if not result.is_file():
            raise ValueError(
                f"{result} is missing; give --overwrite_output_dir to edit all images again"
            )
        before = result.with_name(f"{result.stem}_SRCIMG.png")
        # An older one may be of earlier results, of another image.
        if not before.is_file() or before.stat().st_mtime_ns < result.stat().st_mtime_ns:
            original = pair.fitted_original()
            save_image(gedit_size(original) if protocol == "gedit" else original, before)
        if protocol == "gedit":
            text = prompts[SEMANTICS].replace("<instruction>", pair.instruction)
            questions.append(Question(pair.key, SEMANTICS, text, (before, result)))
            questions.append(Question(pair.key, QUALITY, prompts[QUALITY], (result,)))
            continue
        text = prompts.get(pair.group) or prompts[ALL_TYPES]
        text = text.replace("<edit_prompt>", pair.instruction)
        questions.append(Question(pair.key, ALL_TYPES, text, (before, result)))
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
        reply: text: of ALL_TYPES lines that end in ": 3"; else JSON with "score", or a list. Of
            several answers the last complete one counts. A score may be text, followed by a reason
            in brackets.

    Returns:
        List of numbers, NUM_SCORES or 2.

    Raises:
        ValueError: there are more, fewer or none, or they are out of range.
    """
    text = THINKING.sub("", reply)
    if question == ALL_TYPES:
        least, most, number = 1, 5, NUM_SCORES
        found = re.findall(
            r":[ *]*(\d{1,9})(?: */ *5)?[ *.]*(?:\([^()\n]*\))?[ *.\r]*$", text, re.MULTILINE
        )
        scores = found[-number:] if len(found) % number == 0 else []
    else:
        least, most, number = 0, 10, 2
        lists = re.findall(r"""(?i)scores?["']?\s*:\s*\[([^\[\]]*)\](?=[\s\S]*\})""", text)
        if not lists and "score" not in text.lower():
            lists = re.findall(r"\[([^\[\]]*)\]", text)
        lists = lists or [""]
        items = re.sub(r"\([^()]*\)", "", lists[-1]).split(",")
        found = [re.fullmatch(r"""\s*["']?\s*(\d{1,9}(?:\.\d+)?)\s*["']?\s*""", x) for x in items]
        scores = [match[1] for match in found] if all(found) else []
    scores = [float(x) if "." in x else int(x) for x in scores]
    if len(scores) != number or not all(least <= x <= most for x in scores):
        raise ValueError(
            f"no {number} scores from {least} to {most} in the answer {one_line(text, 80)!r}"
        )
    return scores


def scores_of_edit(protocol, answers):
    """The metrics of an edit.

    Args:
        protocol: "gedit" or "imgedit".
        answers: {question: list of scores}, of some or all questions.

    Returns:
        {metric: float}, NaN if a question has no answer.
    """
    if protocol == "imgedit":
        scores = answers.get(ALL_TYPES)
        # Its program rounds the mean of each edit.
        return {"overall": np.nan if scores is None else round(sum(scores) / len(scores), 2)}
    if len(answers) < 2:
        return dict.fromkeys((SEMANTICS, QUALITY, "overall"), np.nan)
    least = {name: min(answers[name]) for name in (SEMANTICS, QUALITY)}
    return least | {"overall": math.sqrt(least[SEMANTICS] * least[QUALITY])}


class Judge:
    """A model behind an OpenAI-compatible endpoint; flags: JudgeFlags."""

    def __init__(self, flags):
        url = flags.judge.rstrip("/")
        self._url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        self.model, self._flags, self._key = flags.judge_model, flags, judge_key()
        self._stopped = threading.Event()

    def stop(self):
        """End all pauses; waiting requests give up."""
        self._stopped.set()

    def ask(self, question):
        """Ask until the answer has scores.

        Returns:
            (scores, reply).

        Raises:
            ValueError: no attempt had scores; says the last attempt's reason.
            PermissionError: the endpoint refuses all requests.
            ConnectionError: it cannot be reached.
        """
        content = [{"type": "text", "text": question.text}]
        content += [{"type": "image_url", "image_url": {"url": x}} for x in data_urls(question)]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        data, pause = json.dumps(body).encode(), FIRST_PAUSE
        for attempt in range(1, self._flags.judge_attempts + 1):
            wanted = None
            try:
                reply = self._post(data)
                return parse_scores(question.name, reply), reply
            except urllib.error.HTTPError as error:
                reason, wanted, said = f"HTTP {error.code}", error.headers.get("Retry-After"), ""
                with error, contextlib.suppress(OSError, http.client.HTTPException):
                    said = one_line(error.read(300).decode(errors="replace"))
                if error.code in (401, 403, 404):
                    raise PermissionError(reason) from error
                if error.code != 429 and error.code < 500:
                    raise ValueError(f"{reason}: {said or 'no reason given'}") from error
                failure = ValueError(reason)
            except (OSError, http.client.HTTPException) as error:
                # urllib's error of a request that could not be sent has the cause as its reason.
                cause = getattr(error, "reason", error)
                kind = ConnectionError if isinstance(error, urllib.error.URLError) else ValueError
                failure = kind(one_line(cause, 100))
                if isinstance(cause, TimeoutError):
                    failure = ValueError(f"no answer in {self._flags.judge_timeout:g} s")
            except ValueError as error:
                failure = error
            if attempt < self._flags.judge_attempts:
                wanted = float(wanted) if wanted and wanted.isdigit() else 0
                if self._stopped.wait(min(max(pause, wanted), LONGEST_PAUSE)):
                    break
                pause *= 2
        raise failure

    def _post(self, data):
        """The text of the answer to a request.

        Raises:
            ValueError: the answer is not that of a chat.
        """
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, data, headers)
        with urllib.request.urlopen(request, timeout=self._flags.judge_timeout) as answer:
            text = answer.read()
        try:
            reply = json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"the answer is no chat completion: {text[:80]!r}") from error
        if not isinstance(reply, str):
            raise ValueError("the answer has no text")
        return reply


def ask_all(questions, file, judge, bar, parallel=8):
    """Ask what has no answer yet; every answer is saved at once.

    Args:
        questions: list of Question.
        file: of answers, JSON lines.
        judge: Judge.
        bar: progress bar, in units of answers.
        parallel: requests at once.

    Returns:
        ({(key, question): (scores, reply)}, {key: reason} of edits without a score).

    Raises:
        ValueError: the endpoint refuses all requests, cannot be reached, or has no score for the
            first MOST_FAILURES questions.
    """
    sums = {x[:2]: checksum(x, judge.model) for x in questions}
    answers, failures, num_failed = load_answers(file, sums), {}, 0
    todo = [question for question in questions if question[:2] not in answers]
    bar.update(len(questions) - len(todo))
    file.parent.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(parallel)
    try:
        asked = {pool.submit(judge.ask, question): question for question in todo}
        with open(file, "a", encoding="utf-8") as opened:
            for future in as_completed(asked):
                question = asked[future]
                line = {"key": question.key, "question": question.name}
                line["checksum"] = sums[question[:2]]
                try:
                    scores, reply = future.result()
                    answers[question[:2]] = scores, reply
                    line |= {"scores": scores, "reply": reply}
                except (PermissionError, ConnectionError) as error:
                    refused = isinstance(error, PermissionError)
                    what = f"refuses requests ({error})" if refused else f"has no answer ({error})"
                    remedy = "start it"
                    if refused:
                        remedy = f"set {KEY}, and check the address and --judge_model"
                    raise ValueError(
                        f"--judge {what}; {remedy}; answers so far are kept, and the same command "
                        "goes on"
                    ) from error
                except ValueError as error:
                    failures[question.key] = line["error"] = str(error)
                    num_failed += 1
                opened.write(json.dumps(line) + "\n")
                opened.flush()
                bar.update(1)
                if num_failed == MOST_FAILURES and not answers:
                    raise ValueError(
                        f"--judge has no score for the first {num_failed} questions "
                        f"({line['error']}); check that it works; the same command goes on"
                    )
    finally:
        judge.stop()
        pool.shutdown(wait=False, cancel_futures=True)
    return answers, failures


def checksum(question, model):
    """CRC-32 of a question's text and images and of the judge's name."""
    total = zlib.crc32(json.dumps([model, question.text]).encode())
    for file in question.images:
        total = zlib.crc32(file.read_bytes(), total)
    return f"{total:08x}"


def load_answers(file, sums):
    """{(key, question): (scores, reply)} of a file of answers, of the same questions only.

    sums: {(key, question): checksum}. Lines that a kill cut short do not count.
    """
    answers = {}
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return answers
    if lines[-1]:  # the next answer begins a line of its own
        with open(file, "a", encoding="utf-8") as opened:
            opened.write("\n")
    for line in lines:
        try:
            entry = json.loads(line)
            key = entry["key"], entry["question"]
            if entry["checksum"] == sums.get(key):
                answers[key] = entry["scores"], entry["reply"]
        except (ValueError, LookupError, TypeError):  # cut short, or an error
            continue
    return answers


# ---------------------------------------------------------------- all rows


def judge_rows(results, pairs, config, save, images, prompts, bar):
    """Write the questions about every row's results; ask them if there is a judge.

    Args:
        results: content of results.json; its rows get the metrics.
        pairs: list of HeldOutPair.
        config: Config of evaluate_edits.py.
        save: writes results.json.
        images: directory of the rows' images.
        prompts: of load_prompts.
        bar: function of total=, the number of answers -> progress bar.

    Returns:
        Sentences: the judge and its prompts, and each row with edits that have no score.
    """
    sentences = []
    all_questions = [
        questions_of(pairs, images / row["images"], config.protocol, prompts)
        for row in results["rows"]
    ]
    for row, questions in zip(results["rows"], all_questions):
        lines = (
            question._asdict() | {"images": [os.path.relpath(x, images) for x in question.images]}
            for question in questions
        )
        file = config.output_dir / ANSWERS / f"{row['images']}_questions.jsonl"
        write_text(file, "".join(f"{json.dumps(line)}\n" for line in lines))
    if not config.judge:
        return judges(results["rows"])
    with bar(total=sum(map(len, all_questions))) as progress:
        for row, questions in zip(results["rows"], all_questions):
            file = config.output_dir / ANSWERS / f"{row['images']}.jsonl"
            answers, failures = ask_all(
                questions, file, Judge(config), progress, config.judge_parallel
            )
            add_scores(row, pairs, answers, config)
            save()
            if config.protocol == "imgedit":
                replies = {key: reply for (key, _), (_, reply) in answers.items()}
                write_text(images / row["images"] / "result.json", json.dumps(replies, indent=4))
            if failures:
                named = [f"{key} ({reason})" for key, reason in failures.items()][:NUM_NAMED]
                more = f" and {len(failures) - len(named)} more" * (len(failures) > len(named))
                sentences.append(
                    f"no score for {len(failures)} of {len(pairs)} edits of {row['model']}: "
                    f"{', '.join(named)}{more}; the same command asks again"
                )
    return [*judges(results["rows"]), *sentences]


def judges(rows):
    """Sentences that name the judge and the prompts of rows, and count rows without a judge."""
    sentences = sorted(
        {
            f"judge: {row['judge']}, with {row.get('judge_prompts') or 'unknown prompts'}"
            for row in rows
            if "judge" in row
        }
    )
    if number := sum("judge" not in row for row in rows):
        which = "" if number == len(rows) else f" ({number} of {len(rows)} rows)"
        sentences.append(f"not judged{which}: {ANSWERS}/ has the questions, and --judge asks them")
    return sentences


def add_scores(row, pairs, answers, config):
    """Add the metrics of the answers to a row and to its values per pair."""
    answers_to = defaultdict(dict)
    for (key, name), (scores, _) in answers.items():
        answers_to[key][name] = scores
    found = [scores_of_edit(config.protocol, answers_to[pair.key]) for pair in pairs]
    values, groups = load_values(config.output_dir, row["images"]), [x.group for x in pairs]
    for part in sorted({part for pair in pairs for part in pair.parts}):
        for name in found[0]:
            values[f"{name}{part}"] = numbers = [
                scores[name] if part in pair.parts else np.nan for scores, pair in zip(found, pairs)
            ]
            row[f"{name}{part}"] = mean_over(numbers, groups)
    prompts = f"the prompts of {config.judge_prompts.name}" if config.judge_prompts else OWN_PROMPTS
    row |= {"judge": config.judge_model, "judge_prompts": prompts, "ranked_by": "overall"}
    save_values(config.output_dir, row["images"], values)
