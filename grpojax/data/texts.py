r"""Damage that texts arrive with: backslashes that JSON or YAML took, or doubled; marks that nobody sees.

``"\frac"`` in JSON is a form feed and ``rac``: the escape ``\f`` was read, and no parser can know that a LaTeX command
was meant. `lost_backslash` recognises it by the control character and by what follows.
"""

import re
import unicodedata

# Control character -> its name, the letter of its escape, and what follows it in running text if a command was meant.
# Tabs and line breaks are common in prose, so what follows must be the rest of a command that begins no English text.
_LETTER = r"[a-zA-Z](?![a-zA-Z])"
_ESCAPES = {
    "\b": ("backspace", "b", ""),
    "\f": ("form feed", "f", "[a-z]"),  # before anything else it is a page break
    "\a": ("bell", "a", "[a-z]"),
    "\v": ("vertical tab", "v", "(?:ar[a-z]|ec(?![a-z])|ee(?![a-z])|ert|dots|phantom|space|dash)"),
    "\x1b": ("escape character", "e", r"(?:psilon|xp(?![a-z])|quiv|ta(?![a-z])|mpty|ll(?![a-z])|xists|nd\s*\{)"),
    "\u2028": ("line separator", "L", "(?:ambda|eft|ong)"),
    "\u2029": ("paragraph separator", "P", "(?:i(?![a-z])|hi(?![a-z])|si(?![a-z])|r(?![a-z]))"),
    "\t": (
        "tab",
        "t",
        r"(?:imes|heta|hickspace|herefore|riangle|anh(?![a-z])|ext[a-z]*\s*\{|(?:frac|binom|ag|ilde)\s*\{"
        rf"|(?<![\n\t]\t)(?:anx(?![a-z])|an(?=[(\\^{{0-9]| (?:[(\\0-9]|{_LETTER}))|au(?= ?[=+*/^_)}}$]))"
        rf"|(?:(?<=[\w)}}]\t)|(?<=[\w)}}] \t))o(?= ?[-+]?[0-9(\\]| [-+]?{_LETTER}))",
    ),
    "\r": ("carriage return", "r", r"(?:ight|ho(?![a-z])|angle(?![a-z])|ceil|floor|brace|brack|vert|m\s*\{)"),
    "\n": (
        "line break",
        "n",
        rf"(?:eqq?(?![a-z.])|abla(?![a-z])|otin(?![a-z])|ot(?= ?[\\=<>])|leq|geq"
        rf"|(?<= \n)e(?= ?[-0-9(\\]| {_LETTER})|(?<= \n)u(?= ?[=<>^_])|eg(?=\(| ?\\| {_LETTER})"
        r"|subseteq|supseteq|[lrLR](?:eft|ight)arrow|ewline|onumber|otag|atural(?![a-z]))",
    ),
}
# In an answer, which is short and has no prose in it, the rest of any command will do.
_IN_ANSWERS = {
    "\f": "",
    "\a": "",
    "\v": "",
    "\t": r"(?:imes|heta|herefore|riangle|anh?(?![a-z])|anx|ext|frac|binom|ag(?![a-z])|ilde|au(?![a-z])|op?(?![a-z]))",
    "\r": r"(?:ight|ho(?![a-z])|angle|ceil|floor|brace|brack|vert|m(?![a-z])|e(?:al)?(?![a-z]))",
    "\n": r"(?:eqq?(?![a-z])|eg(?![a-z.])|abla|otin|ot(?![a-z])|e(?= ?[-0-9({\\])|u(?![a-z])|leq|geq|atural"
    r"|(?:mid|parallel|exists)(?![a-z])|su[bp]set)",
}


def _pattern(of_answers: bool) -> re.Pattern[str]:
    after = {c: follows for c, (_, _, follows) in _ESCAPES.items()}
    for c, more in _IN_ANSWERS.items() if of_answers else ():
        after[c] = more and f"(?:{more}|{after[c]})"
    return re.compile("|".join(f"{re.escape(c)}(?={follows})" if follows else c for c, follows in after.items()))


_IN_TEXT, _IN_ANSWER = _pattern(False), _pattern(True)


def lost_backslash(text: str, *, answer: bool = False) -> str | None:
    r"""The error for a text with a control character in place of a LaTeX command's backslash; None without.

    Args:
      text: a question, an instruction, an answer.
      answer: it is a short one: the rest of any command counts, where prose might begin a line with ``mid`` or ``u``.

    >>> lost_backslash("Half is \frac{1}{2}.")
    "has a form feed where '\\frac' lost its backslash; write '\\\\frac'"
    >>> lost_backslash("a\tb\nan apple") is None
    True
    """
    if "\0" in text:
        return f"has a NUL character before {text[text.index(chr(0)) + 1 :][:20]!r}; take it out"
    found = (_IN_ANSWER if answer else _IN_TEXT).search(text)
    if found is None:
        return None
    name, letter, _ = _ESCAPES[found[0]]
    rest = re.match("[a-zA-Z]*", text[found.end() :])
    command = f"\\{letter}{rest[0] if rest else ''}"[:20]
    return f"has a {name} where '{command}' lost its backslash; write '\\{command}'"


_COMMANDS = (
    "frac|dfrac|tfrac|cfrac|sqrt|mathrm|mathbf|mathbb|mathcal|operatorname|boxed|binom|times|cdot|cdots|ldots|div|pm|mp"
    "|leq|geq|neq|approx|equiv|cong|notin|subset|subseteq|emptyset|infty|mapsto|rightarrow|leftarrow|Rightarrow|iff"
    "|implies|land|lor|neg|forall|prod|arcsin|arccos|arctan|bmod|pmod|circ|overline|underline|qquad|lfloor|rfloor|lceil"
    "|rceil|langle|rangle|alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma"
    "|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|partial|nabla|setminus"
)
# Those that are words besides, such as names of folders, count before a bracket or a number only.
_WORDS = (
    "text|textbf|textit|textrm|left|right|begin|end|in|to|le|ge|ne|dots|cup|cap|exists|sum|int|lim|log|ln|exp|sin|cos"
    "|tan|cot|sec|csc|max|min|gcd|angle|triangle|perp|parallel|hat|vec|bar|tilde|quad|prime|mid|star|sim"
)
_DOUBLED = re.compile(rf"(?<!\\)\\\\(?:(?:{_COMMANDS})(?![a-zA-Z])|(?:{_WORDS})(?= ?[{{(\[0-9^_]|\\\\[{{}}]))")


def halved(text: str) -> str:
    r"""The text with the backslashes of LaTeX commands as they were, where something doubled all of them.

    A single backslash anywhere shows that nothing did; then two of them are a line break, as in a matrix.

    >>> halved(r"[0, \\frac{1}{2}]"), halved(r"\begin{matrix}1\\pi\end{matrix}")
    ('[0, \\frac{1}{2}]', '\\begin{matrix}1\\\\pi\\end{matrix}')
    """
    if not _DOUBLED.search(text) or any(len(run) % 2 for run in re.findall(r"\\+", text)):
        return text
    return text.replace("\\\\", "\\")


_UNSEEN = dict.fromkeys(map(ord, "\ufeff\u200b\u2060\u200e\u200f\u00ad"))


def seen(text: str) -> str:
    r"""The text without marks that nobody sees, and with full-width signs in ASCII where there is nothing else.

    A byte order mark, zero-width blanks, direction marks and soft hyphens go. Among Chinese or Japanese characters
    full-width signs belong to the script, and stay.

    >>> seen("\ufeff５０．５"), seen("Ⅴ"), seen("北京，上海")
    ('50.5', 'V', '北京，上海')
    """
    text = text.translate(_UNSEEN).strip(" \u200c\u200d")
    wide = [c for c in text if "\uff01" <= c <= "\uff5e" or c == "\u3000" or "\u2160" <= c <= "\u217f"]
    if wide and all(c in wide or c.isascii() for c in text):
        return unicodedata.normalize("NFKC", text)
    return text
