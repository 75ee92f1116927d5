"""Which domain a source of prompts belongs to: what a reader of the figures wants to see apart.

A name tells in most cases (`orca-math`, `evol-codealpaca`); where it does not, `prompts.domains` says so.
"""

from collections.abc import Mapping

CHAT = "chat"
# The first domain with a word in the name counts: a data set of function calls is often called code too.
WORDS = {
    "tool calls": ("function", "tool", "xlam", "agent"),
    "math": ("math", "gsm", "aime", "numina", "olympiad"),
    "code": ("code", "python", "humaneval", "mbpp", "programming", "swe-"),
    "multilingual": ("aya", "multilingual", "translat", "wmt"),
}


def domain_of(source: str, named: Mapping[str, str]) -> str:
    """named: source -> domain, from the settings; the longest source that the name begins with counts."""
    known = max((key for key in named if source.startswith(key)), key=len, default=None)
    if known is not None:
        return named[known]
    name = source.casefold()
    return next((domain for domain, words in WORDS.items() if any(word in name for word in words)), CHAT)
