"""Generated code as HTML, its comments, words, types and numbers told apart: as much of C++ and Python as occurs."""

from __future__ import annotations

import re
from html import escape

_WORDS = (
    "auto break case const constexpr continue default do else enum extern for if inline namespace return sizeof static "
    "struct switch template typename using void while and as assert def from import in is lambda not or pass None True "
    "False true false nullptr"
)
_TYPES = (
    "bool char double float int long short unsigned signed int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t "
    "uint64_t size_t float16 bfloat16 float32 float64 int8 int16 int32 int64"
)
_TOKEN = re.compile(
    r"(?P<c>//[^\n]*|/\*.*?\*/|#(?!include|pragma|define|if|endif)[^\n]*)"
    r"|(?P<p>^[ \t]*#\w+[^\n]*|@\w+[\w.]*)"
    r"|(?P<s>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    rf"|(?P<k>\b(?:{'|'.join(_WORDS.split())})\b)"
    rf"|(?P<t>\b(?:{'|'.join(_TYPES.split())})\b)"
    r"|(?P<n>(?<![\w.])\d[\w.]*(?:e[+-]\d+)?)",
    re.DOTALL | re.MULTILINE,
)

STYLE = """
.code .c { color: var(--dim); font-style: italic; }
.code .k { color: var(--strong); font-weight: 600; }
.code .t { color: var(--good); }
.code .n, .code .s { color: var(--alarm); }
.code .p { color: var(--dim); }
"""


def highlight(code: str) -> str:
    """Escaped, each token of interest in an element whose class says what it is."""
    parts, last = [], 0
    for match in _TOKEN.finditer(code):
        parts += [
            escape(code[last : match.start()], quote=False),
            f'<span class="{match.lastgroup}">{escape(match[0], quote=False)}</span>',
        ]
        last = match.end()
    return "".join([*parts, escape(code[last:], quote=False)])
