"""The table in the docstring of `jobs.draft.formats` is what the files hold: every name of both forms, its partner and its shape."""

import re

from safetensors.torch import load_file
from small_heads import small_head

from jobs.draft import formats
from jobs.draft.export import save_llama_eagle3, save_speculators

MISSING_IN_MOST, DERIVED, FROZEN_COPY = "*", "+", "-"


def rows_of_the_table() -> list[tuple[tuple[str, str], tuple[str, str], str]]:
    """Of each row: (name, mark) in the speculators form, the same in the Llama form, and the shape."""
    lines = formats.__doc__.splitlines()
    first, heading, last = (number for number, line in enumerate(lines) if line.startswith("====="))
    columns = [match.span() for match in re.finditer("=+", lines[first])]
    assert len(columns) == 3 and lines[first] == lines[heading] == lines[last] and heading == first + 2
    rows = []
    for line in lines[heading + 1 : last]:
        *names, shape = (line[begin:end].strip() for begin, end in columns)
        ours, theirs = (re.fullmatch(r"(\S*?)(?: \((.)\))?", name).groups(default="") for name in names)
        rows.append((ours, theirs, shape))
    return rows


def test_the_table_names_every_tensor_of_both_forms(tmp_path):
    # Every size another number, so that no shape can stand for another.
    head = small_head(1, heads=6, kv_heads=2, head_dim=10)
    save_speculators(head, tmp_path / "speculators", verifier_name="v", verifier_architecture="KimiK25ForConditionalGeneration", dtype=None)
    save_llama_eagle3(head, tmp_path / "llama", dtype=None)
    speculators, llama = (load_file(tmp_path / form / "model.safetensors") for form in ("speculators", "llama"))

    table = rows_of_the_table()
    own = [row for row in table if row[0][1] != FROZEN_COPY]
    assert {name for (name, _), _, _ in own} == set(head.state_dict()) == set(speculators)
    assert {name for _, (name, _), _ in own} == set(llama)
    assert len(own) == len(speculators) == len(llama), "no tensor stands there twice"
    copies = [row for row in table if row[0][1] == FROZEN_COPY]
    assert {name for (name, _), _, _ in copies} == set(formats.FROZEN_COPIES) and all(theirs == ("", "") for _, theirs, _ in copies)

    c = head.config
    sizes = {
        "V": c.vocab_size, "Vd": c.draft_vocab_size, "H": c.hidden_size, "3H": 3 * c.hidden_size, "2H": 2 * c.hidden_size,
        "I": c.intermediate_size, "heads*D": c.heads * c.head_dim, "kv_heads*D": c.kv_heads * c.head_dim,
    }  # fmt: skip
    assert len(set(sizes.values())) == len(sizes)
    for (ours, mark), (theirs, other_mark), shape in own:
        assert mark == other_mark and mark in ("", MISSING_IN_MOST, DERIVED)
        assert speculators[ours].equal(llama[theirs]), f"{ours} is {theirs}"
        dimensions, kind = re.fullmatch(r"\[(.+)\](?: (int64|bool)\b.*)?", shape).groups()
        assert list(speculators[ours].shape) == [sizes[name] for name in dimensions.split(", ")], ours
        assert str(speculators[ours].dtype) == f"torch.{kind or 'float32'}", ours


def test_its_marks_are_what_a_file_may_lack():
    marked = {mark: {name for (name, found), _, _ in rows_of_the_table() if found == mark} for mark in (MISSING_IN_MOST, DERIVED)}
    assert marked == {MISSING_IN_MOST: {"embed_tokens.weight"}, DERIVED: {"d2t", "t2d"}}
