"""Numbers of things as people write them: 1 file, 24 files."""


def counted(number: float, things: str) -> str:
    """`things` is a plural, as "eval answers" or "repositories"; of one there is the singular."""
    return f"{number:,} {name_of(number, things)}" if isinstance(number, int) else f"{number:g} {name_of(number, things)}"


def name_of(number: float, things: str) -> str:
    """What so many `things` are called, without their number."""
    if number != 1:
        return things
    if things.endswith("ies"):
        return f"{things[:-3]}y"
    return things.removesuffix("es" if things.endswith("sses") else "s")
