"""Grading: does a response to a mathematics problem end in the right answer?

    grade(response, ground_truth) -> Grade          one response
    grade_all(responses, ground_truths) -> [Grade]  many, each bounded in time
    reference_verdict(response, ground_truth)       the string rule behind the paper's figures, for comparison

The answer is what the response commits to on its last answer line ("Answer: …"), or else in its last
\\boxed{…}. Numbers are compared exactly, as fractions, right here. Other values go to math-verify, which
only ever sees the extracted answer, in a child process with a time and a memory limit. A hedge ("5 or 6"), a
negation, an inequality or a sum that was never worked out ("2 + 3" for 5) is wrong: a policy trained on this
verdict finds every leak.

1 the end of the response · 2 the answer line · 3 cleaning · 4 exact value · 5 what the answer commits to
6 equality · 7 the child process · 8 grade · 9 the reference rule
"""

from __future__ import annotations

import atexit
import json
import math
import operator
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Callable, NamedTuple, Sequence

ANSWER_LABEL = "Answer:"
INSTRUCTION = (  # .format(question=…): what a prompt asks for is what grade() looks for
    "{question}\n\nReason step by step. When you are done, write one last line that holds "
    f'the label "{ANSWER_LABEL}" and, after it, only the result.'
)
MAX_RAW_CHARS = 4_000  # an answer longer than this, or after cleaning longer than the next,
MAX_CHARS = 1_000  # can be right only by equal text: this bounds every conversion below
MAX_BITS = 20_000  # of a power's value
CHILD_MEMORY = 2 << 30  # bytes of address space
CHILD_START_SECONDS = 120  # importing sympy from a cold network disk


class Grade(NamedTuple):
    """The verdict on one response; `reason` says why nothing could be compared ("" otherwise)."""

    correct: bool
    extracted: str | None  # the answer after cleaning; None: no answer found, or no ground truth
    reason: str = ""  # "" | "no answer" | "no ground truth" | "timeout" | "crash", for callers to count


# ---- 1. The end of the response ----

_END_MARK = re.compile(r"<[|｜][^\s|｜<>]{1,40}[|｜]>")


def _final_text(response: str) -> str:
    """What follows the thinking and precedes the first end mark (<|im_end|> and its like)."""
    if mark := _END_MARK.search(response):
        response = response[: mark.start()]
    return response.rpartition("</think>")[2].partition("<think>")[0]


# ---- 2. The answer line ----

# Before the label: anything but words (emoji, > # * _ [ $ …), LaTeX commands, tags, a list number
_BEFORE_LABEL = re.compile(r"(?:[^\w\\]|_|\\[a-zA-Z]+|\\[^\w\s]|</?\w{1,10}>|(?<!\w)\d{1,2}[.)]\s)*", re.A)
_AFTER_LABEL = re.compile(r"s?(?:[^\w\s:：.,;?!=\\<(\[{]|_|[ \t\xa0]|</\w{1,10}>){0,12}[:：]", re.I)
_FINAL = re.compile(r"\bfinal[\s*_]{1,4}$", re.I)
_IS = re.compile(r"[\s*_]{1,4}is\b\s*[:：]?", re.I)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BOX_JOIN = re.compile(r"(?:[\s$,;&]|\\[()\[\]]|\\text|[{}]|and\b|or\b)*")
_FENCE = re.compile(r"^\s*```\w*\s*$")


def _answer_line(text: str) -> str | None:
    """What stands after the last answer label (perhaps on later lines); None without a label."""
    text = text.replace("İ", "I")  # the one letter whose lower case has another length
    lower = text.lower()
    end = len(text)
    chinese = "答案" in text
    for _ in range(1000):  # bounds the time on a line made of labels
        start = max(lower.rfind("answer", 0, end), text.rfind("答案", 0, end) if chinese else -1)
        if start < 0:
            return None
        end = start
        stop = start + (6 if lower.startswith("answer", start) else 2)
        head = text[text.rfind("\n", 0, start) + 1 : start].replace("最终", "")
        label = _AFTER_LABEL.match(text, stop)
        if final := _FINAL.search(head[-12:]):
            label = label or _IS.match(text, stop)
        if label and (final or (len(head) <= 5000 and _BEFORE_LABEL.fullmatch(head))):
            return _value_after(text[label.end() :])
    return None


def _value_after(rest: str) -> str:
    """The first line with content, and its continuation while a brace, environment or display is open."""
    lines = rest.splitlines()[:60]
    first = next((i for i, line in enumerate(lines) if not _FENCE.match(line) and _clean(line[:2000])), None)
    if first is None:
        return ""
    value = "\n".join(lines[: first + 1])
    for last in range(first + 1, min(first + 20, len(lines)) + 1):
        block = "\n".join(lines[:last])
        opened = block.count("\\begin") - block.count("\\end") + block.count("\\[") - block.count("\\]")
        # a label inside \text{ or \boxed{ leaves closing braces, which opened before it
        if opened <= 0 and block.count("{") <= block.count("}") and block.count("$$") % 2 == 0:
            return block
    return value


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every complete outermost \\boxed{…} or \\fbox{…}."""
    stack, found = [], []
    for token in _BRACE.finditer(text):
        if token[0][-1] == "{" and token[0] != "\\{":
            stack.append(token)
        elif token[0] == "}" and stack:
            opener = stack.pop()
            if len(opener[0]) > 1:
                while found and found[-1][0] > opener.start():  # boxes inside this one
                    found.pop()
                found.append((opener.start(), token.end(), text[opener.end() : token.start()]))
    return found


def last_box(text: str) -> str | None:
    """The last complete box, together with those joined to it by commas or "and"; None without a box."""
    if "box" not in text or not (boxes := _boxes(text)):
        return None
    first = len(boxes) - 1
    while first and _BOX_JOIN.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    before, after = text[: boxes[first][0]].rpartition("\n")[2][-200:], text[boxes[-1][1] :][:200]
    refused = re.search(r"(?:\b(?:not|never|nor|or)|n['’]t|\\neq?|≠|!=)[\W_]*$", before)
    if refused or re.match(r"[\W_]*(?:or|fails|is (?:wrong|incorrect|not|false|impossible))\b", after):
        return ""
    return ", ".join(dict.fromkeys(content for _, _, content in boxes[first:]))


def _extract(response: str) -> str | None:
    text = _final_text(response)
    value = _answer_line(text)
    if value is None:
        return last_box(text)
    if "box" in value and (boxes := _boxes(value)):
        outside = _clean((value[: boxes[0][0]] + " " + value[boxes[-1][1] :])[:MAX_RAW_CHARS])
        doubtful = _DOUBT.search(outside) or _RELATION.search(outside) or "=" in outside
        if len({content for _, _, content in boxes}) == 1 and not doubtful:
            return boxes[0][2]
    return value


# ---- 3. Cleaning: one spelling for what means the same ----

_TRANSLATE = {code: None for code in range(32)} | {code: " " for code in b"\t\n\r\x0b\x0c"} | {0x7F: None}
_TRANSLATE |= {0xFF01 + i: chr(0x21 + i) for i in range(94)}  # full-width ASCII
_TRANSLATE |= {ord(c): "-" for c in "−–‐‑﹣"} | {ord(c): "'" for c in "‘’"}
_TRANSLATE |= {ord(c): " " for c in "\"`“”„«»「」€£¥₹"}  # never glue 5"6 into 56
_TRANSLATE |= {ord(c): "\\," for c in "\u2009\u202f\u2006"} | {0xA0: " ", 0x3000: " "}
_TRANSLATE |= str.maketrans({
    "。": ".", "、": ",", "，": ",", "×": "*", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "⁄": "/", "∕": "/",
    "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "°": "^\\circ ", "±": "\\pm ", "∓": "\\mp ", "≤": "\\le ",
    "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "≡": "\\equiv ", "→": "\\to ", "⇒": "\\to ", "∴": "\\to ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "…": "\\ldots ", "θ": "\\theta ",
    "½": "\\frac12", "⅓": "\\frac13", "⅔": "\\frac23", "¼": "\\frac14", "¾": "\\frac34", "⅕": "\\frac15",
    "⅖": "\\frac25", "⅗": "\\frac35", "⅘": "\\frac45", "⅙": "\\frac16", "⅚": "\\frac56", "⅛": "\\frac18",
    "⅜": "\\frac38", "⅝": "\\frac58", "⅞": "\\frac78"})  # fmt: skip
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_INVISIBLE, _DECORATION = {"Cf", "Mn", "Cc"}, {"So", "Sk", "Cs", "Co", "Cn"}  # zero-width marks; emoji …
_WRAP = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|bm|boldsymbol|boxed|fbox"
                   r"|operatorname\*?|underline)\s*\{([^{}]*)\}")  # fmt: skip
_REWRITES = [(re.compile(pattern, re.A), new) for pattern, new in (
    (r"\\[$#&_]", " "), (r"\\%|\\?\b(?:percent|per cent|pct)\b", "%"),
    (r"\s+", " "), (r"(?<!\\)\\[()\[\]]|\$|\\(?:begin|end)\{(?:align|equation|gather|center)\w*\*?\}", " "),
    (r"\\[dtc]frac\b", r"\\frac"), (r"\\(?:text)?color\s*\{\w+\}|\\+$", " "),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
    (r"\\(?:displaystyle|textstyle|q\.?e\.?d|blacksquare|square|Box|checkmark|rm|bf|it)(?![a-zA-Z])", " "),
    (r"(?<=\d)(?:\{,\}|,\\!|\\[,;:!])(?=\d{3}(?!\d))", ","), (r"\\[,;:!> ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"</?[a-z]{1,10}\s*/?>", " "),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])|(?<=\d)\s*degrees?\b", " "),
    (r"(?<![\w)}])(?:\*\*\*?|__)|(?:\*\*\*?|__)(?![\w({\\])", " "),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"), (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"), (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\a-zA-Z])(pi|sqrt)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*[\^(\\\d])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])(?:oo|inf|infinity)(?![a-zA-Z])", r"\\infty "), (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\^\s*(-?\d+)", r"^{\1}"), (r"(?<=[\w)}])_(\d+|[a-zA-Z])", r"_{\1}"),
    (r"\s+", " "))]  # fmt: skip
_LABEL_AGAIN = re.compile(r"^(?:final\s+)?answer\s*(?::|is\b)\s*", re.I)


def _clean(text: str) -> str:
    """The value without what does not matter: delimiters, bold, quotes, emoji, spacing, a trailing stop …"""
    text = text.translate(_TRANSLATE)
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text)
        kinds = ((c, "" if c.isascii() else unicodedata.category(c)) for c in text)
        text = "".join(" " if kind in _DECORATION else c for c, kind in kinds if kind not in _INVISIBLE)
    if not text.strip().isdigit():
        for _ in range(8):  # wrappers nest a few levels at most
            text, count = _WRAP.subn(r" \1 ", text)
            if not count:
                break
        for pattern, new in _REWRITES:
            text = pattern.sub(new, text)
    for _ in range(8):
        before = text
        text = _LABEL_AGAIN.sub("", text.lstrip(" *_'#|:;,").rstrip(" *_'#|:;,."))
        text = _trim(_unwrap(text) if text[:1] == "{" else text)
        if text == before:
            break
    return text


def _trim(text: str) -> str:
    """Without brackets at the ends whose partner is missing."""
    opened = sum(text.count(c) for c in "([{")
    closed = sum(text.count(c) for c in ")]}")
    while text and closed > opened and (text[-1] in ")]}" or text[0] in ")]}"):
        text, closed = (text[:-1] if text[-1] in ")]}" else text[1:]).rstrip("\\"), closed - 1
    while text and opened > closed and (text[0] in "([{" or text[-1] in "([{"):
        text, opened = (text[1:] if text[0] in "([{" else text[:-1]).rstrip("\\"), opened - 1
    return text.strip()


def _partners(text: str) -> dict[int, int]:
    """Position of the closing bracket for each opening one."""
    stack, partners = [], {}
    for bracket in re.finditer(r"[()\[\]{}]", text):
        if bracket[0] in "([{":
            stack.append(bracket.start())
        elif stack:
            partners[stack.pop()] = bracket.start()
    return partners


def _unwrap(text: str) -> str:
    """Without bracket pairs around the whole of a single value."""
    if text[-1:] not in (")", "]", "}") or "," in text:
        return text
    partners, start, end = _partners(text), 0, len(text)
    while partners.get(start) == end - 1 and text[start] + text[end - 1] in ("()", "[]", "{}"):
        start, end = start + 1, end - 1
        while start < end and text[start] == " ":
            start += 1
        while end > start and text[end - 1] == " ":
            end -= 1
    return text[start:end]


def _squash(text: str) -> str:
    """Spaces out, except between two words or numbers: "1 1/2" is not "11/2"."""
    text = re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text)
    return text.casefold() if re.fullmatch(r"(?=.*[^\W\d_]{3})[^\W\d_][\w '-]*", text) else text


# ---- 4. Exact value ----

_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", re.A)
_SCIENTIFIC = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\*|\\cdot|\\times)\s*10\s*\^\{\s*(-?\d{1,3})\s*\}", re.A)
_UNEVALUATED = re.compile(r"[\d)}%]\s*(?:[-+*]|\\cdot|\\times|\\div)|[\d)]\s*\(", re.A)  # 2 + 3, 2(3)
_MIXED = re.compile(r"(?<![\d.])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}"
                    r"|(?<![\d./])(\d+) (\d+)\s*/\s*(\d+)(?![\d.])", re.A)  # fmt: skip
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TOKEN = re.compile(r" *(?:(\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?|\.\d+)"
                    r"|(\\(?:cdot|times|div)|[-+*/^()]))", re.A)  # fmt: skip
_BINARY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negate": 3, "^": 4}


class _Value(NamedTuple):
    number: Fraction | None  # None: arithmetic without a value that could be right (1/0, a power tower)
    written_out: bool  # False for a sum or product that still has to be worked out ("2 + 3")


def _mixed(match: re.Match) -> str:
    whole, top, bottom = match.groups()[:3] if match[1] else match.groups()[3:]
    return f"({whole}+{top}/{bottom})" if int(top) < int(bottom) else match[0]


@lru_cache(maxsize=4096)
def _evaluate(text: str) -> _Value | None:
    """The value of an arithmetic expression, exactly; None for anything else.

    Shunting-yard without recursion, so that a thousand parentheses are as harmless as one."""
    text = _unwrap(text)
    if len(text) > MAX_CHARS or not re.search("[0-9]", text):
        return None
    text = _SCIENTIFIC.sub(r"\1e\2", _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text))
    written_out = not _UNEVALUATED.search(text)
    text, count = _MIXED.sub(_mixed, text), 1
    while count:
        text, count = _FRACTION.subn(r"((\1)/(\2))", text)
    text = text.replace("{", "(").replace("}", ")").rstrip()
    values: list[Fraction] = []
    operators: list[str] = []
    position, operand_next = 0, True
    try:
        while position < len(text):
            if not (token := _TOKEN.match(text, position)):
                return None
            position, number = token.end(), token[1]
            sign = {"\\cdot": "*", "\\times": "*", "\\div": "/"}.get(token[2], token[2])
            if operand_next and sign in ("+", "-"):
                operators.extend(["negate"] * (sign == "-"))
            elif operand_next != (number is not None or sign == "("):
                return None  # two operators or two operands in a row
            elif number is not None:
                values.append(Fraction(number))
                operand_next = False
            elif sign == "(":
                operators.append(sign)
            elif sign == ")":
                while (pending := operators.pop()) != "(":
                    _apply(pending, values)
            else:
                while operators and _PRECEDENCE[operators[-1]] >= _PRECEDENCE[sign] + (sign == "^"):
                    _apply(operators.pop(), values)
                operators.append(sign)
                operand_next = True
        while operators:
            _apply(operators.pop(), values)
    except (ZeroDivisionError, OverflowError):
        return _Value(None, False)
    except (IndexError, KeyError):  # unbalanced, or a root
        return None
    return _Value(values[0], written_out)


def _apply(sign: str, values: list[Fraction]) -> None:
    right = values.pop()
    if sign == "negate":
        values.append(-right)
    elif sign == "^":
        size = max(values[-1].numerator.bit_length(), values[-1].denominator.bit_length())
        if right.denominator != 1:
            raise KeyError("a root: math-verify's business")
        if abs(right) * size > MAX_BITS:
            raise OverflowError("too large")
        values.append(values.pop() ** int(right))
    else:
        left = values.pop()
        if max(left.denominator.bit_length(), right.denominator.bit_length()) > 4 * MAX_BITS:
            raise OverflowError("too large")
        values.append(_BINARY[sign](left, right))


# ---- 5. What the answer commits to ----

_RELATION = re.compile(r"[<>]|!=|\\(?:le|ge|lt|gt|ne|neq|leq|geq|[lg]eqslant|not|in|notin|ll|gg)(?![a-zA-Z])")
_DOUBT = re.compile(
    r"\b(?:not|no|none|never|neither|nor|cannot|or|either|unless|except|but|maybe|perhaps|possibly|might"
    r"|could|unsure|wrong|incorrect|false|impossible|invalid|rejected|excluded|discarded|fails?|failed|wait"
    r"|instead|however|actually|alternatively|otherwise|doubt\w*|ruled|too|than|unknown)\b|n't\b|或|不|非", re.I)
_CHANGES_VALUE = re.compile(  # words after a number that make it another number
    r"\b(?:least|most|more|less|fewer|over|under|above|below|between|beyond|up|half|halves|thirds?|quarters?"
    r"|fifths?|dozens?|hundreds?|thousands?|[mbtr]+illions?|squared|cubed|factorial|times|plus|minus|choose"
    r"|mod|base|divided|point|out|if|when|st|nd|rd|th|pi|sqrt|zero|one|two|three|four|five|six|seven|eight"
    r"|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b|万|千|百|亿", re.I)
_REASON = re.compile(r"\s*(?:[,;.(]|\s-)\s*(?:as|where|with|when|by|from|using|for|obtained)\b"
                     r"|\b(?:because|since|due to)\b|因为")  # fmt: skip
_RETRACTS = re.compile(r"\b(?:but|maybe|perhaps|wait|actually|however|alternatively)\b|\bor\W*\d", re.I)
_SO = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|rightarrow|to|therefore)(?![a-zA-Z])|->"
                 r"|\b(?:so|thus|hence|therefore)\b|所以|因此", re.I)  # fmt: skip
_VERB = re.compile(r"(?:,?\s*\bwhich\s+)?(?<!\\)\b(?:is|are|equals?|was|be|becomes|gives|yields|makes)\b"
                   r"|(?<=\w )(?:get|have|has)\b|(?<=\w)'s\b|\\equiv|等于|是|为", re.I)  # fmt: skip
_LEAD = re.compile(
    r"^(?:(?:a(?=\s+[a-z]{2})|an|the|about|approximately|approx|roughly|around|exactly|precisely|just|only"
    r"|simply|total|sum|of|to|value|number|integer|result|answer|equal|final|finally|then|we|it|there|get"
    r"|obtain|find|that)\b(?:[.:]|\s)+|\\approx\s*)+", re.I)
_MODULUS = re.compile(r"\(\s*\\?b?mod\s*\d+\s*\)|\\pmod\s*\{?\d+\}?")
_OPTION = re.compile(r"^(?:\(\s*[A-H]\s*\)|[A-H][).:])\s*(?=\S)")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\{-?[1-3]\}")
_UNIT = re.compile(r"(.*[\d)}.%])(\s*)([^\d%]*)", re.A | re.DOTALL)
_SYMBOL = re.compile(r"\\?[A-Za-z]+(?:_\{\w+\})?(?:\([a-z]\))?|[A-Za-z]'?")


def _claim(text: str) -> str | None:
    """The statement at the end of the reasoning on the line, verbs as "="; None where it is taken back."""
    if (reason := _REASON.search(text)) and reason.start() > 0:
        if _RETRACTS.search(text[reason.end() :]):
            return None
        text = _trim(text[: reason.start()].strip())
    parts = [part for part in _SO.split(text) if re.search(r"\d", part)]
    text = _MODULUS.sub(" ", parts[-1] if parts else text)
    left, approx, right = text.partition("\\approx")
    if approx:  # the exact value precedes its approximation
        text = left if re.search(r"\d", left) else right
    return _VERB.sub("=", text).lstrip(" ,;:").rstrip(" ,;.:")


def _strip_unit(text: str) -> str:
    """"204 apples" -> "204", "48 cm^{2}" -> "48"; unchanged where what follows could change the value."""
    match = _UNIT.fullmatch(_UNIT_POWER.sub("", re.sub(r"\s\(([A-Za-z ]+)\)$", r" \1", text)))
    if not match or not (words := re.findall(r"[^\W\d_]+", match[3])) or _CHANGES_VALUE.search(match[3]):
        return text
    if len(words) > 5 or match[3][0] == "-" or set(re.sub(r"[^\W\d_]+|\s", "", match[3])) - set("./()'-,"):
        return text
    if len(words[0]) == 1 and words[0].isascii():  # 5x, 5 n and 5m are products; 5 m and 5km/h have units
        if words[0] not in "mgshlLJNWV" or not (match[2] or words[1:]):
            return text
    return _trim(match[1].strip())


def _unit_words(text: str) -> set[str]:
    after_number = re.split(r"\d", _UNIT_POWER.sub("", text.lower()))[-1]
    return {word.rstrip("s") for word in re.findall("[a-z]+", after_number)}


def _quantity(text: str) -> tuple[str, bool]:
    """One value without option letter, lead words, unit and per cent sign; and whether it had that sign."""
    text = _unwrap(_strip_unit(_trim(_LEAD.sub("", _OPTION.sub("", text).strip()))))
    return (text[:-1].strip(), True) if text.endswith("%") else (text, False)


def _assignment(text: str) -> tuple[str, str]:
    """("x", "5") of "x = 5", with the last value of a chain; ("", text) where there is none."""
    parts = [part.strip() for part in text.split("=")]
    if len(parts) == 1 or not parts[-1]:
        return "", text
    if _SYMBOL.fullmatch(parts[0]):
        return parts[0], parts[-1]
    return "", text if re.search(r"\d", parts[0]) else parts[-1]


# ---- 6. Equality ----

_SEPARATOR = re.compile(r";|,(?!\d{3}(?!\d))|,\s|\.\s+(?=[A-Z])|\b(?:and|or)\b|或|和|—|\s-\s(?=[a-z]{3})", re.A)
_EVERY_COMMA = re.compile(r"[,;]|\b(?:and|or)\b")


def _split(text: str, separator: re.Pattern) -> list[str]:
    """The pieces between separators that stand outside of all brackets."""
    pieces, start, depth, scanned = [], 0, 0, 0
    for match in separator.finditer(text):
        between = text[scanned : match.start()]
        depth += sum(between.count(c) for c in "([{") - sum(between.count(c) for c in ")]}")
        scanned = match.start()
        if depth == 0:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [piece.strip() for piece in [*pieces, text[start:]] if piece.strip()] or [text]


def _items(text: str, count: int = 0) -> list[str]:
    """The values of a list; a comma inside a thousand separates only where that gives `count` values."""
    if "\\pm" in text:
        return [text.replace("\\pm", sign).replace("\\mp", other).strip(" +") for sign, other in ("+-", "-+")]
    items = _split(text, _SEPARATOR)
    if count and len(items) != count and len(every := _split(text, _EVERY_COMMA)) == count:
        return every
    return items


def _brackets(text: str) -> tuple[str, str]:
    """("()", inside) of a bracketed list or interval, ("{}", inside) of a set; ("", text) otherwise."""
    if text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        return "{}", text[2:-2]
    if len(text) > 2 and text[0] in "([{" and _partners(text).get(0) == len(text) - 1:
        return text[0] + text[-1], text[1:-1]
    return "", text


def _same(answer: str, gold: str, ask: Callable[[str, str], bool]) -> bool:
    """Whether a cleaned answer has the value of a cleaned ground truth. `ask` consults math-verify."""
    if _squash(answer) == _squash(gold):
        return True
    if not answer or max(len(answer), len(gold)) > MAX_CHARS or sum(gold.count(c) for c in "([{") > 100:
        return False
    if _RELATION.search(answer) and not _RELATION.search(gold):
        return False
    if (statement := _claim(answer)) is None:
        return False
    if len(_items(gold)) > 1:
        return _same_list(statement if "=" in gold else answer, gold, ask)
    label, gold_value = _assignment(gold)
    wanted, percent = _quantity(gold_value)
    if (value := _evaluate(wanted)) and value.number is not None:
        units, given = (_unit_words(text) for text in (gold_value, statement))
        if units and given and not units & given:
            return False  # 5 km for 5 m
        return _same_number(statement, label, value.number, percent, ask)
    if _squash(statement) == _squash(gold):
        return True
    if gold.count("=") == 1 and (not label or re.search(r"(?<![\\a-zA-Z])[a-z](?![a-zA-Z])", gold_value)):
        if statement.count("=") == 1:  # both are equations
            return ask(statement, gold)
        return bool(label) and "=" not in statement and _same(statement, gold_value, ask)
    if "=" not in gold or label:
        answer_label, statement = _assignment(statement)
        if label and answer_label and label != answer_label:
            return False
        gold = gold_value
    statement = _LEAD.sub("", statement).strip() or statement
    if not re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3}", gold) and not _DOUBT.search(statement):
        statement = re.sub(r"(?<=[\w)}])(?:\s+[A-Za-z]{3,})+$", "", statement)  # a unit
    statement, gold = _unwrap(statement), _unwrap(gold)
    if _squash(statement) == _squash(gold):
        return True
    if "\\cup" not in gold + statement and (_brackets(gold)[0] or _brackets(statement)[0]):
        return _brackets(gold)[0] == _brackets(statement)[0] and _same_list(statement, gold, ask)
    if len(_items(statement)) > 1:
        return False
    if choice := re.fullmatch(r"\(?([A-H])\)?", gold):
        return re.match(r"\(?([A-H]?)(?:[).:]|$)|", statement)[1] == choice[1]
    return ask(statement, gold)


def _same_number(statement: str, label: str, gold: Fraction, gold_percent: bool, ask: Callable) -> bool:
    """One number is wanted: one candidate, written out, whose equalities hold, and no word of doubt."""
    items = _items(statement)
    candidates = [item for item in items if re.search(r"\d|^\\?[A-Za-z]$", item)]
    prose = " ".join(item for item in items if item not in candidates)
    if len(candidates) != 1 or _DOUBT.search(statement) or _CHANGES_VALUE.search(prose):
        return False
    parts = [part.strip() for part in candidates[0].split("=") if part.strip()]
    if len(parts) > 1 and re.fullmatch(r"\\?[A-Za-z]|(?:the|our|my) (?:final )?(?:answer|result)", parts[-1]):
        parts.pop()  # "204 = N"
    if label and len(parts) > 1 and _SYMBOL.fullmatch(parts[0]) and parts[0] != label:
        return False
    written_out = False
    for i, part in enumerate(parts):
        core, percent = _quantity(part)
        if value := _evaluate(core):
            if value.number is None:
                return False
            readings = {value.number, value.number / 100} if percent else {value.number}
            if gold not in readings and not (gold_percent and (percent or gold / 100 in readings)):
                return False
            written_out |= value.written_out
        elif i == len(parts) - 1:
            return not _UNEVALUATED.search(core) and ask(core, str(gold))
        elif sum(part.count(c) for c in "([{") != sum(part.count(c) for c in ")]}"):
            return False  # the "=" stands inside of brackets: f(x=1)
        elif gold == 0 and re.search(r"[a-zA-Z].*[-+*^]|[-+*^].*[a-zA-Z]", part):
            return False  # "x^2 - 4 = 0" states an equation, not the value 0
    return written_out


def _same_list(answer: str, gold: str, ask: Callable) -> bool:
    """Several values: sets and bare lists in any order, intervals, tuples and named values in theirs."""
    brackets, gold = _brackets(gold)
    given_brackets, answer = _brackets(answer)
    wanted = _items(gold)
    given = _items(answer, len(wanted))
    if len(given) != len(wanted) or len(wanted) > 50 or given_brackets not in (brackets, "()", "{}"):
        return False
    if _DOUBT.search(re.sub(r"\bor\b", " ", answer)):
        return False
    labels, given_labels = ([_assignment(item)[0] for item in items] for items in (wanted, given))
    if len(set(labels)) > 1 and all(given_labels):
        wanted, given = (sorted(items, key=lambda item: _assignment(item)[0]) for items in (wanted, given))
    if len(set(labels)) > 1 or brackets not in ("", "{}") or given_brackets not in ("", "{}"):
        return all(_same(a, g, ask) for a, g in zip(given, wanted))
    for want in wanted:
        equal = [a for a in given if _squash(a) == _squash(want)] or [a for a in given if _same(a, want, ask)]
        if not equal:
            return False
        given.remove(equal[0])
    return True


def _is_mathematics(text: str) -> bool:
    """Whether math-verify may see it: no prose (it would multiply letters), nothing it would drop."""
    bare = re.sub(r"\\[a-zA-Z]+|\{[pbvBV]?matrix\}", " ", text).replace("&", ",")
    dropped = r"[A-Za-z]{3,}|\d\s+\d|[:?%@#;\"'~`]|[^\x00-\x7f]|\d\s*_|\.\s*\."
    return bool(re.search(r"[\\\dA-Za-z]", text)) and "\\ldots" not in text and not re.search(dropped, bare)


# ---- 7. The child process ----


def _math_verify_equal(answer: str, gold: str) -> bool:
    """math-verify's verdict, confirmed by our own comparison of values. Runs in the child only."""
    import math_verify
    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

    # units off: it would take the m of 5m for metres. No plain-expression extraction: it calls parse_expr
    normalization = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
    config = math_verify.LatexExtractionConfig(normalization_config=normalization)
    sides = [math_verify.parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
             for text in (answer, gold)]  # fmt: skip
    if not all(sides):
        return False
    ours, theirs = sides[0][0], sides[1][0]
    if isinstance(ours, sympy.Eq) and isinstance(theirs, sympy.Eq):
        # not verify(): it calls two equations without solutions equal
        ours, theirs = (sympy.expand(side.lhs - side.rhs) for side in (ours, theirs))
        ratio = sympy.simplify(ours / theirs)
        return bool(ours.free_symbols and ratio.is_number and ratio.is_finite and ratio.is_nonzero)
    if not math_verify.verify(theirs, ours, float_rounding=12, timeout_seconds=None):
        return False
    if not (isinstance(ours, sympy.Expr) and isinstance(theirs, sympy.Expr)):
        return True
    # verify() calls differences below 1e-15 zero, so that 1/2004! = 1/2006!: compare relatively, at one point
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    point = {symbol: sympy.Rational(37 + 14 * i, 29 + 2 * i) for i, symbol in enumerate(symbols)}
    a, b = ours.subs(point).doit().evalf(40), theirs.subs(point).doit().evalf(40)
    tolerance = 1e-12 if ours.has(sympy.Float) or theirs.has(sympy.Float) else 1e-25
    return bool(not (a.is_number and b.is_number) or a == b or abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _child() -> None:
    """Answers {"answer", "gold", "timeout"} lines until stdin closes; an exception ends it (a crash)."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may look like a reply
    import math_verify  # noqa: F401  (before the memory limit, so that a reply needs no more imports)

    resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY, CHILD_MEMORY))
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        # its own alarm: even a parent that was killed leaves no child computing behind
        signal.setitimer(signal.ITIMER_REAL, request["timeout"] + 1)
        verdict = _math_verify_equal(request["answer"], request["gold"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


class _NoVerdict(Exception):
    """The child timed out or crashed."""


class _Child:
    """One process, started on first need and again after it had to be killed.

    A plain subprocess: no fork of a parent that holds CUDA, no second import of the parent's script."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.owner = 0
        self.verdicts: dict[tuple[str, str], bool | None] = {}  # None: known to time out

    def ask(self, answer: str, gold: str, timeout: float) -> bool:
        with self.lock:
            if (answer, gold) not in self.verdicts:
                if len(self.verdicts) > 20_000:
                    self.verdicts.clear()
                self.verdicts[answer, gold] = self._ask(answer, gold, timeout)
            verdict = self.verdicts[answer, gold]
        if verdict is None:
            raise _NoVerdict("timeout")
        return verdict

    def _ask(self, answer: str, gold: str, timeout: float) -> bool | None:
        self._start()
        request = json.dumps({"answer": answer, "gold": gold, "timeout": timeout})
        try:
            self.process.stdin.write(request.encode() + b"\n")
            reply = self._read(timeout)
        except BrokenPipeError:
            reply = b""
        if reply in (b"true\n", b"false\n"):
            return reply == b"true\n"
        self.close()
        if reply is None:
            return None
        raise _NoVerdict("crash")  # not remembered: it may have been killed from outside

    def _start(self) -> None:
        if self.process and self.owner == os.getpid() and self.process.poll() is None:
            return
        self.close()
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--child"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0)  # fmt: skip
        if self._read(CHILD_START_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError("grade.py: the math-verify process did not start; try "
                               f"`{sys.executable} -m pip install math-verify`")  # fmt: skip

    def _read(self, timeout: float) -> bytes | None:
        """A line; what there was of it if the child ended; None if the time is over."""
        reply, end = b"", time.monotonic() + timeout
        while not reply.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            if not (data := os.read(self.process.stdout.fileno(), 64)):
                break
            reply += data
        return reply

    def close(self) -> None:
        if self.process and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None


_CHILD = _Child()
atexit.register(_CHILD.close)


# ---- 8. grade ----

_PLAIN = re.compile(r"\s*([-+]?[0-9]{1,18})\s*")


@lru_cache(maxsize=65536)
def _clean_gold(gold: str) -> str:
    if len(gold) > MAX_RAW_CHARS:
        return gold.strip()
    box = last_box(gold)
    return _clean(gold if box is None else box)


def _gold_text(ground_truth: str | int | float | None) -> str:
    """The ground truth as text, "" where it is missing."""
    if ground_truth is None or (isinstance(ground_truth, float) and math.isnan(ground_truth)):
        return ""
    return str(ground_truth)


def grade(response: str | None, ground_truth: str | int | float | None, timeout: float = 5.0) -> Grade:
    """The verdict on one response; no text makes it raise. `timeout`: seconds it may spend in math-verify.

    A missing, empty or NaN ground truth never pays: Grade(False, None, "no ground truth")."""
    gold = _gold_text(ground_truth)
    gold_plain = _PLAIN.fullmatch(gold)
    if not gold_plain:
        gold = _clean_gold(gold)
        if not gold:
            return Grade(False, None, "no ground truth")
    value = _extract(response) if isinstance(response, str) else None
    if value is None:
        return Grade(False, None, "no answer")
    if gold_plain and (plain := _PLAIN.fullmatch(value)):
        return Grade(int(plain[1]) == int(gold_plain[1]), plain[1])
    if len(value) > MAX_RAW_CHARS:
        return Grade(value.strip() == gold.strip(), value.strip())
    answer = _clean(value)
    if not answer:
        return Grade(False, None, "no answer")
    deadline = None

    def ask(candidate: str, wanted: str) -> bool:
        nonlocal deadline
        if not (_is_mathematics(candidate) and _is_mathematics(wanted)):
            return False
        deadline = deadline or time.monotonic() + timeout
        if (left := deadline - time.monotonic()) <= 0:
            raise _NoVerdict("timeout")
        return _CHILD.ask(candidate, wanted, left)

    try:
        return Grade(_same(answer, gold, ask), answer)
    except _NoVerdict as failure:
        return Grade(False, answer, str(failure))


def grade_all(responses: Sequence[str | None], ground_truths: Sequence, timeout: float = 5.0) -> list[Grade]:
    """`grade` for each pair, in order; each item is bounded by `timeout` seconds of math-verify."""
    if len(responses) != len(ground_truths):
        raise ValueError(f"grade_all: {len(responses)} responses but {len(ground_truths)} ground truths")
    return [grade(response, truth, timeout) for response, truth in zip(responses, ground_truths)]


# ---- 9. The reference rule: how the paper's released code grades ----

_UNIT_WORDS = (
    "square ways integers dollars mph inches hours km units sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples"
).split()
_MARKS = [r"\text{s}", r"\text{.}", r"\text{}^2", r"\text{}^3", r"\text{}", r"\mathrm{th}", r"^\circ",
          r"^{\circ}", r"\;", r"\,\!", r"\ldots", r"\dots", "{,}", '"']  # fmt: skip
_REFERENCE_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.I)


def _reference_form(text: str) -> str:
    text = text.rpartition("=")[2]
    for old, new in (("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""),
                     ("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","),
                     (r"\text{m}", r"\text{}")):  # fmt: skip
        text = text.replace(old, new)
    for word in [*_UNIT_WORDS, *_MARKS]:
        text = text.replace(word, "")
    if pair := re.search(r"\$(.*?)\$", text):
        text = f"${pair[1]}$"
    text = re.sub(r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def reference_verdict(response: str | None, ground_truth: str | int | float | None) -> bool:
    """The verdict of the rule that the paper's figures were graded with: strings, not values.

    The last "Answer:" in the last 300 characters, the rest of its line, both sides normalised as strings. It
    refuses `\\(204\\)` and `016` and takes `$204$ or $205$` for 204: to compare with the paper, no reward."""
    gold = _gold_text(ground_truth)
    if not isinstance(response, str) or not _clean_gold(gold):
        return False
    matches = _REFERENCE_ANSWER.findall(response[-300:])
    return bool(matches) and _reference_form(matches[-1]) == _reference_form(gold)


if __name__ == "__main__" and sys.argv[1:] == ["--child"]:
    _child()
