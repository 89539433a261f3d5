"""Training and evaluation files for rpg.py: parquet, one row a problem, in the columns of the verl ecosystem.

    python prep_data.py aime24                              # data/aime24.parquet, from the Hugging Face hub
    python prep_data.py aime24 --repeat 32                  # 32 copies of each problem, for mean@32
    python prep_data.py aime24 --from downloaded.parquet    # the hub's file, fetched by hand (no network)
    python prep_data.py mine --from problems.csv            # your own problems and answers
    python prep_data.py arithmetic                          # additions for the tiny model, no network

Columns: data_source, prompt (list of {role, content}), ability, reward_model {ground_truth, style} and
extra_info {index: which copy of the problem, raw_problem, split}. rpg.py reads files that already have these
columns as they are; passed through --from they are checked and de-duplicated, and keep their prompts.
"""

import argparse
import csv
import json
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from grade import ANSWER_LABEL, INSTRUCTION, grade, last_box

DATA_DIR = "data"
FORMATS = ".parquet, .jsonl, .json or .csv"
QUESTION_COLUMNS = ("question", "problem", "prompt")
# `solution` comes last: where a file has a worked solution and a final answer, the final answer counts.
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "solution")
ARITHMETIC_HELD_OUT = 100


class DataError(ValueError):
    """A one-line message: which file, row and column is wrong, and what to do about it."""


class _BadRow(ValueError):
    """A row that can't be used; the message names the column."""


@dataclass(frozen=True)
class Dataset:
    """A named set. `rows` counts distinct problems; hub and file are None for a generated set."""
    data_source: str
    rows: int
    columns: str
    licence: str
    about: str
    split: str
    hub: str | None = None
    file: str | None = None


# Columns, row counts and licences as the hub pages, or people who loaded the files, state them.
DATASETS = {
    "dapo-math-17k": Dataset(
        "math_dapo", 13_900, "prompt, reward_model", "not found (DAPO-Math-17k, its source: apache-2.0)",
        "to train on: the English part of DAPO-Math-17k, about 13.9 thousand; answers are integers",
        "train", "math-dataset/DAPO-17k-Eng", "dapo-math-17k-eng.parquet"),
    "aime24": Dataset(
        "math_dapo", 30, "problem, solution (boxed)", "apache-2.0",
        "AIME I and II of 2024; answers are integers from 0 to 999",
        "test", "math-ai/aime24", "test-00000-of-00001.parquet"),
    "aime25": Dataset(
        "aime2025", 30, "problem, answer", "apache-2.0",
        "AIME I and II of 2025; answers are integers from 0 to 999",
        "test", "math-ai/aime25", "test.jsonl"),
    "amc23": Dataset(
        "amc_23", 40, "question, answer", "apache-2.0",
        "AMC of 2023; answers are integers",
        "test", "math-ai/amc23", "test-00000-of-00001.parquet"),
    "math500": Dataset(
        "math500", 500, "problem, answer, solution", "not stated",
        r"500 problems of MATH's test set; answers are LaTeX, such as \frac{3}{4}",
        "test", "HuggingFaceH4/MATH-500", "test.jsonl"),
    "minerva-math": Dataset(
        "minerva_math", 272, "question, answer", "not stated",
        "undergraduate science from MIT OpenCourseWare; answers are numbers and expressions",
        "test", "math-ai/minervamath", "test.jsonl"),
    "olympiad-bench": Dataset(
        "olympiad_bench", 674, "question, final_answer (list)", "apache-2.0",
        'English, text-only mathematics; some problems have several answers, "1, 3"',
        "train", "Hothan/OlympiadBench", "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet"),
    "arithmetic": Dataset(
        "arithmetic", 800, "prompt, reward_model", "none needed",
        'to train the tiny model on: two digits plus one, "83+5=" and "88", without an instruction', "train"),
    "arithmetic-eval": Dataset(
        "arithmetic", ARITHMETIC_HELD_OUT, "prompt, reward_model", "none needed",
        "the additions held out from `arithmetic`", "test"),
}


# ---- Reading files ----

def _records(path: Path) -> Iterator[tuple[str, dict]]:
    """Each row of a file as (place, columns): "row 3", in jsonl "line 3", counted from 1."""
    kind = path.suffix.lower()
    place = ""
    try:
        if kind == ".parquet":
            import pyarrow.parquet as pq  # here: importing this module must stay fast
            rows = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
            return
        if kind not in (".jsonl", ".json", ".csv"):
            raise DataError(f"{path}: unknown kind of file; give {FORMATS}")
        with open(path, encoding="utf-8-sig", newline="") as file:
            if kind == ".jsonl":
                rows = ((f"line {number}", line) for number, line in enumerate(file, 1) if line.strip())
            elif kind == ".csv":
                table = csv.DictReader(file, strict=True)
                rows = ((f"row {number}", row) for number, row in enumerate(table, 1))
            else:
                whole = json.load(file)
                if not isinstance(whole, list):
                    raise DataError(f"{path}: holds a {type(whole).__name__}; give a list of objects")
                rows = ((f"row {number}", row) for number, row in enumerate(whole, 1))
            for place, row in rows:
                row = json.loads(row) if kind == ".jsonl" else row
                if not isinstance(row, dict):
                    raise DataError(f"{path}, {place}: a {type(row).__name__}, not an object of columns")
                if kind == ".csv" and (None in row or None in row.values()):
                    raise DataError(f"{path}, {place}: has more or fewer fields than the header; "
                                    "quote fields that contain commas or line breaks")
                yield place, row
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; correct the path") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, {place or f'line {error.lineno}'}: not JSON ({error.msg}); correct it"
                        + ("" if place else ", or name the file .jsonl if each line is an object")) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from None
    except (OSError, csv.Error, RecursionError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        # pyarrow raises ValueErrors and OSErrors, some of them several lines long.
        raise DataError(f"{path}: can't be read ({str(error).splitlines()[0]}); write it anew") from None


def _text(value: object, column: str) -> str:
    """An answer or question as text: 204.0 becomes "204"; None, NaN and blanks are missing."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        raise _BadRow(f"column {column} is empty")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(int(value)) if value == int(value) else repr(value)
    if not isinstance(value, str):
        raise _BadRow(f"column {column} is a {type(value).__name__}, not text")
    if not value.strip():
        raise _BadRow(f"column {column} is empty")
    return value.strip()


def _verl_row(record: dict) -> dict:
    """One row in verl's columns, checked, as `read_rows` returns it."""
    prompt, reward, extra = record.get("prompt"), record.get("reward_model"), record.get("extra_info")
    if not isinstance(prompt, list) or not prompt:
        raise _BadRow("column prompt is not a list of {role, content} messages")
    for message in prompt:
        if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) and message[key].strip() for key in ("role", "content")):
            raise _BadRow("column prompt has a message without text in role and content")
    if not isinstance(reward, dict):
        raise _BadRow("column reward_model is not a {ground_truth, style} record")
    index = extra.get("index") if isinstance(extra, dict) else None
    return {"data_source": _text(record.get("data_source"), "data_source"),
            "prompt": [{"role": message["role"], "content": message["content"]} for message in prompt],
            "ground_truth": _text(reward.get("ground_truth"), "reward_model.ground_truth"),
            "index": index if isinstance(index, int) else None}


def read_rows(path: str | os.PathLike) -> list[dict]:
    """Read a training or evaluation file: parquet or jsonl in verl's columns.

    For each row, in the file's order, {"data_source": str, "prompt": [{"role": str, "content": str}, ...],
    "ground_truth": str, "index": int | None}. Copies of a problem stay separate rows; other columns are
    ignored. Raises DataError, with file, row and column, at the first row that is not like that.
    """
    path, rows = Path(path), []
    for place, record in _records(path):
        try:
            rows.append(_verl_row(record))
        except _BadRow as error:
            raise DataError(f"{path}, {place}: {error}; convert the file with "
                            f"`python prep_data.py NAME --from {path.name}`") from None
    if not rows:
        raise DataError(f"{path}: has no rows; write or make it anew")
    return rows


def group_copies(rows: list[dict]) -> tuple[list[dict], list[int]]:
    """The distinct problems among the rows, in first-seen order, and how many copies of each there are.

    By prompt, since extra_info.index is the problem's number in some files and the copy's in others. Raises
    DataError if copies of a problem have different answers.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = tuple((message["role"], message["content"]) for message in row["prompt"])
        group = groups.setdefault(key, [])
        group.append(row)
        if row["ground_truth"] != group[0]["ground_truth"]:
            raise DataError(f"two answers, {group[0]['ground_truth']!r} and {row['ground_truth']!r}, to one "
                            f"problem (...{row['prompt'][-1]['content'][-80:]!r}); keep the right one")
    return [group[0] for group in groups.values()], [len(group) for group in groups.values()]


# ---- Problems and answers from other files ----

def _find_column(path: Path, record: dict, wanted: str | None, what: str, usual: tuple[str, ...]) -> str:
    """The wanted column, else the first of the usual names, in any case, that the file has."""
    has = ", ".join(map(repr, record)) or "none"
    if wanted is not None:
        if wanted not in record:
            raise DataError(f"{path}: no column {wanted!r}; --{what}-column must be one of {has}")
        return wanted
    for name in usual:
        for column in record:
            if column.lower() == name:
                return column
    raise DataError(f"{path}: no column {' or '.join(usual)}; name the right one of {has} by --{what}-column")


def _answer(value: object, column: str) -> str:
    r"""The ground truth in an answer or solution column: the last \boxed{}, if any; lists by commas."""
    if isinstance(value, list):
        # Each has its own dollars; left in place they would enclose the commas.
        value = ", ".join(_text(item, column).strip("$") for item in value)
    text = _text(value, column)
    if "\\boxed" in text:
        return _text(last_box(text), rf"{column}, last \boxed{{}},")
    if "\n" in text:
        raise _BadRow(rf"column {column} has several lines and no \boxed{{}}")
    return text


def _read_problems(name: str, path: Path, question_column: str | None,
                   answer_column: str | None) -> dict[str, dict]:
    """{problem: row} in the file's order, each problem once. Prints what was dropped and why."""
    problems: dict[str, dict] = {}
    reasons, first, conflicts, count = Counter(), {}, set(), 0
    for place, record in tqdm(_records(path), f"{path.name}", unit=" rows", leave=False, disable=None):
        if count == 0:
            is_verl = {"prompt", "reward_model"} <= record.keys() and question_column is answer_column is None
            if not is_verl:
                question_column = _find_column(path, record, question_column, "question", QUESTION_COLUMNS)
                answer_column = _find_column(path, record, answer_column, "answer", ANSWER_COLUMNS)
        count += 1
        try:
            if is_verl:
                row = _verl_row(record)
                extra = record.get("extra_info")
                problem = extra.get("raw_problem") if isinstance(extra, dict) else None
                if not isinstance(problem, str):
                    problem = row["prompt"][-1]["content"]
            else:
                problem = _text(record.get(question_column), question_column)
                row = {"data_source": DATASETS[name].data_source if name in DATASETS else name,
                       "prompt": [{"role": "user", "content": INSTRUCTION.format(question=problem)}],
                       "ground_truth": _answer(record.get(answer_column), answer_column)}
            problem, truth = problem.strip(), row["ground_truth"]
            if problem not in problems and not grade(f"{ANSWER_LABEL} {truth}", truth).correct:
                raise _BadRow("the grader can't read the answer, so that no response would ever be right")
        except _BadRow as error:
            reasons[str(error)] += 1
            first.setdefault(str(error), place)
            continue
        if problems.setdefault(problem, row)["ground_truth"] != truth:
            conflicts.add(problem)
    # Which of two answers is right can't be known here, and a wrong one teaches mistakes: drop the problem.
    for problem in conflicts:
        del problems[problem]
    for reason, number in reasons.items():
        print(f"{path}: dropped {number} rows: {reason} (the first: {first[reason]})")
    if conflicts:
        print(f"{path}: dropped {len(conflicts)} problems that have different answers in different rows")
    if not problems:
        why = next(iter(reasons), "each has several answers" if conflicts else "it has no rows")
        raise DataError(f"{path}: no usable problem: {why}")
    print(f"{path}: {count} rows, {len(problems)} distinct problems kept")
    return problems


# ---- Making a set ----

def _arithmetic(held_out: bool) -> dict[str, dict]:
    """All two-digit plus one-digit additions in a fixed shuffle: the first 800, or the 100 held out."""
    sums = [(a, b) for a in range(10, 100) for b in range(10)]
    random.Random(0).shuffle(sums)
    part = sums[-ARITHMETIC_HELD_OUT:] if held_out else sums[:-ARITHMETIC_HELD_OUT]
    return {f"{a}+{b}=": {"data_source": "arithmetic", "prompt": [{"role": "user", "content": f"{a}+{b}="}],
                          "ground_truth": str(a + b)} for a, b in part}


def _download(name: str) -> Path:
    """The set's file from the hub or the hub's local cache. DataError says how to do without the network."""
    import httpx2  # the hub client's transport, whose errors pass through it
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    hub, file = DATASETS[name].hub, DATASETS[name].file
    cached = try_to_load_from_cache(hub, file, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    url = hf_hub_url(hub, file, repo_type="dataset")
    try:
        get_hf_file_metadata(url, timeout=10)  # tried once; the download itself retries for long
        return Path(hf_hub_download(hub, file, repo_type="dataset"))
    except (OSError, httpx2.HTTPError) as error:
        raise DataError(f"can't download {name} ({type(error).__name__}): fetch {file} of the hub's data set "
                        f"{hub} ({url}) elsewhere, copy it to this folder and run "
                        f"`python prep_data.py {name} --from {Path(file).name}`") from None


def _write(path: Path, rows: list[dict]) -> None:
    """Write a parquet file under a temporary name, then rename it: a failure harms no existing file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    schema = pa.schema({
        "data_source": text,
        "prompt": pa.list_(pa.struct({"role": text, "content": text})),
        "ability": text,
        "reward_model": pa.struct({"ground_truth": text, "style": text}),
        "extra_info": pa.struct({"index": pa.int64(), "raw_problem": text, "split": pa.null()})})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                pq.write_table(pa.Table.from_pylist(rows, schema), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: can't be written ({error.strerror or error}); change --out") from None


def prepare(name: str, out_path: str | os.PathLike, source: str | os.PathLike | None = None, repeat: int = 1,
            question_column: str | None = None, answer_column: str | None = None) -> Path:
    """Make the set `name` at `out_path` (parquet), atomically, and return the path. Raises DataError.

    source: a file to read instead of downloading, the set's own or, under a new name, one's own problems.
    repeat: copies of each problem, numbered in extra_info.index. question_column, answer_column: of `source`.
    """
    out_path, known = Path(out_path), DATASETS.get(name)
    if source is not None:
        source = Path(source)
        if known and known.hub is None:
            raise DataError(f"{name} is generated; give the problems of {source} another name")
        if source.resolve() == out_path.resolve():
            raise DataError(f"{source}: would be overwritten by the result; choose another NAME or --out")
    elif known is None:
        raise DataError(f"no set {name!r}: known are {', '.join(DATASETS)}; for your own add --from FILE")
    elif known.hub is not None:
        source = _download(name)
    problems = (_arithmetic(held_out=name == "arithmetic-eval") if source is None
                else _read_problems(name, source, question_column, answer_column))
    _write(out_path, [{
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "ability": "MATH",
        "reward_model": {"ground_truth": row["ground_truth"], "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": copy, "raw_problem": problem, "split": None},
    } for problem, row in problems.items() for copy in range(repeat)])
    expected = f" ({known.rows} expected)" if known and known.rows != len(problems) else ""
    print(f"{out_path}: {len(problems)} problems{expected}, {len(problems) * repeat} rows")
    return out_path


# ---- Command line ----

class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise DataError(f"{message}; see --help")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 2 after a one-line error."""
    table = "".join(
        f"  {name}: {record.about}\n"
        f"      {f'hub {record.hub}, {record.file}' if record.hub else 'generated, no network'}\n"
        f"      {record.split} split, {record.rows} problems; columns {record.columns}\n"
        f"      licence: {record.licence}\n"
        for name, record in DATASETS.items())
    parser = _Parser(prog="prep_data.py", description=__doc__, epilog=f"sets:\n{table}",
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="a set below or, with --from, a new name")
    parser.add_argument("--out", default=DATA_DIR, metavar="DIR", help="folder of NAME.parquet (data)")
    parser.add_argument("--repeat", default=1, type=int, metavar="K", help="copies of each problem (1)")
    parser.add_argument("--from", dest="source", metavar="FILE", help=f"read this file: {FORMATS}")
    parser.add_argument("--question-column", metavar="COLUMN",
                        help=f"of FILE (else the first of {', '.join(QUESTION_COLUMNS)})")
    parser.add_argument("--answer-column", metavar="COLUMN",
                        help=f"of FILE (else the first of {', '.join(ANSWER_COLUMNS)}); in a text with "
                             r"\boxed{} the last box is the answer")
    try:
        options = parser.parse_args(arguments)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", options.name):
            raise DataError(f"NAME {options.name!r} names a file too: use letters, digits, '.', '_', '-'")
        if options.repeat < 1:
            raise DataError(f"--repeat {options.repeat}: give 1 or more")
        path = prepare(options.name, Path(options.out) / f"{options.name}.parquet", options.source,
                       options.repeat, options.question_column, options.answer_column)
        example = read_rows(path)[0]
        print(f"example: {example['prompt'][-1]['content']!r}, answer {example['ground_truth']!r}")
    except DataError as error:
        print(f"prep_data.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
